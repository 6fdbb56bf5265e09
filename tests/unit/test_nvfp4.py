"""NVFP4: blocks of 16 in FP4, block scales in FP8, one float32 scale."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import round_to_e4m3

from gptneo_trt import nvfp4
from gptneo_trt.errors import BuildError
from gptneo_trt.nvfp4 import FP4_MAGNITUDES, FP4_MAX, FP8_MAGNITUDES


def weight_of(*shape, std=0.02):
    """Return a seeded float32 weight."""
    return np.random.default_rng(0).normal(0, std, shape).astype(np.float32)


@pytest.mark.parametrize("largest", [1e-2, 1e-20, 1e-30, 1e30])
def test_C09_a_block_of_zeros_dequantizes_to_zero(largest):
    """Its scale is 0 and not a replacement that FP8 cannot hold, however small the others are."""
    weight = weight_of(64, 64)
    weight *= np.float32(largest) / np.abs(weight).max()
    weight[3, 16:32] = 0.0

    found = nvfp4.quantize("c_fc.weight", weight)

    assert found.block_scales.max() == 0x7E  # 448; 0x7F and more are NaN and negative
    restored = nvfp4.dequantize(found)
    assert not restored[3, 16:32].any()
    assert np.isfinite(restored).all()
    assert np.abs(restored).max() == pytest.approx(largest, rel=0.05)


@pytest.mark.parametrize("width", [60, 1, 17])
def test_C09_a_width_that_is_no_multiple_of_16_is_refused_by_name(width):
    """Nothing is padded: the message has the weight and its width."""
    message = rf"^c_proj\.weight: NVFP4 of width {width}, expected a multiple of 16; "
    with pytest.raises(BuildError, match=message):
        nvfp4.quantize("c_proj.weight", np.ones((512, width), np.float32))


def test_C09_the_first_element_is_in_the_low_bits():
    """0.5 and -6 are the codes 1 and 15, packed as 0xF1; the other order would be 0x1F."""
    codes = nvfp4.to_fp4(np.float32([0.5, -6.0, 2.0, 0.0]))
    packed = nvfp4.pack(codes)
    assert codes.tolist() == [0x1, 0xF, 0x4, 0x0]
    assert packed.tolist() == [0xF1, 0x04]
    assert nvfp4.unpack(packed).tolist() == codes.tolist()


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf"), -1.0, 1e-38])
def test_C09_a_range_without_a_scale_is_refused_by_name(amax):
    """An activation that was always zero has no scale, nor has one that float32 cannot hold."""
    with pytest.raises(BuildError, match=r"^c_fc input: NVFP4 range .*; leave"):
        nvfp4.global_scale_from_amax("c_fc input", amax)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_C09_a_weight_without_a_range_is_refused_by_name(value):
    """One value that is not finite, or nothing but zeros."""
    weight = np.zeros((16, 16), np.float32)
    weight[5, 5] = value
    with pytest.raises(BuildError, match=r"^q_proj\.weight: NVFP4 range "):
        nvfp4.quantize("q_proj.weight", weight)


def test_every_code_is_the_nearest_value_and_ties_go_to_the_even_code():
    """The 16 values stay, what lies between goes to the nearer one, a midpoint to the even code."""
    codes = np.arange(16, dtype=np.uint8)
    values = nvfp4.from_fp4(codes)
    assert values[:8].tolist() == list(FP4_MAGNITUDES)
    np.testing.assert_array_equal(values[8:], -values[:8])
    np.testing.assert_array_equal(nvfp4.to_fp4(values), codes)  # -0.0 keeps its sign
    midpoints = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert nvfp4.from_fp4(nvfp4.to_fp4(midpoints)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    above = nvfp4.to_fp4(np.nextafter(midpoints[:7], np.float32(9)))
    assert above.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_block_scales_are_e4m3():
    """Codes are E4M3's bytes, by torch's own type and by the specification's table."""
    table = np.arange(127, dtype=np.uint8)
    expected = torch.from_numpy(table).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(FP8_MAGNITUDES, expected)
    values = np.random.default_rng(0).uniform(0, 500, 10_000).astype(np.float32)
    obtained = FP8_MAGNITUDES[nvfp4.nearest_codes(values, FP8_MAGNITUDES)]
    np.testing.assert_array_equal(obtained, round_to_e4m3(values))


@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
@settings(max_examples=50, deadline=None)
def test_quantize_dequantize_is_idempotent_and_near(seed, std):
    """Rounded again nothing changes; no value moves by more than half the widest step."""
    weight = np.random.default_rng(seed).normal(0, std, (4, 64)).astype(np.float32)

    once = nvfp4.dequantize(nvfp4.quantize("weight", weight))
    twice = nvfp4.dequantize(nvfp4.quantize("weight", once))

    np.testing.assert_allclose(twice, once, rtol=1e-6)
    blocks, error = (each.reshape(4, -1, 16) for each in (weight, once - weight))
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    # Half the widest step, 2 of 6, and what FP8 rounds the block scale by, 1 of 16.
    assert (np.abs(error) <= largest * (1 / FP4_MAX + 1 / 16)).all()
