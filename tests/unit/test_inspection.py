"""Inspection: what is quantized is read back from the network, and a wrong network is seen."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import fixed_scales, tiny_checkpoint

from gptneo_trt import layers
from gptneo_trt import network as network_module
from gptneo_trt.errors import BuildError
from gptneo_trt.inspection import quantization_of
from gptneo_trt.network import PHASES, activation_scales, build_network
from gptneo_trt.variants import PROJECTIONS, VARIANTS

LAYERS = 3  # one more than both edges, so that every row quantizes something


@pytest.fixture(scope="module")
def checkpoint(t0):
    """Return T0 with a third layer."""
    names = ("global", "local", "global")
    return tiny_checkpoint(replace(t0.architecture, attention_layers=names))


@pytest.fixture
def build(backend, checkpoint):
    """Return a function that builds a row in one phase."""

    def build_row(row, phase="decode"):
        return build_network(backend, checkpoint, row, fixed_scales(checkpoint), phase, 8)

    return build_row


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", VARIANTS.values(), ids=VARIANTS)
def test_C03_exactly_the_row_s_projections_are_fp8(build, row, phase):
    """The products with two FP8 inputs are the row's modules, no more and no fewer."""
    obtained = quantization_of(build(row, phase))
    expected_type = {"fp16": "HALF", "fp32": "FLOAT"}[row.dequantize_type]
    assert sorted(obtained.modules) == sorted(row.quantized_modules(LAYERS))
    assert obtained.dequantize_types == ((expected_type,) if row.quantized else ())
    assert len(obtained.products) == len(set(obtained.products)) == LAYERS * len(PROJECTIONS) + 1


def test_C03_rows_are_told_apart(build):
    """No two rows that quantize other projections read back the same: the check can fail."""
    read = {name: quantization_of(build(row)).modules for name, row in VARIANTS.items()}
    asked = {name: row.quantized_modules(LAYERS) for name, row in VARIANTS.items()}
    assert len(set(read.values())) == len(set(asked.values())) > 15


def leave_out(monkeypatch, skipped):
    """Build networks in which the named Quantize/Dequantize pair is left out."""
    real = layers.add_quantize_dequantize

    def add(graph, name, tensor, scale, dequantize_type):
        if name == skipped:
            return layers.add_cast(graph, f"{name}.cast", tensor, dequantize_type)
        return real(graph, name, tensor, scale, dequantize_type)

    monkeypatch.setattr(layers, "add_quantize_dequantize", add)


@pytest.mark.parametrize("side", ["input", "weight"])
def test_C03_one_sided_product_is_seen(monkeypatch, build, side):
    """A product with one FP8 input and one that is not is an error naming the projection."""
    leave_out(monkeypatch, f"transformer.h.1.mlp.c_fc.{side}")
    network = build(VARIANTS["fp8"])
    with pytest.raises(BuildError, match=r"fp8, decode: transformer.h.1.mlp.c_fc: one input"):
        quantization_of(network)


def test_C03_one_too_few_is_seen(monkeypatch, build):
    """A projection that the builder forgot is missing in what is read back."""
    module = "transformer.h.2.mlp.c_proj"
    real = network_module.activation_scales

    def forgetful(*arguments):
        return {name: scale for name, scale in real(*arguments).items() if name != module}

    monkeypatch.setattr(network_module, "activation_scales", forgetful)
    obtained = quantization_of(build(VARIANTS["fp8"])).modules
    assert set(VARIANTS["fp8"].quantized_modules(LAYERS)) - set(obtained) == {module}


def test_C03_another_8_bit_type_is_seen(monkeypatch, build):
    """Products of INT8 are not FP8, although they come from a Dequantize too."""
    real = layers.Graph.data_type

    def data_type(graph, name):
        return graph.backend.trt.DataType.INT8 if name == "fp8" else real(graph, name)

    monkeypatch.setattr(layers.Graph, "data_type", data_type)
    network = build(VARIANTS["fp8-c_fc"])
    with pytest.raises(BuildError, match="does not read an FP8 Quantize") as caught:
        quantization_of(network)
    assert str(caught.value).count("does not read an FP8 Quantize") == 2 * LAYERS


def test_scales_are_those_of_the_row(backend, t0):
    """The scale read back for each product is amax x factor / 448, in float32."""
    scales = fixed_scales(t0)
    row = VARIANTS["fp8-scales-x1.5"]
    found = quantization_of(build_network(backend, t0, row, scales, "decode", 16))
    assert dict(found.activation_scales) == activation_scales(row, scales, 2)


def test_a_dequantize_with_another_scale_is_seen(backend, t0, monkeypatch):
    """Quantize and Dequantize of one product must share their scale."""

    def split(graph, name, tensor, scale, dequantize_type):
        scales = [
            layers.add_constant(graph, f"{name}.{part}_scale", np.asarray(np.float32(value)))
            for part, value in (("quantize", scale), ("dequantize", 2 * scale))
        ]
        quantized = graph.network.add_quantize(tensor, scales[0], graph.data_type("fp8"))
        layer = graph.network.add_dequantize(
            quantized.get_output(0), scales[1], graph.data_type(dequantize_type)
        )
        return graph.named(layer, f"{name}.dequantize")

    monkeypatch.setattr(layers, "add_quantize_dequantize", split)
    network = build_network(backend, t0, VARIANTS["fp8-c_fc"], fixed_scales(t0), "decode", 16)
    with pytest.raises(BuildError, match=r"mlp.c_fc: .* does not read an FP8 Quantize of its own"):
        quantization_of(network)
