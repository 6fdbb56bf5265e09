"""Verdicts on engines: only a finite, timed and acceptable ratio or excess is green."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptneo_trt.data import PairedDifference, Speedup
from gptneo_trt.engine_verdicts import (
    judge_disturbed,
    judge_excess,
    judge_resolved,
    judge_speedup,
    minimum_detectable_x,
)
from gptneo_trt.verdicts import is_green

SPEED = ("fp8_recipe", "decode", "speedup_ratio")
EXCESS = ("fp8_recipe", "decode", "excess/kl_mean_nats")
NOISE = {"noise_frac": 0.005}
number = st.floats(allow_nan=True, allow_infinity=True)


def paired(mean, half):
    """Return a paired difference with bounds ``mean - half`` and ``mean + half``."""
    return PairedDifference(mean, mean - half, mean + half, half / 2, 1.5 * half, 0.95, 40, 4600)


def speedup(ratio, half=0.0):
    """Return a ratio with bounds ``ratio - half`` and ``ratio + half``."""
    return Speedup(ratio, ratio - half, ratio + half, 0.95, 500.0, 500.0 * ratio, 30, 50)


QUIET = speedup(1.0001, 0.0005)


@pytest.mark.parametrize(
    ("ratio", "half", "verdict", "words"),
    [
        (1.10, 0.01, "passed", "obtained 1.1 (1.09 to 1.11 at 95 %, 30 rounds), expected at least"),
        (1.08, 0.002, "passed", "obtained 1.08"),
        (1.07, 0.005, "failed", "slower than the baseline: obtained 1.07 (1.065 to 1.075"),
        (1.08, 0.01, "inconclusive", "too few rounds to decide: obtained 1.08"),
        (1.07, 0.01, "inconclusive", "too few rounds to decide: obtained 1.07"),
        (1.10, 0.50, "inconclusive", "too few rounds to decide: obtained 1.1"),
        (1.13, 0.005, "passed", "faster than the baseline: update it: obtained 1.13"),
        (1.12, 0.005, "passed", "obtained 1.12"),
    ],
)
def test_speedup_is_decided_by_the_bounds(ratio, half, verdict, words):
    """Slower needs the upper end, no slower the lower; both numbers and the rounds are stated."""
    cell = judge_speedup(*SPEED, speedup(ratio, half), 1.10, 0.02, QUIET, **NOISE)

    assert cell.verdict == verdict
    assert cell.reason.startswith(words)
    assert "expected at least 1.078, stored 1.1 - 2 %" in cell.reason
    assert (cell.obtained, cell.baseline, cell.limit) == (ratio, 1.10, "stored - 2 %")


def test_speedup_limits_include_their_end():
    """A ratio of exactly what is acceptable passes, whatever its stored value."""
    assert judge_speedup(*SPEED, speedup(0.75), 1.0, 0.25, QUIET, **NOISE).verdict == "passed"
    assert judge_speedup(*SPEED, speedup(0.98), 0.98, 0.0, QUIET, **NOISE).verdict == "passed"


@pytest.mark.parametrize("ratio", [0.5, 1.10, 1.50])
@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (speedup(1.02, 0.01), "the machine is too noisy: A/A gave 1.02 (1.01 to 1.03 at 95 %, 30"),
        (speedup(0.99, 0.005), "the machine is too noisy: A/A gave 0.99 (0.985 to 0.995 at 95 %"),
        (None, "no A/A run says how noisy the machine is"),
    ],
)
def test_a_noisy_machine_decides_nothing(ratio, noise, words):
    """Where the same engine differs from itself, or was not timed so, no ratio is judged."""
    cell = judge_speedup(*SPEED, speedup(ratio), 1.10, 0.02, noise, **NOISE)

    assert cell.verdict == "inconclusive"
    assert cell.reason.startswith(words)
    assert f"obtained {ratio:.4g}" in cell.reason


@pytest.mark.parametrize(
    "noise", [speedup(1.2, 0.3), speedup(1 + 0.9 * NOISE["noise_frac"], 1e-4), speedup(1.0)]
)
def test_a_quiet_machine_judges(noise):
    """An A/A interval may contain 1, or exclude it by less than matters."""
    assert judge_speedup(*SPEED, speedup(1.1), 1.1, 0.02, noise, **NOISE).verdict == "passed"
    assert judge_speedup(*SPEED, speedup(0.9), 1.1, 0.02, noise, **NOISE).verdict == "failed"


@pytest.mark.parametrize(
    ("obtained", "stored", "tolerance", "noise", "words"),
    [
        (speedup(1.1), None, 0.02, QUIET, "no baseline"),
        (None, None, 0.02, None, "no baseline"),
        (speedup(1.1), np.nan, 0.02, QUIET, "non-finite baseline: stored nan"),
        (None, np.inf, 0.02, QUIET, "non-finite baseline: stored inf"),
        (speedup(1.1), 0.0, 0.02, QUIET, "nonsensical limit: obtained stored ratio 0 - 2 %"),
        (speedup(1.1), -1.1, 0.02, QUIET, "nonsensical limit: obtained stored ratio -1.1 - 2 %"),
        (speedup(1.1), 1.1, 2.0, QUIET, "nonsensical limit: obtained stored ratio 1.1 - 200 %"),
        (speedup(1.1), 1.1, np.nan, QUIET, "non-finite limit"),
        (speedup(1.1), 1.1, -0.1, QUIET, "nonsensical limit: obtained tolerance -0.1"),
        (speedup(np.nan), 1.1, 0.02, QUIET, "non-finite measurement: obtained nan"),
        (speedup(1.1, np.inf), 1.1, 0.02, QUIET, "non-finite measurement: obtained 1.1 (-inf"),
        (speedup(1.1, -0.1), 1.1, 0.02, QUIET, "nonsensical measurement: obtained 1.1 (1.2 to 1 "),
        (speedup(1.1, 1.1), 1.1, 0.02, QUIET, "nonsensical measurement: obtained 1.1 (0 to 2.2 "),
        (speedup(1.1), 1.1, 0.02, speedup(np.nan), "non-finite measurement: obtained nan"),
        (speedup(1.1), 1.1, 0.02, speedup(1.0, -1), "nonsensical measurement: obtained 1 (2 to 0"),
    ],
)
def test_B01_speedup_never_passes_on_nan(obtained, stored, tolerance, noise, words):
    """A broken ratio, baseline, tolerance or A/A run fails and says which it was."""
    cell = judge_speedup(*SPEED, obtained, stored, tolerance, noise, **NOISE)

    assert cell.verdict == "failed"
    assert cell.reason.startswith(words)


def test_minimum_detectable_change_of_a_ratio_is_stated():
    """(1.645 + 1.282) standard errors, one being the half width over 1.96; it decides nothing."""
    half = 0.0196
    detectable = minimum_detectable_x(speedup(1.1, half), 0.95, 0.9)

    cell = judge_speedup(
        *SPEED, speedup(1.1, half), 1.1, 0.05, QUIET, **NOISE, minimum_detectable=detectable
    )

    assert detectable == pytest.approx(0.01 * (1.6449 + 1.2816), rel=1e-4)
    assert minimum_detectable_x(speedup(1.1), 0.95, 0.9) == 0
    assert (cell.verdict, cell.minimum_detectable) == ("passed", detectable)
    assert cell.reason.endswith("; minimum detectable effect 0.0293")


def test_P03_speedup_that_was_not_timed_is_not_measured():
    """No ratio is "not measured", with and without an A/A run."""
    for noise in (QUIET, None):
        cell = judge_speedup(*SPEED, None, 1.1, 0.02, noise, **NOISE)

        assert (cell.verdict, cell.obtained, cell.baseline) == ("not measured", None, 1.1)
        assert cell.reason == "not measured: no ratio to hold against 1.1"
        assert not is_green([cell], {SPEED})


@pytest.mark.parametrize(
    ("mean", "half", "verdict", "words"),
    [
        (0.0, 0.0, "passed", "engine excess +0 "),
        (0.0009, 0.0001, "passed", "engine excess +0.0009 (+0.0008 to +0.001, each bound at 95 %"),
        (-0.001, 0.0001, "passed", "engine excess -0.001 "),
        (0.003, 0.004, "passed", "engine excess +0.003 "),
        (-0.003, 0.003, "passed", "engine excess -0.003 "),
        (
            0.003,
            0.001,
            "failed",
            "the engine loses more than its recipe: TensorRT is to blame, not",
        ),
        (-0.003, 0.001, "failed", "the engine loses less than its recipe: TensorRT is to blame, n"),
    ],
)
def test_excess_is_small_or_within_its_interval(mean, half, verdict, words):
    """A tenth of the recipe's loss, or bounds around zero, pass; more blames TensorRT by name."""
    cell = judge_excess(*EXCESS, paired(mean, half), 0.01, 0.1, 1e-6)

    assert cell.verdict == verdict
    assert cell.reason.startswith(words)
    assert "expected 0 +- 0.001 or bounds around 0; the recipe loses 0.01" in cell.reason
    assert cell.reason.endswith(f"minimum detectable effect {1.5 * half:.3g}")
    assert cell.minimum_detectable == 1.5 * half
    assert (cell.obtained, cell.baseline) == (mean, None)
    assert cell.limit == "+- max(10 % of the recipe loss, 1e-06)"


