"""Calibrated ranges against stored ones: a wrong calibration is seen, whatever it costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt.scale_verdicts import judge_ranges, range_ratios
from gptneo_trt.verdicts import NO_BASELINE

STORED = {"h.0.c_fc": 2.0, "h.0.c_proj": 4.0, "h.1.c_fc": 8.0}
positive = st.floats(1e-3, 1e3)


def judged(obtained, stored=STORED, tolerance_frac=0.05):
    """Return the cell of these ranges."""
    return judge_ranges(
        "fp8", "both", "regression/activation_amax", obtained, stored, tolerance_frac
    )


def test_same_ranges_pass_and_name_the_furthest():
    """Whoever reads a passed cell sees how far it was."""
    cell = judged(STORED | {"h.0.c_proj": 4.1})

    assert cell.verdict == "passed"
    assert cell.obtained == pytest.approx(0.025)
    assert cell.reason == (
        "obtained 0.025, expected at most 0.05; h.0.c_proj: obtained range 4.1, stored 4, the "
        "furthest of 3"
    )


@pytest.mark.parametrize("factor", [16.0, 1 / 16, 1.06, 0.94, 0.0, -1.0])
def test_one_range_beyond_the_tolerance_fails_by_name(factor):
    """Too large or too small: 16 times too large costs nothing that a KL would show."""
    cell = judged(STORED | {"h.1.c_fc": 8.0 * factor})

    assert cell.verdict == "failed"
    assert "h.1.c_fc: obtained range" in cell.reason


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_range_that_is_not_finite_fails(broken):
    """NaN compares with nothing; it comes before every other projection."""
    cell = judged({**STORED, "h.0.c_fc": broken, "h.0.c_proj": 400.0})

    assert cell.verdict == "failed"
    assert "non-finite measurement" in cell.reason
    assert "h.0.c_fc: obtained range" in cell.reason


def test_a_stored_range_of_zero_fails():
    """Nothing is relative to it."""
    assert judged(STORED, STORED | {"h.0.c_fc": 0.0}).verdict == "failed"


def test_swapped_ranges_fail():
    """One layer's scales in another's place have the same mean."""
    swapped = STORED | {"h.0.c_fc": STORED["h.1.c_fc"], "h.1.c_fc": STORED["h.0.c_fc"]}

    assert judged(swapped).verdict == "failed"


def test_baseline_without_ranges_fails_as_a_missing_one():
    """A measured baseline from before ranges were stored is written again."""
    cell = judged(STORED, {})

    assert (cell.verdict, cell.reason) == ("failed", NO_BASELINE)


def test_ranges_of_other_projections_fail():
    """A projection more and one fewer are both named."""
    cell = judged({"h.0.c_fc": 2.0, "h.0.c_proj": 4.0, "h.2.c_fc": 8.0})

    assert cell.verdict == "failed"
    assert cell.reason.startswith(
        "ranges of other projections: missing ['h.1.c_fc'], not stored ['h.2.c_fc']; write"
    )


@given(st.dictionaries(st.sampled_from("abcdef"), positive, min_size=1), positive)
def test_verdict_is_that_of_the_worst_range(stored, factor):
    """A factor on all ranges passes exactly when it is within the tolerance of 1."""
    obtained = {module: amax * factor for module, amax in stored.items()}
    ratios = [obtained[module] / stored[module] for module in stored]

    cell = judged(obtained, stored)

    assert (cell.verdict == "passed") == (max(abs(ratio - 1) for ratio in ratios) <= 0.05)


def test_ratios_are_sorted_by_factor():
    """Half and double are as far; a range that is no number comes first."""
    stored = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}

    found = range_ratios({"a": 1.5, "b": 0.25, "c": 3.0, "d": math.nan, "e": 9.0}, stored)

    assert [module for module, _ in found] == ["d", "b", "c", "a"]
