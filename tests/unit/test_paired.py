"""Paired differences: bounds that respect texts, and what cannot be bounded."""

import numpy as np
import pytest

from gptneo_trt import paired
from gptneo_trt.errors import MetricError

CHANCES = {"confidence": 0.95, "power": 0.9}


def test_paired_difference_of_an_unchanged_run_is_exactly_zero():
    """Current float64 values are rounded as the stored ones were, so nothing differs."""
    current = np.random.default_rng(0).gamma(1, 0.01, 90)

    stored, text = current.astype(np.float32), np.arange(90) // 30
    difference = paired.paired_difference(stored, current, text, **CHANCES)

    assert (difference.mean, difference.lower, difference.upper) == (0, 0, 0)
    assert (difference.standard_error, difference.minimum_detectable) == (0, 0)
    assert (difference.texts, difference.positions) == (3, 90)


def test_paired_difference_weighs_positions_and_brackets_the_mean():
    """The mean is over positions; bounds lie on both sides and do not depend on the order."""
    random = np.random.default_rng(1)
    text = np.repeat(np.arange(20), random.integers(5, 60, 20))
    stored = random.gamma(1, 0.01, text.size).astype(np.float32)
    current = (stored + random.normal(0.002, 0.001, text.size)).astype(np.float32)
    order = random.permutation(text.size)

    difference = paired.paired_difference(stored, current, text, **CHANCES)
    shuffled = paired.paired_difference(stored[order], current[order], text[order], **CHANCES)

    assert difference.mean == pytest.approx(np.mean(current.astype(float) - stored))
    assert difference.lower < difference.mean < difference.upper
    assert difference.lower > 0.0015
    assert difference.upper < 0.0025
    assert difference.minimum_detectable > 2.9 * difference.standard_error
    assert (shuffled.lower, shuffled.upper) == pytest.approx((difference.lower, difference.upper))
    assert difference == paired.paired_difference(stored, current, text, **CHANCES, seed=0)


@pytest.mark.parametrize("texts", [2, 8, 40])
def test_paired_bounds_err_about_as_often_as_stated(texts):
    """Over 200 samples without a true change, at most 10 % of lower bounds are above 0."""
    random = np.random.default_rng(texts)
    text = np.repeat(np.arange(texts), 3)
    zero = np.zeros(text.size)

    lower = [
        paired.paired_difference(
            zero, random.normal(size=texts)[text], text, **CHANCES, seed=trial
        ).lower
        for trial in range(200)
    ]

    assert np.mean(np.array(lower) > 0) <= 0.1


@pytest.mark.parametrize(
    ("texts", "power", "quantiles"),
    [(2, 0.9, 6.3138 + 3.0777), (12, 0.9, 1.7959 + 1.3634), (12, 0.8, 1.7959 + 0.8755)],
)
def test_minimum_detectable_effect_is_the_sum_of_two_quantiles(texts, power, quantiles):
    """Student's t with N - 1 degrees of freedom, from a printed table, times the error."""
    change = np.random.default_rng(texts).normal(size=texts)

    found = paired.paired_difference(np.zeros(texts), change, np.arange(texts), 0.95, power)

    assert found.standard_error == pytest.approx(np.std(change, ddof=1) / texts**0.5)
    assert found.minimum_detectable == pytest.approx(quantiles * found.standard_error, rel=1e-4)


def test_minimum_detectable_effect_is_found_as_often_as_stated():
    """A true worsening of that size brings the lower bound above 0 in nine of ten runs."""
    random, texts = np.random.default_rng(3), 12
    zero, text = np.zeros(texts), np.arange(texts)
    effect = (1.7959 + 1.3634) / texts**0.5  # of texts with a standard deviation of 1

    found = [
        paired.paired_difference(zero, random.normal(effect, 1, texts), text, **CHANCES).lower > 0
        for _ in range(300)
    ]

    assert 0.83 <= np.mean(found) <= 0.95


def test_a_run_that_repeats_its_bits_detects_no_less_than_the_noise():
    """Without an error of its own, the noise between two runs is what hides a change."""
    values, text = np.ones(24), np.repeat(np.arange(12), 2)
    worse = values + np.random.default_rng(0).normal(size=24)
    noise = {"noise_standard_error": 0.01}

    same = paired.paired_difference(values, values, text, **CHANCES, **noise)
    changed = paired.paired_difference(values, worse, text, **CHANCES, **noise)

    assert same.minimum_detectable == pytest.approx((1.7959 + 1.3634) * 0.01, rel=1e-4)
    assert (same.standard_error, same.lower, same.upper) == (0, 0, 0)
    assert changed == paired.paired_difference(values, worse, text, **CHANCES)


def test_paired_difference_refuses_what_it_cannot_bound():
    """Shapes, NaN, a single text and a confidence that is no confidence are named together."""
    good = np.zeros(4, dtype=np.float32)
    text = np.zeros(4, dtype=int)

    with pytest.raises(MetricError) as caught:
        paired.paired_difference(
            good, np.full(3, np.nan), text, np.nan, 0.0, noise_standard_error=-1.0
        )

    assert str(caught.value) == (
        "paired difference: confidence: obtained nan, expected above 0.5 and below 1; "
        "current: obtained float32 with non-finite values, expected finite float; "
        "noise: obtained standard error -1.0, expected finite and 0 or more; "
        "power: obtained 0.0, expected above 0.5 and below 1; "
        "stored, current, text: obtained (4,), (3,), (4,), expected one shape [M]; "
        "texts: obtained 1, expected at least 2; score more"
    )
    with pytest.raises(MetricError, match="current: obtained float32 with non-finite"):
        paired.paired_difference(good, np.full(4, 1e300), np.arange(4), **CHANCES)


def test_ratio_of_sums_of_proportional_sums_has_no_width():
    """A text that is hard for both moves neither bound; of something to itself it is 1."""
    sums = np.random.default_rng(0).gamma(1, 1, 12)

    three, itself = (paired.ratio_of_sums(each, sums, 0.95) for each in (3 * sums, sums))

    assert (three.value, three.lower, three.upper) == pytest.approx((3, 3, 3))
    assert (itself.value, itself.lower, itself.upper) == (1, 1, 1)


def test_ratio_of_sums_is_within_its_bounds_as_often_as_stated():
    """Of 200 samples with a true ratio of 3, about one in ten lies outside of both bounds."""
    random, outside = np.random.default_rng(1), 0
    for _ in range(200):
        own, floor = random.gamma(20, 3, 12), random.gamma(20, 1, 12)
        found = paired.ratio_of_sums(own, floor, 0.95)
        assert found.lower < found.value < found.upper
        outside += not found.lower <= 3 <= found.upper

    assert outside <= 30


def test_block_standard_error():
    """With equal texts it is the standard error of text means; one text is refused."""
    means = np.array([1.0, 2.0, 4.0, 7.0])
    sums, counts = paired.text_sums(np.repeat(means, 3), np.repeat([5, 1, 9, 2], 3))

    assert counts.tolist() == [3, 3, 3, 3]
    assert sums.tolist() == [6, 21, 3, 12]
    expected = np.std(means, ddof=1) / 2
    assert paired.block_standard_error(sums, counts) == pytest.approx(expected)
    with pytest.raises(MetricError, match="obtained 1 texts, expected at least 2"):
        paired.block_standard_error(sums[:1], counts[:1])
