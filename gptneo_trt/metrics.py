"""Logits and tokens -> metrics, on arrays: imports without torch, transformers, TensorRT.

Axes: M scored positions over all texts, V vocabulary, N texts, T tokens. Every exponential,
logarithm and sum is taken in float64, row by row, whatever the type of the logits.

Direction of the divergence: KL(reference || obtained), in nats a position, over all V.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gptneo_trt.data import Metrics, ReferenceDistribution, TokenMetrics
from gptneo_trt.errors import MetricError
from gptneo_trt.ratios import standard_errors

SCORED = ("every", "last")
LOGIT_TYPES = ("float16", "float32", "float64")
# Logits a chunk of rows: 2 MiB in float64, so that a chunk stays in a core's cache.
CHUNK_LOGITS = 1 << 18
LARGEST_LOGIT = float(np.finfo(np.float32).max)


def reference_distribution(
    logits: np.ndarray, targets: np.ndarray, text: np.ndarray
) -> ReferenceDistribution:
    """Return what comparisons with these logits reuse; see ReferenceDistribution for the arrays.

    Raises:
        MetricError: shapes or types that do not fit, a target outside [-1, V), a logit that is
            not a finite float32.
    """
    targets, text = np.asarray(targets), np.asarray(text)
    wrong = _logits_mismatches("reference", logits) + _index_mismatches(logits, targets, text)
    _raise_all("reference distribution", wrong)
    probabilities = np.empty(logits.shape)
    cross, log_sum_exp = np.empty(len(logits)), np.empty(len(logits))
    top = np.empty(len(logits), dtype=np.int64)
    for rows, shifted, first in _shifted_chunks("reference", logits):
        top[rows] = first
        part = np.exp(shifted, out=probabilities[rows])
        sums = part.sum(axis=1)
        part /= sums[:, None]
        log_sum_exp[rows] = np.log(sums)
        cross[rows] = np.multiply(part, shifted, out=shifted).sum(axis=1)
    return ReferenceDistribution(
        logits=logits,
        targets=targets.astype(np.int64),
        text=text.astype(np.int32),
        probabilities=probabilities,
        cross=cross,
        log_sum_exp=log_sum_exp,
        top=top,
        nll_nats=_nll(logits, targets, top, log_sum_exp),
    )


def compare(reference: ReferenceDistribution, obtained: np.ndarray) -> TokenMetrics:
    """Return what one comparison measured a position; see ``compare_many``."""
    return compare_many([reference], obtained)[0]


def compare_many(
    references: Sequence[ReferenceDistribution], obtained: np.ndarray
) -> list[TokenMetrics]:
    """Return one TokenMetrics a reference, in order, exponentiating the same logits once.

    KL = sum p (z_ref - z_obt) - lse_ref + lse_obt, p = softmax(z_ref). Each z has its row's
    maximum subtracted first, so a constant shift of a row cancels; the sum over V is numpy's
    pairwise sum. Equal logits give exactly 0. Rounding can leave a value just below 0, about
    -1e-13; it is not clamped, so that a real sign error would show.

    Args:
        references: of the same M positions.
        obtained: float32 [M, V], before softmax.

    Raises:
        MetricError: no reference, another type or shape than a reference's, or a logit that is
            not a finite float32 (row and column are named).
    """
    wrong = _logits_mismatches("obtained", obtained)
    if not references:
        wrong.append("nothing to compare with: obtained 0 references, expected at least 1")
    wrong += [
        f"obtained logits of shape {np.shape(obtained)}, expected {each.logits.shape} [M, V] of "
        f"reference {index}; compare the same positions and exactly vocab_size columns"
        for index, each in enumerate(references)
        if np.shape(obtained) != each.logits.shape
    ]
    _raise_all("comparison", wrong)
    cross = np.empty((len(references), len(obtained)))
    log_sum_exp = np.empty(len(obtained))
    top = np.empty(len(obtained), dtype=np.int64)
    for rows, shifted, first in _shifted_chunks("obtained", obtained):
        top[rows] = first
        work = np.exp(shifted)
        log_sum_exp[rows] = np.log(work.sum(axis=1))
        for index, each in enumerate(references):
            np.multiply(each.probabilities[rows], shifted, out=work)
            cross[index, rows] = work.sum(axis=1)
    return [
        _token_metrics(each, obtained, top, log_sum_exp, cross[index])
        for index, each in enumerate(references)
    ]


def summarize(tokens: TokenMetrics) -> Metrics:
    """Return the statistics of one comparison over all its positions.

    Each mean is over positions or scored tokens, never over windows, so a short last window
    has no more weight than its tokens. Values, float64:

    - ``positions``, and ``scored_tokens``, those with a true next token.
    - ``kl_mean_nats``, ``kl_median_nats``, ``kl_p99_nats`` (linear interpolation),
      ``kl_max_nats``: of KL(reference || obtained) over positions.
    - ``kl_mean_stderr_nats``, ``top1_stderr_frac``, ``perplexity_ratio_log_stderr``: see
      ``ratios.standard_errors``; absent below two texts.
    - ``top1_frac``, and ``top1_tied_frac``, where agreeing up to a tie counts.
    - ``perplexity``, ``reference_perplexity``: exp(mean token NLL), normalised by scored
      tokens; ``perplexity_ratio``: of the two; ``true_prob_rms_frac``: root mean square of
      p_obtained(true) - p_reference(true). All four absent where no position has a target.

    An overflowing perplexity is infinity, which no verdict accepts.

    Raises:
        MetricError: nothing was scored; a KL or a scored NLL that is not finite; targets that
            differ between reference and obtained.
    """
    positions = len(tokens.kl_nats)
    if positions == 0:
        raise MetricError(
            "summary: nothing was scored: obtained 0 positions, expected at least 1; "
            "check that the text set is not empty"
        )
    scored = ~np.isnan(tokens.reference_nll_nats)
    _require_finite_tokens(tokens, scored)
    values = {
        "positions": float(positions),
        "scored_tokens": float(scored.sum()),
        "kl_mean_nats": float(np.mean(tokens.kl_nats)),
        "kl_median_nats": float(np.median(tokens.kl_nats)),
        "kl_p99_nats": float(np.quantile(tokens.kl_nats, 0.99)),
        "kl_max_nats": float(np.max(tokens.kl_nats)),
        "top1_frac": float(np.mean(tokens.top1)),
        "top1_tied_frac": float(np.mean(tokens.tied_top1)),
    }
    values |= standard_errors(tokens)
    if scored.any():
        values |= _perplexities(tokens.nll_nats[scored], tokens.reference_nll_nats[scored])
    return Metrics(values=values, tokens=tokens)


def scored_rows(
    token_ids: Sequence[np.ndarray], scored: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which positions of ragged texts are scored, text by text, and their true tokens.

    "every" scores positions 0 to T - 1; the last one has no target, so a text gives T - 1 scored
    tokens and a text of one token gives none. "last" scores position T - 1 only, without a
    target. ``logits[text, position]`` gathers the [M, V] rows from padded [N, T, V].

    Args:
        token_ids: N texts, int32 [T] each; T may differ. No text gives M = 0.
        scored: "every" or "last".

    Returns:
        text: int32 [M]; position: int64 [M]; target: int64 [M], -1 where there is none.

    Raises:
        MetricError: another value of ``scored``, a text that is not int [T] with T of at least
            1, a negative token id.
    """
    wrong = []
    if scored not in SCORED:
        wrong.append(f"scored: obtained {scored!r}, expected one of {list(SCORED)}")
    for index, ids in enumerate(token_ids):
        shaped = np.ndim(ids) == 1 and np.size(ids) > 0
        if not shaped or np.asarray(ids).dtype.kind not in "iu" or np.min(ids) < 0:
            wrong.append(
                f"text {index}: obtained {np.asarray(ids).dtype} {np.shape(ids)}, expected "
                "non-negative int32 [T] with T >= 1; drop empty texts when tokenizing"
            )
    _raise_all("scored rows", wrong)
    rows = [
        (index, at, ids[at + 1] if at + 1 < len(ids) else -1)
        for index, ids in enumerate(token_ids)
        for at in range(0 if scored == "every" else len(ids) - 1, len(ids))
    ]
    text, position, target = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    return text.astype(np.int32), position, target


