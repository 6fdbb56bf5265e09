"""Paired differences: bounds that respect texts, and what cannot be bounded."""

import numpy as np
import pytest

from gptneo_trt import paired
from gptneo_trt.errors import MetricError


def test_paired_difference_of_an_unchanged_run_is_exactly_zero():
    """Current float64 values are rounded as the stored ones were, so nothing differs."""
    current = np.random.default_rng(0).gamma(1, 0.01, 90)

    difference = paired.paired_difference(current.astype(np.float32), current, np.arange(90) // 30)

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

    difference = paired.paired_difference(stored, current, text)
    shuffled = paired.paired_difference(stored[order], current[order], text[order])

    assert difference.mean == pytest.approx(np.mean(current.astype(float) - stored))
    assert difference.lower < difference.mean < difference.upper
    assert difference.lower > 0.0015
    assert difference.upper < 0.0025
    assert difference.minimum_detectable > 2.4 * difference.standard_error
    assert (shuffled.lower, shuffled.upper) == pytest.approx((difference.lower, difference.upper))
    assert difference == paired.paired_difference(stored, current, text, seed=0)


@pytest.mark.parametrize("texts", [2, 8, 40])
def test_paired_bounds_err_about_as_often_as_stated(texts):
    """Over 200 samples without a true change, at most 10 % of lower bounds are above 0."""
    random = np.random.default_rng(texts)
    text = np.repeat(np.arange(texts), 3)
    zero = np.zeros(text.size)

    lower = [
        paired.paired_difference(zero, random.normal(size=texts)[text], text, seed=trial).lower
        for trial in range(200)
    ]

    assert np.mean(np.array(lower) > 0) <= 0.1


def test_paired_difference_refuses_what_it_cannot_bound():
    """Shapes, NaN, a single text and a confidence that is no confidence are named together."""
    good = np.zeros(4, dtype=np.float32)

    with pytest.raises(MetricError) as caught:
        paired.paired_difference(good, np.full(3, np.nan), np.zeros(4, dtype=int), np.nan)

    assert str(caught.value) == (
        "paired difference: confidence: obtained nan, expected above 0.5 and below 1; "
        "current: obtained float32 with non-finite values, expected finite float; "
        "stored, current, text: obtained (4,), (3,), (4,), expected one shape [M]; "
        "texts: obtained 1, expected at least 2; score more"
    )
    with pytest.raises(MetricError, match="current: obtained float32 with non-finite"):
        paired.paired_difference(good, np.full(4, 1e300), np.arange(4))


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
