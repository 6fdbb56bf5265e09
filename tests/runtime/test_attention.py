"""The attention of engines: the window acts where it must, scores are neither scaled nor lost."""

import pytest
import torch

from gptneo_trt import decoder, metrics, reference
from gptneo_trt.network import PHASES
from tests.runtime.conftest import SHORT
from tests.unit.scores import largest_score
from tests.unit.tiny import WINDOW_MUTANTS, kl_nats

pytestmark = [pytest.mark.runtime, pytest.mark.parametrize("phase", PHASES)]

NOISE_NATS = 1e-4  # see test_engine.py
RUN = {"prefill": decoder.prefill, "decode": decoder.decode}


@pytest.fixture
def run(engine_of, checkpoints, phase):
    """Return a function (checkpoint, row) -> what its engine gives of SHORT."""

    def decoded(name, row="fp16"):
        engine = engine_of(phase, row, name)
        return RUN[phase](engine, checkpoints[name].architecture, SHORT)

    return decoded


@pytest.fixture
def expected(checkpoints):
    """Return a function checkpoint -> Hugging Face's float32 logits of SHORT."""

    def logits(name):
        return reference.logits(reference.torch_model(checkpoints[name], torch.float32), SHORT)

    return logits


def test_N01_window_of_4_is_the_reference_s(run, expected, phase):
    """Of 12 tokens, 8 are beyond the window: the engine is within float16's noise everywhere."""
    kl = kl_nats(expected("t0"), run("t0").logits)
    assert kl.mean() < NOISE_NATS
    assert kl.max() < 10 * NOISE_NATS


@pytest.mark.parametrize("mutant", WINDOW_MUTANTS)
def test_N01_window_mutants_are_rejected(run, expected, mutant, phase):
    """An engine with another window is as good until the window acts, and then far off."""
    kl = kl_nats(expected("t0"), run(mutant).logits)
    first = 3 if mutant == "window 3" else 4
    assert kl[:, :first].max() < 10 * NOISE_NATS
    assert kl[:, first:].mean() > 100 * NOISE_NATS


def test_N02_scores_are_not_scaled(run, expected, phase):
    """(a) With |q.k| about 5 the engine matches; dividing by sqrt(head width) is far off."""
    logits = expected("scores of 5")
    assert kl_nats(logits, run("scores of 5").logits).max() < 10 * NOISE_NATS
    assert kl_nats(logits, run("scores of 5, divided").logits).mean() > 30 * NOISE_NATS


def test_N02_large_scores_match_in_float32(run, expected, checkpoints, phase):
    """(b) Scores of 7e4 in the float32 row give Hugging Face's distribution."""
    assert largest_score(checkpoints["scores of 7e4"], SHORT) > 65504
    obtained = run("scores of 7e4", "fp32").logits
    assert kl_nats(expected("scores of 7e4"), obtained).max() < 100 * NOISE_NATS


@pytest.mark.parametrize("row", ["fp16", "fp8-all"])
def test_N02_large_scores_stay_finite(run, row, phase):
    """(b) Scores of 7e4, above float16's range, leave logits, K and V finite.

    Else the first tensor that is not, and where, is named.
    """
    obtained = run("scores of 7e4", row)
    arrays = {"logits": obtained.logits, "keys": obtained.keys, "values": obtained.values}
    assert metrics.first_non_finite(arrays) is None
