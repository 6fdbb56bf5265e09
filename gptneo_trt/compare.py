"""Two results files -> every cell that changed, and whether by more than noise.

``python -m gptneo_trt.compare BEFORE/results.json AFTER/results.json`` prints a table and returns
1 where a cell changed beyond noise. It is for runs that differ in one thing, such as the version of
TensorRT; what they differ in is printed first.

Noise: a KL whose means a text are in both files is compared paired by text (t-test); another loss
by its standard error over texts, which ignores that the texts are the same and so finds less; a
time ratio by its interval over rounds, which knows nothing of other runs' clocks. p-values are
two-sided and Holm's over all cells that have one: at most 5 % of comparisons of equal things show
any change. A figure that is counted, such as a plan's size, changed if it differs at all; of one
that is timed without an interval nobody knows.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy import stats

from gptneo_trt.errors import MetricError
from gptneo_trt.report import PHASES
from gptneo_trt.results import read_results

Results = Mapping[str, Any]  # content of results.json
T = TypeVar("T")
Key = tuple[str, str, str]
Pair = tuple[T, T]  # before and after
LEVEL = 0.05
# Metric of a cell -> its standard error among the values, after the phase.
ERRORS = {
    "kl_mean_nats": "prose/bf16/kl_mean_stderr_nats",
    "float32/kl_mean_nats": "prose/float32/kl_mean_stderr_nats",
    "next_token/kl_mean_nats": "next_token/bf16/kl_mean_stderr_nats",
    "top1_frac": "prose/bf16/top1_stderr_frac",
    "next_token/top1_frac": "next_token/bf16/top1_stderr_frac",
    "perplexity_ratio": "prose/bf16/perplexity_ratio_log_stderr",
}
PAIRED = "kl_mean_nats"  # of the prose to bf16: the profiles have its mean a text
SPEED = "speedup_x"  # a value of each row that was timed, whether or not a stored one judged it
# Timed once, by a clock that has no interval.
WITHOUT_ERROR = ("alternative/", "clock_frac", "step_overhead_x")
NORMAL_95 = 1.959964  # half a two-sided 95 % interval, in standard errors
# Standard deviation of a time ratio between runs of equal engines, over the ratio: five runs on two
# H200 hosts had a range of up to 2.4 %, which is 2.33 deviations (docs/statistics.md).
SPEED_DEVIATION_FRAC = 0.01
TOKEN_COUNTS = ("/positions", "/scored_tokens")
MEASURED_AGAIN = ("regression/", "build")  # the same figure as another cell's, or of the cache


@dataclass(frozen=True)
class Change:
    """Hold how one cell differs.

    Attributes:
        key: (variant, phase, metric).
        before, after: what was obtained.
        verdicts: before and after.
        p: two-sided; None where there is no estimate of an error.
        significant: whether it changed beyond noise; None: nobody knows.
    """

    key: Key
    before: float | str | None
    after: float | str | None
    verdicts: tuple[str, str]
    p: float | None
    significant: bool | None


def _cells(results: Results) -> dict[Key, Mapping[str, Any]]:
    """Return the cells of a run, without those that compare with a stored one of its own.

    A time ratio is judged by such a one alone, so it is taken from the values.
    """
    found = {
        (cell["variant"], cell["phase"], cell["metric"]): cell
        for cell in results["cells"]
        if not cell["metric"].startswith(MEASURED_AGAIN)
    }
    for variant, row in results["values"].items():
        for phase in PHASES:
            if f"{phase}/{SPEED}" in row:
                timed = {"obtained": row[f"{phase}/{SPEED}"], "verdict": "timed"}
                found[variant, phase, SPEED] = timed
    return found


def differences_of_runs(before: Results, after: Results) -> list[str]:
    """Return what the runs themselves differ in, a line each: target, model, shape, versions."""
    lines = []
    for name in ("target", "model.sha256", "provenance.commit", "provenance.machine"):
        pair = [_member(results, name) for results in (before, after)]
        if pair[0] != pair[1]:
            lines.append(f"{name}: {pair[0]} -> {pair[1]}")
    shapes = [_shape(results) for results in (before, after)]
    if shapes[0] != shapes[1]:
        lines.append(f"shape: {shapes[0]} -> {shapes[1]}")
    versions = [results["provenance"].get("versions", {}) for results in (before, after)]
    for name in sorted(versions[0].keys() | versions[1].keys()):
        pair = [each.get(name, "absent") for each in versions]
        if pair[0] != pair[1]:
            lines.append(f"{name}: {pair[0]} -> {pair[1]}")
    return lines


def _shape(results: Results) -> str:
    """Return batch and context of a run, which names them where nothing is stored of them."""
    shape = results.get("shape")
    return f"batch {shape['batch']}, context {shape['context']}" if shape else "the baselines'"


def _member(results: Results, path: str) -> Any:
    found: Any = results
    for name in path.split("."):
        found = found[name]
    return found


def changes(before: Results, after: Results) -> list[Change]:
    """Return every cell whose figure or verdict differs, in the order of ``before``.

    A cell that one run alone has is one with the verdict "absent" in the other.

    Raises:
        MetricError: the losses are of other numbers of tokens.
    """
    _require_same_tokens(before, after)
    old, new = _cells(before), _cells(after)
    runs = (before, after)
    found = [
        _change(key, (old.get(key), new.get(key)), runs)
        for key in [*old, *(key for key in new if key not in old)]
    ]
    significant = iter(_holm([each.p for each in found if each.p is not None]))
    judged = [
        each if each.p is None else replace(each, significant=next(significant)) for each in found
    ]
    return [
        each for each in judged if each.before != each.after or each.verdicts[0] != each.verdicts[1]
    ]


def _require_same_tokens(before: Results, after: Results) -> None:
    """Raise MetricError where a loss of one run is over more tokens than the other's."""
    wrong = []
    for variant, row in before["values"].items():
        other = after["values"].get(variant, {})
        wrong += [
            f"{variant}/{name}: {row[name]:g} and {other[name]:g}"
            for name in row.keys() & other.keys()
            if name.endswith(TOKEN_COUNTS) and row[name] != other[name]
        ]
    if wrong:
        raise MetricError(
            f"losses over other tokens cannot be compared: {'; '.join(sorted(wrong))}; compare "
            "runs of the same texts"
        )


