"""Logits and tokens -> metrics, in numpy alone: imports without torch, transformers, TensorRT.

Axes: M scored positions over all texts, V vocabulary, N texts, T tokens. Every exponential,
logarithm and sum is taken in float64, row by row, whatever the type of the logits.

Direction of the divergence: KL(reference || obtained), in nats a position, over all V.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gptneo_trt.data import Metrics, TokenMetrics
from gptneo_trt.errors import MetricError

SCORED = ("every", "last")
LOGIT_TYPES = ("float16", "float32", "float64")
# Logits a chunk of rows: 2 MiB in float64, so that a chunk stays in a core's cache.
CHUNK_LOGITS = 1 << 18
LARGEST_LOGIT = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class ReferenceDistribution:
    """Hold a reference's logits and what every comparison with them reuses.

    The probabilities are float64, 8 bytes a logit: float32 would halve the memory but put an
    error of 6e-8 times sum p |z_ref - z_obt| into each KL, and their sum would not be 1.

    Attributes:
        logits: float32 [M, V], before softmax; the caller's array, not a copy.
        targets: int64 [M], id of the true next token, -1 where the text has none.
        text: int32 [M], index of the text.
        probabilities: float64 [M, V], softmax of the logits.
        cross: float64 [M], sum over V of probabilities * (logits - their maximum).
        log_sum_exp: float64 [M], log sum over V of exp(logits - their maximum), in [0, ln V].
        top: int64 [M], most likely token; the first index wins a tie.
        nll_nats: float64 [M], -log p(target); NaN where there is no target.
    """

    logits: np.ndarray
    targets: np.ndarray
    text: np.ndarray
    probabilities: np.ndarray
    cross: np.ndarray
    log_sum_exp: np.ndarray
    top: np.ndarray
    nll_nats: np.ndarray


def reference_distribution(
    logits: np.ndarray, targets: np.ndarray, text: np.ndarray
) -> ReferenceDistribution:
    """Return what comparisons with these reference logits reuse.

    Args:
        logits: float32 [M, V], before softmax.
        targets: int [M], id of the true next token, -1 where there is none.
        text: int [M], index of the text that a position belongs to.

    Raises:
        MetricError: shapes or types that do not fit, a target outside [-1, V), a logit that is
            not a finite float32.
    """
    targets, text = np.asarray(targets), np.asarray(text)
    wrong = _logits_mismatches("reference", logits)
    wrong += _index_mismatches(logits, targets, text)
    _raise_all("reference distribution", wrong)
    probabilities = np.empty(logits.shape)
    cross, log_sum_exp = np.empty(len(logits)), np.empty(len(logits))
    top = np.empty(len(logits), dtype=np.int64)
    for rows in _row_chunks(logits.shape):
        shifted, top[rows] = _shift(logits[rows], "reference", rows.start)
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
    """Compare the same logits with several references, exponentiating them once.

    KL(reference || obtained) = sum p (z_ref - z_obt) - lse_ref + lse_obt, p = softmax(z_ref),
    nats a position. Each z has its row's maximum subtracted in float64 first, so a constant
    shift of a row cancels; the sum over V is numpy's pairwise sum in float64. Equal logits give
    exactly 0. Rounding can leave a value just below 0, about -1e-13; it is not clamped, so that
    a real sign error would show.

    Args:
        references: of the same M positions.
        obtained: float32 [M, V], before softmax.

    Returns:
        One TokenMetrics a reference, in order.

    Raises:
        MetricError: an unequal number of rows or vocabulary (both shapes are named, for every
            reference), or a logit that is not a finite float32 (row and column are named).
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
    for rows in _row_chunks(obtained.shape):
        shifted, top[rows] = _shift(obtained[rows], "obtained", rows.start)
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
    - ``kl_mean_stderr_nats``: see ``block_standard_error``; absent below two texts.
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
    sums, counts = text_sums(tokens.kl_nats, tokens.text)
    if len(sums) > 1:
        values["kl_mean_stderr_nats"] = block_standard_error(sums, counts)
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
    text, position, target = [], [], []
    for index, ids in enumerate(token_ids):
        first = 0 if scored == "every" else len(ids) - 1
        text.append(np.full(len(ids) - first, index))
        position.append(np.arange(first, len(ids)))
        target.append(np.append(ids[first + 1 :], -1))
    return _joined(text, np.int32), _joined(position, np.int64), _joined(target, np.int64)


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
            place = f"[{', '.join(str(int(axis)) for axis in index)}]" if index else ""
            return f"{name}{place} = {float(np.asarray(array)[index])}"
    return None


def text_sums(values: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of values a text, float64 [N] each, texts ascending.

    Args:
        values: float [M].
        text: int [M], index of the text.
    """
    _, block = np.unique(text, return_inverse=True)
    sums = np.bincount(block, weights=values.astype(np.float64))
    return sums, np.bincount(block).astype(np.float64)


def block_standard_error(sums: np.ndarray, counts: np.ndarray) -> float:
    """Return the standard error of sum(sums) / sum(counts) when whole texts are the sample.

    Tokens of one text are correlated, so texts are the independent units. The mean is a ratio
    estimator; its linearised variance (Cochran, Sampling Techniques, 1977, section 6.3) is
    N / (N - 1) * sum (sums - mean * counts)^2 / sum(counts)^2, in float64.

    Args:
        sums: float64 [N], sum of a text's values.
        counts: float64 [N], number of a text's values.

    Raises:
        MetricError: fewer than two texts.
    """
    if len(sums) < 2:
        raise MetricError(
            f"standard error: obtained {len(sums)} texts, expected at least 2; score more texts"
        )
    residuals = sums - sums.sum() / counts.sum() * counts
    variance = len(sums) / (len(sums) - 1) * np.sum(residuals**2) / counts.sum() ** 2
    return float(np.sqrt(variance))


def _row_chunks(shape: tuple[int, ...]) -> list[slice]:
    """Return slices over the M rows of [M, V], of about CHUNK_LOGITS logits each."""
    step = max(1, CHUNK_LOGITS // shape[1])
    return [slice(start, start + step) for start in range(0, shape[0], step)]


def _shift(rows: np.ndarray, name: str, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows minus their maximum, float64, and the first index of that maximum.

    The float64 difference of two finite float32 is finite, so nothing overflows later.
    """
    good = np.isfinite(rows)
    if rows.dtype == np.float64:
        good &= np.abs(rows) <= LARGEST_LOGIT
    if not good.all():
        row, column = np.unravel_index(np.argmin(good), rows.shape)
        raise MetricError(
            f"{name} logits: non-finite measurement: obtained {float(rows[row, column])} at row "
            f"{start + int(row)}, column {int(column)}, expected a finite float32; "
            "find the first bad tensor with first_non_finite"
        )
    top = rows.argmax(axis=1)
    maxima = np.take_along_axis(rows, top[:, None], axis=1)
    return np.subtract(rows, maxima, dtype=np.float64), top


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
    if not np.array_equal(scored, ~np.isnan(tokens.nll_nats)):
        raise MetricError(
            f"summary: obtained {int((~np.isnan(tokens.nll_nats)).sum())} positions with an NLL, "
            f"expected the reference's {int(scored.sum())} at the same places; compare again"
        )
    checked = {"kl_nats": tokens.kl_nats}
    if scored.any():
        checked["scored nll_nats"] = tokens.nll_nats[scored]
        checked["scored reference_nll_nats"] = tokens.reference_nll_nats[scored]
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


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the concatenation as this type, of length 0 when there is no part."""
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype=dtype)
