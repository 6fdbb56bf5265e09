"""Add the pieces of a GPT-Neo graph to an ``INetworkDefinition``.

A layer carries the path of the weights it uses (``transformer.h.0.mlp.c_fc``); what belongs to
it carries that path and a suffix (``...c_fc.weight.quantize``). Source of the operators:
"TensorRT Operator's Reference", docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gptneo_trt import backend as backends
from gptneo_trt.backend import Backend
from gptneo_trt.errors import BuildError
from gptneo_trt.nvfp4 import FP4_MAX, FP8_MAX

NVFP4_MAX = FP4_MAX * FP8_MAX  # an FP4 value times an FP8 block scale
# Largest value of a quantized format; integers are symmetric, so that 0 is exact.
LARGEST = {"fp8": FP8_MAX, "int8": 127.0, "int4": 7.0, "nvfp4": NVFP4_MAX}
# What it saturates at: integers reach further down than up.
FARTHEST = {"fp8": FP8_MAX, "int8": 128.0, "int4": 8.0, "nvfp4": NVFP4_MAX}
NUMPY_TYPES: dict[str, type[np.floating[Any]]] = {"fp32": np.float32, "fp16": np.float16}


@dataclass
class Graph:
    """Hold a network under construction, and the arrays that must outlive the build.

    Attributes:
        backend: the TensorRT flavour.
        network: the ``INetworkDefinition``.
        compute_type: "fp16" or "fp32".
        arrays: every array handed to TensorRT, which does not copy them.
        packed: layer name -> uint8 bytes of a constant of FP4 or FP8; TensorRT refers to them, but
            shows none of them, unlike those of other types.
    """

    backend: Backend
    network: Any
    compute_type: str
    arrays: list[np.ndarray] = field(default_factory=list)
    packed: dict[str, np.ndarray] = field(default_factory=dict)

    def data_type(self, name: str) -> Any:
        """Return the ``DataType`` of "fp32", "fp16", "fp8", "int8", "int4" or "fp4"."""
        types = self.backend.trt.DataType
        known = {"fp32": types.FLOAT, "fp16": types.HALF, "fp8": types.FP8, "int8": types.INT8}
        return (known | {"int4": types.INT4, "fp4": types.FP4})[name]

    def named(self, layer: Any, name: str) -> Any:
        """Name a layer and its output; return the output tensor.

        Raises:
            BuildError: TensorRT returned no layer.
        """
        if layer is None:
            raise BuildError(f"layer {name}: {self.backend.target} returned None instead of it")
        layer.name = name
        output = layer.get_output(0)
        if output is None:
            raise BuildError(f"layer {name}: {self.backend.target} gave it no output")
        output.name = f"{name}:0"
        return output


@dataclass(frozen=True)
class LinearWeights:
    """Hold what one product needs.

    Attributes:
        weight: float32 or float16 [out, in], as PyTorch stores it.
        bias: float32 or float16 [out], or None.
        activation_scale: float32 scale of the quantized input; None for an input that is not.
        dequantize_type: output type of Dequantize, "fp16" or "fp32".
        quantized_format: of what is quantized, see ``Variant``.
        weight_scales: "tensor", "channel" or "block".
        weight_only: whether the weight is quantized although the input is not.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    activation_scale: float | None = None
    dequantize_type: str = "fp16"
    quantized_format: str = "fp8"
    weight_scales: str = "tensor"
    weight_only: bool = False

    @property
    def is_quantized(self) -> bool:
        """Return whether the weight is quantized, with its input or alone."""
        return self.weight_only or self.activation_scale is not None


def add_constant(graph: Graph, name: str, array: np.ndarray) -> Any:
    """Add a constant of the array's own type and shape; return its tensor."""
    array = np.asarray(array, order="C")  # ascontiguousarray would turn a scalar into [1]
    graph.arrays.append(array)
    trt = graph.backend.trt
    layer = graph.network.add_constant(trt.Dims(array.shape), trt.Weights(array))
    return graph.named(layer, name)


