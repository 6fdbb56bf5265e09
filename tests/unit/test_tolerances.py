"""Tolerances: a reason for every number, and what the sample must resolve."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt.paired import paired_difference
from gptneo_trt.targets import TARGETS
from tests.gate import test_quality, tolerances
from tests.gate.tolerances import Tolerance

CPU, H200 = TARGETS["cpu"], TARGETS["h200"]
MAPPINGS = ("REGRESSIONS", "PUBLISHED_FRAC")
NUMBERS = {name: value for name, value in vars(tolerances).items() if isinstance(value, float)} | {
    f"{name}/{'-'.join(key) if isinstance(key, tuple) else key}": value
    for name in MAPPINGS
    for key, value in getattr(tolerances, name).items()
}
# Parts of a whole; a standard error, a temperature and a loss in nats are not.
FRACTIONS = [name for name in NUMBERS if "FRAC" in name or name.startswith("REGRESSIONS")]
CHANCES = [name for name in NUMBERS if name.endswith(("CONFIDENCE", "POWER"))]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_positive_and_has_a_reason(name):
    """No tolerance is turned off or nameless, nor turned into one that allows anything."""
    number = NUMBERS[name]

    assert isinstance(number, Tolerance)
    assert 0 < number < math.inf
    assert len(number.reason.split()) >= 5


@pytest.mark.parametrize("name", FRACTIONS)
def test_fractions_are_at_most_the_whole(name):
    """A per cent written as a number of per cent would allow anything."""
    assert NUMBERS[name] <= 1


@pytest.mark.parametrize("name", CHANCES)
def test_chances_can_be_those_of_a_bound(name):
    """What the paired differences accept."""
    assert 0.5 < NUMBERS[name] < 1


def test_no_two_numbers_share_a_reason():
    """A reason that was copied is not the reason of this number."""
    reasons = [number.reason for number in NUMBERS.values()]

    assert len(set(reasons)) == len(reasons)


def test_a_tolerance_is_its_number():
    """It is computed with and printed as the float that it is."""
    found = Tolerance(0.05, "made up for this test")

    assert (found, found * 2, f"{found:g}", repr(found)) == (0.05, 0.1, "0.05", "0.05")
    assert found.reason == "made up for this test"


# Regressions


@pytest.mark.parametrize(("text_set", "frac"), [("prose", 0.12), ("sampled", 0.08)])
def test_regression_tolerance_of_kl_is_a_fraction_with_a_floor(text_set, frac):
    """A part of the stored mean, and never less than the noise of fp32's own rounding."""
    tolerance = tolerances.regression_tolerance

    assert tolerance(text_set, "kl_mean_nats", 0.008) == pytest.approx(frac * 0.008)
    for tiny in (0.0, -1e-9):
        assert tolerance(text_set, "kl_mean_nats", tiny) == tolerances.REGRESSION_NATS


@pytest.mark.parametrize("stored_mean", [0.0, 0.1, 0.125])
def test_regression_tolerances_of_other_metrics_have_a_floor(stored_mean):
    """NLL and disagreement may move by so much, and by a part of a large loss."""
    tolerance = tolerances.regression_tolerance

    assert tolerance("prose", "nll_mean_nats", stored_mean) == 0.01
    assert tolerance("prose", "nll_mean_nats", stored_mean, stored_kl_nats=0.01) == 0.01
    assert tolerance("prose", "nll_mean_nats", stored_mean, 0.25) == pytest.approx(0.04)
    assert tolerance("prose", "top1_disagreement_frac", stored_mean) == 0.025
    assert tolerance("prose", "top1_disagreement_frac", 0.2) == pytest.approx(0.04)


@pytest.mark.parametrize("name", ["true_prob_rms_frac", "kl_max_nats"])
def test_a_metric_without_a_tolerance_is_an_error(name):
    """A regression metric that nobody gave a tolerance is not compared with 0 or infinity."""
    with pytest.raises(KeyError, match=name):
        tolerances.regression_tolerance("prose", name, 0.1)


