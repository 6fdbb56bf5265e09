"""Time ratio, engine excess -> Cell; pure, and closed as ``verdicts`` is."""

import math
from collections.abc import Sequence
from dataclasses import replace

from scipy import stats

from gptneo_trt.data import Cell, PairedDifference, Speedup
from gptneo_trt.verdicts import (
    NO_BASELINE,
    NOT_MEASURED,
    UPDATE_IT,
    measurement_fault,
    paired_fault,
    stored_fault,
    tolerance_fault,
)


def judge_speedup(
    variant: str,
    phase: str,
    metric: str,
    obtained: Speedup | None,
    stored: float | None,
    tolerance_frac: float,
    noise: Speedup | None,
    *,
    noise_frac: float,
    minimum_detectable: float | None = None,
    against: str = "stored",
) -> Cell:
    """Judge a time ratio, better when larger, against the stored one.

    It must be at least stored * (1 - ``tolerance_frac``). Failed when its upper end is below,
    passed when its lower end is not, inconclusive in between: more rounds are needed. Passed
    with a note when its lower end is above stored * (1 + ``tolerance_frac``). Inconclusive,
    whatever it is, when the A/A run ``noise`` is missing or shows a noisy machine: its interval
    excludes 1 and its ratio is more than ``noise_frac`` away from it.
    ``minimum_detectable`` (see ``minimum_detectable_x``) is stated. ``against`` says what the
    stored one is.
    """
    limit = f"{against} - {100 * tolerance_frac:.6g} %"
    if stored is None:
        verdict, reason = "failed", NO_BASELINE
    elif fault := _worst_ratio_fault(stored, tolerance_frac) or tolerance_fault(noise_frac):
        verdict, reason = "failed", fault
    elif obtained is None:
        verdict, reason = NOT_MEASURED, f"not measured: no ratio to hold against {stored:.6g}"
    elif fault := _ratio_fault(obtained) or (_ratio_fault(noise) if noise else ""):
        verdict, reason = "failed", fault
    elif fault := noise_fault(noise, noise_frac):
        verdict, reason = "inconclusive", f"{fault}; obtained {_ratio_text(obtained)}"
    else:
        verdict, reason = _ratio_verdict(obtained, stored, tolerance_frac, against)
    if minimum_detectable is not None:
        reason += f"; minimum detectable effect {minimum_detectable:.3g}"
    ratio = None if obtained is None else obtained.ratio
    return Cell(variant, phase, metric, ratio, limit, stored, verdict, reason, minimum_detectable)


def judge_resolved(
    variant: str,
    phase: str,
    metric: str,
    obtained: Speedup,
    tolerance_frac: float,
    noise: Speedup | None,
    *,
    noise_frac: float,
    minimum_detectable: float | None = None,
) -> Cell:
    """Judge a time ratio that nothing is stored for: whether its rounds resolve the tolerance.

    As ``judge_speedup`` does with the ratio itself as the stored one: inconclusive where one that
    is smaller by ``tolerance_frac`` would be within its bounds, or the machine is too noisy.
    """
    cell = judge_speedup(
        variant, phase, metric, obtained, obtained.ratio, tolerance_frac, noise,
        noise_frac=noise_frac, minimum_detectable=minimum_detectable, against="itself",
    )  # fmt: skip
    return replace(cell, baseline=None)


def judge_disturbed(cell: Cell, disturbances: Sequence[str]) -> Cell:
    """Return a cell of times as it is, or inconclusive where the GPU was disturbed.

    Args:
        cell: as judged without a look at the GPU.
        disturbances: during the measurement that is judged, the second one; a line each.
    """
    if not disturbances or cell.verdict == NOT_MEASURED:
        return cell
    otherwise = cell.reason if cell.verdict == "inconclusive" else f"{cell.verdict}: {cell.reason}"
    reason = f"measured twice, disturbed: {'; '.join(disturbances)}; otherwise {otherwise}"
    return replace(cell, verdict="inconclusive", reason=reason)


def minimum_detectable_x(speedup: Speedup, confidence: float, power: float) -> float:
    """Return the change of a time ratio that its rounds find with this power.

    (z_confidence + z_power) * standard error (Bloom, Evaluation Review 19, 1995), z quantiles of
    the normal distribution. The standard error is half of the bootstrap interval over the z of
    that interval's end, because the median of paired rounds has no formula of its own.

    Args:
        speedup: with its two-sided interval.
        confidence: of a one-sided bound, above 0.5 and below 1.
        power: above 0 and below 1.
    """
    end = stats.norm.ppf((1 + speedup.confidence) / 2)
    standard_error = (speedup.upper - speedup.lower) / 2 / end
    return float(stats.norm.ppf([confidence, power]).sum() * standard_error)


