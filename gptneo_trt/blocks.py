"""Add products whose weight has a scale for every block of its input axis: INT4 and NVFP4.

INT4 is of weights alone: a constant goes through Quantize and Dequantize. NVFP4 has two levels of
scales. Its weight is stored packed, because TensorRT quantizes no constant to FP4 in blocks; an
input is quantized to it at run time (DynamicQuantize), with scales of its own blocks.
Source: "Quantization Schemes" in TensorRT's "Working with Quantized Types".
"""

from typing import Any

import numpy as np

from gptneo_trt import layers, nvfp4
from gptneo_trt.errors import BuildError
from gptneo_trt.layers import FARTHEST, LARGEST, NUMPY_TYPES, Graph, LinearWeights

# Sizes of a block of INT4 that TensorRT supports; the largest that divides the width is taken.
INT4_BLOCKS = (128, 64)
# Largest value of an element, in steps of its block's scale.
LARGEST_STEP = {"int4": LARGEST["int4"], "nvfp4": nvfp4.FP4_MAX}


def add_linear(graph: Graph, name: str, tensor: Any, weights: LinearWeights) -> Any:
    """Add ``tensor @ weight.T + bias``, rounded as the weights say.

    ``tensor``: [B, T, in]. Returns [B, T, out] in the graph's type.

    Raises:
        BuildError: a width that is no multiple of a block, a range whose scales are lost, or a
            weight of zeros.
    """
    add = _add_weight_only if weights.activation_scale is None else _add_nvfp4
    product = add(graph, name, tensor, weights)
    return layers.add_bias(graph, name, product, weights.bias, weights.dequantize_type)


def _add_weight_only(graph: Graph, name: str, tensor: Any, weights: LinearWeights) -> Any:
    operations = graph.backend.trt.MatrixOperation
    tensor = layers.add_cast(graph, f"{name}.input.cast", tensor, weights.dequantize_type)
    if weights.quantized_format == "int4":
        weight, operation = _add_int4_weight(graph, name, weights), operations.NONE
    else:
        weight, operation = _add_nvfp4_weight(graph, name, weights, (1,)), operations.TRANSPOSE
    product = graph.network.add_matrix_multiply(tensor, operations.NONE, weight, operation)
    return graph.named(product, name)


def _add_nvfp4(graph: Graph, name: str, tensor: Any, weights: LinearWeights) -> Any:
    """Add a product with both sides in NVFP4, of matrices.

    TensorRT-RTX 1.6 fails where a quantized input has three axes and one of them is dynamic.
    """
    operations = graph.backend.trt.MatrixOperation
    width_out, width_in = weights.weight.shape
    rows = layers.add_reshape(graph, f"{name}.input.rows", tensor, (-1, width_in))
    rows = _add_nvfp4_input(graph, f"{name}.input", rows, weights)
    weight = _add_nvfp4_weight(graph, name, weights, ())
    product = graph.network.add_matrix_multiply(rows, operations.NONE, weight, operations.TRANSPOSE)
    shape = (*tuple(tensor.shape)[:-1], width_out)
    return layers.add_reshape(graph, f"{name}.output", graph.named(product, name), shape)


def int4_block(module: str, width: int) -> int:
    """Return how many elements of a row have one scale.

    Raises:
        BuildError: no block that TensorRT supports divides the width.
    """
    for size in INT4_BLOCKS:
        if width % size == 0:
            return size
    raise BuildError(
        f"{module}.weight: INT4 of width {width}, expected a multiple of {INT4_BLOCKS[-1]}; leave "
        "this projection out of the variant"
    )


def int4_scales(module: str, weight: np.ndarray, type_name: str) -> np.ndarray:
    """Return amax / 7 of each block of a weight [out, in], [out, in / block] in a type.

    A block of zeros, or so small that the type loses its scale, has the smallest normal number of
    the type: what its values lose is then half of that.

    Raises:
        BuildError: see ``add_linear``.
    """
    block = int4_block(module, weight.shape[1])
    largest = layers.weight_scale(module, weight, "int4") * LARGEST["int4"]
    _check_range(f"{module}.weight", "int4", largest, type_name)
    stored = NUMPY_TYPES[type_name]
    amax = np.abs(weight.astype(np.float32)).reshape(len(weight), -1, block).max(axis=-1)
    scales = amax / np.float32(LARGEST["int4"])
    return np.maximum(scales, np.finfo(stored).tiny).astype(stored)


