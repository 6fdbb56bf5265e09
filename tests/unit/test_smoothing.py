"""SmoothQuant: the function stays, the ranges change."""

import numpy as np
import pytest
import torch
from tiny import changed, tiny_checkpoint

from gptneo_trt import reference
from gptneo_trt.errors import CalibrationError
from gptneo_trt.smoothing import (
    READERS,
    smoothed,
    smoothed_ranges,
    smoothing_factors,
    smoothquant_factors,
)

TOKENS = np.random.default_rng(5).integers(0, 61, (2, 32)).astype(np.int32)
LAYERS = range(2)
C_FC = "transformer.h.1.mlp.c_fc"


@pytest.fixture(scope="module")
def outliers():
    """Return T0 with two channels of each LayerNorm 30 times as wide, as large models have them."""
    wide = {
        f"transformer.h.{layer}.{norm}.weight": lambda weight: np.where(
            np.arange(len(weight)) < 2, weight * 30, weight
        ).astype(np.float32)
        for layer in LAYERS
        for norm in READERS
    }
    return changed(tiny_checkpoint(), wide)


def channel_amax(checkpoint):
    """Return module -> float32 [in], the largest input of each channel on TOKENS, from hooks."""
    model, found = reference.torch_model(checkpoint, torch.float32), {}
    modules = dict(model.named_modules())
    for layer in LAYERS:
        for paths in READERS.values():
            for path in paths:
                name = f"transformer.h.{layer}.{path}"
                modules[name].register_forward_hook(
                    lambda module, inputs, output, name=name: found.update(
                        {name: inputs[0].abs().flatten(0, -2).amax(0).numpy()}
                    )
                )
    logits = reference.logits(model, TOKENS)
    return found, logits


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_function_is_unchanged(outliers, strength):
    """Hugging Face's float32 logits of the smoothed checkpoint are those of the original."""
    ranges, expected = channel_amax(outliers)

    smooth = smoothed(outliers, smoothquant_factors(outliers, ranges, strength))

    _, obtained = channel_amax(smooth)
    np.testing.assert_allclose(obtained, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)
    weights = f"{C_FC}.weight"
    assert not np.array_equal(smooth.weights[weights], outliers.weights[weights])


def test_returned_ranges_are_those_of_the_smoothed_checkpoint(outliers):
    """Nothing has to be calibrated again: what the hooks see is what was computed."""
    ranges, _ = channel_amax(outliers)
    factors = smoothquant_factors(outliers, ranges)

    computed = smoothed_ranges(outliers, ranges, factors)

    seen, _ = channel_amax(smoothed(outliers, factors))
    assert computed.keys() == seen.keys()
    for module, obtained in computed.items():
        np.testing.assert_allclose(obtained, seen[module].max(), rtol=1e-4)


def test_wide_channels_become_narrow(outliers):
    """The largest channel is less far from the typical one, and a scale a tensor fits better."""
    ranges, _ = channel_amax(outliers)
    seen, _ = channel_amax(smoothed(outliers, smoothquant_factors(outliers, ranges)))

    def spread(module, amax):
        return amax[module].max() / np.median(amax[module])

    for module in ranges:
        assert spread(module, seen) < 0.5 * spread(module, ranges)


def test_factors_are_those_of_the_equation():
    """amax_x^s / amax_w^(1 - s), the weights' amax over all products that read the channel."""
    weights = {"q": np.array([[1.0, -4.0]]), "k": np.array([[0.5, 2.0]])}
    factors = smoothing_factors(np.array([9.0, 1.0], np.float32), weights, 0.5)
    np.testing.assert_allclose(factors, [3.0, 0.5])


def test_channels_without_a_range_keep_the_factor_1():
    """A channel that is always 0, or that nobody reads, has nothing to move."""
    weights = {"q": np.array([[1.0, 0.0, 2.0]])}
    factors = smoothing_factors(np.array([0.0, 5.0, 2.0], np.float32), weights, 0.5)
    np.testing.assert_allclose(factors, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("amax", [None, np.ones(31), np.full(32, np.nan), np.full(32, -1.0)])
def test_ranges_that_do_not_fit_are_named(outliers, amax):
    """Missing, of another width, not finite or negative."""
    ranges, _ = channel_amax(outliers)
    module = C_FC
    if amax is None:
        del ranges[module]
    else:
        ranges[module] = amax
    with pytest.raises(CalibrationError, match=rf"{module}: .*; calibrate again$"):
        smoothquant_factors(outliers, ranges)


@pytest.mark.parametrize("factors", [(), (1.0,) * 31, (0.0,) * 32, (float("nan"),) * 32])
def test_factors_that_do_not_fit_are_refused(outliers, factors):
    """Missing, of another width, or not positive: they would move a NaN into the weights."""
    ranges, _ = channel_amax(outliers)
    given = smoothquant_factors(outliers, ranges) | {"transformer.h.1.ln_2": factors}
    with pytest.raises(CalibrationError, match=r"transformer\.h\.1\.ln_2: .*; calibrate again$"):
        smoothed(outliers, given)