def test_excess_tolerance_may_be_absolute():
    """Where the recipe loses next to nothing, a tenth of it is replaced by nats."""
    small = paired(4e-6, 1e-6)

    assert judge_excess(*EXCESS, small, 1e-8, 0.1, 5e-6).verdict == "passed"
    assert judge_excess(*EXCESS, small, 0.0, 0.1, 4e-6).verdict == "passed"
    assert judge_excess(*EXCESS, small, -1e-9, 0.1, 3e-6).verdict == "failed"


@pytest.mark.parametrize(
    ("difference", "recipe", "frac", "nats", "words"),
    [
        (paired(np.nan, 0), 0.01, 0.1, 1e-6, "non-finite measurement: obtained PairedDifference"),
        (paired(0, np.inf), 0.01, 0.1, 1e-6, "non-finite measurement: obtained PairedDifference"),
        (paired(0, -1), 0.01, 0.1, 1e-6, "nonsensical measurement: obtained bounds 1 and -1"),
        (
            paired(0, 0),
            np.nan,
            0.1,
            1e-6,
            "non-finite measurement: obtained nan, expected a finite",
        ),
        (paired(0, 0), -0.01, 0.1, 1e-6, "nonsensical measurement: obtained -0.01, expected 0"),
        (paired(0, 0), 0.01, np.inf, 1e-6, "non-finite limit"),
        (paired(0, 0), 0.01, 0.1, np.nan, "non-finite limit"),
        (paired(0, 0), 0.01, -0.1, 1e-6, "nonsensical limit"),
        (None, 0.01, 0.1, -1.0, "nonsensical limit"),
    ],
)
def test_B01_excess_never_passes_on_nan(difference, recipe, frac, nats, words):
    """A broken difference, recipe loss or tolerance fails and says which it was."""
    cell = judge_excess(*EXCESS, difference, recipe, frac, nats)

    assert cell.verdict == "failed"
    assert cell.reason.startswith(words)


