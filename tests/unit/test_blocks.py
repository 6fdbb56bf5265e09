"""Products with a scale a block: what is stored, what is read back, what is refused, and plans."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import T0, changed, fixed_scales, round_to_e4m3, tiny_checkpoint

from gptneo_trt import blocks, decoder, layers, nvfp4
from gptneo_trt.backend import create_builder, create_network, log_collector
from gptneo_trt.errors import BuildError, RunError
from gptneo_trt.inspection import fingerprint, quantization_of
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.layers import Graph, LinearWeights
from gptneo_trt.network import PHASES, Network, activation_scales, build_network
from gptneo_trt.plans import MIB, PlanRequest, build_plan, plan_key
from gptneo_trt.variant import Variant
from gptneo_trt.variants import RECIPE, VARIANTS

INT4 = Variant(
    "int4", "", RECIPE, quantized_format="int4", weight_scales="block", quantized_activations=False
)
NVFP4 = Variant("nvfp4", "", RECIPE, quantized_format="nvfp4", weight_scales="block")
NVFP4_WEIGHTS = replace(NVFP4, name="nvfp4-weights", quantized_activations=False)
ROWS = {row.name: row for row in (INT4, NVFP4, NVFP4_WEIGHTS)}
OF_THE_TABLE = {name: row for name, row in VARIANTS.items() if row.weight_scales == "block"}
ROWS |= {f"{name}, fp32": replace(row, dequantize_type="fp32") for name, row in ROWS.items()}
C_FC = "transformer.h.1.mlp.c_fc"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wide():
    """Return T0 of twice the width: blocks of 64 and of 128."""
    return tiny_checkpoint(replace(T0, hidden_size=64, intermediate_size=256))


@pytest.fixture(scope="module")
def build(backend, wide):
    """Return a function that builds a row in one phase."""

    def build_row(row, phase="decode", checkpoint=wide, amax=8.0):
        scales = fixed_scales(checkpoint, amax)
        return build_network(backend, checkpoint, row, scales, phase, 16)

    return build_row


@pytest.fixture
def product(backend):
    """Return a function (row, weight, float32 [T, in]) -> float32 [T, out], by the interpreter."""

    def multiply(row, weight, x):
        log = log_collector(backend.trt)
        builder = create_builder(backend, log)
        graph = Graph(backend, create_network(backend, builder), "fp16")
        tensor = graph.network.add_input("x", backend.trt.DataType.HALF, (1, -1, x.shape[1]))
        scale = 8 / layers.LARGEST["nvfp4"] if row.quantized_activations else None
        linear = LinearWeights(
            weight, None, scale, row.dequantize_type, row.quantized_format, "block", scale is None
        )
        output = blocks.add_linear(graph, "c_fc", tensor, linear)
        graph.network.mark_output(output)
        arrays, packed = tuple(graph.arrays), graph.packed
        built = (backend, builder, graph.network, log, row, "prefill", 1, arrays)
        network = Network(*built, packed=packed)
        outputs = Interpreter(network).run({"x": torch.from_numpy(x)[None, None]})
        return outputs[output.name][0, 0].numpy()

    return multiply


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", (OF_THE_TABLE | ROWS).values(), ids=OF_THE_TABLE | ROWS)
def test_what_is_read_back_is_the_row_s(build, wide, row, phase):
    """Modules, Dequantize type, scales of inputs, and a scale for every block of every weight."""
    found = quantization_of(build(row, phase))
    modules = row.quantized_modules(2)
    shapes = {module: wide.weights[f"{module}.weight"].shape for module in modules}
    sizes = {64: 64, 256: 128} if row.quantized_format == "int4" else {64: 16, 256: 16}
    assert sorted(found.modules) == sorted(modules)
    assert len(found.products) == 13
    assert found.dequantize_types == ({"fp16": "HALF", "fp32": "FLOAT"}[row.dequantize_type],)
    assert found.activation_scales == activation_scales(row, fixed_scales(wide), 2)
    assert found.weight_scale_counts == {
        module: out * width // sizes[width] for module, (out, width) in shapes.items()
    }


def test_nvfp4_inputs_have_the_global_scale_of_their_range():
    """The scale of an input is amax / (6 x 448)."""
    checkpoint = tiny_checkpoint()
    found = activation_scales(NVFP4, fixed_scales(checkpoint, 8.0), 2)
    assert set(found.values()) == {float(np.float32(8) / np.float32(2688))}


def rows_of(width):
    """Return float32 [3, width], values of float16."""
    values = np.random.default_rng(0).normal(0, 1, (3, width))
    return values.astype(np.float16).astype(np.float32)


def int4(weight, size):
    """Return a weight rounded to INT4 in numpy's own steps, with scales of float16."""
    parts = weight.astype(np.float16).astype(np.float32).reshape(len(weight), -1, size)
    largest = np.abs(weight).reshape(parts.shape).max(-1, keepdims=True)
    scales = (largest / 7).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint(parts / scales), -8, 7) * scales).reshape(weight.shape)


