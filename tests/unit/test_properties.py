"""Properties that hold for any input and span modules: rows, scales, rounding, files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny import tiny_checkpoint

from gptneo_trt import baselines, layers
from gptneo_trt.backend import create_network, log_collector
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Scales, TextSet
from gptneo_trt.inspection import quantization_of
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.layers import Graph
from gptneo_trt.network import PHASES, Network, activation_scales, build_network
from gptneo_trt.operators import to_fp8, to_int8
from gptneo_trt.scales import read_scales, write_scales
from gptneo_trt.smoothing import SMOOTHQUANT, readers, smoothed
from gptneo_trt.variant import (
    BLOCK_FORMATS,
    CALIBRATIONS,
    FORMATS,
    HEAD,
    KINDS,
    PROJECTIONS,
    TYPES,
    Variant,
)
from gptneo_trt.variants import VARIANTS, every_module

pytestmark = pytest.mark.usefixtures("one_thread")

# Those of the pair; test_blocks.py has the others.
# Those of blocks: test_blocks.py.
PAIRED = {name: row for name, row in VARIANTS.items() if row.weight_scales != "block"}
PAIR_FORMATS = tuple(name for name in FORMATS if name not in BLOCK_FORMATS)
# Type and format of a pair -> scales, from the smallest to the largest that it takes.
TINY = float(np.finfo(np.float32).tiny)
SCALES = {
    (wide, narrow): (TINY, 2.2321e-8, 4.4643e-8, 1e-7, 1e-4, 1 / 448, 0.3, 1.0, *more, largest)
    for wide, more in (("fp16", (7.7, 120.0)), ("fp32", (1e4, 1e30)))
    for narrow in PAIR_FORMATS
    for largest in [layers.largest_scale(narrow, wide)]
}


@pytest.fixture(scope="module")
def deep():
    """Return T0 with seven layers: one is left when three at each end stay in floating point."""
    architecture = tiny_checkpoint().architecture
    names = ("global", "local") * 3 + ("global",)
    return tiny_checkpoint(replace(architecture, attention_layers=names))


# Rows: what is read back from a network is what the row says


@st.composite
def rows(draw):
    """Draw a row that VARIANTS could have."""
    quantized = tuple(draw(st.lists(st.sampled_from(KINDS), max_size=8)))
    settings = {"compute_type": draw(st.sampled_from(TYPES))}
    if quantized:
        settings |= {
            "dequantize_type": draw(st.sampled_from(TYPES)),
            "float_edge_layers": draw(st.integers(0, 1)),
            "quantized_format": draw(st.sampled_from(PAIR_FORMATS)),
            "weight_scales": draw(st.sampled_from(("tensor", "channel"))),
            "quantized_activations": draw(st.booleans()),
        }
    if settings.get("quantized_activations"):
        settings["activation_scale_factor"] = draw(st.floats(0.125, 8))
        settings["calibration"] = draw(st.sampled_from(CALIBRATIONS))
        if settings["calibration"] == "max":
            settings["smoothing"] = draw(st.sampled_from(("", SMOOTHQUANT)))
    return Variant("drawn", "", quantized, **settings)


def assert_quantizes_what_it_says(backend, checkpoint, row, phase):
    """Read a row's network back, and hold modules, types and both scales against the row."""
    scales = drawn_scales(checkpoint)
    network = build_network(backend, checkpoint, row, scales, phase, 8)
    num_layers = checkpoint.architecture.num_layers
    modules = row.quantized_modules(num_layers)

    obtained = quantization_of(network)

    assert set(obtained.modules) == set(modules)
    assert len(obtained.products) == len(PROJECTIONS) * num_layers + 1
    wide = {"fp16": "HALF", "fp32": "FLOAT"}[row.dequantize_type]
    assert obtained.dequantize_types == ((wide,) if modules else ())
    assert obtained.activation_scales == activation_scales(row, scales, num_layers)
    assert quantized_types(network) == ({row.quantized_format.upper()} if modules else set())
    found = constants(network, ".weight.scale")
    assert set(found) == {f"{module}.weight.scale" for module in modules}
    if row.smoothing:
        checkpoint = smoothed(checkpoint, scales.smoothing[row.smoothing])
    for module in modules:
        name = "transformer.wte" if module == HEAD else module  # T0's head is tied
        weight = checkpoint.weights[f"{name}.weight"]
        expected = weight_scales(module, weight, row)
        np.testing.assert_array_equal(found[f"{module}.weight.scale"], expected)


