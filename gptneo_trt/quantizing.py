"""What the quantizing layers compute, in PyTorch: Quantize, Dequantize, DynamicQuantize and packed
constants. See ``operators``, whose tables name these readers.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gptneo_trt.errors import RunError
from gptneo_trt.number_formats import block_scales, fp4_values, fp8_values, in_block_steps
from gptneo_trt.nvfp4 import BLOCK
from gptneo_trt.supported import Operation, refuse_unless


def read_packed(layer: Any, trt: ModuleType, packed: np.ndarray) -> Operation:
    """Return what a constant of FP4 or FP8 holds: TensorRT takes its bytes and shows none.

    ``packed``: uint8, the array that TensorRT was given for it.

    Raises:
        RunError: a constant of another type or size than the array's.
    """
    layer.__class__ = trt.IConstantLayer
    types, stored = trt.DataType, layer.weights
    decoders = {types.FP4: (fp4_values, 2), types.FP8: (fp8_values, 1)}
    if stored.dtype not in decoders:
        raise RunError(f"layer {layer.name}: packed {stored.dtype} is unknown; add it here")
    decode, values_a_byte = decoders[stored.dtype]
    refuse_unless(layer, {"size": (stored.size, packed.size * values_a_byte)})
    values = decode(torch.from_numpy(packed.reshape(-1))).reshape(1, *layer.shape)
    return lambda: values


def _spread_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what spreads a scale over the data: as it is, along the layer's axis, or in blocks."""
    shape, scale_shape = (tuple(layer.get_input(i).shape) for i in range(2))
    rank, axis = len(shape), layer.axis
    if not scale_shape:
        return lambda scale: scale
    if len(scale_shape) == 1 and 0 <= axis < rank:
        along = [1] * (rank + 1)
        along[axis + 1] = -1
        return lambda scale: scale.reshape(along)
    if len(scale_shape) == rank and 0 <= axis < rank:
        blocks = scale_shape[axis]
        spread = (*scale_shape[:axis], shape[axis], *scale_shape[axis + 1 :])
        if spread == shape and shape[axis] % blocks == 0:
            block = shape[axis] // blocks
            return lambda scale: scale.repeat_interleave(block, dim=axis + 1)
    raise RunError(
        f"layer {layer.name}: scale {scale_shape} of data {shape}, axis {axis}; add it here"
    )


def _refuse_unless_quantizing(layer: Any, trt: ModuleType, side: str, tensor: Any) -> None:
    types = trt.DataType
    quantized = tensor.dtype in (types.FP8, types.INT8, types.INT4, types.FP4)
    refuse_unless(
        layer,
        {
            "inputs": (layer.num_inputs, 2),
            f"{side} a quantized type": (quantized, True),
            "block_shape": (_block_shape(layer), ()),
        },
    )


def _block_shape(layer: Any) -> tuple[int, ...]:
    """Return the block shape of a layer; () where none is set, which TensorRT-RTX 1.6 refuses."""
    try:
        return tuple(size for size in layer.block_shape if size > 0)
    except (RuntimeError, ValueError):
        return ()


def read_quantize(layer: Any, trt: ModuleType) -> Operation:
    """Read x / scale, which is rounded to its type afterwards."""
    layer.__class__ = trt.IQuantizeLayer
    _refuse_unless_quantizing(layer, trt, "to", layer.get_output(0))
    spread = _spread_of(layer)
    return lambda tensor, scale: tensor / spread(scale)


def read_dequantize(layer: Any, trt: ModuleType) -> Operation:
    """Read x times scale."""
    layer.__class__ = trt.IDequantizeLayer
    _refuse_unless_quantizing(layer, trt, "from", layer.get_input(0))
    spread = _spread_of(layer)
    return lambda tensor, scale: tensor * spread(scale)


def _refuse_unless_nvfp4(layer: Any, trt: ModuleType) -> None:
    layer.__class__ = trt.IDynamicQuantizeLayer
    types, rank = trt.DataType, len(layer.get_input(0).shape)
    refuse_unless(
        layer,
        {
            "axis, block_size": ((layer.axis, layer.block_size), (rank - 1, BLOCK)),
            "to_type, scale_type": ((layer.to_type, layer.scale_type), (types.FP4, types.FP8)),
            "inputs": (layer.num_inputs, 2),
        },
    )


def read_dynamic_quantize(layer: Any, trt: ModuleType) -> Operation:
    """Read the values that NVFP4 rounds, in steps of their blocks."""
    _refuse_unless_nvfp4(layer, trt)
    return in_block_steps


def read_dynamic_scales(layer: Any, trt: ModuleType) -> Operation:
    """Read the scales of the blocks."""
    _refuse_unless_nvfp4(layer, trt)
    return block_scales
