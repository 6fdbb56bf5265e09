"""The network: its inputs, outputs and stored values, and what cannot be built."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import changed, fixed_scales, tiny_checkpoint

from gptneo_trt import network as network_module
from gptneo_trt.errors import BuildError, CalibrationError
from gptneo_trt.network import PHASES, activation_scales, build_network
from gptneo_trt.variants import VARIANTS

# The FP8 scales of these amax values: case C-01.
AMAX = {"attn.attention.q_proj": 0.5, "mlp.c_fc": 0.02, "mlp.c_proj": 2e-5}


def tensors(network):
    """Return input and output name -> (type name, shape)."""
    definition = network.definition
    inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
    outputs = [definition.get_output(i) for i in range(definition.num_outputs)]
    return {t.name: (t.dtype.name, tuple(t.shape)) for t in inputs + outputs}


def layer_names(network):
    """Return the layers' names in order."""
    definition = network.definition
    return [definition.get_layer(i).name for i in range(definition.num_layers)]


def constants(network):
    """Return constant name -> array, as the network holds it."""
    definition, found = network.definition, {}
    for i in range(definition.num_layers):
        layer = definition.get_layer(i)
        if layer.type.name == "CONSTANT":
            layer.__class__ = network.backend.trt.IConstantLayer
            found[layer.name] = np.array(layer.weights).reshape(tuple(layer.shape))
    return found


@pytest.mark.parametrize("row", ["fp32", "fp16", "fp8-dequantize-fp32"])
@pytest.mark.parametrize("batch", [1, 3])
def test_prefill_inputs_and_outputs(backend, t0, row, batch):
    """Prefill takes ids and positions of any length, and gives logits and the rows of K and V."""
    built = build_network(backend, t0, VARIANTS[row], fixed_scales(t0), "prefill", 64, batch)
    stored, ids = "FLOAT" if row == "fp32" else "HALF", ("INT32", (batch, -1))
    names = [f"h.{i}.{part}" for i in (0, 1) for part in ("key", "value")]
    expected = {"token_ids": ids, "position_ids": ids}
    expected |= dict.fromkeys(names, (stored, (batch, 2, -1, 16)))
    assert tensors(built) == expected | {"logits": ("FLOAT", (batch, -1, 64))}


@pytest.mark.parametrize("context", [1, 64])
@pytest.mark.parametrize("batch", [1, 3])
def test_decode_inputs_and_outputs(backend, t0, context, batch):
    """Decode takes one token and the cache, and gives its logits and its own K and V row."""
    built = build_network(backend, t0, VARIANTS["fp16"], None, "decode", context, batch)
    expected = dict.fromkeys(("token_ids", "position_ids"), ("INT32", (batch, 1)))
    for name in (f"h.{i}.{part}" for i in (0, 1) for part in ("key", "value")):
        expected[f"past.{name}"] = ("HALF", (batch, 2, context, 16))
        expected[name] = ("HALF", (batch, 2, 1, 16))
    assert tensors(built) == expected | {"logits": ("FLOAT", (batch, 1, 64))}


@pytest.mark.parametrize("phase", PHASES)
def test_layers_have_names_of_their_own(backend, t0, phase):
    """Every layer has a name, and none is in use twice: errors can name it."""
    names = layer_names(build_network(backend, t0, VARIANTS["fp8"], fixed_scales(t0), phase, 8))
    assert all(names)
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith("(Unnamed")]


@pytest.mark.parametrize("tied", [True, False])
def test_L01_tied_head_is_the_embedding(backend, t0, tied):
    """A tied head reads the embedding's own constant; an untied one has its own."""
    checkpoint = t0 if tied else tiny_checkpoint(replace(t0.architecture, tied_head=False))
    held = constants(build_network(backend, checkpoint, VARIANTS["fp32"], None, "prefill", 8))
    assert ("lm_head.weight" in held) != tied
    if not tied:
        expected = checkpoint.weights["lm_head.weight"]
        np.testing.assert_array_equal(held["lm_head.weight"], expected)


def test_weights_reach_the_network(backend, t0):
    """Each weight of the checkpoint is a constant of the float32 network, and none is left out."""
    held = constants(build_network(backend, t0, VARIANTS["fp32"], None, "prefill", 8))
    for name, expected in t0.weights.items():
        obtained = np.squeeze(held[name])
        projection = expected.ndim == 2 and name.startswith("transformer.h.")
        np.testing.assert_array_equal(obtained, expected.T if projection else expected)


@pytest.mark.parametrize(("path", "amax"), AMAX.items(), ids=AMAX)
def test_C01_activation_scales_stay_float32(backend, t0, path, amax):
    """The scale constant of an input is amax / 448 in float32, read back from the network."""
    module = f"transformer.h.1.{path}"
    scales = fixed_scales(t0)
    scales = replace(scales, activation_amax={**scales.activation_amax, module: amax})
    held = constants(build_network(backend, t0, VARIANTS["fp8"], scales, "decode", 8))
    obtained = held[f"{module}.input.scale"]
    assert obtained.dtype == np.float32
    assert obtained.shape == ()
    assert float(obtained) == pytest.approx(np.float32(amax) / np.float32(448), rel=2e-7)


