"""What each TensorRT layer computes, in PyTorch: one reader a layer type.

A reader takes a layer of the ``INetworkDefinition``, checks every attribute that changes the
result, and returns a function of the input tensors. Tensors carry one axis more than TensorRT's,
in front: the texts evaluated together, of size N or, for constants, 1. Floating-point values are
held as float32; ``rounding`` brings them to the declared type of a tensor.

Source of every rule: "TensorRT Operator's Reference", one page a layer type,
docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators; of the quantized formats'
rounding: ``number_formats``.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gptneo_trt.errors import RunError
from gptneo_trt.number_formats import to_fp4, to_fp8, to_int4, to_int8
from gptneo_trt.quantizing import (
    read_dequantize,
    read_dynamic_quantize,
    read_dynamic_scales,
    read_quantize,
)
from gptneo_trt.supported import Operation, refuse_unless

# MKL sums a product of 1 to 3 rows in another order than one of more; 16 is well beyond that.
FEWEST_ROWS = 16


def rounding(trt: ModuleType, data_type: Any) -> Operation | None:
    """Return the function that brings float32 to a declared type; None for exact types.

    Raises:
        RunError: a type that the interpreter does not know.
    """
    types = trt.DataType
    if data_type in (types.FLOAT, types.INT32, types.INT64, types.BOOL):
        return None
    if data_type == types.HALF:
        return lambda tensor: tensor.to(torch.float16).to(torch.float32)
    if data_type == types.BF16:
        return lambda tensor: tensor.to(torch.bfloat16).to(torch.float32)
    quantized = {types.FP8: to_fp8, types.INT8: to_int8, types.INT4: to_int4, types.FP4: to_fp4}
    if data_type in quantized:
        return quantized[data_type]
    raise RunError(f"tensor type {data_type}: the interpreter does not know it; add it here")


def _read_constant(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IConstantLayer
    if not isinstance(layer.weights, np.ndarray):
        data_type = layer.weights.dtype
        raise RunError(f"layer {layer.name}: TensorRT shows no values of {data_type}; add it here")
    array = np.array(layer.weights, copy=True).reshape(tuple(layer.shape))
    tensor = torch.from_numpy(array)[None]
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    return lambda: tensor


def _read_gather(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IGatherLayer
    obtained = (layer.axis, layer.mode, layer.num_elementwise_dims)
    supported = (0, trt.GatherMode.DEFAULT, 0)
    refuse_unless(layer, {"axis, mode, num_elementwise_dims": (obtained, supported)})

    def gather(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if table.shape[0] != 1:
            raise RunError(f"layer {layer_name}: gathers from an activation; add it here")
        return functional.embedding(indices, table[0])

    layer_name = layer.name
    return gather


def _read_shuffle(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IShuffleLayer
    rank = len(layer.get_input(0).shape)
    first, second = tuple(layer.first_transpose), tuple(layer.second_transpose)
    refuse_unless(
        layer,
        {
            "zero_is_placeholder": (layer.zero_is_placeholder, True),
            "inputs": (layer.num_inputs, 1),
            "reshapes": (layer.reshape_dims is not None, True),
        },
    )
    shape = tuple(layer.reshape_dims)
    before = (0, *(axis + 1 for axis in first[:rank]))
    after = (0, *(axis + 1 for axis in second[: len(shape)]))

    def shuffle(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.permute(before)
        # A 0 keeps the size of the same axis, -1 takes what is left.
        sizes = [tensor.shape[i + 1] if size == 0 else size for i, size in enumerate(shape)]
        return tensor.reshape(tensor.shape[0], *sizes).permute(after)

    return shuffle


def _read_elementwise(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IElementWiseLayer
    kinds = trt.ElementWiseOperation
    known: dict[Any, Operation] = {
        kinds.SUM: torch.add,
        kinds.SUB: torch.sub,
        kinds.PROD: torch.mul,
        kinds.GREATER: torch.gt,
        kinds.LESS: torch.lt,
        kinds.AND: torch.logical_and,
    }
    if layer.op not in known:
        raise RunError(f"layer {layer.name}: elementwise {layer.op} is unknown; add it here")
    return known[layer.op]


def _read_concatenation(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IConcatenationLayer
    axis = layer.axis + 1

    def concatenate(*tensors: torch.Tensor) -> torch.Tensor:
        texts = max(tensor.shape[0] for tensor in tensors)
        spread = [tensor.expand(texts, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(spread, dim=axis)

    return concatenate


def _read_matrix_multiply(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IMatrixMultiplyLayer
    operation = trt.MatrixOperation
    known = (operation.NONE, operation.TRANSPOSE)
    if layer.op0 not in known or layer.op1 not in known:
        raise RunError(f"layer {layer.name}: {layer.op0} x {layer.op1} is unknown; add it here")
    transpose_left = layer.op0 == operation.TRANSPOSE
    transpose_right = layer.op1 == operation.TRANSPOSE

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left = left.transpose(-1, -2) if transpose_left else left
        right = right.transpose(-1, -2) if transpose_right else right
        # One weight for all texts: a single product instead of one a text.
        if right.shape[:-2].numel() == 1:
            return _rows_times(left, right.reshape(right.shape[-2:]))
        return torch.matmul(left, right)

    return multiply


def _rows_times(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [..., C] x [C, F]; a row's bits do not depend on how many rows are beside it."""
    rows = left.shape[:-1].numel()
    if rows >= FEWEST_ROWS:
        return torch.matmul(left, right)
    filled = functional.pad(left.reshape(rows, -1), (0, 0, 0, FEWEST_ROWS - rows))
    return torch.matmul(filled, right)[:rows].reshape(*left.shape[:-1], -1)


