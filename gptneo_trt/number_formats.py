"""Round float32 to the quantized formats, and read packed ones, in PyTorch.

Values of a format are held as float32. Source: the pages "Quantize", "Dequantize" and
"DynamicQuantize" of the "TensorRT Operator's Reference"; FP8 E4M3 and FP4 E2M1: the OCP's
specifications, see ``nvfp4``.
"""

import torch

from gptneo_trt import nvfp4
from gptneo_trt.nvfp4 import BLOCK, FP4_MAX, FP8_MAX

# Bit patterns of float32, whose exponent starts at bit 23 with a bias of 127.
FLOAT32_EXPONENT = 0xFF << 23
E4M3_SMALLEST_NORMAL = (127 - 6) << 23  # 2^-6
E2M1_SMALLEST_NORMAL = 127 << 23  # 1
TWENTY = 20 << 23  # from 2^exponent to 2^23 steps of 2^(exponent - 3)
TWENTY_TWO = 22 << 23  # the same of 2^(exponent - 1)


def to_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to FP8 E4M3: nearest even, saturating at 448; NaN stays NaN.

    E4M3 has steps of 2^(exponent - 3), and of 2^-9 below 2^-6. Adding and subtracting 1.5 * 2^23
    steps leaves a multiple of the step, because float32 has 24 bits and adds to nearest even.
    The values are those of a saturating cast to ``torch.float8_e4m3fn`` (tested over every value
    and midpoint), in less than half its time.
    """
    clamped = tensor.clamp(-FP8_MAX, FP8_MAX)
    exponent = clamped.view(torch.int32) & FLOAT32_EXPONENT
    steps = exponent.clamp_(min=E4M3_SMALLEST_NORMAL).add_(TWENTY).view(torch.float32).mul_(1.5)
    return clamped.add_(steps).sub_(steps)


def to_fp4(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to FP4 E2M1: nearest even, saturating at 6; as ``to_fp8``, in larger steps."""
    clamped = tensor.clamp(-FP4_MAX, FP4_MAX)
    exponent = clamped.view(torch.int32) & FLOAT32_EXPONENT
    steps = exponent.clamp_(min=E2M1_SMALLEST_NORMAL).add_(TWENTY_TWO).view(torch.float32)
    steps = steps.mul_(1.5)
    return clamped.add_(steps).sub_(steps)


def to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to an integer of 8 bits: nearest even, saturating at -128 and 127."""
    return tensor.round().clamp(-128, 127)


def to_int4(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to an integer of 4 bits: nearest even, saturating at -8 and 7."""
    return tensor.round().clamp(-8, 7)


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Return float32 [M] of uint8 [M / 2]: two FP4 codes a byte, the first in the low 4 bits."""
    return torch.from_numpy(nvfp4.from_fp4(nvfp4.unpack(packed.numpy())))


def fp8_values(stored: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of FP8 E4M3 bytes."""
    return stored.view(torch.float8_e4m3fn).float()


def block_scales(tensor: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Return the FP8 scales [..., I / 16] of the blocks of a tensor [..., I] in NVFP4.

    A block whose largest value is beyond 6 x 448 x ``global_scale`` has the scale 448, and its
    values saturate.
    """
    amax = tensor.unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1)
    return to_fp8(amax / FP4_MAX / global_scale)


def in_block_steps(tensor: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Return the values that FP4 rounds, [..., I]: in steps of their blocks, 0 where that is 0."""
    steps = block_scales(tensor, global_scale) * global_scale
    steps = steps.repeat_interleave(BLOCK, dim=-1)
    return torch.where(steps > 0, tensor / steps, 0.0)