def judge_excess(
    variant: str,
    phase: str,
    metric: str,
    paired: PairedDifference | None,
    recipe_mean_nats: float | None,
    tolerance_frac: float,
    tolerance_abs: float,
) -> Cell:
    """Judge the engine excess: the engine's mean KL minus the interpreter's, paired a token.

    Passed when |excess| is at most the larger of tolerance_frac * ``recipe_mean_nats``, what the
    interpreter loses, and ``tolerance_abs`` nats, or when ``paired.lower`` to ``paired.upper``
    contains zero (for a 95 % interval each bound needs a confidence of 0.975). Failed otherwise:
    the network that both evaluate loses less, or more, than TensorRT's plan of it.
    """
    limit = f"+- max({100 * tolerance_frac:.6g} % of the recipe loss, {tolerance_abs:.6g})"
    fault = tolerance_fault(tolerance_frac) or tolerance_fault(tolerance_abs)
    if fault:
        verdict, reason = "failed", fault
    elif paired is None or recipe_mean_nats is None:
        missing = "paired values" if paired is None else "recipe loss"
        verdict, reason = NOT_MEASURED, f"not measured: no {missing}"
    elif fault := _excess_fault(paired, recipe_mean_nats):
        verdict, reason = "failed", fault
    else:
        allowed = max(tolerance_frac * recipe_mean_nats, tolerance_abs)
        verdict, reason = _excess_verdict(paired, recipe_mean_nats, allowed)
    obtained = None if paired is None else paired.mean
    detectable = None if paired is None else paired.minimum_detectable
    return Cell(variant, phase, metric, obtained, limit, None, verdict, reason, detectable)


def _worst_ratio_fault(stored: float, tolerance_frac: float) -> str:
    """Return why stored * (1 - tolerance) cannot be the least ratio of times, or ""."""
    fault = tolerance_fault(tolerance_frac) or stored_fault(stored)
    if fault or stored * (1 - tolerance_frac) > 0:
        return fault
    return (
        f"nonsensical limit: obtained stored ratio {stored:.6g} - {100 * tolerance_frac:.6g} %, "
        "expected above 0"
    )


def _ratio_text(speedup: Speedup) -> str:
    """Return ``1.1 (1.09 to 1.11 at 95 %, 30 rounds)``."""
    return (
        f"{speedup.ratio:.4g} ({speedup.lower:.4g} to {speedup.upper:.4g} at "
        f"{100 * speedup.confidence:g} %, {speedup.rounds} rounds)"
    )


def _ratio_fault(speedup: Speedup) -> str:
    """Return why a ratio of times cannot be judged, or ""."""
    if not all(math.isfinite(each) for each in (speedup.lower, speedup.ratio, speedup.upper)):
        return f"non-finite measurement: obtained {_ratio_text(speedup)}, expected finite numbers"
    if not 0 < speedup.lower <= speedup.ratio <= speedup.upper:
        return (
            f"nonsensical measurement: obtained {_ratio_text(speedup)}, expected a ratio within "
            "bounds above 0"
        )
    return ""


def noise_fault(noise: Speedup | None, noise_frac: float) -> str:
    """Return why the A/A run lets no ratio be judged, or ""."""
    if noise is None:
        return "no A/A run says how noisy the machine is"
    if noise.lower <= 1 <= noise.upper or abs(noise.ratio - 1) <= noise_frac:
        return ""
    return (
        f"the machine is too noisy: A/A gave {_ratio_text(noise)}, expected 1 within the bounds or "
        f"a ratio within 1 +- {noise_frac:g}"
    )


def _ratio_verdict(
    obtained: Speedup, stored: float, tolerance_frac: float, against: str
) -> tuple[str, str]:
    """Return the verdict on a finite ratio, and its reason."""
    worst = stored * (1 - tolerance_frac)
    reason = (
        f"obtained {_ratio_text(obtained)}, expected at least {worst:.4g}, {against} {stored:.4g} "
        f"- {100 * tolerance_frac:g} %"
    )
    if obtained.upper < worst:
        return "failed", f"slower than the baseline: {reason}"
    if obtained.lower > stored * (1 + tolerance_frac):
        return "passed", f"faster {UPDATE_IT}: {reason}"
    if obtained.lower >= worst:
        return "passed", reason
    return "inconclusive", f"too few rounds to decide: {reason}"


def _excess_fault(paired: PairedDifference, recipe_mean_nats: float) -> str:
    """Return why an engine excess cannot be judged, or ""; the recipe loss is a mean KL."""
    fault = measurement_fault("kl_mean_nats", recipe_mean_nats)
    return f"{fault} for the recipe loss" if fault else paired_fault(paired)


def _excess_verdict(
    paired: PairedDifference, recipe_mean_nats: float, allowed: float
) -> tuple[str, str]:
    """Return the verdict on a finite engine excess, and its reason."""
    reason = (
        f"engine excess {paired.mean:+.3g} ({paired.lower:+.3g} to {paired.upper:+.3g}, each bound "
        f"at {100 * paired.confidence:g} %, {paired.texts} texts), expected 0 +- {allowed:.3g} or "
        f"bounds around 0; the recipe loses {recipe_mean_nats:.3g}; minimum detectable effect "
        f"{paired.minimum_detectable:.3g}"
    )
    if abs(paired.mean) <= allowed or paired.lower <= 0 <= paired.upper:
        return "passed", reason
    direction = "more" if paired.mean > 0 else "less"
    return "failed", (
        f"the engine loses {direction} than its recipe: TensorRT is to blame, not the recipe: "
        f"{reason}"
    )
