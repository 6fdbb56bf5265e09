"""Engines of a batch: each text gives what an engine of batch 1 gives, at positions of its own."""

import numpy as np
import pytest
import torch

from gptneo_trt import decoder
from gptneo_trt.network import PHASES
from tests.gate.measurer import CONTEXT
from tests.unit.tiny import kl_nats, ragged_feeds

pytestmark = [pytest.mark.runtime, pytest.mark.parametrize("phase", PHASES)]

BATCH = 4
TOKENS = np.random.default_rng(5).integers(0, 64, (2 * BATCH, CONTEXT)).astype(np.int32)
# See test_engine.py. A single position is up to a hundred times as far off as the mean; positions
# of another text cost about 1 nat (interpreted).
NOISE_NATS = 1e-4
CACHE_NOISE = 0.2
RUN = {"prefill": decoder.prefill, "decode": decoder.decode}


@pytest.fixture
def together(engine_of, phase):
    """Return T0's fp16 engine of a batch of 4."""
    return engine_of(phase, "fp16", "t0", BATCH)


@pytest.fixture
def alone(engine_of, phase):
    """Return T0's fp16 engine of a batch of 1."""
    return engine_of(phase)


def ran(engine, feeds):
    """Return the engine's outputs of feeds [1, B, ...], batch by batch, [B, ...] on the host."""
    parts = []
    for start in range(0, BATCH, engine.batch):
        part = {name: feed[:, start : start + engine.batch] for name, feed in feeds.items()}
        outputs = engine.run({name: each.contiguous() for name, each in part.items()})
        parts.append({name: each[0].float().cpu().numpy() for name, each in outputs.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture
def feeds(phase):
    """Return the inputs of 4 texts of other tokens and caches, each at positions of its own."""
    arrays = ragged_feeds(phase, BATCH, CONTEXT)
    return {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}


def test_texts_of_a_batch_are_texts_alone(together, alone, checkpoints, phase):
    """8 texts that fill the context, in 2 batches: logits, K and V are those of batch 1."""
    architecture = checkpoints["t0"].architecture
    obtained, expected = (RUN[phase](each, architecture, TOKENS) for each in (together, alone))
    kl = kl_nats(expected.logits, obtained.logits)
    assert kl.mean(axis=-1).max() < NOISE_NATS
    assert kl.max() < 100 * NOISE_NATS
    np.testing.assert_allclose(obtained.keys, expected.keys, atol=CACHE_NOISE, rtol=0)
    np.testing.assert_allclose(obtained.values, expected.values, atol=CACHE_NOISE, rtol=0)


def test_each_text_has_positions_of_its_own(together, alone, feeds, phase):
    """With other positions a text, and so other masks, every output is that of batch 1."""
    obtained, expected = (ran(engine, feeds) for engine in (together, alone))
    kl = kl_nats(expected.pop("logits"), obtained.pop("logits"))
    assert kl.mean(axis=-1).max() < 10 * NOISE_NATS
    assert obtained.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_allclose(obtained[name], rows, atol=CACHE_NOISE, rtol=0, err_msg=name)


def test_positions_of_the_first_text_for_all_are_seen(together, alone, feeds, phase):
    """The check above can fail: the others are then far off, and the first one is not."""
    expected = ran(alone, feeds)["logits"]
    first = feeds["position_ids"][:, :1].expand_as(feeds["position_ids"])
    obtained = ran(together, feeds | {"position_ids": first})["logits"]
    kl = kl_nats(expected, obtained).mean(axis=-1)
    assert kl[0] < 10 * NOISE_NATS
    assert kl[1:].min() > 1000 * NOISE_NATS


def test_what_a_text_gives_does_not_depend_on_the_others(together, feeds, phase):
    """With other texts beside it in the batch, the first one gives the same bits."""
    before = ran(together, feeds)
    other = {name: torch.cat((each[:, :1], each[:, 1:].flip(1)), 1) for name, each in feeds.items()}
    after = ran(together, other)
    assert [name for name in before if before[name][0].tobytes() != after[name][0].tobytes()] == []
    assert not np.array_equal(before["logits"][1], after["logits"][1])