def _change(key: Key, cells: Pair[Mapping[str, Any] | None], runs: Pair[Results]) -> Change:
    before, after = (cell["obtained"] if cell else None for cell in cells)
    verdicts = tuple(cell["verdict"] if cell else "absent" for cell in cells)
    other_verdict = verdicts[0] != verdicts[1]
    significant: bool | None = before != after or other_verdict
    if key[2].startswith(WITHOUT_ERROR) and not other_verdict:
        significant = None
    p = _p_value(key, (before, after), runs)
    return Change(key, before, after, (verdicts[0], verdicts[1]), p, significant)


def _p_value(key: Key, obtained: Pair[Any], runs: Pair[Results]) -> float | None:
    """Return the two-sided p-value that a figure did not change; None without errors of both."""
    variant, phase, metric = key
    if metric == PAIRED:
        texts = [_kl_by_text(results, variant, phase) for results in runs]
        if texts[0] and texts[1] and len(texts[0]) == len(texts[1]):
            return _paired_p(np.array(texts[0]), np.array(texts[1]))
    rows = (results["values"].get(variant, {}) for results in runs)
    pairs = [
        _figure_and_error(row, phase, metric, figure)
        for row, figure in zip(rows, obtained, strict=True)
    ]
    if None in pairs:
        return None
    (old, old_error), (new, new_error) = (pair for pair in pairs if pair)
    error = float(np.hypot(old_error, new_error))
    if error == 0:
        return 1.0 if old == new else 0.0
    return float(2 * stats.norm.sf(abs(new - old) / error))


