"""NVFP4: a weight as FP4 E2M1 in blocks of 16, a block scale in FP8 E4M3, and one float32 scale.

value = FP4 x block scale x global scale. Source: "NVFP4" in TensorRT's "Working with Quantized
Types"; E2M1 in "OCP Microscaling Formats (MX) Specification 1.0", table 5; E4M3 in "OCP 8-bit
Floating Point Specification 1.0". A plan's worker quantizes weights, so this needs no torch.
"""

from dataclasses import dataclass

import numpy as np

from gptneo_trt.errors import BuildError

BLOCK = 16
FP4_MAX = 6.0
FP8_MAX = 448.0
# The magnitudes of a format by their code; one more bit is the sign.
FP4_MAGNITUDES = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=np.float32)
_EXPONENT, _MANTISSA = np.divmod(np.arange(127), 8)  # code 127 is NaN
FP8_MAGNITUDES = np.where(
    _EXPONENT == 0, _MANTISSA * 2.0**-9, (1 + _MANTISSA / 8) * 2.0 ** (_EXPONENT - 7.0)
).astype(np.float32)
FP4_SIGN = 8


@dataclass(frozen=True, eq=False)
class BlockQuantized:
    """Hold a weight in NVFP4.

    Attributes:
        packed: uint8 [O, I / 2], two codes a byte, the first element in the low 4 bits.
        block_scales: uint8 [O, I / 16], bytes of FP8 E4M3; 0 where a block is all zeros.
        global_scale: float32 scalar, positive.
    """

    packed: np.ndarray
    block_scales: np.ndarray
    global_scale: np.float32


def global_scale_from_amax(name: str, amax: float) -> np.float32:
    """Return amax / (6 x 448), which brings the largest block's scale to the end of FP8's range.

    Raises:
        BuildError: a range that is not positive and finite, or whose scale float32 loses.
    """
    scale = np.float32(amax) / np.float32(FP4_MAX * FP8_MAX)
    if not np.finfo(np.float32).tiny <= scale < np.inf:
        raise BuildError(
            f"{name}: NVFP4 range {float(amax)!r}, expected positive and finite with a scale in "
            "float32; leave this projection out of the variant"
        )
    return scale


def nearest_codes(sizes: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Return the code of each value of at least 0: the nearest magnitude, ties to the even code."""
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    below, above = (np.searchsorted(midpoints, sizes, side=side) for side in ("left", "right"))
    return np.where(below % 2 == 0, below, above).astype(np.uint8)  # they differ on midpoints alone


def to_fp4(values: np.ndarray) -> np.ndarray:
    """Return the code of each float32 value: nearest E2M1, ties to the even code, at most 6."""
    signs = np.where(np.signbit(values), FP4_SIGN, 0).astype(np.uint8)
    return nearest_codes(np.abs(values), FP4_MAGNITUDES) | signs


def from_fp4(codes: np.ndarray) -> np.ndarray:
    """Return the float32 value of each code."""
    magnitudes = FP4_MAGNITUDES[codes % FP4_SIGN]
    return np.where(codes >= FP4_SIGN, -magnitudes, magnitudes)


def pack(codes: np.ndarray) -> np.ndarray:
    """Return uint8 [..., I / 2] of codes [..., I]: the first of each pair in the low 4 bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: np.ndarray) -> np.ndarray:
    """Return uint8 [..., I] codes of packed [..., I / 2]."""
    pairs = np.stack((packed & 0xF, packed >> 4), axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def quantize(name: str, weight: np.ndarray) -> BlockQuantized:
    """Return a weight in NVFP4, scales from the largest absolute values.

    A block of zeros has scale 0 and codes 0, so that it dequantizes to exactly 0; no block scale
    is NaN or above 448.

    Args:
        name: of the weight, for messages.
        weight: float [O, I], along whose last axis the blocks lie.

    Raises:
        BuildError: I is no multiple of 16; a value that is not finite; nothing but zeros.
    """
    if weight.shape[-1] % BLOCK:
        raise BuildError(
            f"{name}: NVFP4 of width {weight.shape[-1]}, expected a multiple of {BLOCK}; leave "
            "this projection out of the variant"
        )
    blocks = weight.astype(np.float32).reshape(len(weight), -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    scale = global_scale_from_amax(name, amax.max(initial=0.0))
    block_scales = nearest_codes(amax / np.float32(FP4_MAX) / scale, FP8_MAGNITUDES)
    steps = (FP8_MAGNITUDES[block_scales] * scale)[..., None]
    values = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
    return BlockQuantized(pack(to_fp4(values).reshape(weight.shape)), block_scales, scale)


def dequantize(quantized: BlockQuantized) -> np.ndarray:
    """Return float32 [O, I]: what a weight in NVFP4 stands for."""
    values = from_fp4(unpack(quantized.packed))
    steps = FP8_MAGNITUDES[quantized.block_scales] * quantized.global_scale
    return values * np.repeat(steps, BLOCK, axis=-1)
