"""The layers: names, stored types and scales, and what cannot be added."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import round_to_e4m3
from transformers.activations import ACT2FN

from gptneo_trt import layers
from gptneo_trt.backend import create_network, log_collector
from gptneo_trt.errors import BuildError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.layers import Graph, LinearWeights
from gptneo_trt.network import Network
from gptneo_trt.variants import VARIANTS

# Case C-01: amax -> amax / 448 in float32, which float16 holds wrongly or not at all.
SCALES = {0.5: 1.1161e-3, 0.02: 4.4643e-5, 2e-5: 4.4643e-8, 1e-5: 2.2321e-8}


@pytest.fixture
def new_graph(backend):
    """Return a function that starts a graph, with what must outlive it kept alive."""
    kept = []

    def start(compute_type="fp16"):
        log = log_collector(backend.trt)
        kept.extend((log, backend.trt.Builder(log.logger)))
        graph = Graph(backend, create_network(backend, kept[-1]), compute_type)
        kept.append(graph)
        return graph

    return start


def layers_of(graph):
    """Return layer name -> layer."""
    network = graph.network
    return {network.get_layer(i).name: network.get_layer(i) for i in range(network.num_layers)}


def constant(graph, name):
    """Return the array that a constant of the network holds."""
    layer = layers_of(graph)[name]
    layer.__class__ = graph.backend.trt.IConstantLayer
    return np.array(layer.weights).reshape(tuple(layer.shape))


def add_input(graph, shape, data_type="HALF"):
    """Add an input called "x"."""
    return graph.network.add_input("x", getattr(graph.backend.trt.DataType, data_type), shape)


def run(graph, output, x):
    """Evaluate ``output`` for one x."""
    output.name = "y"
    graph.network.mark_output(output)
    network = Network(
        graph.backend,
        None,
        graph.network,
        None,
        VARIANTS["fp16"],
        "prefill",
        1,
        tuple(graph.arrays),
    )
    return Interpreter(network).run({"x": torch.from_numpy(x)[None]})["y"][0].numpy()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_constant_keeps_type_and_shape(new_graph, shape):
    """A constant has the array's own type, shape and values, also where it is a scalar."""
    graph = new_graph()
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float16).reshape(shape)
    tensor = layers.add_constant(graph, "c", array)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == graph.backend.trt.DataType.HALF
    np.testing.assert_array_equal(constant(graph, "c"), array)


def test_constant_of_a_transposed_view_is_in_order(new_graph):
    """A transposed weight, not contiguous in memory, is stored as it reads, and kept alive."""
    graph = new_graph()
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    layers.add_constant(graph, "c", array)
    np.testing.assert_array_equal(constant(graph, "c"), array)
    assert any(np.array_equal(kept, array) for kept in graph.arrays)


def test_N06_a_missing_layer_is_named(new_graph):
    """Where TensorRT returns no layer, the error names the layer and the flavour's version."""
    graph = new_graph()
    with pytest.raises(BuildError, match=f"layer mlp.act: {graph.backend.target} returned None"):
        graph.named(None, "mlp.act")


def test_N06_a_layer_without_output_is_named(new_graph):
    """A layer that TensorRT returns without an output tensor is named in the same way."""
    layer = SimpleNamespace(get_output=lambda index: None)
    with pytest.raises(BuildError, match=r"layer mlp.act: tensorrt_rtx-.* gave it no output"):
        new_graph().named(layer, "mlp.act")


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_N02_a_weight_beyond_float16_is_named(new_graph, kind):
    """A finite value that float16 cannot hold is refused: it would become infinity."""
    graph = new_graph()
    weight, bias = np.ones((3, 4), np.float32), np.ones(3, np.float32)
    {"weight": weight, "bias": bias}[kind].flat[1] = -7e4
    x = add_input(graph, (1, 2, 4))
    with pytest.raises(BuildError, match=f"c_fc.{kind}: obtained values up to 70000, expected at"):
        layers.add_linear(graph, "h.1.mlp.c_fc", x, LinearWeights(weight, bias))


def test_a_weight_in_float32_may_be_larger(new_graph):
    """What the type holds is stored as it is, and so is what was no number before."""
    graph = new_graph()
    array = np.array([7e4, np.inf, np.nan], np.float32)
    layers.add_weight(graph, "wide", array, "fp32")
    layers.add_weight(graph, "narrow", array[1:], "fp16")
    np.testing.assert_array_equal(constant(graph, "wide"), array)
    np.testing.assert_array_equal(constant(graph, "narrow"), array[1:])


def test_cast_to_the_same_type_adds_nothing(new_graph):
    """A cast adds a layer only where the type differs."""
    graph = new_graph()
    x = add_input(graph, (1, 2, 4))
    assert layers.add_cast(graph, "same", x, "fp16") is x
    assert layers.add_cast(graph, "other", x, "fp32").dtype == graph.backend.trt.DataType.FLOAT
    assert list(layers_of(graph)) == ["other"]