def _kl_by_text(results: Results, variant: str, phase: str) -> Sequence[float]:
    profile = results.get("token_profiles", {}).get(variant, {}).get(phase, {})
    return profile.get("kl_by_text_nats", [])


def _paired_p(before: np.ndarray, after: np.ndarray) -> float:
    """Return the p-value of a paired t-test over texts, float64 [N] each."""
    if np.array_equal(before, after):
        return 1.0
    if np.ptp(after - before) == 0:
        return 0.0
    return float(stats.ttest_rel(after, before).pvalue)


def _figure_and_error(
    row: Mapping[str, Any], phase: str, metric: str, obtained: Any
) -> tuple[float, float] | None:
    """Return a figure and its standard error; a ratio of perplexities in log space."""
    if not isinstance(obtained, int | float):
        return None
    figure = float(obtained)
    if metric == SPEED:
        lower, upper = (row.get(f"{phase}/speedup_{end}_x") for end in ("lower", "upper"))
        if lower is None or upper is None:
            return None
        rounds = (upper - lower) / (2 * NORMAL_95)
        return figure, float(np.hypot(rounds, SPEED_DEVIATION_FRAC * figure))
    error = row.get(f"{phase}/{ERRORS[metric]}") if metric in ERRORS else None
    if error is None:
        return None
    return (float(np.log(figure)) if metric == "perplexity_ratio" else figure), float(error)


def _holm(p_values: Sequence[float]) -> list[bool]:
    """Return which hypotheses Holm's step-down procedure rejects at LEVEL, in the given order.

    Source: S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (1979).
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > LEVEL / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def table(before: Results, after: Results) -> Iterator[str]:
    """Yield the lines of a Markdown report of the comparison."""
    return _table(before, after, changes(before, after))


def _table(before: Results, after: Results, found: Sequence[Change]) -> Iterator[str]:
    yield "What the runs differ in:"
    yield from (f"- {line}" for line in differences_of_runs(before, after) or ["nothing"])
    beyond = [change for change in found if change.significant]
    compared = len(_cells(before).keys() | _cells(after).keys())
    yield ""
    yield f"{len(beyond)} of {compared} cells changed beyond noise, {len(found)} at all."
    if not found:
        return
    yield ""
    yield "| cell | before | after | change | significance |"
    yield "| --- | --- | --- | --- | --- |"
    for change in sorted(found, key=lambda each: not each.significant):
        yield _line(change)


def _line(change: Change) -> str:
    figures = change.before, change.after
    numbers = all(isinstance(figure, int | float) for figure in figures)
    moved = "-"
    if numbers and change.before:
        moved = f"{100 * (float(figures[1] or 0) / float(change.before) - 1):+.2f} %"
    told = [f"{figure:.4g}" if isinstance(figure, float) else str(figure) for figure in figures]
    if change.verdicts[0] != change.verdicts[1]:
        told = [f"{one} ({verdict})" for one, verdict in zip(told, change.verdicts, strict=True)]
    judged = {True: "beyond noise", False: "within noise", None: "unknown"}[change.significant]
    counted = "timed without an interval" if change.significant is None else "counted"
    evidence = counted if change.p is None else f"p = {change.p:.2g}"
    return f"| {'/'.join(change.key)} | {told[0]} | {told[1]} | {moved} | {judged}: {evidence} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how two runs differ; return 1 where a cell changed beyond noise.

    Runs that cannot be compared end with status 2 and the reason.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gptneo_trt.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="results.json of one run")
    parser.add_argument("after", type=Path, help="results.json of the other")
    options = parser.parse_args(arguments)
    before, after = read_results(options.before), read_results(options.after)
    try:
        found = changes(before, after)
    except MetricError as error:
        parser.error(str(error))
    print("\n".join(_table(before, after, found)))
    return int(any(change.significant for change in found))


if __name__ == "__main__":
    sys.exit(main())
