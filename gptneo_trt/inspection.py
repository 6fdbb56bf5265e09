"""Read back what a network is, from its layers and not from the row: what it quantizes, with
which scales, and a fingerprint of all of it.

A matrix product counts as quantized when both of its inputs come from a Dequantize whose own input
comes from a Quantize to the row's format; of a row that leaves activations alone, when its weight
does. In NVFP4 a constant or a DynamicQuantize is in the place of the Quantize, and the scale of
the blocks comes from a Dequantize of its own.
One quantized input, or two where one is asked for, is an error.
"""

import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, cast

import numpy as np

from gptneo_trt.errors import BuildError
from gptneo_trt.network import Network


@dataclass(frozen=True)
class Quantization:
    """Hold what was found.

    Attributes:
        modules: names of the quantized products, in network order.
        products: names of all matrix products, in network order.
        dequantize_types: the output types of their Dequantize layers, TensorRT's names.
        activation_scales: module -> the float32 scale that its activation is quantized with, in
            NVFP4 the global one.
        weight_scale_counts: module -> scales of its weight, 1, or one a channel or a block.
    """

    modules: tuple[str, ...]
    products: tuple[str, ...]
    dequantize_types: tuple[str, ...]
    activation_scales: Mapping[str, float]
    weight_scale_counts: Mapping[str, int] = field(default_factory=dict)


def quantization_of(network: Network) -> Quantization:
    """Return which products of a network are quantized, and with which scales.

    Raises:
        BuildError: a product with one quantized input, a Dequantize without its Quantize, or with
            another scale; a Quantize or Dequantize that is not at a product.
    """
    definition, trt = network.definition, network.backend.trt
    layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    producer = {
        layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)
    }
    products = {
        layer.name: _dequantized(layer, producer)
        for layer in layers
        if layer.type.name == "MATRIX_MULTIPLY"
    }
    wrong = _strays(layers, products, producer)
    for name, inputs in products.items():
        wrong += _product_mismatches(name, inputs, producer, network)
    if wrong:
        title = f"variant {network.variant.name}, {network.phase}"
        raise BuildError(f"{title}: {'; '.join(sorted(wrong))}")
    quantized = {name: inputs for name, inputs in products.items() if inputs}
    types = {
        source.get_output(0).dtype.name
        for inputs in quantized.values()
        for source in inputs.values()
    }
    return Quantization(
        modules=tuple(quantized),
        products=tuple(products),
        dequantize_types=tuple(sorted(types)),
        activation_scales={
            name: _activation_scale(inputs[0], producer, trt)
            for name, inputs in quantized.items()
            if 0 in inputs
        },
        weight_scale_counts={
            name: math.prod(inputs[1].get_input(1).shape) for name, inputs in quantized.items()
        },
    )


def _dequantized(layer: Any, producer: Mapping[str, Any]) -> dict[int, Any]:
    """Return input -> the Dequantize that it comes from, of a product's inputs that do."""
    sources = {i: producer.get(layer.get_input(i).name) for i in range(2)}
    return {i: each for i, each in sources.items() if each and each.type.name == "DEQUANTIZE"}


def _product_mismatches(
    name: str, inputs: Mapping[int, Any], producer: Mapping[str, Any], network: Network
) -> list[str]:
    """Return what keeps a product from being quantized as its row says, or not at all."""
    types, number_format = network.backend.trt.DataType, network.variant.quantized_format.upper()
    if number_format == "NVFP4":
        sources = ("DYNAMIC_QUANTIZE", "CONSTANT")
        wrong = [
            f"{name}: {source.name} does not read an NVFP4 {sources[side]} with scales of its own"
            for side, source in inputs.items()
            if not _reads_blocks(source, producer, (sources[side], types.FP4, types.FP8))
        ]
    else:
        wanted = {"FP8": types.FP8, "INT8": types.INT8, "INT4": types.INT4}[number_format]
        wrong = [
            f"{name}: {source.name} does not read an {number_format} Quantize of its own scale"
            for source in inputs.values()
            if not _reads_quantize(source, producer, wanted)
        ]
    sides = (0, 1) if network.variant.quantized_activations else (1,)
    if len(inputs) == 1 and sides == (0, 1):
        wrong.append(f"{name}: one input is {number_format}, the other is not")
    elif inputs and tuple(inputs) != sides:
        wrong.append(f"{name}: its activation is {number_format}, expected its weight alone")
    return wrong


def _strays(
    layers: Sequence[Any], products: Mapping[str, Mapping[int, Any]], producer: Mapping[str, Any]
) -> list[str]:
    """Return each Quantize and Dequantize that no product reads."""
    read = set()
    for inputs in products.values():
        for source in inputs.values():
            of_scale = producer.get(source.get_input(1).name)
            tensors = (
                source.get_output(0),
                source.get_input(0),
                of_scale and of_scale.get_output(0),
            )
            read |= {tensor.name for tensor in tensors if tensor}
    return [
        f"{layer.name}: quantizes, but at no product"
        for layer in layers
        if layer.type.name in ("QUANTIZE", "DYNAMIC_QUANTIZE", "DEQUANTIZE")
        and layer.get_output(0).name not in read
    ]


