"""Calibrated ranges, stored ranges -> Cell; pure, and closed as ``verdicts`` is.

A loss hardly shows a range that is too large: FP8 has exponent bits to spare, and one 16 times
too large leaves most activations with all their bits. The ranges themselves show it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from gptneo_trt.data import Cell
from gptneo_trt.verdicts import AT_MOST, NO_BASELINE, Bound, judge_limit


def range_ratios(
    obtained: Mapping[str, float], stored: Mapping[str, float]
) -> list[tuple[str, float]]:
    """Return (module, obtained / stored) of the modules that both have, furthest from 1 first.

    A ratio that is no positive finite number comes first, then large and small factors alike.
    """
    ratios = [
        (module, obtained[module] / stored[module] if stored[module] else math.nan)
        for module in sorted(obtained.keys() & stored.keys())
    ]

    def distance(pair: tuple[str, float]) -> float:
        return abs(math.log(pair[1])) if 0 < pair[1] < math.inf else math.inf

    return sorted(ratios, key=distance, reverse=True)


def judge_ranges(
    variant: str,
    phase: str,
    metric: str,
    obtained: Mapping[str, float],
    stored: Mapping[str, float],
    tolerance_frac: float,
) -> Cell:
    """Judge calibrated ranges against the stored ones: passed or failed.

    The largest |obtained / stored - 1| over all projections must be at most ``tolerance_frac``;
    its projection is named. Ranges of other projections than the stored ones fail, and so does a
    baseline without ranges.

    Args:
        variant: row name.
        phase: "both": ranges are of no phase.
        metric: name of the cell.
        obtained: module -> largest absolute input in calibration, before the row's factor.
        stored: the same of the stored run.
        tolerance_frac: of each range.
    """
    bound = Bound(AT_MOST, tolerance_frac)
    failed = Cell(variant, phase, metric, None, str(bound), None, "failed", NO_BASELINE)
    if not stored:
        return failed
    if obtained.keys() != stored.keys():
        missing = sorted(stored.keys() - obtained.keys())
        extra = sorted(obtained.keys() - stored.keys())
        reason = f"ranges of other projections: missing {missing}, not stored {extra}"
        return replace(failed, reason=f"{reason}; write the baseline again")
    module, ratio = max(range_ratios(obtained, stored), key=_deviation)
    cell = judge_limit(variant, phase, metric, abs(ratio - 1), bound)
    where = f"{module}: obtained range {obtained[module]:.6g}, stored {stored[module]:.6g}"
    return replace(cell, reason=f"{cell.reason}; {where}, the furthest of {len(stored)}")


def _deviation(pair: tuple[str, float]) -> float:
    """Return |ratio - 1|, NaN as the largest."""
    deviation = abs(pair[1] - 1)
    return math.inf if math.isnan(deviation) else deviation
