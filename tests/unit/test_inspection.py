"""Inspection: what is quantized is read back from the network, and a wrong network is seen."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import fixed_scales, tiny_checkpoint

from gptneo_trt import inspection, layers
from gptneo_trt import network as network_module
from gptneo_trt.errors import BuildError
from gptneo_trt.inspection import fingerprint, quantization_of
from gptneo_trt.network import PHASES, activation_scales, build_network
from gptneo_trt.variant import PROJECTIONS
from gptneo_trt.variants import VARIANTS

ROOT = Path(__file__).parents[2]
LAYERS = 7  # one more than both edges, so that every row quantizes something


@pytest.fixture(scope="module")
def checkpoint(t0):
    """Return T0 with more layers, twice as wide: a block of 64 fits."""
    names = ("global", "local") * 3 + ("global",)
    return tiny_checkpoint(
        replace(t0.architecture, attention_layers=names, hidden_size=64, intermediate_size=128)
    )


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

    def add(graph, name, tensor, scale, dequantize_type, **options):
        if name == skipped:
            return layers.add_cast(graph, f"{name}.cast", tensor, dequantize_type)
        return real(graph, name, tensor, scale, dequantize_type, **options)

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


def test_C03_quantization_elsewhere_is_seen(monkeypatch, build):
    """What a row quantizes beside its products is named, such as the input of an activation."""
    real = layers.add_activation

    def rounded(graph, name, tensor, activation):
        tensor = layers.add_quantize_dequantize(graph, f"{name}.extra", tensor, 1.0, "fp16")
        return real(graph, name, tensor, activation)

    monkeypatch.setattr(layers, "add_activation", rounded)
    with pytest.raises(BuildError, match="at no product") as caught:
        quantization_of(build(VARIANTS["fp8-c_fc"]))
    found = [f"h.{i}.mlp.act.extra.{part}quantize" for i in range(LAYERS) for part in ("", "de")]
    assert [name for name in found if f"{name}: quantizes" not in str(caught.value)] == []
    assert str(caught.value).count("at no product") == 2 * LAYERS


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

    def split(graph, name, tensor, scale, dequantize_type, **options):
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


# Fingerprint


@pytest.fixture
def printed(backend, t0):
    """Return a function that builds a row of T0 with changes and returns its fingerprint."""

    def fingerprint_of(row=VARIANTS["fp8"], phase="decode", checkpoint=t0, amax=8.0, context=16):
        scales = fixed_scales(checkpoint, amax)
        return fingerprint(build_network(backend, checkpoint, row, scales, phase, context))

    return fingerprint_of


def with_shape(checkpoint, **changes):
    """Return the same weights under another architecture."""
    return replace(checkpoint, architecture=replace(checkpoint.architecture, **changes))


@pytest.mark.parametrize("phase", PHASES)
def test_fingerprint_knows_the_graph_and_neither_weights_nor_scales(printed, t0, phase):
    """Built again, of other weights or other scales, it is the same network."""
    expected = printed(phase=phase)

    assert printed(phase=phase) == expected
    assert printed(phase=phase, checkpoint=tiny_checkpoint(t0.architecture, seed=7)) == expected
    assert printed(phase=phase, amax=3.0) == expected
    assert printed(VARIANTS["fp8-scales-x2"], phase=phase) == expected


def test_fingerprint_of_another_graph_differs(printed, t0):
    """A window, an activation, an epsilon, a quantized projection, a cast, a type, a length."""
    found = {
        "as it is": printed(),
        "prefill": printed(phase="prefill"),
        "window": printed(checkpoint=with_shape(t0, window_size=3)),
        "activation": printed(checkpoint=with_shape(t0, activation="gelu")),
        "epsilon": printed(checkpoint=with_shape(t0, layer_norm_epsilon=1e-6)),
        "attention": printed(checkpoint=with_shape(t0, attention_layers=("global", "global"))),
        "one projection more": printed(VARIANTS["fp8-all"]),
        "one projection fewer": printed(VARIANTS["fp8-no-k_proj"]),
        "cast": printed(VARIANTS["fp8-dequantize-fp32"]),
        "fp16": printed(VARIANTS["fp16"]),
        "fp32": printed(VARIANTS["fp32"]),
        "context": printed(context=15),
    }

    assert len(set(found.values())) == len(found)


def test_fingerprint_sees_how_layers_are_wired(printed, monkeypatch):
    """K and V swapped have the same layers, types and shapes."""
    expected, real = printed(), layers.add_attention

    def swapped(graph, name, tensors, mask):
        query, key, value = tensors
        return real(graph, name, (query, value, key), mask)

    monkeypatch.setattr(layers, "add_attention", swapped)

    assert printed() != expected


def test_fingerprint_is_the_same_in_another_process(printed):
    """Nothing of this process is in it: no address, no order of a set, no time."""
    script = (
        "import sys; sys.path.insert(0, 'tests/unit')\n"
        "from tiny import fixed_scales, tiny_checkpoint\n"
        "from gptneo_trt.backend import backend_named\n"
        "from gptneo_trt.inspection import fingerprint\n"
        "from gptneo_trt.network import build_network\n"
        "from gptneo_trt.variants import VARIANTS\n"
        "t0 = tiny_checkpoint()\n"
        "parts = (backend_named('tensorrt_rtx'), t0, VARIANTS['fp8'], fixed_scales(t0))\n"
        "print(fingerprint(build_network(*parts, 'decode', 16)))\n"
    )

    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert run.stdout.split() == [printed()]


def test_network_can_be_read_after_its_fingerprint(backend, t0):
    """A layer that was described is left as it was: its type is the layer's, not the activation's.

    An IActivationLayer has a type of its own, which hides the layer's.
    """
    network = build_network(backend, t0, VARIANTS["fp8"], fixed_scales(t0), "decode", 16)
    kept = [network.definition.get_layer(i) for i in range(network.definition.num_layers)]
    before = [layer.type.name for layer in kept]

    fingerprint(network)

    assert [layer.type.name for layer in kept] == before
    assert len(quantization_of(network).modules) == 10


def test_what_cannot_be_described_is_an_error(backend, t0, monkeypatch):
    """A network is never called the same for want of a reader."""
    network = build_network(backend, t0, VARIANTS["fp16"], None, "decode", 16)
    monkeypatch.setattr(inspection, "_classes", lambda trt: {})
    with pytest.raises(BuildError, match=r"layer .*: type \w+ has no class of its own; add it"):
        fingerprint(network)
    monkeypatch.undo()
    monkeypatch.setattr(inspection, "_property_names", lambda kind: ("get_input",))
    with pytest.raises(BuildError, match=r"get_input: a \w+ cannot be described; add it here"):
        fingerprint(network)
