"""Properties that hold for any input and span modules: rows, scales, rounding, texts, files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny import fixed_scales, tiny_checkpoint

from gptneo_trt import baselines, decoder, layers, metrics
from gptneo_trt.backend import create_network, log_collector
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Scales, TextSet
from gptneo_trt.inspection import quantization_of
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.layers import Graph
from gptneo_trt.network import PHASES, Network, activation_scales, build_network
from gptneo_trt.operators import to_fp8, to_int8
from gptneo_trt.scales import read_scales, write_scales
from gptneo_trt.variants import (
    CALIBRATIONS,
    FORMATS,
    PROJECTIONS,
    TYPES,
    VARIANTS,
    WEIGHT_SCALES,
    Variant,
)
from tests.gate import measure
from tests.gate.last_rows import last_rows, padded

PHASE_FUNCTIONS = {"prefill": decoder.prefill, "decode": decoder.decode}
# Type and format of a pair -> scales, from the smallest to the largest that it takes.
TINY = float(np.finfo(np.float32).tiny)
SCALES = {
    (wide, narrow): (TINY, 2.2321e-8, 4.4643e-8, 1e-7, 1e-4, 1 / 448, 0.3, 1.0, *more, largest)
    for wide, more in (("fp16", (7.7, 120.0)), ("fp32", (1e4, 1e30)))
    for narrow in FORMATS
    for largest in [layers.largest_scale(narrow, wide)]
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Use one thread: sums are then always split alike, and a busy machine costs little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def deep():
    """Return T0 with three layers: one is left when both edges stay in floating point."""
    architecture = tiny_checkpoint().architecture
    names = ("global", "local", "global")
    return tiny_checkpoint(replace(architecture, attention_layers=names))


@pytest.fixture(scope="module")
def executor(backend, t0):
    """Return a function that interprets a row of T0 in one phase, each once."""
    made = {}

    def make(row, phase):
        if (row, phase) not in made:
            network = build_network(backend, t0, VARIANTS[row], fixed_scales(t0), phase, 64)
            made[row, phase] = Interpreter(network)
        return made[row, phase]

    return make


# Rows: what is read back from a network is what the row says


@st.composite
def rows(draw):
    """Draw a row that VARIANTS could have."""
    quantized = tuple(draw(st.lists(st.sampled_from(list(PROJECTIONS)), max_size=8)))
    settings = {"compute_type": draw(st.sampled_from(TYPES))}
    if quantized:
        settings |= {
            "dequantize_type": draw(st.sampled_from(TYPES)),
            "float_edge_layers": draw(st.integers(0, 1)),
            "quantized_format": draw(st.sampled_from(FORMATS)),
            "weight_scales": draw(st.sampled_from(WEIGHT_SCALES)),
            "quantized_activations": draw(st.booleans()),
        }
    if settings.get("quantized_activations"):
        settings["activation_scale_factor"] = draw(st.floats(0.125, 8))
        settings["calibration"] = draw(st.sampled_from(CALIBRATIONS))
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
    for module in modules:
        weight = checkpoint.weights[f"{module}.weight"]
        expected = weight_scales(module, weight, row)
        np.testing.assert_array_equal(found[f"{module}.weight.scale"], expected)


def weight_scales(module, weight, row):
    """Return float32 [1], or [out] of a row that has one a channel."""
    if row.weight_scales == "channel":
        return layers.channel_scales(module, weight, row.quantized_format)
    return np.float32([layers.weight_scale(module, weight, row.quantized_format)])


def drawn_scales(checkpoint):
    """Return other ranges for every projection and method: none can stand in for another."""
    modules = VARIANTS["fp8-all"].quantized_modules(checkpoint.architecture.num_layers)
    methods = ("max", "percentile", *(f"mse-{each}" for each in FORMATS))
    ranges = {
        method: {module: index + 0.1 * number for index, module in enumerate(modules, 1)}
        for number, method in enumerate(methods)
    }
    return Scales(ranges.pop("max"), "max", checkpoint.sha256, "", 1, "", (), ranges)


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
@pytest.mark.parametrize("row", VARIANTS.values(), ids=VARIANTS)
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


# Texts: neither their order nor their company changes a result


def split(array, sizes):
    """Return consecutive parts of an array of these sizes, and what is left."""
    return [part for part in np.split(array, np.cumsum(sizes)) if len(part)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", ["fp32", "fp16", "fp8-all"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_results_do_not_depend_on_order_or_batching(executor, t0, row, phase, data):
    """Logits, K and V of a text are bitwise the same in any order and any batch, also alone."""
    tokens = data.draw(hnp.arrays(np.int32, (6, 9), elements=st.integers(0, 63)))
    order = np.array(data.draw(st.permutations(range(6))))
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=5))
    made, run = executor(row, phase), PHASE_FUNCTIONS[phase]

    expected = vars(run(made, t0.architecture, tokens))
    parts = [vars(run(made, t0.architecture, part)) for part in split(tokens[order], sizes)]

    for name, array in expected.items():
        obtained = np.concatenate([part[name] for part in parts])
        assert np.array_equal(obtained, array[order]), name


def ragged(seed, lengths):
    """Return random texts of T0's vocabulary of these lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 64, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("row", ["fp16", "fp8"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_gate_scores_texts_alike_in_any_order_and_group(executor, t0, row, data):
    """Sampled texts padded to the context give bitwise the same logits in groups of any size.

    So do last tokens at given widths, whatever the order of the texts.
    """
    lengths = data.draw(st.lists(st.integers(2, 64), min_size=2, max_size=7))
    order = data.draw(st.permutations(range(len(lengths))))
    texts, made = ragged(data.draw(st.integers(0, 99)), lengths), executor(row, "prefill")

    def run(ids):
        return decoder.prefill(made, t0.architecture, ids)

    def scored(chosen, at_once):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "TEXTS_AT_ONCE", at_once)
            patch.setattr(measure, "CONTEXT", 64)
            logits, non_finite = measure._scored_logits(run, chosen)
        assert non_finite is None
        return split(logits, [len(ids) for ids in chosen])

    expected, shuffled = scored(texts, 6), scored([texts[index] for index in order], 2)
    for place, index in enumerate(order):
        assert np.array_equal(shuffled[place], expected[index])

    last = last_rows(lambda ids: run(ids).logits, texts, (64,))
    again = last_rows(lambda ids: run(ids).logits, [texts[index] for index in order], (64,))
    assert np.array_equal(again, last[list(order)])
    assert np.array_equal(last, [logits[-1] for logits in expected])


