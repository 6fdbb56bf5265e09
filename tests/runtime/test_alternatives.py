"""What a user would run instead of an engine computes on a GPU what the engine computes."""

import numpy as np
import pytest

from gptneo_trt import decoder
from gptneo_trt.alternatives import ALTERNATIVES, READ_SAMPLE, alternative
from gptneo_trt.static_step import seeded_token_ids
from tests.gate.measurer import CONTEXT
from tests.unit.tiny import kl_nats

pytestmark = pytest.mark.runtime

# Nats to the fp16 network, on the bundled checkpoint. Interpreted on a CPU, the static step in
# float16 is 5e-6 away, and Hugging Face's bf16 model 5e-4 (9e-4 at the last position).
STATIC_NATS, BF16_NATS = 1e-4, 3e-3
TOP1_FRAC = 0.97  # of 256 positions; bf16 agrees on 0.996
# Batch and context. The last logits of these texts have one that is largest by 0.5 or more.
SHAPES = [(1, CONTEXT), (3, CONTEXT)]
ROWS = [(row.name, row.phase) for row in ALTERNATIVES if row.name != "weights_read"]


@pytest.fixture(scope="module")
def expected(engine_of, checkpoints):
    """Return the fp16 engine's logits [B, T, V] of the texts of every alternative."""
    checkpoint = checkpoints["bundled"]
    token_ids = seeded_token_ids(checkpoint, SHAPES[-1]).astype(np.int32)
    engine = engine_of("prefill", "fp16", "bundled")
    return decoder.prefill(engine, checkpoint.architecture, token_ids).logits


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "phase"), ROWS)
def test_alternative_gives_the_engines_logits(checkpoints, expected, name, phase, shape):
    """Eager, captured or compiled: the same texts give the same distribution, time and again."""
    timed = alternative(name, phase, checkpoints["bundled"], shape, "cuda")
    outputs = []
    for _ in range(3):
        timed.prepare()
        timed.replay()
        outputs.append(np.array(timed.outputs()))
    assert [each.tobytes() for each in outputs] == 3 * [outputs[0].tobytes()]
    obtained, wanted = outputs[0], expected[: shape[0]]
    wanted = wanted[:, -1] if phase == "decode" else wanted
    assert obtained.shape == wanted.shape
    assert kl_nats(wanted, obtained).mean() < (STATIC_NATS if "static" in name else BF16_NATS)
    assert np.mean(wanted.argmax(-1) == obtained.argmax(-1)) > TOP1_FRAC


def test_weights_read_copies_the_weights(checkpoints):
    """Each replay copies: values that were cleared before it are the first weights again."""
    weights = [array.ravel() for array in checkpoints["bundled"].weights.values()]
    timed = alternative("weights_read", "decode", checkpoints["bundled"], SHAPES[0], "cuda")
    timed.prepare()
    assert not timed.outputs().any()
    timed.replay()
    expected = np.concatenate(weights)[:READ_SAMPLE].astype(np.float16)
    assert np.array_equal(timed.outputs(), expected)