def _read_normalization(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.INormalizationLayer
    rank = len(layer.get_input(0).shape)
    refuse_unless(
        layer,
        {
            "is_v2": (layer.is_v2, True),
            "num_groups": (layer.num_groups, 1),
            "axes": (layer.axes, 1 << (rank - 1)),
            "inputs": (layer.num_inputs, 3),
        },
    )
    epsilon = layer.epsilon

    def normalize(tensor: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        width = tensor.shape[-1:]
        return functional.layer_norm(tensor, width, scale.flatten(), bias.flatten(), epsilon)

    return normalize


def _read_activation(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IActivationLayer
    kinds = trt.ActivationType
    known: dict[Any, Operation] = {
        kinds.RELU: functional.relu,
        kinds.GELU_ERF: functional.gelu,
        kinds.GELU_TANH: lambda tensor: functional.gelu(tensor, approximate="tanh"),
    }
    if layer.type not in known:
        raise RunError(f"layer {layer.name}: activation {layer.type} is unknown; add it here")
    return known[layer.type]


def _read_cast(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.ICastLayer
    floating = (trt.DataType.FLOAT, trt.DataType.HALF, trt.DataType.BF16)
    for data_type in (layer.to_type, layer.get_input(0).dtype):
        if data_type not in floating:
            raise RunError(f"layer {layer.name}: cast with {data_type} is unknown; add it here")
    return lambda tensor: tensor


def _read_attention(layer: Any, trt: ModuleType) -> Operation:
    """Read softmax(q k^T + mask) v; scores and softmax in float32, rounded once at the end."""
    layer.__class__ = trt.IAttentionInputLayer
    attention = layer.attention
    padded = trt.AttentionIOForm.PADDED_BHND
    refuse_unless(
        layer,
        {
            "norm_op": (attention.norm_op, trt.AttentionNormalizationOp.SOFTMAX),
            "causal_kind": (attention.causal_kind, trt.CausalMaskKind.NONE),
            "normalization_quantize_scale": (attention.normalization_quantize_scale, None),
            "query_form": (attention.query_form, padded),
            "key_value_form": (attention.key_value_form, padded),
            "query_lengths": (attention.query_lengths, None),
            "key_value_lengths": (attention.key_value_lengths, None),
            "num_ranks": (attention.num_ranks, 1),
        },
    )
    mask_type = attention.mask.dtype if attention.mask else None
    refuse_unless(layer, {"mask": (mask_type, trt.DataType.BOOL)})
    refuse_unless(layer, {"inputs": (layer.num_inputs, 4)})

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        texts, batch = query.shape[:2]
        mask = mask.expand(texts, *mask.shape[1:]).flatten(0, 1)
        query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=1.0
        )
        return output.unflatten(0, (texts, batch))

    return attend


def _read_attention_output(layer: Any, trt: ModuleType) -> Operation:
    return lambda tensor: tensor


READERS: dict[str, Callable[[Any, ModuleType], Operation]] = {
    "ACTIVATION": _read_activation,
    "ATTENTION_INPUT": _read_attention,
    "ATTENTION_OUTPUT": _read_attention_output,
    "CAST": _read_cast,
    "CONCATENATION": _read_concatenation,
    "CONSTANT": _read_constant,
    "DEQUANTIZE": read_dequantize,
    "DYNAMIC_QUANTIZE": read_dynamic_quantize,
    "ELEMENTWISE": _read_elementwise,
    "GATHER": _read_gather,
    "MATRIX_MULTIPLY": _read_matrix_multiply,
    "NORMALIZATION": _read_normalization,
    "QUANTIZE": read_quantize,
    "SHUFFLE": _read_shuffle,
}

# The layer types with a second output.
SECOND_READERS = {"DYNAMIC_QUANTIZE": read_dynamic_scales}

# These move values without computing any: their outputs are of the inputs' type already.
MOVES_ONLY = frozenset({"ATTENTION_OUTPUT", "CONCATENATION", "GATHER", "SHUFFLE"})


def read_layer(layer: Any, trt: ModuleType) -> Operation:
    """Return what the first output of a layer is.

    Raises:
        RunError: a layer type or an attribute that has no reader; nothing is ever skipped.
    """
    kind = layer.type.name
    if kind not in READERS:
        raise RunError(f"layer {layer.name}: type {kind} has no reader in operators.READERS")
    return READERS[kind](layer, trt)


def read_outputs(layer: Any, trt: ModuleType) -> tuple[Operation, ...]:
    """Return what each output of a layer is.

    Raises:
        RunError: see ``read_layer``; or a layer with more outputs than are known.
    """
    kind = layer.type.name
    expected = 2 if kind in SECOND_READERS else 1
    if layer.num_outputs != expected:
        raise RunError(f"layer {layer.name}: {layer.num_outputs} outputs, expected {expected}")
    first = read_layer(layer, trt)
    return (first, SECOND_READERS[kind](layer, trt)) if expected == 2 else (first,)
