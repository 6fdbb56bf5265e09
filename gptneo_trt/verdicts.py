"""Measured value, limit and baseline -> Cell; pure, and closed: what cannot be judged is not green.

Every comparison is written so that NaN fails it, and every number is first checked to be
finite. Reasons give both numbers. A cell is named by (variant, phase, metric).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gptneo_trt.data import Cell, Interval, PairedDifference

AT_MOST, AT_LEAST = "at most", "at least"
SHIPPED, STUDIED, EXPLORED = "shipped", "studied", "explored"
WITHIN, OUTSIDE, UNDECIDED = "within the ship limits", "outside the ship limits", "undecided"
# Metrics that cannot be negative, by how their names begin; a KL rounds to -1e-7 at worst.
NON_NEGATIVE = ("kl_", "top1_", "perplexity", "true_prob_", "plan_", "latency_", "speedup_")
ROUNDING = 1e-7
NOT_MEASURED = "not measured"
UPDATE_IT = "than the baseline: update it"  # of a figure that passed and is better beyond noise
NO_BASELINE = "no baseline: write one with --update-baselines"

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Bound:
    """Hold an acceptable range with one end.

    Attributes:
        direction: AT_MOST or AT_LEAST.
        value: the end, itself acceptable; in the metric's unit.
    """

    direction: str
    value: float

    def __str__(self) -> str:
        return f"{self.direction} {self.value:.6g}"

    def allows(self, obtained: float) -> bool:
        """Return whether a value is in the range; NaN on either side is not."""
        if self.direction == AT_MOST:
            return obtained <= self.value
        return self.direction == AT_LEAST and obtained >= self.value


def not_measured(variant: str, phase: str, metric: str, reason: str) -> Cell:
    """Return the cell of a figure that was not taken, for example "benchmarks are disabled"."""
    return Cell(variant, phase, metric, None, None, None, NOT_MEASURED, f"not measured: {reason}")


def judge_limit(
    variant: str,
    phase: str,
    metric: str,
    obtained: float | None,
    limit: Bound,
    standard_error: float | None = None,
) -> Cell:
    """Judge a measured value against a fixed limit: passed, failed or not measured.

    ``standard_error`` of the value over texts is stated and decides nothing: every run scores the
    same texts, so it says how far other texts would move the value, not how far two runs differ.
    For that reason such a cell has no minimum detectable effect: on these texts any loss beyond
    the limit is found.

    A non-finite measurement or limit, an impossible measurement (a negative KL) and a
    nonsensical limit (negative for what cannot be negative, above 1 for a fraction, of an
    unknown direction) fail, whatever the other number is.
    """
    fault = _limit_fault(metric, limit)
    if fault:
        verdict, reason = "failed", fault
    elif obtained is None:
        verdict, reason = NOT_MEASURED, f"not measured: no value to hold against {limit}"
    else:
        fault = measurement_fault(metric, obtained)
        passed = not fault and limit.allows(obtained)
        verdict = "passed" if passed else "failed"
        reason = fault or f"obtained {obtained:.6g}, expected {limit}"
        if not fault and standard_error is not None:
            reason += f"; standard error over texts {standard_error:.2g}"
    return Cell(variant, phase, metric, obtained, str(limit), None, verdict, reason)


def judge_regression(
    variant: str,
    phase: str,
    metric: str,
    paired: PairedDifference | None,
    stored_mean: float | None,
    tolerance: float,
) -> Cell:
    """Judge a paired difference to the baseline, of a metric that is worse when larger.

    The mean of current - stored must be at most ``tolerance``, in the metric's unit. Failed when
    its lower bound is above, passed when its upper bound is not, and inconclusive in between:
    more tokens are needed. Passed with a note when its upper bound is below -tolerance.
    """
    limit = f"stored + {tolerance:.6g}"
    obtained = None if paired is None or stored_mean is None else stored_mean + paired.mean
    if stored_mean is None:
        verdict, reason = "failed", NO_BASELINE
    elif tolerance_fault(tolerance):
        verdict, reason = "failed", tolerance_fault(tolerance)
    elif paired is None:
        verdict, reason = NOT_MEASURED, "not measured: no paired values"
    else:
        fault = stored_fault(stored_mean) or paired_fault(paired)
        verdict, reason = ("failed", fault) if fault else _paired_verdict(paired, tolerance)
    detectable = None if paired is None else paired.minimum_detectable
    return Cell(variant, phase, metric, obtained, limit, stored_mean, verdict, reason, detectable)


def judge_stored(
    variant: str,
    phase: str,
    metric: str,
    obtained: float | None,
    stored: float | None,
    tolerance_frac: float,
    *,
    tolerance_abs: float = 0.0,
) -> Cell:
    """Judge a value against the stored one, on both sides: passed, failed or not measured.

    |obtained - stored| must be at most the larger of tolerance_frac * |stored| and
    ``tolerance_abs``, the latter in the metric's unit. A missing baseline fails.
    """
    limit = f"stored +- max({100 * tolerance_frac:.6g} %, {tolerance_abs:.6g})"
    fault = tolerance_fault(tolerance_frac) or tolerance_fault(tolerance_abs)
    if stored is None:
        verdict, reason = "failed", NO_BASELINE
    elif fault or not math.isfinite(stored):
        verdict, reason = "failed", fault or f"non-finite baseline: stored {stored}"
    elif obtained is None:
        verdict, reason = NOT_MEASURED, f"not measured: no value to hold against {stored:.6g}"
    else:
        fault = measurement_fault(metric, obtained)
        allowed = max(tolerance_frac * abs(stored), tolerance_abs)
        passed = not fault and abs(obtained - stored) <= allowed
        verdict = "passed" if passed else "failed"
        reason = fault or f"obtained {obtained:.6g}, expected {stored:.6g} +- {allowed:.6g}"
    return Cell(variant, phase, metric, obtained, limit, stored, verdict, reason)


def judge_decision(
    variant: str,
    phase: str,
    metric: str,
    decision: str,
    judged: Mapping[str, tuple[Interval, Bound]],
) -> Cell:
    """Judge whether a row is still SHIPPED or STUDIED: passed, failed or inconclusive.

    SHIPPED needs evidence that every figure is within its ship limit, STUDIED that at least one
    is outside; where neither can be said the cell is inconclusive. Requiring all bounds to be
    within keeps the chance of shipping a row that misses a limit at that of one bound, however
    many there are (intersection-union test: Berger, Technometrics 24, 1982). One bound of several
    outside is wrong more often, up to the sum of their chances: it only keeps a row from being
    shipped.

    Args:
        decision: SHIPPED or STUDIED; or EXPLORED, of which nothing is expected.
        judged: name, for the reason -> figure with its bounds, ship limit; at least one.
    """
    found = {name: _evidence(interval, bound) for name, (interval, bound) in judged.items()}
    told = next((each for each in (OUTSIDE, UNDECIDED) if each in found.values()), WITHIN)
    figures = "; ".join(
        f"{name} {interval.value:.4g} ({interval.lower:.4g} to {interval.upper:.4g}, each bound at "
        f"{100 * interval.confidence:g} %), expected {bound}"
        for name, (interval, bound) in judged.items()
        if found[name] == told
    )
    reason = f"{decision}: {told}: {figures}"
    if told == UNDECIDED:
        verdict, reason = "inconclusive", f"too few tokens to decide: {reason}"
    elif decision in (EXPLORED, SHIPPED if told == WITHIN else STUDIED):
        verdict = "passed"
    else:
        verdict = "failed"
        reason += "; now within the limits: revisit the decision" if told == WITHIN else ""
    return Cell(variant, phase, metric, told, decision, None, verdict, reason)


def coverage(expected: Collection[Key], cells: Iterable[Cell]) -> tuple[set[Key], set[Key]]:
    """Return which expected (variant, phase, metric) were measured, and which are missing."""
    judged = {_key(cell) for cell in cells if cell.verdict != NOT_MEASURED}
    return set(expected) & judged, set(expected) - judged


def problems(expected: Collection[Key], cells: Iterable[Cell]) -> list[str]:
    """Return everything that keeps a run from being green, a sorted line each.

    Every cell that did not pass, every expected cell without a cell, every cell that was not
    expected (a renamed row), every cell given twice; or that nothing was expected.
    """
    cells = list(cells)
    given = Counter(_key(cell) for cell in cells)
    lines = [
        f"{_name(_key(cell))}: {cell.verdict}: {cell.reason}"
        for cell in cells
        if cell.verdict != "passed"
    ]
    lines += [f"{_name(key)}: not measured: no cell" for key in set(expected) - given.keys()]
    lines += [f"{_name(key)}: unexpected cell" for key in given.keys() - set(expected)]
    lines += [
        f"{_name(key)}: {count} cells, expected 1" for key, count in given.items() if count > 1
    ]
    if not expected:
        lines.append("nothing was expected: obtained 0 cells to measure, expected at least 1")
    return sorted(lines)


def is_green(cells: Iterable[Cell], expected: Collection[Key]) -> bool:
    """Return whether every expected cell passed, once, and there is no other cell at all."""
    return not problems(expected, cells)


def _key(cell: Cell) -> Key:
    """Return what names a cell."""
    return cell.variant, cell.phase, cell.metric


def _name(key: Key) -> str:
    """Return ``variant/phase/metric``."""
    return "/".join(key)


def _cannot_be_negative(metric: str) -> bool:
    """Return whether a metric, ``kl_mean_nats`` or ``prose/bf16/kl_mean_nats``, is never < 0."""
    return metric.rpartition("/")[2].startswith(NON_NEGATIVE)


def _evidence(interval: Interval, bound: Bound) -> str:
    """Return WITHIN or OUTSIDE where both ends of an interval are; else, and of NaN, UNDECIDED."""
    ends = (interval.lower, interval.upper)
    allowed = {bound.allows(end) for end in ends}
    if len(allowed) > 1 or any(math.isnan(end) for end in ends):
        return UNDECIDED
    return WITHIN if allowed == {True} else OUTSIDE


def _limit_fault(metric: str, limit: Bound) -> str:
    """Return why a limit cannot judge this metric, or ""."""
    if not math.isfinite(limit.value):
        return f"non-finite limit: obtained {limit}, expected a finite number"
    if limit.direction not in (AT_MOST, AT_LEAST):
        return f"nonsensical limit: obtained {limit}, expected {AT_MOST!r} or {AT_LEAST!r}"
    if limit.value < 0 and _cannot_be_negative(metric):
        return f"nonsensical limit: obtained {limit}, expected 0 or more for {metric}"
    if limit.value > 1 and metric.endswith("_frac"):
        return f"nonsensical limit: obtained {limit}, expected 1 or less for {metric}"
    return ""


def measurement_fault(metric: str, obtained: float) -> str:
    """Return why a value cannot be a measurement of this metric, or ""."""
    if not math.isfinite(obtained):
        return f"non-finite measurement: obtained {obtained}, expected a finite number"
    if obtained < -ROUNDING and _cannot_be_negative(metric):
        return f"nonsensical measurement: obtained {obtained:.6g}, expected 0 or more"
    return ""


def tolerance_fault(tolerance: float) -> str:
    """Return why a number cannot be a tolerance, or ""."""
    if not math.isfinite(tolerance):
        return f"non-finite limit: obtained tolerance {tolerance}, expected a finite number"
    if tolerance < 0:
        return f"nonsensical limit: obtained tolerance {tolerance:.6g}, expected 0 or more"
    return ""


def stored_fault(stored: float) -> str:
    """Return why a stored value cannot be a baseline, or ""."""
    if not math.isfinite(stored):
        return f"non-finite baseline: stored {stored}, expected a finite number"
    return ""


def paired_fault(paired: PairedDifference) -> str:
    """Return why a paired difference cannot be judged, or ""."""
    figures = (paired.lower, paired.mean, paired.upper, paired.minimum_detectable)
    if not all(math.isfinite(figure) for figure in figures):
        return f"non-finite measurement: obtained {paired}, expected finite numbers"
    if not paired.lower <= paired.upper:
        return f"nonsensical measurement: obtained bounds {paired.lower} and {paired.upper}"
    return ""


def _paired_verdict(paired: PairedDifference, tolerance: float) -> tuple[str, str]:
    """Return the verdict on finite bounds, and its reason."""
    reason = (
        f"changed by {paired.mean:+.3g} ({paired.lower:+.3g} to {paired.upper:+.3g}, each bound "
        f"at {100 * paired.confidence:g} %, {paired.texts} texts), expected at most "
        f"{tolerance:+.3g}; minimum detectable effect {paired.minimum_detectable:.3g}"
    )
    if paired.lower > tolerance:
        return "failed", f"worse than the baseline: {reason}"
    if paired.upper < -tolerance:
        return "passed", f"better {UPDATE_IT}: {reason}"
    if paired.upper <= tolerance:
        return "passed", reason
    return "inconclusive", f"too few tokens to decide: {reason}"