def test_scales_are_of_the_row(backend, t0):
    """Only the row's projections get a scale, times the row's factor."""
    obtained = activation_scales(VARIANTS["fp8-scales-x1.5"], fixed_scales(t0, 448.0), 2)
    assert obtained == dict.fromkeys(VARIANTS["fp8"].quantized_modules(2), 1.5)
    assert activation_scales(VARIANTS["fp16"], None, 2) == {}


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf"), -1.0], ids=str)
def test_C01_unusable_range_is_named(backend, t0, amax):
    """A range of which no scale can be made stops the build with variant, phase and projection."""
    module = "transformer.h.1.mlp.c_fc"
    scales = fixed_scales(t0)
    scales = replace(scales, activation_amax={**scales.activation_amax, module: amax})
    with pytest.raises(BuildError, match=rf"variant fp8, decode: {module}.input: FP8 scale"):
        build_network(backend, t0, VARIANTS["fp8"], scales, "decode", 8)


def test_C02_weight_of_zeros_is_named(backend, t0):
    """(a) A c_fc of zeros cannot be FP8 and is named; the float16 row of it builds."""
    module = "transformer.h.1.mlp.c_fc"
    zeros = changed(t0, {f"{module}.weight": np.zeros_like})
    with pytest.raises(BuildError, match=rf"variant fp8, prefill: {module}.weight: largest .* 0.0"):
        build_network(backend, zeros, VARIANTS["fp8"], fixed_scales(t0), "prefill", 8)
    assert build_network(backend, zeros, VARIANTS["fp16"], None, "prefill", 8)


def test_C02_missing_ranges_are_all_named(backend, t0):
    """Projections without a calibrated range are counted and named; none is invented."""
    scales = fixed_scales(t0)
    gone = ["transformer.h.0.mlp.c_fc", "transformer.h.1.attn.attention.q_proj"]
    left = {name: amax for name, amax in scales.activation_amax.items() if name not in gone}
    with pytest.raises(CalibrationError, match=f"'fp8': .* 2 of 10 projections: {', '.join(gone)}"):
        build_network(
            backend, t0, VARIANTS["fp8"], replace(scales, activation_amax=left), "decode", 8
        )
    with pytest.raises(CalibrationError, match="no calibrated range for 2 of 2 projections"):
        build_network(backend, t0, VARIANTS["fp8-c_fc"], None, "decode", 8)


@pytest.mark.parametrize("context", [0, 65, 256])
def test_R03_context_beyond_the_position_table(backend, t0, context):
    """A context that the position table does not cover is refused with both numbers."""
    with pytest.raises(BuildError, match=f"context {context}: .* has 64 positions; choose 1 to 64"):
        build_network(backend, t0, VARIANTS["fp16"], None, "decode", context)


def test_unknown_phase_is_refused(backend, t0):
    """A phase that is neither prefill nor decode is refused with the list."""
    with pytest.raises(BuildError, match=r"phase 'generate': expected one of \['prefill', 'dec"):
        build_network(backend, t0, VARIANTS["fp16"], None, "generate", 8)


class Refusing:
    """Pass everything on to a network, but return None for one kind of layer, with a log line."""

    def __init__(self, network, method, log):
        self._network, self._method, self._log = network, method, log

    def __getattr__(self, name):
        if name != self._method:
            return getattr(self._network, name)
        self._log.logger.log(self._log.logger.ERROR, "first: Error Code 4")
        self._log.logger.log(self._log.logger.ERROR, "then: invalid layer")
        return lambda *arguments: None


def test_N06_missing_layer_carries_tensorrt_s_lines(monkeypatch, backend, t0):
    """Where add_activation returns None: variant, phase, layer, version and both log lines."""
    logs = []

    def collector(trt):
        logs.append(real_collector(trt))
        return logs[-1]

    real_collector, real_create = network_module.log_collector, network_module.create_network
    monkeypatch.setattr(network_module, "log_collector", collector)
    monkeypatch.setattr(
        network_module,
        "create_network",
        lambda *arguments: Refusing(real_create(*arguments), "add_activation", logs[-1]),
    )
    with pytest.raises(BuildError, match=r"fp16, decode: layer transformer.h.0.mlp.act: ") as e:
        build_network(backend, t0, VARIANTS["fp16"], None, "decode", 8)
    assert e.value.log == ("[ERROR] first: Error Code 4", "[ERROR] then: invalid layer")
    assert backend.target in str(e.value)
    assert "TensorRT: [ERROR] then: invalid layer" in str(e.value)