@settings(deadline=None)
@given(data=st.data())
def test_last_tokens_are_the_same_in_any_order(data):
    """Nor does the order decide which texts run together, and so how far each is padded."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    order = data.draw(st.permutations(range(len(lengths))))
    texts = ragged(data.draw(st.integers(0, 99)), lengths)
    assume(len({text.tobytes() for text in texts}) == len(texts))  # which of two equals is nothing

    def run(ids):
        """Return what shows a token, its text and how far that was padded."""
        return np.stack(np.broadcast_arrays(ids, ids.sum(1)[:, None], ids.shape[1]), -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gate.last_rows.BUCKET", 2)
        expected = last_rows(run, texts)
        assert np.array_equal(
            last_rows(run, [texts[index] for index in order]), expected[list(order)]
        )


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.integers(3, 20), st.integers(0, 40))
def test_padding_to_another_width_changes_sums_alone(executor, t0, seed, length, more):
    """In float32 a text padded to any width gives its logits up to the order of a sum."""
    text, made = ragged(seed, [length]), executor("fp32", "prefill")

    short, wide = (
        decoder.prefill(made, t0.architecture, padded(text, width)).logits[0, :length]
        for width in (length, length + more)
    )

    np.testing.assert_allclose(wide, short, atol=1e-4, rtol=0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_statistics_do_not_depend_on_the_order_of_texts(data):
    """Every summary value is the same for texts in another order, up to the order of a sum."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    order = data.draw(st.permutations(range(5)))
    random = np.random.default_rng(seed)
    reference, obtained = random.normal(0, 3, (2, 5, 7, 11)).astype(np.float32)
    ids = random.integers(0, 11, (5, 7)).astype(np.int32)

    def summary(chosen):
        text, position, target = metrics.scored_rows(list(ids[chosen]), "every")
        known = metrics.reference_distribution(reference[chosen][text, position], target, text)
        return metrics.summarize(metrics.compare(known, obtained[chosen][text, position])).values

    expected = summary(list(range(5)))
    assert summary(list(order)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


# Files


TEXT = TextSet("calibration", "here", (), "every", "a" * 64, "\n", "b" * 64, 64)
# Names as people type them: letters, digits, marks and signs of any script.
names = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@settings(deadline=None)
@given(st.dictionaries(names, positive, min_size=1), names)
def test_scales_survive_their_file(tmp_path_factory, t0, amax, version):
    """Any positive finite range comes back bit by bit, under any name."""
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    scales = Scales(amax, "max", t0.sha256, TEXT.sha256, 0, version, notes=(version,))

    write_scales(path, scales)
    obtained = read_scales(path, t0, TEXT, tuple(amax))

    assert obtained == scales
    assert {name: value.hex() for name, value in obtained.activation_amax.items()} == {
        name: value.hex() for name, value in amax.items()
    }


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
    assert {n: v.hex() for n, v in stored.values.items()} == {n: v.hex() for n, v in values.items()}
    assert {n: a.tobytes() for n, a in stored.tokens.items()} == {
        n: a.tobytes() for n, a in tokens.items()
    }
    assert baselines.differences(stored, Baseline(key, provenance, values, tokens)) == []