@pytest.mark.parametrize(("amax", "expected"), SCALES.items(), ids=map(str, SCALES))
def test_C01_weight_scale_is_float32(new_graph, amax, expected):
    """The scale of a weight is amax / 448 in float32, also where float16 would lose it."""
    graph = new_graph()
    weight = np.linspace(-amax, amax / 2, 12, dtype=np.float32).reshape(3, 4)
    x = add_input(graph, (1, 2, 4))
    layers.add_linear(graph, "c_fc", x, LinearWeights(weight, activation_scale=1.0))
    stored = constant(graph, "c_fc.weight.scale")
    assert stored.dtype == np.float32
    assert stored == np.float32(amax) / np.float32(448)
    assert float(stored) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("amax", SCALES)
@pytest.mark.parametrize("dequantize_type", ["fp16", "fp32"])
def test_C01_small_weights_keep_their_size(new_graph, amax, dequantize_type):
    """A weight of each amax is rounded to FP8 and back within FP8's step, and is never 0 or NaN.

    A float16 Dequantize adds its own rounding, of 2^-25 at most below float16's normal range.
    """
    graph = new_graph("fp32")
    weight = np.linspace(-amax, -amax / 2, 16, dtype=np.float32)[None]
    x = graph.network.add_input("x", graph.backend.trt.DataType.FLOAT, (1, 16, 16))
    linear = LinearWeights(weight, None, 1 / 448, dequantize_type)
    output = layers.add_linear(graph, "c_fc", x, linear)
    obtained = run(graph, output, np.eye(16, dtype=np.float32)[None])[0, :, 0]
    step = {"fp16": 2.0**-25, "fp32": 0}[dequantize_type]
    np.testing.assert_allclose(obtained, weight[0], rtol=1 / 16, atol=step)
    assert (obtained < 0).all()


def test_C01_float16_would_lose_these_scales():
    """The two small scales of the case are 33.5 % off and 0 in float16: the check can fail."""
    third, last = (np.float32(amax) / np.float32(448) for amax in (2e-5, 1e-5))
    assert float(np.float16(third)) / float(third) - 1 == pytest.approx(0.335, abs=1e-3)
    assert np.float16(last) == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-40, 1e39], ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_C01_unusable_activation_scale_is_named(new_graph, scale):
    """A scale that is not a positive normal float32 is refused with the projection's name."""
    graph = new_graph()
    weights = LinearWeights(np.ones((3, 4), np.float32), activation_scale=scale)
    with pytest.raises(BuildError, match=r"transformer.h.1.mlp.c_fc.input: FP8 scale .* expected"):
        layers.add_linear(graph, "transformer.h.1.mlp.c_fc", add_input(graph, (1, 2, 4)), weights)


@pytest.mark.parametrize(
    ("dequantize_type", "fits", "overflows"),
    [("fp16", 65504 / 448, 146.3), ("fp32", 7.5e35, 7.7e35)],
    ids=["fp16", "fp32"],
)
def test_C01_scale_whose_range_overflows_is_named(new_graph, dequantize_type, fits, overflows):
    """The other end: 448 x scale must be finite in the type of Dequantize, else it is named.

    A float16 Dequantize at scale 146.3 makes infinity of an input of 65504.
    """
    graph = new_graph()
    x, weight = add_input(graph, (1, 2, 4)), np.ones((3, 4), np.float32)
    layers.add_linear(graph, "good", x, LinearWeights(weight, None, fits, dequantize_type))
    with pytest.raises(BuildError, match=rf"c_fc.input: FP8 scale .* whose amax {dequantize_type}"):
        layers.add_linear(graph, "c_fc", x, LinearWeights(weight, None, overflows, dequantize_type))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf], ids=str)
def test_C02_unusable_weight_is_named(value):
    """(a, e) A weight of zeros, or with one value that is not finite, has no scale: named."""
    weight = np.zeros((3, 4), np.float32)
    weight[1, 2] = value
    with pytest.raises(BuildError, match=r"h.1.mlp.c_fc.weight: largest .* (0|nan|inf)"):
        layers.weight_scale("h.1.mlp.c_fc", weight)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
def test_C06_no_infinity_or_nan_becomes_fp8(new_graph, value):
    """A weight that holds one is refused by name: no byte of it is ever stored."""
    weight = np.ones((3, 4), np.float32)
    weight[2, 1] = value
    graph = new_graph()
    linear = LinearWeights(weight, activation_scale=1.0)
    with pytest.raises(BuildError, match=r"h.0.mlp.c_fc.weight: largest absolute value (inf|nan)"):
        layers.add_linear(graph, "h.0.mlp.c_fc", add_input(graph, (1, 2, 4)), linear)


def test_C02_empty_weight_is_named():
    """A weight without values has no scale either."""
    with pytest.raises(BuildError, match=r"c_fc.weight: largest absolute value 0.0, expected"):
        layers.weight_scale("c_fc", np.zeros((0, 4), np.float32))