def nvfp4_of(values, scale):
    """Return values [M, in] rounded to NVFP4 in numpy's own steps; steps in float16."""
    parts = values.reshape(len(values), -1, 16)
    scales = round_to_e4m3(np.abs(parts).max(-1, keepdims=True) / np.float32(6) / scale)
    steps = scales.astype(np.float32) * scale
    codes = nvfp4.from_fp4(nvfp4.to_fp4(parts / steps))
    return (codes * steps.astype(np.float16).astype(np.float32)).reshape(values.shape)


@pytest.mark.parametrize("name", ["int4", "nvfp4", "nvfp4-weights"])
def test_the_head_can_be_in_blocks_too(build, name):
    """A described row may name it: it is rounded as the projections are, not in another way."""
    network = build(replace(ROWS[name], quantized=("c_fc", "lm_head")))
    found = quantization_of(network)
    assert found.modules == ("transformer.h.0.mlp.c_fc", C_FC, "lm_head")
    assert ("lm_head" in found.activation_scales) == ROWS[name].quantized_activations
    assert found.weight_scale_counts["lm_head"] == T0.vocab_size * 64 // (
        64 if name == "int4" else 16
    )


@pytest.mark.parametrize("name", ["int4", "nvfp4", "nvfp4-weights"])
def test_product_is_rounded_once(product, wide, name):
    """A product is of the rounded weight and, where it is, the rounded input; no more is lost."""
    x, weight = rows_of(64), wide.weights[f"{C_FC}.weight"]
    if name == "int4":
        expected = x @ int4(weight, 64).T
    else:
        rounded = nvfp4_of(weight, np.abs(weight).max() / np.float32(2688))
        left = nvfp4_of(x, np.float32(8) / np.float32(2688)) if name == "nvfp4" else x
        expected = left @ rounded.T
    obtained = product(ROWS[name], weight, x)
    np.testing.assert_allclose(obtained, expected, rtol=2e-3, atol=5e-3)
    assert np.abs(expected - x @ weight.T).max() > 0.1, "the format cannot be seen here"


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_block_of_zeros_stays_zero(product, wide, row):
    """Neither INT4, whose scale would be 0, nor NVFP4, whose scale is, makes NaN of it."""
    weight, x = wide.weights[f"{C_FC}.weight"].copy(), rows_of(64)
    weight[3], x[1] = 0, 0
    obtained = product(row, weight, x)
    assert not obtained[1].any()
    assert not obtained[:, 3].any()
    assert np.isfinite(obtained).all()
    assert (obtained[0, :3] != 0).all()


def test_int4_keeps_small_blocks(product):
    """A block whose scale float16 loses is rounded in steps of float16's smallest normal number."""
    weight = np.full((16, 128), 1.0, np.float32)
    weight[0] = 1e-4
    weight[1] = 1e-6
    obtained = product(INT4, weight, np.eye(128, dtype=np.float32))
    assert set(obtained[:, 0].tolist()) == {float(np.float16(2 * 2.0**-14))}  # 1.22e-4
    assert not obtained[:, 1].any()
    assert (obtained[:, 2:] == np.float16(7 * np.float16(1 / 7))).all()


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_wrong_widths_are_refused_by_name(backend, row):
    """A width that no block divides is named, with the row, phase and what to do."""
    narrow = tiny_checkpoint(replace(T0, hidden_size=40))
    size, shown = (64, "INT4") if row.quantized_format == "int4" else (16, "NVFP4")
    message = (
        rf"variant {row.name}, decode: transformer\.h\.0\.attn\.attention\.q_proj\.(weight|input): "
        rf"{shown} of width 40, expected a multiple of {size}; leave this projection out"
    )
    with pytest.raises(BuildError, match=message):
        build_network(backend, narrow, row, fixed_scales(narrow), "decode", 8)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf], ids=str)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_unusable_weights_are_refused_by_name(build, wide, row, value):
    """Nothing but zeros, or one value that is not finite."""

    def spoiled(weight):
        return np.where(np.arange(weight.size).reshape(weight.shape) == 5, value, 0 * weight)

    spoilt = changed(wide, {f"{C_FC}.weight": lambda weight: np.float32(spoiled(weight))})
    with pytest.raises(BuildError, match=rf"{C_FC}\.weight: (largest absolute value|NVFP4 range)"):
        build(row, checkpoint=spoilt)