def test_every_regression_of_the_prose_has_a_tolerance():
    """Both tables name the same metrics."""
    of_prose = {metric for text, metric in tolerances.REGRESSIONS if text == "prose"}

    assert of_prose == set(test_quality.REGRESSIONS)


# Resolution


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_tolerance_is_resolved_from_the_minimum_detectable_effect_on(effect, tolerance):
    """A smaller tolerance is refused with both numbers, an equal one is not."""
    told = tolerances.unresolved("kl_mean_nats", effect, tolerance)

    assert bool(told) == (effect > tolerance)
    if told:
        assert told == (
            "kl_mean_nats: the sample cannot resolve the tolerance: obtained minimum detectable "
            f"effect {effect:.3g} at power 0.9, expected at most {tolerance:.3g}; score more "
            "texts, or loosen the tolerance with a reason"
        )


@pytest.mark.parametrize("effect", [math.nan, math.inf])
def test_what_is_not_a_number_resolves_nothing(effect):
    """An effect that could not be estimated is no reason to accept a threshold."""
    assert tolerances.unresolved("kl_mean_nats", effect, 0.1)


def test_an_unchanged_run_passes_a_resolved_tolerance_as_often_as_stated():
    """Where the tolerance is the effect itself, nine of ten runs without a change pass."""
    random, texts = np.random.default_rng(0), 12
    zero, text = np.zeros(texts), np.arange(texts)
    chances = {"confidence": tolerances.CONFIDENCE, "power": tolerances.POWER}
    tolerance = (1.7959 + 1.3634) / texts**0.5  # of texts with a standard deviation of 1

    passed = [
        paired_difference(zero, random.normal(size=texts), text, **chances).upper <= tolerance
        for _ in range(300)
    ]

    assert 0.83 <= np.mean(passed) <= 0.96


def test_the_measured_noise_of_another_processor_is_resolved():
    """Standard errors of 1.6 % and 2.9 % of the KL, 12 texts, against the tolerance of the KL."""
    quantiles = 1.7959 + 1.3634
    for error in (0.016, 0.029):
        assert tolerances.unresolved("kl_mean_nats", quantiles * error, 0.10) == ""
    assert tolerances.unresolved("kl_mean_nats", quantiles * 0.042, 0.10) != ""


# Agreement of the phases


def test_agreement_grows_with_the_row_s_own_loss():
    """Half of what a row loses, and never less than what a row without FP8 shows."""
    assert tolerances.agreement_nats(0.0, CPU) == tolerances.AGREEMENT_NATS
    assert tolerances.agreement_nats(1e-6, CPU) == tolerances.AGREEMENT_NATS
    assert tolerances.agreement_nats(0.008, CPU) == pytest.approx(0.004)


def test_agreement_of_engines_has_numbers_of_its_own():
    """The engines of the two phases run other kernels, the interpreter the same functions."""
    assert tolerances.agreement_nats(0.0, H200) == tolerances.ENGINE_AGREEMENT_NATS
    assert tolerances.agreement_nats(0.008, H200) == pytest.approx(0.008)


@given(st.floats(0, 100), st.floats(0, 100), st.sampled_from([CPU, H200]))
def test_agreement_is_monotonic(one, other, target):
    """A row that loses more is allowed no less."""
    smaller, larger = sorted((one, other))

    assert tolerances.agreement_nats(smaller, target) <= tolerances.agreement_nats(larger, target)


@pytest.mark.parametrize("target", [CPU, H200], ids=lambda target: target.name)
def test_agreement_of_a_nan_loss_is_no_looser_than_that_of_none(target):
    """A loss that is not a number earns no tolerance."""
    found = tolerances.agreement_nats(float("nan"), target)

    assert found == tolerances.agreement_nats(0.0, target)


def test_a_tolerance_can_be_copied():
    """Dataclasses that hold one are copied into reports, and sent to workers."""
    copied = copy.deepcopy(tolerances.POWER)
    assert (copied, copied.reason, copied.direction) == (
        tolerances.POWER,
        tolerances.POWER.reason,
        tolerances.POWER.direction,
    )