def test_excess_without_one_of_its_sides_is_not_measured():
    """Without the pairs, or without what the recipe loses, nobody is to blame yet."""
    cells = (
        judge_excess(*EXCESS, None, 0.01, 0.1, 1e-6),
        judge_excess(*EXCESS, paired(0, 0), None, 0.1, 1e-6),
    )

    assert [cell.verdict for cell in cells] == ["not measured", "not measured"]
    assert cells[0].reason == "not measured: no paired values"
    assert cells[1].reason == "not measured: no recipe loss"


@settings(deadline=None)
@given(number, number, number, number, number)
def test_no_speed_or_excess_passes_on_a_number_that_is_not_finite(mean, half, expected, frac, nats):
    """Passed implies finite numbers, and a ratio or excess that is within its own limit."""
    speed = judge_speedup(*SPEED, speedup(mean, half), expected, frac, speedup(1.0, nats), **NOISE)
    excess = judge_excess(*EXCESS, paired(mean, half), expected, frac, nats)

    if speed.verdict == "passed":
        assert np.isfinite([mean, half, expected, frac, nats]).all()
        assert mean >= mean - half >= expected * (1 - frac) > 0
    if excess.verdict == "passed":
        assert np.isfinite([mean, half, expected, frac, nats]).all()
        assert abs(mean) <= max(frac * expected, nats) or abs(mean) <= half