def weight_scales(module, weight, row):
    """Return float32 [1], or [out] of a row that has one a channel."""
    if row.weight_scales == "channel":
        return layers.channel_scales(module, weight, row.quantized_format)
    return np.float32([layers.weight_scale(module, weight, row.quantized_format)])


def drawn_scales(checkpoint):
    """Return other ranges for every projection and method: none can stand in for another."""
    modules = every_module(checkpoint.architecture.num_layers)
    methods = ("max", "percentile", *(f"mse-{each}" for each in PAIR_FORMATS), SMOOTHQUANT)
    ranges = {
        method: {module: index + 0.1 * number for index, module in enumerate(modules, 1)}
        for number, method in enumerate(methods)
    }
    factors = {
        norm: tuple(0.5 + np.arange(checkpoint.architecture.hidden_size) % (3 + index))
        for index, norm in enumerate(readers(checkpoint))
    }
    smoothing = {SMOOTHQUANT: factors}
    return Scales(ranges.pop("max"), "max", checkpoint.sha256, "", 1, "", (), ranges, smoothing)


def all_layers(network):
    """Return the layers of a network."""
    return [network.definition.get_layer(i) for i in range(network.definition.num_layers)]


def quantized_types(network):
    """Return the names of the types that Quantize layers give."""
    return {
        layer.get_output(0).dtype.name
        for layer in all_layers(network)
        if layer.type.name == "QUANTIZE"
    }


def constants(network, suffix):
    """Return name -> values of the constants whose names end so, float32 [M]."""
    found = {}
    for layer in all_layers(network):
        if layer.name.endswith(suffix):
            layer.__class__ = network.backend.trt.IConstantLayer
            found[layer.name] = np.array(layer.weights).reshape(-1)
    return found


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", PAIRED.values(), ids=PAIRED)
def test_C03_every_row_quantizes_what_it_says(backend, deep, row, phase):
    """Modules, Dequantize types, activation and weight scales read back are the row's."""
    assert_quantizes_what_it_says(backend, deep, row, phase)


@settings(max_examples=40, deadline=None)
@given(rows(), st.sampled_from(PHASES))
def test_C03_any_row_quantizes_what_it_says(backend, deep, row, phase):
    """So are those of any other set of projections, edges, types, formats and calibration."""
    assert_quantizes_what_it_says(backend, deep, row, phase)


# Quantize and Dequantize


@pytest.fixture(scope="module")
def rounded(backend):
    """Return a function (pair, float32 [M]) -> scale -> what the pair makes of it at that scale.

    One network a pair holds a ``layers.add_quantize_dequantize`` for each scale.
    """
    executors = {}
    for (wide, narrow), scales in SCALES.items():
        log = log_collector(backend.trt)
        builder = backend.trt.Builder(log.logger)
        graph = Graph(backend, create_network(backend, builder), "fp32")
        x = graph.network.add_input("x", graph.data_type("fp32"), (-1,))
        for index, scale in enumerate(scales):
            output = layers.add_quantize_dequantize(
                graph, f"pair.{index}", x, scale, wide, number_format=narrow
            )
            output.name = f"y.{index}"
            graph.network.mark_output(output)
        row, arrays = VARIANTS["fp16"], tuple(graph.arrays)
        network = Network(backend, builder, graph.network, log, row, "prefill", 1, arrays)
        executors[wide, narrow] = Interpreter(network)

    def run(pair, x):
        outputs = executors[pair].run({"x": torch.from_numpy(x)[None]})
        return {scale: outputs[f"y.{i}"][0].numpy() for i, scale in enumerate(SCALES[pair])}

    return run