@pytest.mark.parametrize("amax", [1e-5, 1e-4], ids=str)
@pytest.mark.parametrize("row", [INT4, NVFP4_WEIGHTS], ids=lambda row: row.name)
def test_weights_whose_scales_float16_loses_are_refused(build, wide, row, amax):
    """Steps below float16's normal numbers are refused; in float32 they are kept."""
    small = changed(wide, {f"{C_FC}.weight": lambda w: w * np.float32(amax) / np.abs(w).max()})
    with pytest.raises(BuildError, match=rf"{C_FC}\.weight: .*4 of amax {amax:.4g}, .* fp16"):
        build(row, checkpoint=small)
    build(replace(row, dequantize_type="fp32"), checkpoint=small)


@pytest.mark.parametrize("amax", [1e-5, 7e4], ids=str)
def test_a_range_that_float16_does_not_hold_is_refused(build, amax):
    """Of an input: steps that float16 loses, or values beyond its largest."""
    with pytest.raises(BuildError, match=r"q_proj\.input: NVFP4 of amax .*, expected 0.0003662 to"):
        build(NVFP4, amax=amax)
    build(replace(NVFP4, dequantize_type="fp32"), amax=amax)


def test_the_largest_block_that_divides_is_taken():
    """128, else 64."""
    widths = (64, 128, 192, 768, 1024)
    assert [blocks.int4_block("c_fc", width) for width in widths] == [64, 128, 64, 128, 128]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_decode_gives_what_prefill_gives(build, wide, row):
    """And sums in another order move logits a little: both by what float16 rounds, no more."""
    ids = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
    prefill, decode = (Interpreter(build(row, phase)) for phase in PHASES)
    expected = decoder.prefill(prefill, wide.architecture, ids).logits
    obtained = decoder.decode(decode, wide.architecture, ids).logits
    np.testing.assert_allclose(obtained, expected, atol=0.05)
    other = Interpreter(build(row, "prefill"), summation_order=1)
    moved = decoder.prefill(other, wide.architecture, ids).logits
    assert 0 < np.abs(moved - expected).max() < 0.05


# Another network than the row's is seen


def another_scale(monkeypatch, side):
    """Read blocks of NVFP4 with other scales than their own, on one side of every product."""
    real = blocks._add_dequantize

    def add(graph, name, parts, dequantize_type):
        values, scales, global_scale = parts
        if name.endswith(side) and side == "input":
            global_scale = layers.add_constant(graph, f"{name}.other", np.asarray(np.float32(1)))
        elif name.endswith(side):
            ones = np.ones(tuple(scales.shape), np.float16)
            scales = layers.add_constant(graph, f"{name}.other", ones)
            layer = graph.network.add_dequantize(values, scales, graph.data_type(dequantize_type))
            return graph.named(layer, f"{name}.dequantize")
        return real(graph, name, (values, scales, global_scale), dequantize_type)

    monkeypatch.setattr(blocks, "_add_dequantize", add)


@pytest.mark.parametrize("side", ["input", "weight"])
def test_scales_of_something_else_are_seen(monkeypatch, build, side):
    """Blocks that are not dequantized with their own scales are named."""
    another_scale(monkeypatch, side)
    with pytest.raises(BuildError, match=rf"c_fc\.{side}\.dequantize does not read an NVFP4 "):
        quantization_of(build(NVFP4))


