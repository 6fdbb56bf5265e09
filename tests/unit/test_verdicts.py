"""Verdicts: only a finite, expected, measured and acceptable value is green."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptneo_trt import verdicts
from gptneo_trt.data import Interval, PairedDifference
from gptneo_trt.verdicts import (
    AT_LEAST,
    AT_MOST,
    OUTSIDE,
    SHIPPED,
    STUDIED,
    UNDECIDED,
    WITHIN,
    Bound,
)

WHERE = ("fp8_recipe", "prefill", "kl_mean_nats")
PLAN = ("fp8_recipe", "prefill", "plan_mib")
number = st.floats(allow_nan=True, allow_infinity=True)


def paired(mean, half):
    """Return a paired difference with bounds ``mean - half`` and ``mean + half``."""
    return PairedDifference(mean, mean - half, mean + half, half / 2, 1.5 * half, 0.95, 40, 4600)


@pytest.mark.parametrize(
    ("obtained", "limit", "cause"),
    [
        (np.nan, 0.01, "non-finite measurement: obtained nan"),
        (np.inf, 0.01, "non-finite measurement: obtained inf"),
        (0.5, np.nan, "non-finite limit: obtained at most nan"),
        (0.5, np.inf, "non-finite limit: obtained at most inf"),
        (0.5, -1, "nonsensical limit: obtained at most -1"),
        (np.nan, np.nan, "non-finite limit"),
        (-0.5, 0.01, "nonsensical measurement: obtained -0.5"),
    ],
)
def test_B01_what_cannot_be_compared_fails(obtained, limit, cause):
    """NaN, infinity and a negative KL or KL limit fail by name, with the limit in the cell."""
    cell = verdicts.judge_limit(*WHERE, obtained, Bound(AT_MOST, limit))

    assert cell.verdict == "failed"
    assert cell.reason.startswith(cause)
    assert (cell.metric, cell.limit) == ("kl_mean_nats", f"at most {limit:g}")
    assert not verdicts.is_green([cell], {WHERE})


def test_B01_nothing_measured_is_not_green():
    """A missing value is "not measured", even where the limit itself is sound."""
    cell = verdicts.judge_limit(*WHERE, None, Bound(AT_MOST, 0.01))

    assert cell.verdict == "not measured"
    assert cell.reason.startswith("not measured: ")
    assert not verdicts.is_green([cell], {WHERE})


@pytest.mark.parametrize(
    ("obtained", "direction", "value", "verdict"),
    [
        (0.01, AT_MOST, 0.01, "passed"),
        (0.0101, AT_MOST, 0.01, "failed"),
        (-1e-9, AT_MOST, 0.0, "passed"),
        (0.01, AT_LEAST, 0.01, "passed"),
        (0.0099, AT_LEAST, 0.01, "failed"),
        (0.01, "below", 0.02, "failed"),
    ],
)
def test_limits_include_their_end(obtained, direction, value, verdict):
    """At most and at least accept equality, state both numbers, and know no other direction."""
    cell = verdicts.judge_limit(*WHERE, obtained, Bound(direction, value))

    assert cell.verdict == verdict
    assert f"{value:g}" in cell.reason
    assert (f"obtained {obtained:g}, expected" in cell.reason) == (direction != "below")


@pytest.mark.parametrize(("obtained", "verdict"), [(0.009, "passed"), (0.011, "failed")])
def test_the_error_over_texts_is_stated_and_decides_nothing(obtained, verdict):
    """Every run scores the same texts, so a limit is no test of other texts."""
    bound = Bound(AT_MOST, 0.01)

    cell = verdicts.judge_limit(*WHERE, obtained, bound, 0.005)

    assert cell.verdict == verdict == verdicts.judge_limit(*WHERE, obtained, bound).verdict
    assert cell.reason == (
        f"obtained {obtained}, expected at most 0.01; standard error over texts 0.005"
    )
    assert cell.minimum_detectable is None


@pytest.mark.parametrize(
    ("metric", "value"), [("prose/bf16/kl_p99_nats", -0.1), ("top1_frac", 1.5), ("perplexity", -1)]
)
def test_limits_beyond_the_metric_are_nonsensical(metric, value):
    """A limit that every or no measurement meets fails instead of judging."""
    cell = verdicts.judge_limit("fp16", "decode", metric, 0.5, Bound(AT_LEAST, value))

    assert (cell.verdict, cell.reason.partition(":")[0]) == ("failed", "nonsensical limit")


@pytest.mark.parametrize(
    ("mean", "half", "verdict", "words"),
    [
        (0.0, 0.0, "passed", "changed by"),
        (0.0005, 0.0005, "passed", "changed by"),
        (0.003, 0.001, "failed", "worse than the baseline"),
        (0.001, 0.002, "inconclusive", "too few tokens to decide"),
        (0.002, 0.0015, "inconclusive", "too few tokens to decide"),
        (-0.003, 0.001, "passed", "better than the baseline: update it"),
        (-0.0015, 0.001, "passed", "changed by"),
    ],
)
def test_regression_is_decided_by_the_bounds(mean, half, verdict, words):
    """Worse needs the lower bound, no worse the upper; the detectable effect is stated."""
    cell = verdicts.judge_regression(*WHERE, paired(mean, half), 0.01, 0.001)

    assert cell.verdict == verdict
    assert cell.reason.startswith(words)
    assert f"minimum detectable effect {1.5 * half:.3g}" in cell.reason
    assert cell.minimum_detectable == 1.5 * half
    assert cell.obtained == pytest.approx(0.01 + mean)
    assert (cell.baseline, cell.limit) == (0.01, "stored + 0.001")


@pytest.mark.parametrize(
    ("difference", "stored", "tolerance", "words"),
    [
        (paired(0, 0), np.nan, 0.001, "non-finite baseline"),
        (paired(0, 0), None, 0.001, "no baseline"),
        (None, None, 0.001, "no baseline"),
        (paired(0, 0), 0.01, np.nan, "non-finite limit"),
        (paired(0, 0), 0.01, np.inf, "non-finite limit"),
        (paired(0, 0), 0.01, -0.1, "nonsensical limit"),
        (paired(np.nan, 0), 0.01, 0.001, "non-finite measurement"),
        (paired(0, -1), 0.01, 0.001, "nonsensical measurement"),
    ],
)
def test_B01_regression_never_passes_on_nan(difference, stored, tolerance, words):
    """A broken baseline, tolerance or difference fails and says which it was."""
    cell = verdicts.judge_regression(*WHERE, difference, stored, tolerance)

    assert cell.verdict == "failed"
    assert cell.reason.startswith(words)


def test_P03_regression_without_values_is_not_measured():
    """A run without the paired values is "not measured", never an AttributeError or a pass."""
    cell = verdicts.judge_regression(*WHERE, None, 0.01, 0.001)

    assert (cell.verdict, cell.reason) == ("not measured", "not measured: no paired values")
    cell = verdicts.not_measured("fp16", "decode", "latency_us", "benchmarks are disabled")
    assert (cell.verdict, cell.reason) == ("not measured", "not measured: benchmarks are disabled")


@pytest.mark.parametrize(
    ("obtained", "stored", "verdict", "words"),
    [
        (240.0, 240.0, "passed", "obtained 240, expected 240 +- 2.4"),
        (242.3, 240.0, "passed", "obtained 242.3"),
        (242.5, 240.0, "failed", "obtained 242.5"),
        (237.5, 240.0, "failed", "obtained 237.5"),
        (240.0, None, "failed", "no baseline"),
        (np.nan, 240.0, "failed", "non-finite measurement"),
        (240.0, np.nan, "failed", "non-finite baseline"),
        (None, 240.0, "not measured", "not measured"),
    ],
)
def test_stored_values_are_judged_on_both_sides(obtained, stored, verdict, words):
    """A plan that grew or shrank by more than 1 % fails; so does one without a baseline."""
    cell = verdicts.judge_stored(*PLAN, obtained, stored, 0.01)

    assert cell.verdict == verdict
    assert cell.reason.startswith(words)
    assert cell.limit == "stored +- max(1 %, 0)"


def test_stored_tolerance_may_be_absolute():
    """The larger of the relative and the absolute tolerance counts, and NaN is neither."""
    assert verdicts.judge_stored(*PLAN, 0.5, 0.0, 0.01, tolerance_abs=0.5).verdict == "passed"
    assert verdicts.judge_stored(*PLAN, 0.5, 0.0, 0.01, tolerance_abs=0.4).verdict == "failed"
    cell = verdicts.judge_stored(*PLAN, 1.0, 1.0, np.nan)
    assert (cell.verdict, cell.reason.partition(":")[0]) == ("failed", "non-finite limit")


@settings(deadline=None)
@given(number, number, number)
def test_no_verdict_passes_on_a_number_that_is_not_finite(obtained, expected, tolerance):
    """Whatever the three numbers are, passed implies finite ones that satisfy the comparison."""
    limited = verdicts.judge_limit(*WHERE, obtained, Bound(AT_MOST, expected))
    stored = verdicts.judge_stored(*WHERE, obtained, expected, tolerance)

    if limited.verdict == "passed":
        assert np.isfinite([obtained, expected]).all()
        assert -1e-7 <= obtained <= expected
    if stored.verdict == "passed":
        assert np.isfinite([obtained, expected, tolerance]).all()
        assert tolerance >= 0


# Decisions


def interval(value, half=0.0):
    """Return a figure with bounds ``value - half`` and ``value + half``."""
    return Interval(value, value - half, value + half, 0.95)


LIMIT = Bound(AT_MOST, 2.0)
IN, OUT, BETWEEN = interval(1.0, 0.5), interval(3.0, 0.5), interval(2.1, 0.2)
SHIP = ("fp8", "both", "ship")


@pytest.mark.parametrize(
    ("figures", "told", "shipped", "studied"),
    [
        ((IN, IN), WITHIN, "passed", "failed"),
        ((IN, OUT), OUTSIDE, "failed", "passed"),
        ((BETWEEN, OUT), OUTSIDE, "failed", "passed"),
        ((IN, BETWEEN), UNDECIDED, "inconclusive", "inconclusive"),
        ((BETWEEN, interval(1.9, 0.2)), UNDECIDED, "inconclusive", "inconclusive"),
        ((interval(2.0),), WITHIN, "passed", "failed"),
        ((interval(np.nan),), UNDECIDED, "inconclusive", "inconclusive"),
        ((interval(np.inf),), OUTSIDE, "failed", "passed"),
    ],
)
def test_a_decision_needs_evidence(figures, told, shipped, studied):
    """Shipped needs all within, studied one outside; lack of evidence either way is neither."""
    judged = {f"figure {index}": (each, LIMIT) for index, each in enumerate(figures)}

    cells = [verdicts.judge_decision(*SHIP, word, judged) for word in (SHIPPED, STUDIED)]

    assert [cell.verdict for cell in cells] == [shipped, studied]
    assert {cell.obtained for cell in cells} == {told}
    assert [cell.limit for cell in cells] == [SHIPPED, STUDIED]


def test_a_decision_names_the_figures_that_decide():
    """Those outside with their bounds and limit; of a row that may ship, all of them."""
    judged = {"prefill: floor_ratio_x": (OUT, LIMIT), "decode: floor_ratio_x": (IN, LIMIT)}

    outside = verdicts.judge_decision(*SHIP, STUDIED, judged)
    within = verdicts.judge_decision(
        *SHIP, STUDIED, {**judged, "prefill: floor_ratio_x": judged["decode: floor_ratio_x"]}
    )

    assert outside.reason == (
        "studied: outside the ship limits: prefill: floor_ratio_x 3 (2.5 to 3.5, each bound at "
        "95 %), expected at most 2"
    )
    assert within.reason.startswith(
        "studied: within the ship limits: prefill: floor_ratio_x 1 (0.5"
    )
    assert within.reason.endswith("; now within the limits: revisit the decision")
    assert "decode: floor_ratio_x 1 (" in within.reason


def test_too_few_tokens_to_decide_are_told():
    """The figures that straddle their limit say how wide they are."""
    cell = verdicts.judge_decision(*SHIP, SHIPPED, {"top1_drop_frac": (BETWEEN, LIMIT)})

    assert cell.reason.startswith(
        "too few tokens to decide: shipped: undecided: top1_drop_frac 2.1"
    )


@settings(deadline=None)
@given(number, number, st.sampled_from([AT_MOST, AT_LEAST]), number)
def test_nothing_ships_on_a_number_that_is_not_within(lower, upper, direction, value):
    """Passed and shipped imply that both ends are allowed; NaN never is."""
    bound, figure = Bound(direction, value), Interval(1.0, lower, upper, 0.95)

    cell = verdicts.judge_decision(*SHIP, SHIPPED, {"figure": (figure, bound)})

    if cell.verdict == "passed":
        assert bound.allows(lower)
        assert bound.allows(upper)


# Coverage


def test_green_needs_every_expected_cell_once():
    """Missing, repeated, unexpected and unpassed cells each keep a run from green."""
    passed = verdicts.judge_limit(*WHERE, 0.001, Bound(AT_MOST, 0.01))
    plan = verdicts.judge_stored(*PLAN, 240.0, 240.0, 0.01)

    assert verdicts.is_green([passed, plan], {WHERE, PLAN})
    assert not verdicts.is_green([passed], {WHERE, PLAN})
    assert not verdicts.is_green([passed, passed], {WHERE})
    for verdict in ("failed", "inconclusive", "not measured", "PASSED", ""):
        assert not verdicts.is_green([passed, replace(plan, verdict=verdict)], {WHERE, PLAN})


def test_zero_expected_is_not_green():
    """A run that expects nothing is not green, with or without cells."""
    passed = verdicts.judge_limit(*WHERE, 0.001, Bound(AT_MOST, 0.01))

    assert not verdicts.is_green([], set())
    assert not verdicts.is_green([passed], set())
    assert verdicts.problems(set(), []) == [
        "nothing was expected: obtained 0 cells to measure, expected at least 1"
    ]


def test_B02_a_renamed_row_is_missing_and_unexpected():
    """A renamed row shows from both sides, in sorted lines, and the run is not green."""
    renamed = verdicts.judge_limit("fp8_v2", *WHERE[1:], 0.001, Bound(AT_MOST, 0.01))

    assert verdicts.coverage({WHERE}, [renamed]) == (set(), {WHERE})
    assert verdicts.problems({WHERE}, [renamed]) == [
        "fp8_recipe/prefill/kl_mean_nats: not measured: no cell",
        "fp8_v2/prefill/kl_mean_nats: unexpected cell",
    ]


def test_coverage_counts_what_was_measured():
    """Failed and inconclusive cells were measured; "not measured" ones were not."""
    failed = verdicts.judge_limit(*WHERE, 1.0, Bound(AT_MOST, 0.01))
    absent = verdicts.judge_stored(*PLAN, None, 240.0, 0.01)

    assert verdicts.coverage({WHERE, PLAN}, [failed, absent]) == ({WHERE}, {PLAN})
