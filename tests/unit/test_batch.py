"""Networks of a batch: each text gives what it gives alone, at positions of its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import fixed_scales, ragged_feeds

from gptneo_trt import decoder
from gptneo_trt.errors import BuildError, RunError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import PHASES, build_network
from gptneo_trt.plans import PlanRequest, build_plan
from gptneo_trt.variants import VARIANTS

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, CONTEXT = 3, 12
RUN = {"prefill": decoder.prefill, "decode": decoder.decode}
TOKENS = np.random.default_rng(5).integers(0, 64, (2 * BATCH, CONTEXT)).astype(np.int32)
# What a network may get wrong -> the layer whose output is that of text 0 for the whole batch.
MUTANTS = {"masks of text 0": "mask.query_positions", "places of text 0": "transformer.wpe"}


@pytest.fixture(scope="module")
def network_of(backend, t0):
    """Return a function (phase, batch, row) -> Network of T0."""

    def build(phase, batch, row="fp16"):
        scales = fixed_scales(t0)
        return build_network(backend, t0, VARIANTS[row], scales, phase, CONTEXT, batch)

    return build


def feeds_of(phase, seed=0):
    """Return the interpreter's inputs of one batch, each text at positions of its own."""
    arrays = ragged_feeds(phase, BATCH, CONTEXT, seed)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {
        name: each.float() if each.is_floating_point() else each for name, each in tensors.items()
    }


def one_by_one(outputs):
    """Return outputs [1, B, ...] as those of B batches of one text."""
    return {name: tensor.transpose(0, 1) for name, tensor in outputs.items()}


def with_text_0_for_all(executor, layer):
    """Return the interpreter with the output of a layer replaced by that of text 0 for all."""

    def of_text_0(operation):
        def run(*inputs):
            output = operation(*inputs)
            return output[:, :1].expand_as(output)

        return run

    executor._steps = tuple(
        replace(step, operation=of_text_0(step.operation)) if step.name == layer else step
        for step in executor._steps
    )
    return executor


def differences(obtained, expected):
    """Return the names of the outputs that are not bitwise the same."""
    assert obtained.keys() == expected.keys()
    return {name for name in expected if not torch.equal(obtained[name], expected[name])}


@pytest.mark.parametrize("row", ["fp32", "fp16", "fp8-all"])
@pytest.mark.parametrize("phase", PHASES)
def test_texts_of_a_batch_are_texts_alone(network_of, phase, row):
    """Of other tokens, at other positions, over other caches: bitwise what batch 1 gives."""
    feeds = feeds_of(phase)
    together, alone = (Interpreter(network_of(phase, batch, row)) for batch in (BATCH, 1))

    obtained = one_by_one(together.run(feeds))

    assert differences(obtained, alone.run(one_by_one(feeds))) == set()
    assert (together.batch, alone.batch) == (BATCH, 1)


@pytest.mark.parametrize("layer", MUTANTS.values(), ids=MUTANTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_network_that_looks_at_text_0_alone_is_seen(network_of, phase, layer):
    """The check above can fail: with masks or places of text 0 the other texts differ."""
    feeds = feeds_of(phase)
    expected = one_by_one(Interpreter(network_of(phase, BATCH)).run(feeds))
    mutant = with_text_0_for_all(Interpreter(network_of(phase, BATCH)), layer)

    obtained = one_by_one(mutant.run(feeds))

    assert "logits" in differences(obtained, expected)
    first, *others = (
        np.array_equal(obtained["logits"][i], expected["logits"][i]) for i in (0, 1, 2)
    )
    assert (first, others) == (True, [False, False])


@pytest.mark.parametrize("phase", PHASES)
def test_batches_of_texts_together_are_batches_one_by_one(network_of, phase):
    """The interpreter takes any number of batches: the axis of texts is in front of the batch."""
    executor = Interpreter(network_of(phase, BATCH))
    batches = [feeds_of(phase, seed) for seed in range(2)]

    obtained = executor.run({name: torch.cat([b[name] for b in batches]) for name in batches[0]})

    parts = [executor.run(batch) for batch in batches]
    assert differences(obtained, {n: torch.cat([p[n] for p in parts]) for n in obtained}) == set()


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_decoder_fills_batches(network_of, t0, phase, at_once):
    """6 texts in 2 batches of 3 give bitwise what they give one by one, in order."""
    together, alone = (Interpreter(network_of(phase, batch)) for batch in (BATCH, 1))
    together.batches_at_once = at_once

    obtained = RUN[phase](together, t0.architecture, TOKENS)

    for name, expected in vars(RUN[phase](alone, t0.architecture, TOKENS)).items():
        assert np.array_equal(vars(obtained)[name], expected), name


@pytest.mark.parametrize("phase", PHASES)
def test_R03_texts_that_do_not_fill_a_batch_are_refused(network_of, t0, phase):
    """4 texts in batches of 3 would need two that nobody gave."""
    executor = Interpreter(network_of(phase, BATCH))
    with pytest.raises(
        RunError, match=f"variant fp16, {phase}: 4 texts, expected a multiple of the batch 3"
    ):
        RUN[phase](executor, t0.architecture, TOKENS[:4])


@pytest.mark.parametrize("texts", [0, 4])
def test_R03_a_loop_of_a_part_of_a_batch_is_refused(network_of, t0, texts):
    """A loop has room for whole batches, and for one at least."""
    executor = Interpreter(network_of("decode", BATCH))
    with pytest.raises(RunError, match=f"{texts} texts, expected a multiple of the batch 3"):
        decoder.DecodeLoop(executor, t0.architecture, texts, 4)


def test_a_loop_hands_out_whole_tensors(network_of, t0):
    """What a loop feeds is contiguous, and positions start at a multiple of 256 bytes."""
    loop = decoder.DecodeLoop(Interpreter(network_of("decode", BATCH)), t0.architecture, BATCH, 4)
    start = loop.feeds["position_ids"].data_ptr() - loop._counters.data_ptr()
    assert [name for name, feed in loop.feeds.items() if not feed.is_contiguous()] == []
    assert start % 256 == 0
    loop.seek(3)
    assert loop.feeds["position_ids"].tolist() == [[[3], [3], [3]]]
    assert loop._position.tolist() == [3]


@pytest.mark.parametrize("phase", PHASES)
def test_a_batch_of_no_text_has_no_network(network_of, phase):
    """A dimension of 0, or of -1, is refused before TensorRT sees it."""
    for batch in (0, -1):
        with pytest.raises(BuildError, match=f"batch {batch}: expected 1 or more"):
            network_of(phase, batch)


@pytest.mark.parametrize("row", ["fp16", "fp8"])
@pytest.mark.parametrize("phase", PHASES)
def test_plans_of_a_batch_build(backend, t0, tmp_path, phase, row):
    """TensorRT takes masks of a text each, and in prefill a profile of the batch."""
    scales = fixed_scales(t0)
    request = PlanRequest(backend, t0, VARIANTS[row], scales, phase, CONTEXT, batch=BATCH)
    assert build_plan(request, tmp_path).plan_mib > 0
