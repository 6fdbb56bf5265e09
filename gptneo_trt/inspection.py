"""Read back what a network quantizes and with which scales, from its layers, not from the row.

A matrix product counts as FP8 when both of its inputs come from a Dequantize whose own input
comes from a Quantize to FP8. Exactly one quantized input is an error: no row asks for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from gptneo_trt.errors import BuildError
from gptneo_trt.network import Network


@dataclass(frozen=True)
class Quantization:
    """Hold what was found.

    Attributes:
        modules: names of the products with two FP8 inputs, in network order.
        products: names of all matrix products, in network order.
        dequantize_types: the output types of their Dequantize layers, TensorRT's names.
        activation_scales: module -> the float32 scale that its activation is quantized with.
    """

    modules: tuple[str, ...]
    products: tuple[str, ...]
    dequantize_types: tuple[str, ...]
    activation_scales: Mapping[str, float]


def quantization_of(network: Network) -> Quantization:
    """Return which products of a network read FP8, and the scales of their activations.

    Raises:
        BuildError: a product with one FP8 input, a Dequantize without its Quantize, or with
            another scale.
    """
    definition, trt = network.definition, network.backend.trt
    all_layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    producer = {layer.get_output(0).name: layer for layer in all_layers}
    modules: list[str] = []
    products: list[str] = []
    wrong: list[str] = []
    dequantize_types: set[str] = set()
    scales: dict[str, float] = {}
    for layer in all_layers:
        if layer.type.name != "MATRIX_MULTIPLY":
            continue
        sources = [producer.get(layer.get_input(i).name) for i in range(2)]
        dequantized = [s for s in sources if s is not None and s.type.name == "DEQUANTIZE"]
        products.append(layer.name)
        wrong += [
            f"{layer.name}: {source.name} does not read an FP8 Quantize of its own scale"
            for source in dequantized
            if not _reads_fp8_quantize(source, producer, trt.DataType)
        ]
        if len(dequantized) == 1:
            wrong.append(f"{layer.name}: one input is FP8, the other is not")
        if len(dequantized) == 2:
            modules.append(layer.name)
            dequantize_types.update(source.get_output(0).dtype.name for source in dequantized)
            scales[layer.name] = _scale_of(dequantized[0], producer, trt)
    if wrong:
        name = f"variant {network.variant.name}, {network.phase}"
        raise BuildError(f"{name}: {'; '.join(sorted(wrong))}")
    types = tuple(sorted(dequantize_types))
    return Quantization(tuple(modules), tuple(products), types, scales)


def _reads_fp8_quantize(layer: Any, producer: dict[str, Any], types: Any) -> bool:
    tensor = layer.get_input(0)
    source = producer.get(tensor.name)
    if source is None or source.type.name != "QUANTIZE" or tensor.dtype != types.FP8:
        return False
    return bool(source.get_input(1).name == layer.get_input(1).name)  # one scale, both ways


def _scale_of(layer: Any, producer: dict[str, Any], trt: ModuleType) -> float:
    constant = producer[layer.get_input(1).name]
    constant.__class__ = trt.IConstantLayer
    return float(np.asarray(constant.weights).reshape(-1)[0])
