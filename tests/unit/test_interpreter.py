"""The interpreter: what it takes and gives, and networks that it does not know."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import fixed_scales

from gptneo_trt.backend import create_network, log_collector
from gptneo_trt.errors import RunError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import Network, build_network
from gptneo_trt.variants import VARIANTS

TOKENS = torch.from_numpy(np.random.default_rng(5).integers(0, 64, (3, 1, 12)))
POSITIONS = torch.arange(12)[None, None].expand_as(TOKENS)
FEEDS = {"token_ids": TOKENS, "position_ids": POSITIONS}


def interpreter(backend, checkpoint, row, phase="prefill", context=16):
    """Return an interpreter of a row, with made-up ranges."""
    scales = fixed_scales(checkpoint)
    return Interpreter(build_network(backend, checkpoint, VARIANTS[row], scales, phase, context))


@pytest.fixture(scope="module")
def prefill(backend, t0):
    """Return the float16 prefill network of T0."""
    return interpreter(backend, t0, "fp16")


@pytest.fixture(scope="module")
def decode(backend, t0):
    """Return the float16 decode network of T0, 16 cache rows."""
    return interpreter(backend, t0, "fp16", "decode")


@pytest.fixture
def hand_made(backend):
    """Return a function that wraps a network made by hand for the interpreter."""
    trt = backend.trt

    def make(add):
        log = log_collector(trt)
        builder = trt.Builder(log.logger)
        definition = create_network(backend, builder)
        x = definition.add_input("x", trt.DataType.FLOAT, (2, 4))
        for tensor in add(definition, x):
            definition.mark_output(tensor)
        return Network(backend, builder, definition, log, VARIANTS["fp32"], "prefill", 4, ())

    return make


@pytest.mark.parametrize(("row", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
def test_texts_together_are_texts_one_by_one(backend, t0, row, tolerance):
    """N texts at once give what each gives alone, up to the order of a sum."""
    executor = interpreter(backend, t0, row)
    together = executor.run(FEEDS)
    for text in range(len(TOKENS)):
        alone = executor.run({name: feed[text : text + 1] for name, feed in FEEDS.items()})
        for name, tensor in alone.items():
            expected = together[name][text : text + 1]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=tolerance)


def test_outputs_have_the_declared_shapes(prefill):
    """Logits [N, 1, T, V] and, for each layer, K and V [N, 1, H, T, D], all float32 tensors."""
    outputs = prefill.run(FEEDS)
    rows = {f"h.{i}.{part}": (3, 1, 2, 12, 16) for i in range(2) for part in ("key", "value")}
    assert {name: tuple(t.shape) for name, t in outputs.items()} == rows | {
        "logits": (3, 1, 12, 64)
    }
    assert {tensor.dtype for tensor in outputs.values()} == {torch.float32}


def test_values_are_of_the_declared_type(backend, t0, prefill):
    """In the float16 network every value is a float16; in the float32 one most are not."""
    for tensor in prefill.run(FEEDS).values():
        assert torch.equal(tensor.half().float(), tensor)
    for tensor in interpreter(backend, t0, "fp32").run(FEEDS).values():
        assert not torch.equal(tensor.half().float(), tensor)


def test_runs_repeat_and_leave_feeds_alone(decode):
    """Two runs of the same feeds are bitwise equal, and no feed is written to."""
    generator = torch.Generator().manual_seed(0)
    feeds = {"token_ids": TOKENS[..., :1], "position_ids": POSITIONS[..., 5:6]}
    for name in (f"past.h.{i}.{part}" for i in (0, 1) for part in ("key", "value")):
        feeds[name] = torch.randn((3, 1, 2, 16, 16), generator=generator).half().float()
    before = {name: feed.clone() for name, feed in feeds.items()}
    first, second = decode.run(feeds), decode.run(feeds)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(feeds[name], before[name]) for name in feeds)


def test_constants_are_evaluated_once(prefill):
    """Nothing that depends on weights alone is left to evaluate in a run."""
    held = prefill._constants
    assert all(not set(step.inputs) <= set(held) for step in prefill._steps)
    assert held


@pytest.mark.parametrize("folded", ["weight.scale", "weight.quantize"])
def test_quantized_weights_are_folded(backend, t0, folded):
    """A weight is rounded to FP8 once, at the start, and only the rounded one is kept."""
    executor = interpreter(backend, t0, "fp8")
    assert not [name for name in executor._constants if name.endswith(f"{folded}:0")]
    assert not [step.name for step in executor._steps if step.name.endswith(folded)]
    kept = executor._constants["transformer.h.1.mlp.c_fc.weight.dequantize:0"]
    assert len(kept.unique()) < 256


def test_wrong_feeds_are_all_named(decode):
    """Missing, unknown and wrongly shaped inputs are reported together, sorted."""
    feeds = {
        "token_ids": torch.zeros((1, 1, 2), dtype=torch.int64),
        "position_ids": torch.zeros((1, 1), dtype=torch.int64),
        "past.h.0.key": torch.zeros((1, 1, 2, 15, 16)),
        "past.h.0.value": torch.zeros((1, 1, 2, 16, 16)),
        "past.h.1.key": torch.zeros((1, 1, 2, 16, 16)),
        "past.h.2.key": torch.zeros((1, 1, 2, 16, 16)),
    }
    with pytest.raises(RunError) as caught:
        decode.run(feeds)
    assert str(caught.value) == (
        "variant fp16, decode: inputs: "
        "past.h.0.key: obtained (1, 2, 15, 16), expected (1, 2, 16, 16); "
        "past.h.1.value: missing; "
        "past.h.2.key: no such input; "
        "position_ids: obtained (1,), expected (1, 1); "
        "token_ids: obtained (1, 2), expected (1, 1)"
    )


def test_right_feeds_after_wrong_ones(prefill):
    """After a refusal the next correct run gives what it gave before."""
    expected = prefill.run(FEEDS)["logits"]
    with pytest.raises(RunError, match="position_ids: missing"):
        prefill.run({"token_ids": TOKENS})
    assert torch.equal(prefill.run(FEEDS)["logits"], expected)


def test_unknown_layer_type_is_refused(hand_made):
    """A network with one layer that has no reader is refused when it is read, by that name."""

    def add(definition, x):
        layer = definition.add_softmax(x)
        layer.name = "scores"
        return [layer.get_output(0)]

    with pytest.raises(RunError, match="layer scores: type SOFTMAX has no reader"):
        Interpreter(hand_made(add))


def test_two_outputs_are_refused(backend, hand_made):
    """A layer with two outputs is refused by name, whatever it is."""

    def add(definition, x):
        layer = definition.add_topk(x, backend.trt.TopKOperation.MAX, 1, 2)
        layer.name = "best"
        return [layer.get_output(0)]

    with pytest.raises(RunError, match="layer best: 2 outputs, expected 1"):
        Interpreter(hand_made(add))


def test_unknown_type_is_refused(backend, hand_made):
    """A tensor of a type that cannot be rounded to is refused, although a reader exists."""
    trt = backend.trt

    array = np.ones((4,), np.uint8)

    def add(definition, x):
        return [definition.add_constant((4,), trt.Weights(array)).get_output(0)]

    with pytest.raises(RunError, match=r"tensor type .*UINT8"):
        Interpreter(hand_made(add))


def test_a_constant_may_be_an_output(backend, hand_made):
    """An output that depends on no input is given too."""
    array = np.arange(8, dtype=np.float32).reshape(2, 4)

    def add(definition, x):
        added = definition.add_constant((2, 4), backend.trt.Weights(array)).get_output(0)
        added.name = "constant"
        total = definition.add_elementwise(x, added, backend.trt.ElementWiseOperation.SUM)
        total.get_output(0).name = "sum"
        return [added, total.get_output(0)]

    outputs = Interpreter(hand_made(add)).run({"x": torch.ones(1, 2, 4)})
    np.testing.assert_array_equal(outputs["constant"][0].numpy(), array)
    np.testing.assert_array_equal(outputs["sum"][0].numpy(), array + 1)


def test_wide_variant_is_the_narrow_one_without_rounding(backend, t0):
    """FP8 with float32 around it differs from FP8 with float16: types are taken from layers."""
    scales = fixed_scales(t0)
    wide = replace(VARIANTS["fp8"], compute_type="fp32", dequantize_type="fp32")
    logits = [
        Interpreter(build_network(backend, t0, row, scales, "prefill", 16)).run(FEEDS)["logits"]
        for row in (wide, VARIANTS["fp8"], VARIANTS["fp32"])
    ]
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
