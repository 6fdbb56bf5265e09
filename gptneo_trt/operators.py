"""What each TensorRT layer computes, in PyTorch: one reader a layer type.

A reader takes a layer of the ``INetworkDefinition``, checks every attribute that changes the
result, and returns a function of the input tensors. Tensors carry one axis more than TensorRT's,
in front: the texts evaluated together, of size N or, for constants, 1. Floating-point values are
held as float32; ``rounding`` brings them to the declared type of a tensor.

Source of every rule: "TensorRT Operator's Reference", one page a layer type,
docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators; of FP8 rounding (to nearest even,
saturating): the page "Quantize" and "OCP 8-bit Floating Point Specification".
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gptneo_trt.errors import RunError

Operation = Callable[..., torch.Tensor]
FP8_MAX = 448.0
# Bit patterns of float32, whose exponent starts at bit 23 with a bias of 127.
FLOAT32_EXPONENT = 0xFF << 23
E4M3_SMALLEST_NORMAL = (127 - 6) << 23  # 2^-6
TWENTY = 20 << 23  # from 2^exponent to 2^23 steps of 2^(exponent - 3)
# MKL sums a product of 1 to 3 rows in another order than one of more; 16 is well beyond that.
FEWEST_ROWS = 16


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


def to_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to an integer of 8 bits: nearest even, saturating at -128 and 127."""
    return tensor.round().clamp(-128, 127)


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
    if data_type == types.FP8:
        return to_fp8
    if data_type == types.INT8:
        return to_int8
    raise RunError(f"tensor type {data_type}: the interpreter does not know it; add it here")


def _refuse_unless(layer: Any, expected: dict[str, tuple[Any, Any]]) -> None:
    """Raise RunError naming every attribute whose obtained value is not the supported one."""
    wrong = sorted(
        f"{name} = {obtained!r} (supported: {wanted!r})"
        for name, (obtained, wanted) in expected.items()
        if obtained != wanted
    )
    if wrong:
        raise RunError(f"layer {layer.name} ({layer.type}): {'; '.join(wrong)}; add it here")


def _read_constant(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IConstantLayer
    array = np.array(layer.weights, copy=True).reshape(tuple(layer.shape))
    tensor = torch.from_numpy(array)[None]
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    return lambda: tensor


def _read_gather(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IGatherLayer
    obtained = (layer.axis, layer.mode, layer.num_elementwise_dims)
    supported = (0, trt.GatherMode.DEFAULT, 0)
    _refuse_unless(layer, {"axis, mode, num_elementwise_dims": (obtained, supported)})

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
    _refuse_unless(
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
    _refuse_unless(
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


def _scale_shape(layer: Any, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what spreads a scale over the data: as it is, or along the layer's axis."""
    scale_rank = len(layer.get_input(1).shape)
    if scale_rank == 0:
        return lambda scale: scale
    if scale_rank == 1 and 0 <= layer.axis < rank:
        shape = [1] * (rank + 1)
        shape[layer.axis + 1] = -1
        return lambda scale: scale.reshape(shape)
    raise RunError(
        f"layer {layer.name}: scale of rank {scale_rank}, axis {layer.axis}; add it here"
    )


def _is_quantized(data_type: Any, trt: ModuleType) -> bool:
    return data_type in (trt.DataType.FP8, trt.DataType.INT8)


def _read_quantize(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IQuantizeLayer
    _refuse_unless(
        layer,
        {
            "inputs": (layer.num_inputs, 2),
            "to a quantized type": (_is_quantized(layer.get_output(0).dtype, trt), True),
        },
    )
    spread = _scale_shape(layer, len(layer.get_input(0).shape))
    return lambda tensor, scale: tensor / spread(scale)


def _read_dequantize(layer: Any, trt: ModuleType) -> Operation:
    layer.__class__ = trt.IDequantizeLayer
    _refuse_unless(
        layer,
        {
            "inputs": (layer.num_inputs, 2),
            "from a quantized type": (_is_quantized(layer.get_input(0).dtype, trt), True),
        },
    )
    spread = _scale_shape(layer, len(layer.get_input(0).shape))
    return lambda tensor, scale: tensor * spread(scale)


def _read_attention(layer: Any, trt: ModuleType) -> Operation:
    """Read softmax(q k^T + mask) v; scores and softmax in float32, rounded once at the end."""
    layer.__class__ = trt.IAttentionInputLayer
    attention = layer.attention
    padded = trt.AttentionIOForm.PADDED_BHND
    _refuse_unless(
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
    _refuse_unless(layer, {"mask": (mask_type, trt.DataType.BOOL)})
    _refuse_unless(layer, {"inputs": (layer.num_inputs, 4)})

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
    "DEQUANTIZE": _read_dequantize,
    "ELEMENTWISE": _read_elementwise,
    "GATHER": _read_gather,
    "MATRIX_MULTIPLY": _read_matrix_multiply,
    "NORMALIZATION": _read_normalization,
    "QUANTIZE": _read_quantize,
    "SHUFFLE": _read_shuffle,
}

# These move values without computing any: their outputs are of the inputs' type already.
MOVES_ONLY = frozenset({"ATTENTION_OUTPUT", "CONCATENATION", "GATHER", "SHUFFLE"})


def read_layer(layer: Any, trt: ModuleType) -> Operation:
    """Return what a layer computes.

    Raises:
        RunError: a layer type or an attribute that has no reader; nothing is ever skipped.
    """
    kind = layer.type.name
    if kind not in READERS:
        raise RunError(f"layer {layer.name}: type {kind} has no reader in operators.READERS")
    return READERS[kind](layer, trt)