values = hnp.arrays(
    np.float32,
    st.integers(2, 20),
    elements=st.floats(width=16, allow_nan=False, allow_infinity=False)
    | st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@pytest.mark.parametrize("pair", SCALES, ids=" ".join)
@settings(max_examples=60, deadline=None)
@given(values)
def test_quantize_dequantize_is_idempotent_monotone_and_finite(rounded, pair, x):
    """At every scale a second pass changes nothing, order is kept and nothing finite is lost."""
    for scale, once in rounded(pair, np.sort(x)).items():
        assert np.isfinite(once).all(), scale
        assert (np.diff(once) >= 0).all(), scale
        np.testing.assert_array_equal(rounded(pair, once)[scale], once, err_msg=str(scale))


@settings(deadline=None)
@given(values, st.floats(TINY, 2.0**119, width=32), st.sampled_from((to_fp8, to_int8)))
def test_operators_round_alike_at_any_scale(x, scale, to_format):
    """What the operators compute for a pair, x / s rounded and times s, is so at any scale."""
    divisor = torch.tensor(scale)

    def once(array):
        return to_format(torch.from_numpy(array) / divisor) * divisor

    obtained = once(np.sort(x))
    assert torch.isfinite(obtained).all()
    assert (obtained.diff() >= 0).all()
    assert torch.equal(once(obtained.numpy()), obtained)


# Files


TEXT = TextSet("calibration", "here", (), "every", "a" * 64, "\n", "b" * 64, 64)
# Names as people type them: letters, digits, marks and signs of any script.
names = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


ranges = st.dictionaries(names, positive, min_size=1, max_size=6)


@settings(deadline=None)
@given(ranges, st.dictionaries(names, ranges, max_size=3), names)
def test_scales_survive_their_file(tmp_path_factory, t0, amax, other, version):
    """Any positive finite range comes back bit by bit, under any name and of any method."""
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    notes = (version,)
    scales = Scales(amax, "max", t0.sha256, TEXT.sha256, 0, version, notes, other)

    write_scales(path, scales)
    obtained = read_scales(path, t0, TEXT, tuple(amax))

    assert obtained == scales
    assert digits(obtained.activation_amax) == digits(amax)
    assert {name: digits(each) for name, each in obtained.other_amax.items()} == {
        name: digits(each) for name, each in other.items()
    }


def digits(values):
    """Return values to the last bit, the sign of a zero included."""
    return {name: value.hex() for name, value in values.items()}


leaves = st.one_of(names, finite, st.integers(), st.booleans(), st.none())
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)
singles = hnp.arrays(
    np.float32,
    st.integers(1, 9),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(names, trees, min_size=1, max_size=3),
    st.dictionaries(names, trees, max_size=3),
    st.dictionaries(names, finite, min_size=1, max_size=4),
    st.dictionaries(names, singles, max_size=3),
)
def test_a_baseline_survives_its_files(tmp_path_factory, key, provenance, values, tokens):
    """Values, tokens, key and provenance come back as they were, bit by bit and in any script."""
    folder = tmp_path_factory.mktemp("baselines")

    baselines.write(folder, "row", Baseline(key, provenance, values, tokens))
    stored = baselines.read(folder, "row")

    assert (stored.key, stored.provenance) == (key, provenance)
    assert digits(stored.values) == digits(values)
    assert {n: a.tobytes() for n, a in stored.tokens.items()} == {
        n: a.tobytes() for n, a in tokens.items()
    }
    assert baselines.differences(stored, Baseline(key, provenance, values, tokens)) == []
