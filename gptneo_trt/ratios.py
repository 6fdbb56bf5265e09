"""A row next to the floor and to its reference: ratios and differences, paired, with bounds."""

import numpy as np

from gptneo_trt.data import Interval, TokenMetrics
from gptneo_trt.errors import MetricError
from gptneo_trt.paired import block_standard_error, ratio_of_sums, text_sums


def floor_ratio(
    own: TokenMetrics, floor: TokenMetrics, confidence: float, *, seed: int = 0
) -> Interval:
    """Return the mean KL of a row over that of the floor on the same tokens, with bounds.

    Both are sums over the same texts, so a text that is hard for both moves neither bound: see
    ``ratio_of_sums``. Of the floor to itself all three are exactly 1.

    Raises:
        MetricError: other positions, or a floor whose mean KL is not above 0.
    """
    _require_same_positions(own, floor)
    numerators, _ = text_sums(own.kl_nats, own.text)
    denominators, _ = text_sums(floor.kl_nats, floor.text)
    if not denominators.sum() > 0:
        raise MetricError(
            f"floor ratio: obtained mean KL {floor.kl_nats.mean():.6g} of the floor, expected "
            "above 0; check that the reference is not the floor itself"
        )
    return ratio_of_sums(numerators, denominators, confidence, seed=seed)


def top1_drop(own: TokenMetrics, floor: TokenMetrics, confidence: float) -> Interval:
    """Return by how much less a row agrees in top-1 than the floor does, a fraction, with bounds.

    The mean over positions of floor - own, each 0 or 1, paired a position: see ``ratio_of_sums``.

    Raises:
        MetricError: other positions.
    """
    _require_same_positions(own, floor)
    drop = floor.top1.astype(np.float64) - own.top1.astype(np.float64)
    return ratio_of_sums(*text_sums(drop, own.text), confidence)


def perplexity_ratio(own: TokenMetrics, confidence: float) -> Interval:
    """Return the perplexity of a row over that of its reference, with bounds.

    exp of the mean difference of the NLLs, paired a scored token; the bounds are exp of the bounds
    of that mean, since errors of a perplexity are multiplicative and exp is monotonic.

    Raises:
        MetricError: fewer than two texts with a scored token.
    """
    mean = ratio_of_sums(*_nll_differences(own), confidence)
    with np.errstate(over="ignore"):
        value, lower, upper = np.exp([mean.value, mean.lower, mean.upper])
    return Interval(float(value), float(lower), float(upper), confidence)


def standard_errors(tokens: TokenMetrics) -> dict[str, float]:
    """Return the errors of mean KL, top-1 and log perplexity ratio with texts as the sample.

    ``kl_mean_stderr_nats``, ``top1_stderr_frac`` and ``perplexity_ratio_log_stderr``, each of
    ``block_standard_error``; absent where fewer than two texts have a value.
    """
    sums = {
        "kl_mean_stderr_nats": text_sums(tokens.kl_nats, tokens.text),
        "top1_stderr_frac": text_sums(tokens.top1, tokens.text),
        "perplexity_ratio_log_stderr": _nll_differences(tokens),
    }
    return {name: block_standard_error(*each) for name, each in sums.items() if len(each[0]) > 1}


def _nll_differences(tokens: TokenMetrics) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of NLL differences to the reference and the scored tokens, a text each."""
    scored = ~np.isnan(tokens.reference_nll_nats)
    difference = tokens.nll_nats[scored] - tokens.reference_nll_nats[scored]
    return text_sums(difference, tokens.text[scored])


def _require_same_positions(own: TokenMetrics, floor: TokenMetrics) -> None:
    """Raise MetricError unless both were measured on the same positions."""
    if not np.array_equal(own.text, floor.text):
        raise MetricError(
            f"ratio to the floor: obtained {len(own.text)} positions of "
            f"{len(np.unique(own.text))} texts, expected the floor's {len(floor.text)} of "
            f"{len(np.unique(floor.text))}; measure both on the same texts"
        )