def _reads_quantize(layer: Any, producer: Mapping[str, Any], wanted: Any) -> bool:
    tensor = layer.get_input(0)
    source = producer.get(tensor.name)
    if source is None or source.type.name != "QUANTIZE" or tensor.dtype != wanted:
        return False
    return bool(source.get_input(1).name == layer.get_input(1).name)  # one scale, both ways


def _reads_blocks(layer: Any, producer: Mapping[str, Any], wanted: tuple[str, Any, Any]) -> bool:
    """Return whether a Dequantize reads FP4 of this kind of layer, and its blocks' FP8 scales."""
    kind, values_type, scales_type = wanted
    values, steps = layer.get_input(0), producer.get(layer.get_input(1).name)
    source = producer.get(values.name)
    if source is None or source.type.name != kind or values.dtype != values_type:
        return False
    if steps is None or steps.type.name != "DEQUANTIZE":
        return False
    scales = steps.get_input(0)
    if scales.dtype != scales_type or producer[scales.name].type.name != kind:
        return False
    if kind == "CONSTANT":
        return True
    own_scales, own_global = source.get_output(1), source.get_input(1)
    return bool((own_scales.name, own_global.name) == (scales.name, steps.get_input(1).name))


def _activation_scale(layer: Any, producer: Mapping[str, Any], trt: ModuleType) -> float:
    """Return the scale of a Dequantize; in NVFP4 that of its blocks' scales."""
    source = producer[layer.get_input(1).name]
    if source.type.name == "DEQUANTIZE":
        source = producer[source.get_input(1).name]
    source.__class__ = trt.IConstantLayer
    return float(np.asarray(source.weights).reshape(-1)[0])


def fingerprint(network: Network) -> str:
    """Return the SHA-256 of the graph as TensorRT holds it: another one is another network.

    In it are inputs and outputs and every layer in order: type, names, types and shapes of its
    tensors, all attributes, and the values of integer and bool constants (windows, positions).
    The values of floating-point constants are not: weights and scales have hashes of their own.

    Raises:
        BuildError: a layer or attribute that cannot be described; nothing is left out silently.
    """
    definition, trt = network.definition, network.backend.trt
    inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
    outputs = [definition.get_output(i) for i in range(definition.num_outputs)]
    described = {
        "flags": definition.flags,
        "inputs": [_described_tensor(tensor) for tensor in inputs],
        "outputs": [tensor.name for tensor in outputs],
        "layers": [
            _described_layer(definition.get_layer(i), trt) for i in range(definition.num_layers)
        ],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _described_tensor(tensor: Any) -> list[Any]:
    return [tensor.name, tensor.dtype.name, list(tensor.shape)]


def _name_of(tensor: Any) -> str | None:
    """Return a tensor's name; None for an optional input that is left out."""
    return None if tensor is None else tensor.name


def _described_layer(layer: Any, trt: ModuleType) -> dict[str, Any]:
    """Return everything that TensorRT says of a layer, as JSON types."""
    kind: str = layer.type.name
    typed = _classes(trt).get(f"i{kind.replace('_', '')}layer".lower())
    if typed is None:
        raise BuildError(f"layer {layer.name}: type {kind} has no class of its own; add it here")
    tensors = {
        "in": [_name_of(layer.get_input(i)) for i in range(layer.num_inputs)],
        "out": [_described_tensor(layer.get_output(i)) for i in range(layer.num_outputs)],
    }
    layer.__class__ = typed
    attributes = _attributes(layer, f"layer {layer.name}", trt)
    layer.__class__ = trt.ILayer  # an IActivationLayer's own type would hide the layer's
    return {"kind": kind, **tensors, "attributes": attributes}


@cache
def _classes(trt: ModuleType) -> dict[str, type]:
    """Return class name in lower case -> class: layer types spell theirs differently."""
    return {name.lower(): getattr(trt, name) for name in dir(trt) if name.startswith("I")}


@cache
def _property_names(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if isinstance(getattr(kind, name), property))


def _attributes(thing: Any, title: str, trt: ModuleType) -> dict[str, Any]:
    """Return property name -> value as JSON types."""
    found, kind = {}, cast(Hashable, type(thing))  # mypy takes a class for unhashable
    for name in _property_names(kind):
        # A block_shape that is not set: an error in TensorRT-RTX 1.6, -1 dimensions in 1.5.
        with suppress(RuntimeError, ValueError):
            found[name] = _plain(getattr(thing, name), f"{title}: {name}", trt)
    return found


def _plain(value: Any, title: str, trt: ModuleType) -> Any:
    """Return an attribute as JSON types; of floating-point arrays the type and size alone."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, trt.ITensor):
        return value.name
    if isinstance(value, trt.Weights):  # of a constant in FP4 or FP8
        return [value.dtype.name, value.size, None]
    if isinstance(value, trt.IAttention):
        return _attributes(value, title, trt)
    if isinstance(value, trt.Dims | trt.Permutation):
        return list(value)
    if isinstance(value, np.ndarray):
        exact = value.dtype.kind in "iub"
        return [value.dtype.name, value.size, value.tolist() if exact else None]
    if hasattr(type(value), "__members__"):
        return value.name
    raise BuildError(f"{title}: a {type(value).__name__} cannot be described; add it here")