def test_minimum_detectable_ratio_is_quantiles_times_the_standard_error():
    """Half of a 95 % interval is 1.96 errors; 0.975 and 0.9 ask for 1.96 + 1.28 of them."""
    found = minimum_detectable_x(speedup(1.1, 0.01), confidence=0.975, power=0.90)

    assert found == pytest.approx((1.959964 + 1.281552) / 1.959964 * 0.01)
    assert minimum_detectable_x(speedup(1.1), 0.975, 0.90) == 0


@pytest.mark.parametrize("drop", [0.5, 1.0, 2.0])
def test_a_drop_of_the_minimum_detectable_ratio_is_found_with_its_power(drop):
    """At that drop beyond the tolerance 90 % of runs fail, at half of it fewer, at twice all."""
    stored, tolerance_frac, half = 1.0, 0.05, 0.01
    detectable = minimum_detectable_x(speedup(1.0, half), 0.975, 0.90)
    truth = stored * (1 - tolerance_frac) - drop * detectable
    obtained = np.random.default_rng(0).normal(truth, half / 1.959964, 2000)
    cells = [
        judge_speedup(*SPEED, speedup(each, half), stored, tolerance_frac, QUIET, **NOISE)
        for each in obtained
    ]
    failed_frac = np.mean([cell.verdict == "failed" for cell in cells])

    assert failed_frac == pytest.approx({0.5: 0.37, 1.0: 0.90, 2.0: 1.0}[drop], abs=0.03)


def test_minimum_detectable_ratio_is_in_the_cell_and_its_reason():
    """A reader sees which drop these rounds could have found."""
    cell = judge_speedup(
        *SPEED, speedup(1.1, 0.01), 1.1, 0.02, QUIET, **NOISE, minimum_detectable=0.0165
    )

    assert cell.minimum_detectable == 0.0165
    assert cell.reason.endswith("; minimum detectable effect 0.0165")


@pytest.mark.parametrize(
    ("obtained", "otherwise"),
    [(1.1, "passed: obtained 1.1"), (0.9, "failed: slower than"), (1.07, "too few rounds to deci")],
)
def test_a_disturbed_measurement_decides_nothing(obtained, otherwise):
    """Neither passed nor failed: what happened is said, and what the verdict would have been."""
    cell = judge_speedup(*SPEED, speedup(obtained, 0.01), 1.1, 0.02, QUIET, **NOISE)

    disturbed = judge_disturbed(cell, ("throttled: software power cap", "another process"))

    assert disturbed.verdict == "inconclusive"
    words = "measured twice, disturbed: throttled: software power cap; another process; otherwise "
    assert disturbed.reason.startswith(words + otherwise)
    assert disturbed.obtained == cell.obtained


def test_without_a_disturbance_a_cell_stays_as_it_is():
    """So does a figure that was not measured, whatever happened to the GPU."""
    passed = judge_speedup(*SPEED, speedup(1.1, 0.01), 1.1, 0.02, QUIET, **NOISE)
    missing = judge_speedup(*SPEED, None, 1.1, 0.02, QUIET, **NOISE)

    assert judge_disturbed(passed, ()) is passed
    assert judge_disturbed(missing, ("throttled: software power cap",)) is missing


# A ratio that nothing is stored for


@pytest.mark.parametrize(
    ("half", "noise", "verdict", "words"),
    [
        (0.01, QUIET, "passed", "obtained 0.9 (0.89 to 0.91 at 95 %, 30 rounds), expected at le"),
        (0.10, QUIET, "inconclusive", "too few rounds to decide: obtained 0.9"),
        (0.01, speedup(1.02, 0.01), "inconclusive", "the machine is too noisy: A/A gave 1.02"),
        (np.nan, QUIET, "failed", "non-finite measurement: obtained 0.9"),
    ],
)
def test_a_ratio_is_told_where_its_rounds_resolve_the_tolerance(half, noise, verdict, words):
    """Slower than fp16 is no failure: no row says what it should be. No baseline is named."""
    cell = judge_resolved(*SPEED, speedup(0.9, half), 0.05, noise, **NOISE, minimum_detectable=0.01)

    assert cell.verdict == verdict
    assert cell.reason.startswith(words)
    assert "stored" not in cell.reason
    assert "minimum detectable effect 0.01" in cell.reason
    assert (cell.obtained, cell.baseline, cell.limit) == (0.9, None, "itself - 5 %")