def add_packed(
    graph: Graph, name: str, stored: np.ndarray, type_name: str, shape: tuple[int, ...]
) -> Any:
    """Add a constant of "fp4" or "fp8" of a shape, whose bytes are ``stored``; return its tensor.

    ``stored``: uint8; of FP4 two values a byte, the first in the low 4 bits.
    """
    graph.packed[name] = np.asarray(stored, order="C")
    trt, size = graph.backend.trt, math.prod(shape)
    weights = trt.Weights(graph.data_type(type_name), graph.packed[name].ctypes.data, size)
    return graph.named(graph.network.add_constant(trt.Dims(shape), weights), name)


def add_weight(graph: Graph, name: str, array: np.ndarray, type_name: str) -> Any:
    """Add a weight of the checkpoint as a constant of "fp16" or "fp32"; return its tensor.

    Raises:
        BuildError: a finite value that the type does not hold, which would become infinity.
    """
    with np.errstate(over="ignore"):
        stored = array.astype(NUMPY_TYPES[type_name])
    lost = array[np.isinf(stored) & np.isfinite(array)]
    if lost.size:
        raise BuildError(
            f"{name}: obtained values up to {np.abs(lost).max():g}, expected at most "
            f"{np.finfo(stored.dtype).max:g} in {type_name}; use a row of fp32"
        )
    return add_constant(graph, name, stored)


def add_cast(graph: Graph, name: str, tensor: Any, type_name: str) -> Any:
    """Cast to "fp16" or "fp32"; a tensor of that type already is returned as it is."""
    wanted = graph.data_type(type_name)
    if tensor.dtype == wanted:
        return tensor
    return graph.named(graph.network.add_cast(tensor, wanted), name)


def add_elementwise(graph: Graph, name: str, left: Any, right: Any, operation: str) -> Any:
    """Add ``left operation right`` with broadcasting; operation is TensorRT's name, "SUM"."""
    operations = graph.backend.trt.ElementWiseOperation
    layer = graph.network.add_elementwise(left, right, getattr(operations, operation))
    return graph.named(layer, name)


def add_quantize_dequantize(
    graph: Graph, name: str, tensor: Any, scale: float | np.ndarray, dequantize_type: str,
    *, number_format: str = "fp8", axis: int = 0,
) -> Any:  # fmt: skip
    """Round a tensor to a quantized format and back, saturating at FARTHEST x scale.

    The scale stays float32 even where the tensor is float16: amax / 448 of a small tensor is
    below float16's range (2e-5 / 448 is 33 % off there, 1e-5 / 448 becomes 0).

    Args:
        graph, name, tensor: what is rounded, [...].
        scale: one of the tensor, or float32 [size of ``axis``].
        dequantize_type: output type of Dequantize.
        number_format: "fp8" (E4M3, to nearest even) or "int8".
        axis: along which an array of scales lies.

    Raises:
        BuildError: a scale that is not a positive normal float32, or so large that FARTHEST x scale
            is beyond ``dequantize_type`` and would come back as infinity.
    """
    stored = np.asarray(scale, dtype=np.float32)
    end = LARGEST[number_format]
    largest = largest_scale(number_format, dequantize_type)
    if not (np.finfo(np.float32).tiny <= stored.min() and stored.max() <= largest):
        raise BuildError(
            f"{name}: {number_format.upper()} scale {_told(scale)} of amax "
            f"{_told(np.multiply(scale, end), '.4g')}, expected a positive normal float32 of at "
            f"most {largest:.4g}, whose amax {dequantize_type} holds; leave this projection out of "
            "the variant, calibrate again or dequantize to fp32"
        )
    scale_tensor = add_constant(graph, f"{name}.scale", stored)
    quantized = graph.network.add_quantize(tensor, scale_tensor, graph.data_type(number_format))
    quantized_tensor = graph.named(quantized, f"{name}.quantize")
    output_type = graph.data_type(dequantize_type)
    dequantized = graph.network.add_dequantize(quantized_tensor, scale_tensor, output_type)
    output = graph.named(dequantized, f"{name}.dequantize")
    if stored.ndim:
        quantized.axis = dequantized.axis = axis
    return output