@pytest.mark.parametrize("dequantize_type", ["fp16", "fp32"])
def test_quantized_linear_is_rounded_once(new_graph, dequantize_type):
    """The quantized product is E4M3 of x / s_x times E4M3 of w / s_w, in numpy's own steps."""
    generator = np.random.default_rng(0)
    weight = generator.normal(0, 0.1, (3, 8)).astype(np.float32)
    bias = generator.normal(0, 1, 3).astype(np.float32)
    x = generator.normal(0, 1, (1, 2, 8)).astype(np.float16).astype(np.float32)
    graph = new_graph()
    linear = LinearWeights(weight, bias, 0.004, dequantize_type)
    output = layers.add_linear(graph, "c_fc", add_input(graph, (1, 2, 8)), linear)
    wide = np.dtype({"fp16": np.float16, "fp32": np.float32}[dequantize_type])

    def fp8(values, scale):
        rounded = round_to_e4m3(values / scale).astype(np.float32)
        return (rounded * scale).astype(wide).astype(np.float32)

    weight_scale = np.float32(np.abs(weight).max()) / np.float32(448)
    product = fp8(x, np.float32(0.004)) @ fp8(weight, weight_scale).T
    expected = product.astype(wide) + bias.astype(wide)
    np.testing.assert_allclose(run(graph, output, x), expected, rtol=1e-3, atol=1e-3)
    assert np.abs(expected - (x @ weight.T + bias)).max() > 5e-3, "FP8 cannot be seen here"


def test_quantized_linear_keeps_its_weight_in_float32(new_graph):
    """A quantized weight is stored [1, in, out] in float32; one that is not, in the graph's."""
    weight = np.linspace(0.1, 0.2, 12, dtype=np.float32).reshape(3, 4)
    graph = new_graph()
    x = add_input(graph, (1, 2, 4))
    layers.add_linear(graph, "quantized", x, LinearWeights(weight, activation_scale=1.0))
    layers.add_linear(graph, "plain", x, LinearWeights(weight))
    np.testing.assert_array_equal(constant(graph, "quantized.weight"), weight.T[None])
    assert constant(graph, "quantized.weight").dtype == np.float32
    assert constant(graph, "plain.weight").dtype == np.float16


@pytest.mark.parametrize("dequantize_type", ["fp16", "fp32"])
def test_linear_returns_the_type_of_the_graph(new_graph, dequantize_type):
    """Whatever Dequantize gives, the bias is added in that type and the output is float16."""
    graph = new_graph()
    weight, bias = np.ones((3, 4), np.float32), np.ones(3, np.float32)
    linear = LinearWeights(weight, bias, 1.0, dequantize_type)
    output = layers.add_linear(graph, "c_fc", add_input(graph, (1, 2, 4)), linear)
    types = graph.backend.trt.DataType
    wide = {"fp16": types.HALF, "fp32": types.FLOAT}[dequantize_type]
    assert layers_of(graph)["c_fc.bias_add"].get_output(0).dtype == wide
    assert output.dtype == types.HALF
    assert ("c_fc.cast" in layers_of(graph)) == (dequantize_type == "fp32")


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu"])
def test_activations_are_hugging_face_s(new_graph, activation):
    """Each activation is the function that transformers has under the same name."""
    graph = new_graph("fp32")
    x = np.linspace(-4, 4, 33, dtype=np.float32).reshape(1, 3, 11)
    output = layers.add_activation(graph, "act", add_input(graph, x.shape, "FLOAT"), activation)
    expected = ACT2FN[activation](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(graph, output, x), expected, atol=1e-6)


def test_split_and_merge_heads_are_inverse(new_graph):
    """Head h of token t is channels h D to (h + 1) D of that token; merging undoes it."""
    graph = new_graph("fp32")
    x = np.arange(24, dtype=np.float32).reshape(1, 3, 8)
    heads = layers.add_split_heads(graph, "split", add_input(graph, x.shape, "FLOAT"), 2)
    merged = layers.add_merge_heads(graph, "merge", heads)
    assert tuple(heads.shape) == (1, 2, 3, 4)
    graph.network.mark_output(heads)
    np.testing.assert_array_equal(run(graph, merged, x), x)


def test_layer_norm_uses_its_epsilon(new_graph):
    """LayerNorm over C with the checkpoint's epsilon, large enough here to be seen."""
    generator = np.random.default_rng(0)
    x, weight, bias = (generator.normal(size=n).astype(np.float32) for n in ((1, 2, 8), 8, 8))
    graph = new_graph("fp32")
    tensor = add_input(graph, x.shape, "FLOAT")
    output = layers.add_layer_norm(graph, "ln_1", tensor, (weight, bias, 0.5))
    center = x - x.mean(-1, keepdims=True)
    expected = center / np.sqrt((center**2).mean(-1, keepdims=True) + 0.5) * weight + bias
    np.testing.assert_allclose(run(graph, output, x), expected, rtol=1e-4, atol=1e-5)
