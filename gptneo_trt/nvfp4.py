"""NVFP4: a weight as FP4 E2M1 in blocks of 16, a block scale in FP8 E4M3, and one float32 scale.

value = FP4 x block scale x global scale. Source: "NVFP4" in TensorRT's "Working with Quantized
Types"; E2M1 in "OCP Microscaling Formats (MX) Specification 1.0", table 5.
"""

from dataclasses import dataclass

import torch

from gptneo_trt.errors import CalibrationError
from gptneo_trt.operators import FP8_MAX, to_fp8

BLOCK = 16
FP4_MAX = 6.0
# The magnitudes of E2M1 by their code; the code's fourth bit is the sign.
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8


@dataclass(frozen=True, eq=False)
class BlockQuantized:
    """Hold a weight in NVFP4.

    Attributes:
        packed: uint8 [O, I / 2], two codes a byte, the first element in the low 4 bits.
        block_scales: float32 [O, I / 16], values of FP8 E4M3; 0 where a block is all zeros.
        global_scale: float32 scalar, positive.
    """

    packed: torch.Tensor
    block_scales: torch.Tensor
    global_scale: torch.Tensor


def global_scale_from_amax(name: str, amax: float) -> torch.Tensor:
    """Return amax / (6 x 448), which brings the largest block's scale to the end of FP8's range.

    Raises:
        CalibrationError: a range that is not positive and finite, or whose scale float32 loses.
    """
    scale = torch.tensor(amax, dtype=torch.float32) / (FP4_MAX * FP8_MAX)
    if not torch.finfo(torch.float32).tiny <= scale < torch.inf:
        raise CalibrationError(
            f"{name}: NVFP4 range {amax!r}, expected positive and finite with a scale in float32; "
            "leave this projection out of the variant or calibrate again"
        )
    return scale


def to_fp4(values: torch.Tensor) -> torch.Tensor:
    """Return the code of each float32 value: nearest E2M1, ties to the even code, at most 6."""
    magnitudes = torch.tensor(FP4_MAGNITUDES, device=values.device)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs()
    below, above = torch.bucketize(size, midpoints), torch.bucketize(size, midpoints, right=True)
    code = torch.where(below % 2 == 0, below, above)  # they differ on a midpoint alone
    return (code + SIGN * torch.signbit(values)).to(torch.uint8)


def from_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 value of each code."""
    magnitudes = torch.tensor(FP4_MAGNITUDES, device=codes.device)[(codes % SIGN).long()]
    return torch.where(codes >= SIGN, -magnitudes, magnitudes)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., I / 2] of codes [..., I]: the first of each pair in the low 4 bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., I] codes of packed [..., I / 2]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantize(name: str, weight: torch.Tensor) -> BlockQuantized:
    """Return a weight in NVFP4, scales from the largest absolute values.

    A block of zeros has scale 0 and codes 0, so that it dequantizes to exactly 0; no block scale
    is NaN or above 448.

    Args:
        name: of the weight, for messages.
        weight: float32 [O, I], along whose last axis the blocks lie.

    Raises:
        CalibrationError: I is no multiple of 16; a value that is not finite; nothing but zeros.
    """
    if weight.shape[-1] % BLOCK:
        raise CalibrationError(
            f"{name}: NVFP4 of width {weight.shape[-1]}, expected a multiple of {BLOCK}; leave "
            "this projection out of the variant"
        )
    blocks = weight.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    scale = global_scale_from_amax(name, float(amax.max()))
    block_scales = to_fp8(amax / FP4_MAX / scale)
    steps = (block_scales * scale).unsqueeze(-1)
    codes = to_fp4(torch.where(steps > 0, blocks / steps, 0.0))
    return BlockQuantized(pack(codes.flatten(-2)), block_scales, scale)


def dequantize(quantized: BlockQuantized) -> torch.Tensor:
    """Return float32 [O, I]: what a weight in NVFP4 stands for."""
    values = from_fp4(unpack(quantized.packed)).unflatten(-1, (-1, BLOCK))
    steps = quantized.block_scales * quantized.global_scale
    return (values * steps.unsqueeze(-1)).flatten(-2)