@pytest.mark.parametrize(
    ("built", "said", "message"),
    [
        (NVFP4_WEIGHTS, NVFP4, r"c_fc: one input is NVFP4, the other is not"),
        (NVFP4, NVFP4_WEIGHTS, r"c_fc: its activation is NVFP4, expected its weight alone"),
        (NVFP4_WEIGHTS, INT4, r"c_fc\.weight\.dequantize does not read an INT4 Quantize"),
        (INT4, NVFP4_WEIGHTS, r"c_fc\.weight\.dequantize does not read an NVFP4 CONSTANT"),
        (NVFP4, VARIANTS["fp8"], r"c_fc\.input\.dequantize does not read an FP8 Quantize"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_another_row_s_network_is_seen(build, built, said, message):
    """A network that quantizes otherwise than its row says is refused by what differs."""
    network = replace(build(built), variant=said)
    with pytest.raises(BuildError, match=message):
        quantization_of(network)


@pytest.mark.parametrize("phase", PHASES)
def test_fingerprints_describe_blocks(build, wide, phase):
    """Built again of other weights it is the same network; another format or type is another."""
    found = {name: fingerprint(build(row, phase)) for name, row in ROWS.items()}
    other = tiny_checkpoint(wide.architecture, seed=7)
    assert len(set(found.values())) == len(ROWS)
    for name, row in ROWS.items():
        assert fingerprint(build(row, phase, other, 3.0)) == found[name]


def test_a_packed_constant_without_its_bytes_is_refused(build):
    """The interpreter never guesses what TensorRT does not show."""
    network = replace(build(NVFP4), packed={})
    with pytest.raises(RunError, match=r"weight: TensorRT shows no values of DataType\.FP4"):
        Interpreter(network)


# Plans


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_plan_builds_without_a_gpu(backend, wide, tmp_path, row, phase):
    """Both phases of every row, NVFP4 for a compute capability that has it."""
    request = PlanRequest(backend, wide, row, fixed_scales(wide), phase, 16)
    built = build_plan(request, tmp_path)
    assert built.log == ()
    assert request.built_for == (("12.0",) if row.quantized_format == "nvfp4" else ())
    assert plan_key(request) == plan_key(replace(request, capabilities=request.built_for))


def test_plans_of_nvfp4_for_a_gpu_are_for_that_gpu(backend, wide):
    """Where a GPU runs the plan, and where capabilities are asked for, these are not changed."""
    request = PlanRequest(backend, wide, NVFP4, None, "decode", 16)
    assert replace(request, gpu="NVIDIA B200, driver 580").built_for == ()
    assert replace(request, capabilities=("12.1",)).built_for == ("12.1",)
    assert replace(request, backend=replace(backend, flavour="tensorrt")).built_for == ()


def test_nvfp4_is_refused_for_a_gpu_without_it(backend, wide, tmp_path):
    """That is why it is not built for TensorRT's default."""
    for row in (NVFP4, NVFP4_WEIGHTS):
        request = PlanRequest(
            backend, wide, row, fixed_scales(wide), "decode", 16, capabilities=("8.9",)
        )
        with pytest.raises(BuildError, match=r"Cannot compile for target.*sm89.*fp4_e2m1"):
            build_plan(request, tmp_path)


def test_plans_are_smaller_by_what_weights_hold_less(backend, bundled, tmp_path):
    """INT4 takes less than INT8, NVFP4 less than fp16, also beside the kernels that each needs.

    On so small a checkpoint kernels take more than half of what 4 bits save over 8.
    """
    rows = {
        "fp16": VARIANTS["fp16"],
        "int8": replace(INT4, name="int8", quantized_format="int8", weight_scales="channel"),
        "int4": INT4,
        "nvfp4": NVFP4_WEIGHTS,
    }
    found = {
        name: build_plan(PlanRequest(backend, bundled, row, None, "decode", 64), tmp_path).plan_mib
        for name, row in rows.items()
    }
    modules = INT4.quantized_modules(bundled.architecture.num_layers)
    weights = sum(bundled.weights[f"{module}.weight"].size for module in modules) / MIB
    assert found["int4"] < found["int8"] - 0.2 * weights
    assert found["nvfp4"] < found["fp16"] - 0.8 * weights
