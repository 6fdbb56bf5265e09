"""Ratios to the floor and to the reference: values, bounds, and what cannot be compared."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptneo_trt import ratios
from gptneo_trt.data import TokenMetrics
from gptneo_trt.errors import MetricError


def tokens(seed, scale=1.0, texts=12, length=8):
    """Return made-up values of texts whose last position has no next token."""
    random, shape = np.random.default_rng(seed), (texts, length)
    reference = random.gamma(2, 2, shape)
    nll = reference + random.normal(0.01, 0.05, shape)
    reference[:, -1] = nll[:, -1] = np.nan
    return TokenMetrics(
        kl_nats=scale * random.gamma(1, 1e-3, shape).ravel(),
        nll_nats=nll.ravel(),
        reference_nll_nats=reference.ravel(),
        top1=random.random(shape).ravel() < 0.9,
        text=np.repeat(np.arange(texts, dtype=np.int32), length),
        tied_top1=np.ones(texts * length, dtype=bool),
    )


FLOOR, ROW = tokens(0), tokens(1, scale=5.0)


def test_floor_ratio_is_of_the_means():
    """The mean KL of the row over the floor's, within its bounds, whatever the seed."""
    found = ratios.floor_ratio(ROW, FLOOR, 0.95)

    assert found.value == pytest.approx(ROW.kl_nats.mean() / FLOOR.kl_nats.mean())
    assert found.lower < found.value < found.upper
    assert ratios.floor_ratio(ROW, FLOOR, 0.95, seed=1).value == found.value


def test_the_floor_to_itself():
    """Exactly 1 and exactly no drop: fp16 is within the ship limits whatever it loses."""
    ratio, drop = ratios.floor_ratio(FLOOR, FLOOR, 0.95), ratios.top1_drop(FLOOR, FLOOR, 0.95)

    assert (ratio.value, ratio.lower, ratio.upper) == (1, 1, 1)
    assert (drop.value, drop.lower, drop.upper) == (0, 0, 0)


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-3, 1e3), st.integers(0, 99))
def test_floor_ratio_scales_with_the_loss(factor, seed):
    """A row that loses twice as much everywhere has twice the ratio and twice the bounds."""
    row = tokens(seed)

    one = ratios.floor_ratio(row, FLOOR, 0.95)
    other = ratios.floor_ratio(replace(row, kl_nats=factor * row.kl_nats), FLOOR, 0.95)

    assert (other.value, other.lower, other.upper) == pytest.approx(
        (factor * one.value, factor * one.lower, factor * one.upper)
    )


def test_top1_drop_is_paired():
    """What both get wrong is no drop, and no error of it."""
    worse = replace(FLOOR, top1=FLOOR.top1 & (np.arange(96) % 8 != 0))

    found = ratios.top1_drop(worse, FLOOR, 0.95)

    assert found.value == pytest.approx(FLOOR.top1.mean() - worse.top1.mean())
    assert 0 < found.lower < found.value < found.upper < 0.2


def test_perplexity_ratio_is_exp_of_the_paired_mean():
    """Of the scored tokens alone; a factor a token on each is that factor, without an error."""
    scored = ~np.isnan(ROW.nll_nats)
    shifted = replace(ROW, nll_nats=ROW.reference_nll_nats + np.log(1.01))

    found, exact = (ratios.perplexity_ratio(each, 0.95) for each in (ROW, shifted))

    difference = (ROW.nll_nats - ROW.reference_nll_nats)[scored]
    assert found.value == pytest.approx(np.exp(difference.mean()))
    assert found.lower < found.value < found.upper
    assert (exact.value, exact.lower, exact.upper) == pytest.approx((1.01, 1.01, 1.01))


def test_a_perplexity_beyond_float_is_infinite():
    """No warning, and no limit that allows it."""
    hopeless = replace(ROW, nll_nats=ROW.nll_nats + 1e4)

    assert ratios.perplexity_ratio(hopeless, 0.95).lower == np.inf


@pytest.mark.parametrize("compare", [ratios.floor_ratio, ratios.top1_drop])
def test_other_positions_are_refused(compare):
    """A row that was measured on fewer tokens is not held against the floor."""
    with pytest.raises(MetricError, match="obtained 48 positions of 6 texts, expected the floor's"):
        compare(tokens(1, texts=6), FLOOR, 0.95)


def test_there_is_no_ratio_to_a_floor_without_loss():
    """A reference that is the floor itself is named, not divided by."""
    nothing = replace(FLOOR, kl_nats=np.zeros(96))

    with pytest.raises(MetricError, match="obtained mean KL 0 of the floor, expected above 0"):
        ratios.floor_ratio(ROW, nothing, 0.95)


def test_standard_errors_are_of_text_means():
    """With equally long texts they are the standard errors of the means of texts."""
    found = ratios.standard_errors(ROW)

    scored = (ROW.nll_nats - ROW.reference_nll_nats).reshape(12, 8)[:, :-1]
    for name, values in {
        "kl_mean_stderr_nats": ROW.kl_nats.reshape(12, 8),
        "top1_stderr_frac": ROW.top1.reshape(12, 8),
        "perplexity_ratio_log_stderr": scored,
    }.items():
        expected = np.std(values.mean(axis=1), ddof=1) / 12**0.5
        assert found.pop(name) == pytest.approx(expected)
    assert found == {}


def test_standard_errors_need_two_texts():
    """One text has no error, and texts without a next token none of the perplexity."""
    unscored = replace(ROW, nll_nats=np.full(96, np.nan), reference_nll_nats=np.full(96, np.nan))

    assert ratios.standard_errors(tokens(0, texts=1)) == {}
    assert ratios.standard_errors(unscored).keys() == {"kl_mean_stderr_nats", "top1_stderr_frac"}