def first_non_finite(name_to_array: Mapping[str, np.ndarray]) -> str | None:
    """Return the first NaN or infinity as ``logits[0, 3, 17] = nan``, or None.

    Args:
        name_to_array: tensors in the order of looking; each in C order of its indices.

    Raises:
        MetricError: no tensor, or a tensor without elements: nothing was looked at.
    """
    empty = sorted(name for name, array in name_to_array.items() if np.size(array) == 0)
    if empty or not name_to_array:
        raise MetricError(
            f"non-finite check: nothing to check: obtained {empty or 'no tensor'} with 0 "
            "elements, expected at least 1; check that the texts were decoded"
        )
    for name, array in name_to_array.items():
        finite = np.isfinite(array)
        if not finite.all():
            index = np.unravel_index(np.argmin(finite), np.shape(array))
            place = [int(axis) for axis in index] or ""
            return f"{name}{place} = {float(np.asarray(array)[index])}"
    return None


def _shifted_chunks(
    name: str, logits: np.ndarray
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield rows, their logits minus each row's maximum, float64, and its first index.

    The float64 difference of two finite float32 is finite, so nothing overflows later.
    """
    step = max(1, CHUNK_LOGITS // logits.shape[1])
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        chunk = logits[rows]
        good = np.isfinite(chunk)
        if chunk.dtype == np.float64:
            good &= np.abs(chunk) <= LARGEST_LOGIT
        if not good.all():
            row, column = np.unravel_index(np.argmin(good), chunk.shape)
            raise MetricError(
                f"{name} logits: non-finite measurement: obtained {float(chunk[row, column])} at "
                f"row {start + int(row)}, column {int(column)}, expected a finite float32; "
                "find the first bad tensor with first_non_finite"
            )
        top = chunk.argmax(axis=1)
        maxima = np.take_along_axis(chunk, top[:, None], axis=1)
        yield rows, np.subtract(chunk, maxima, dtype=np.float64), top


def _nll(
    logits: np.ndarray, targets: np.ndarray, top: np.ndarray, log_sum_exp: np.ndarray
) -> np.ndarray:
    """Return -log softmax(logits)[target] a row, float64 [M], nats; NaN without a target."""
    rows = np.arange(len(logits))
    true = logits[rows, np.maximum(targets, 0)].astype(np.float64)
    nll = log_sum_exp - (true - logits[rows, top].astype(np.float64))
    return np.where(targets >= 0, nll, np.nan)


def _token_metrics(
    reference: ReferenceDistribution,
    obtained: np.ndarray,
    top: np.ndarray,
    log_sum_exp: np.ndarray,
    cross: np.ndarray,
) -> TokenMetrics:
    """Return TokenMetrics from the row sums over V: float64 [M] each."""
    rows = np.arange(len(obtained))
    tied_in_reference = reference.logits[rows, top] == reference.logits[rows, reference.top]
    tied_in_obtained = obtained[rows, reference.top] == obtained[rows, top]
    return TokenMetrics(
        kl_nats=(reference.cross - cross) + (log_sum_exp - reference.log_sum_exp),
        nll_nats=_nll(obtained, reference.targets, top, log_sum_exp),
        reference_nll_nats=reference.nll_nats,
        top1=top == reference.top,
        text=reference.text,
        tied_top1=tied_in_reference | tied_in_obtained,
    )


def _perplexities(nll: np.ndarray, reference_nll: np.ndarray) -> dict[str, float]:
    """Return the metrics of the true tokens from NLLs, float64 [scored tokens], nats."""
    mean, reference_mean = np.mean(nll), np.mean(reference_nll)
    change = np.exp(-nll) - np.exp(-reference_nll)
    with np.errstate(over="ignore"):
        return {
            "perplexity": float(np.exp(mean)),
            "reference_perplexity": float(np.exp(reference_mean)),
            "perplexity_ratio": float(np.exp(mean - reference_mean)),
            "true_prob_rms_frac": float(np.sqrt(np.mean(change**2))),
        }


def _require_finite_tokens(tokens: TokenMetrics, scored: np.ndarray) -> None:
    """Raise MetricError unless KL and the scored NLLs are finite, at the same positions."""
    obtained = ~np.isnan(tokens.nll_nats)
    if not np.array_equal(scored, obtained):
        raise MetricError(
            f"summary: obtained {int(obtained.sum())} positions with an NLL, "
            f"expected the reference's {int(scored.sum())} at the same places; compare again"
        )
    checked = {"kl_nats": tokens.kl_nats}
    for name in ("nll_nats", "reference_nll_nats"):
        checked[f"scored {name}"] = np.where(scored, getattr(tokens, name), 0)
    bad = first_non_finite(checked)
    if bad is not None:
        raise MetricError(
            f"summary: non-finite measurement: obtained {bad}, expected a finite number; "
            "find the first bad tensor with first_non_finite"
        )


def _logits_mismatches(name: str, logits: np.ndarray) -> list[str]:
    """Return what keeps an array from being logits [M, V] of a floating type."""
    wrong = []
    if np.ndim(logits) != 2 or np.shape(logits)[1] == 0:
        wrong.append(f"{name} logits of shape {np.shape(logits)}, expected [M, V] with V >= 1")
    if str(logits.dtype) not in LOGIT_TYPES:
        wrong.append(f"{name} logits of type {logits.dtype}, expected one of {list(LOGIT_TYPES)}")
    return wrong


def _index_mismatches(logits: np.ndarray, targets: np.ndarray, text: np.ndarray) -> list[str]:
    """Return what keeps targets and text from indexing the rows of logits [M, V]."""
    wrong = []
    for name, array in (("targets", targets), ("text", text)):
        if array.shape != np.shape(logits)[:1] or (array.size and array.dtype.kind not in "iu"):
            obtained = f"{array.dtype} {array.shape}"
            wrong.append(f"{name}: obtained {obtained}, expected int {np.shape(logits)[:1]} [M]")
    if np.ndim(logits) == 2 and targets.size:
        low, high, columns = targets.min(), targets.max(), np.shape(logits)[1]
        if low < -1 or high >= columns:
            wrong.append(f"targets: obtained {low} to {high}, expected -1 to {columns - 1}")
    return wrong


def _raise_all(what: str, wrong: Sequence[str]) -> None:
    """Raise MetricError with every mismatch, sorted; return when there is none."""
    if wrong:
        raise MetricError(f"{what}: " + "; ".join(sorted(wrong)))