def _check_range(name: str, number_format: str, amax: float, type_name: str) -> None:
    """Refuse a range whose block scales or values the type of Dequantize does not hold."""
    info, single = np.finfo(NUMPY_TYPES[type_name]), np.finfo(np.float32)
    smallest = max(
        float(info.tiny) * LARGEST_STEP[number_format],
        float(single.tiny) * LARGEST[number_format],
    )
    largest = float(info.max) * LARGEST[number_format] / FARTHEST[number_format]
    if not smallest <= amax <= largest:
        raise BuildError(
            f"{name}: {number_format.upper()} of amax {amax:.4g}, expected {smallest:.4g} to "
            f"{largest:.4g}, whose block scales {type_name} holds; leave this projection out of "
            "the variant, calibrate again or dequantize to fp32"
        )


def _add_int4_weight(graph: Graph, name: str, weights: LinearWeights) -> Any:
    """Return the tensor [1, in, out] of a weight in INT4.

    Weight and scales are in the type of Dequantize, as TensorRT asks of a blocked Quantize.
    """
    type_name, own = weights.dequantize_type, f"{name}.weight"
    scales = int4_scales(name, weights.weight, type_name)
    constant = layers.add_weight(graph, own, weights.weight.T[None], type_name)
    scale = layers.add_constant(graph, f"{own}.scale", scales.T[None])
    quantize = graph.network.add_quantize(constant, scale, graph.data_type("int4"))
    quantized = graph.named(quantize, f"{own}.quantize")
    dequantize = graph.network.add_dequantize(quantized, scale, graph.data_type(type_name))
    output = graph.named(dequantize, f"{own}.dequantize")
    quantize.axis = dequantize.axis = 1
    return output


def _add_nvfp4_weight(
    graph: Graph, name: str, weights: LinearWeights, before: tuple[int, ...]
) -> Any:
    """Return the tensor [*before, out, in] of a weight in NVFP4."""
    own = f"{name}.weight"
    stored = nvfp4.quantize(own, weights.weight)
    amax = float(stored.global_scale) * LARGEST["nvfp4"]
    _check_range(own, "nvfp4", amax, weights.dequantize_type)
    shape = (*before, *weights.weight.shape)
    blocks = (*before, *stored.block_scales.shape)
    values = layers.add_packed(graph, own, stored.packed, "fp4", shape)
    scales = layers.add_packed(graph, f"{own}.scale", stored.block_scales, "fp8", blocks)
    global_scale = layers.add_constant(
        graph, f"{own}.global_scale", np.asarray(stored.global_scale)
    )
    return _add_dequantize(graph, own, (values, scales, global_scale), weights.dequantize_type)


def _add_nvfp4_input(graph: Graph, name: str, rows: Any, weights: LinearWeights) -> Any:
    """Round [M, in] to NVFP4 and back; blocks beyond the calibrated range saturate at it."""
    scale = np.asarray(weights.activation_scale, dtype=np.float32)
    amax = float(scale) * LARGEST["nvfp4"]
    _check_range(name, "nvfp4", amax, weights.dequantize_type)
    if rows.shape[-1] % nvfp4.BLOCK:
        raise BuildError(
            f"{name}: NVFP4 of width {rows.shape[-1]}, expected a multiple of {nvfp4.BLOCK}; "
            "leave this projection out of the variant"
        )
    global_scale = layers.add_constant(graph, f"{name}.global_scale", scale)
    types = graph.backend.trt.DataType
    quantize = graph.network.add_dynamic_quantize(rows, 1, nvfp4.BLOCK, types.FP4, types.FP8)
    values = graph.named(quantize, f"{name}.quantize")
    quantize.set_input(1, global_scale)
    scales = quantize.get_output(1)
    scales.name = f"{name}.quantize:1"
    return _add_dequantize(graph, name, (values, scales, global_scale), weights.dequantize_type)


def _add_dequantize(
    graph: Graph, name: str, parts: tuple[Any, Any, Any], dequantize_type: str
) -> Any:
    """Add values x (block scales x global scale), whose last axis is in blocks.

    The two products have one type: TensorRT takes a scale of no other type than the output's.
    """
    values, scales, global_scale = parts
    output_type = graph.data_type(dequantize_type)
    steps = graph.network.add_dequantize(scales, global_scale, output_type)
    steps_tensor = graph.named(steps, f"{name}.scale.dequantize")
    dequantize = graph.network.add_dequantize(values, steps_tensor, output_type)
    output = graph.named(dequantize, f"{name}.dequantize")
    dequantize.axis = len(output.shape) - 1
    return output
