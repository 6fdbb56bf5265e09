"""NVFP4: blocks of 16 in FP4, block scales in FP8, one float32 scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptneo_trt import nvfp4
from gptneo_trt.errors import CalibrationError
from gptneo_trt.nvfp4 import FP4_MAGNITUDES, FP4_MAX


def weight_of(*shape, std=0.02):
    """Return a seeded float32 weight."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * std


@pytest.mark.parametrize("largest", [1e-2, 1e-20, 1e-30, 1e30])
def test_C09_a_block_of_zeros_dequantizes_to_zero(largest):
    """Its scale is 0 and not a replacement that FP8 cannot hold, however small the others are."""
    weight = weight_of(64, 64)
    weight *= largest / weight.abs().max()
    weight[3, 16:32] = 0.0

    found = nvfp4.quantize("c_fc.weight", weight)

    scales = found.block_scales.to(torch.float8_e4m3fn)
    assert not set(scales.view(torch.uint8).flatten().tolist()) & {0x7F, 0xFF}
    assert torch.equal(scales.float(), found.block_scales)
    restored = nvfp4.dequantize(found)
    assert torch.equal(restored[3, 16:32], torch.zeros(16))
    assert torch.isfinite(restored).all()
    assert restored.abs().max() == pytest.approx(largest, rel=0.05)


@pytest.mark.parametrize("width", [60, 1, 17])
def test_C09_a_width_that_is_no_multiple_of_16_is_refused_by_name(width):
    """Nothing is padded: the message has the weight and its width."""
    message = rf"^c_proj\.weight: NVFP4 of width {width}, expected a multiple of 16; "
    with pytest.raises(CalibrationError, match=message):
        nvfp4.quantize("c_proj.weight", torch.ones(512, width))


def test_C09_the_first_element_is_in_the_low_bits():
    """0.5 and -6 are the codes 1 and 15, packed as 0xF1; the other order would be 0x1F."""
    codes = nvfp4.to_fp4(torch.tensor([0.5, -6.0, 2.0, 0.0]))
    packed = nvfp4.pack(codes)
    assert codes.tolist() == [0x1, 0xF, 0x4, 0x0]
    assert packed.tolist() == [0xF1, 0x04]
    assert nvfp4.unpack(packed).tolist() == codes.tolist()


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf"), -1.0, 1e-38])
def test_C09_a_range_without_a_scale_is_refused_by_name(amax):
    """An activation that was always zero has no scale, nor has one that float32 cannot hold."""
    with pytest.raises(CalibrationError, match=r"^c_fc input: NVFP4 range .*; leave"):
        nvfp4.global_scale_from_amax("c_fc input", amax)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_C09_a_weight_without_a_range_is_refused_by_name(value):
    """One value that is not finite, or nothing but zeros."""
    weight = torch.zeros(16, 16)
    weight[5, 5] = value
    with pytest.raises(CalibrationError, match=r"^q_proj\.weight: NVFP4 range "):
        nvfp4.quantize("q_proj.weight", weight)


def test_every_code_is_the_nearest_value_and_ties_go_to_the_even_code():
    """The 16 values stay, what lies between goes to the nearer one, a midpoint to the even code."""
    codes = torch.arange(16, dtype=torch.uint8)
    values = nvfp4.from_fp4(codes)
    assert values[:8].tolist() == list(FP4_MAGNITUDES)
    assert torch.equal(values[8:], -values[:8])
    assert torch.equal(nvfp4.to_fp4(values), codes)  # -0.0 keeps its sign
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert nvfp4.from_fp4(nvfp4.to_fp4(midpoints)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    above = nvfp4.to_fp4(torch.nextafter(midpoints[:7], torch.tensor(9.0)))
    assert above.tolist() == [1, 2, 3, 4, 5, 6, 7]


@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
@settings(max_examples=50, deadline=None)
def test_quantize_dequantize_is_idempotent_and_near(seed, std):
    """Rounded again nothing changes; no value moves by more than half the widest step."""
    weight = torch.randn((4, 64), generator=torch.Generator().manual_seed(seed)) * std

    once = nvfp4.dequantize(nvfp4.quantize("weight", weight))
    twice = nvfp4.dequantize(nvfp4.quantize("weight", once))

    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0.0)
    blocks, error = weight.unflatten(-1, (-1, 16)), (once - weight).unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(dim=-1)
    # Half the widest step, 2 of 6, and what FP8 rounds the block scale by, 1 of 16.
    assert (error.abs().amax(dim=-1) <= largest * (1 / FP4_MAX + 1 / 16)).all()