def largest_scale(number_format: str, dequantize_type: str) -> float:
    """Return the largest scale of which the other type holds every multiple of a format."""
    return float(np.finfo(NUMPY_TYPES[dequantize_type]).max) / FARTHEST[number_format]


def _told(figures: float | np.ndarray, form: str = "") -> str:
    """Return one figure, or the least and most of several."""
    if np.ndim(figures) == 0:
        return format(float(figures), form) if form else repr(float(figures))
    return f"{float(np.min(figures)):{form or 'g'}} to {float(np.max(figures)):{form or 'g'}}"


def weight_scale(module: str, weight: np.ndarray, number_format: str = "fp8") -> float:
    """Return amax / LARGEST of a weight, in float32.

    Raises:
        BuildError: a weight of zeros or of non-finite values has no scale.
    """
    amax = np.float32(np.max(np.abs(weight.astype(np.float32)))) if weight.size else np.float32(0)
    if not 0 < amax < np.inf:
        raise BuildError(
            f"{module}.weight: largest absolute value {amax}, expected positive and finite; an "
            f"{number_format.upper()} scale cannot be made of it, leave this projection out of the "
            "variant"
        )
    return float(amax / np.float32(LARGEST[number_format]))


def channel_scales(module: str, weight: np.ndarray, number_format: str) -> np.ndarray:
    """Return amax / LARGEST of each output channel of a weight [out, in], float32 [out].

    A channel of zeros, which any scale keeps, has that of the whole weight.

    Raises:
        BuildError: see ``weight_scale``.
    """
    whole = np.float32(weight_scale(module, weight, number_format))
    amax = np.abs(weight.astype(np.float32)).max(axis=1)
    scales = (amax / np.float32(LARGEST[number_format])).astype(np.float32)
    return np.where(scales >= np.finfo(np.float32).tiny, scales, whole)


def add_linear(graph: Graph, name: str, tensor: Any, weights: LinearWeights) -> Any:
    """Add ``tensor @ weight.T + bias``, rounded as the weights say.

    ``tensor``: [B, T, in]. The weight is stored [1, in, out], in float32 where it is quantized,
    so that it is rounded once, to its format and not to float16 before. Returns [B, T, out] in the
    graph's type.
    """
    none = graph.backend.trt.MatrixOperation.NONE
    product_type = weights.dequantize_type if weights.is_quantized else graph.compute_type
    weight_tensor = _add_rounded_weight(graph, f"{name}.weight", weights)
    if weights.activation_scale is not None:
        tensor = add_quantize_dequantize(
            graph, f"{name}.input", tensor, weights.activation_scale, product_type,
            number_format=weights.quantized_format,
        )  # fmt: skip
    else:
        tensor = add_cast(graph, f"{name}.input.cast", tensor, product_type)
    product = graph.network.add_matrix_multiply(tensor, none, weight_tensor, none)
    return add_bias(graph, name, graph.named(product, name), weights.bias, product_type)


def add_bias(
    graph: Graph, name: str, product: Any, bias: np.ndarray | None, product_type: str
) -> Any:
    """Add a product's bias in its own type; return [B, T, out] in the graph's type."""
    if bias is not None:
        bias_tensor = add_weight(graph, f"{name}.bias", bias[None, None], product_type)
        product = add_elementwise(graph, f"{name}.bias_add", product, bias_tensor, "SUM")
    return add_cast(graph, f"{name}.cast", product, graph.compute_type)


def _add_rounded_weight(graph: Graph, name: str, weights: LinearWeights) -> Any:
    """Return the tensor [1, in, out] of a weight, rounded as it is to be."""
    transposed, number_format = weights.weight.T[None], weights.quantized_format
    if not weights.is_quantized:
        return add_weight(graph, name, transposed, graph.compute_type)
    constant = add_weight(graph, name, transposed, "fp32")
    module = name.removesuffix(".weight")
    if weights.weight_scales == "channel":
        scales: float | np.ndarray = channel_scales(module, weights.weight, number_format)
    else:
        scales = weight_scale(module, weights.weight, number_format)
    return add_quantize_dequantize(
        graph, name, constant, scales, weights.dequantize_type,
        number_format=number_format, axis=2,
    )  # fmt: skip


def add_layer_norm(
    graph: Graph, name: str, tensor: Any, parameters: tuple[np.ndarray, np.ndarray, float]
) -> Any:
    """Normalize [B, T, C] over C; ``parameters`` are weight [C], bias [C] and epsilon."""
    weight, bias, epsilon = parameters
    scale = add_weight(graph, f"{name}.weight", weight[None, None], graph.compute_type)
    shift = add_weight(graph, f"{name}.bias", bias[None, None], graph.compute_type)
    layer = graph.network.add_normalization_v2(tensor, scale, shift, 1 << 2)
    output = graph.named(layer, name)
    layer.epsilon = epsilon
    return output


def add_activation(graph: Graph, name: str, tensor: Any, activation: str) -> Any:
    """Add Hugging Face's "gelu_new" (tanh form), "gelu" (erf form) or "relu"."""
    types = graph.backend.trt.ActivationType
    kinds = {"gelu_new": types.GELU_TANH, "gelu": types.GELU_ERF, "relu": types.RELU}
    return graph.named(graph.network.add_activation(tensor, kinds[activation]), name)


def add_embedding(graph: Graph, name: str, indices: Any, table: Any) -> Any:
    """Add rows of ``table`` [rows, C] at int32 ``indices`` [B, T]; return [B, T, C]."""
    return graph.named(graph.network.add_gather(table, indices, 0), name)


def add_reshape(graph: Graph, name: str, tensor: Any, shape: tuple[int, ...]) -> Any:
    """Reshape; one -1 takes what is left."""
    layer = graph.network.add_shuffle(tensor)
    output = graph.named(layer, name)
    layer.reshape_dims = graph.backend.trt.Dims(shape)
    return output


def add_concatenation(graph: Graph, name: str, tensors: tuple[Any, ...], axis: int) -> Any:
    """Put tensors behind one another along an axis."""
    layer = graph.network.add_concatenation(list(tensors))
    output = graph.named(layer, name)
    layer.axis = axis
    return output


def add_split_heads(graph: Graph, name: str, tensor: Any, heads: int) -> Any:
    """Reshape [B, T, C] to [B, H, T, D]."""
    layer = graph.network.add_shuffle(tensor)
    output = graph.named(layer, name)
    layer.reshape_dims = graph.backend.trt.Dims((0, 0, heads, tensor.shape[-1] // heads))
    layer.second_transpose = graph.backend.trt.Permutation([0, 2, 1, 3])
    return output


def add_merge_heads(graph: Graph, name: str, tensor: Any) -> Any:
    """Reshape [B, H, T, D] to [B, T, C]."""
    layer = graph.network.add_shuffle(tensor)
    output = graph.named(layer, name)
    layer.first_transpose = graph.backend.trt.Permutation([0, 2, 1, 3])
    layer.reshape_dims = graph.backend.trt.Dims((0, 0, tensor.shape[1] * tensor.shape[3]))
    return output


def add_attention(graph: Graph, name: str, tensors: tuple[Any, Any, Any], mask: Any) -> Any:
    """Add softmax(q k^T) v as TensorRT's fused attention layer.

    Args:
        graph: the network under construction.
        name: layer name.
        tensors: q [B, H, T, D], k and v [B, H, S, D]. GPT-Neo does not scale the scores
            (transformers, ``GPTNeoSelfAttention._attn``), so neither is multiplied here.
        mask: bool [B, 1, T, S], True where a query may look. A mask and the causal flag exclude
            each other, and the causal flag alone cannot express the window of a local layer.

    Returns:
        [B, H, T, D].
    """
    attention = backends.add_attention(graph.backend, graph.network, *tensors)
    output = graph.named(attention, name)
    attention.mask = mask
    attention.decomposable = True
    return output
