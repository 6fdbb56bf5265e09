"""Cases at the size that they name: T0 with 256 positions, a window of 4, and its full cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import T0, fixed_scales, kl_nats, tiny_checkpoint

from gptneo_trt import decoder, reference
from gptneo_trt.decoder import DecodeLoop
from gptneo_trt.errors import BuildError, RunError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import PHASES, build_network
from gptneo_trt.variants import VARIANTS
from tests.gate.last_rows import last_rows, padded

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 256
TOKENS = np.random.default_rng(11).integers(0, 64, (1, CONTEXT)).astype(np.int32)
# Mean KL of a text of 256 tokens in interpreted float16; a wrong mask or position gives over 0.01.
NOISE_NATS = {"fp32": 1e-9, "fp16": 1e-3}


@pytest.fixture(scope="module")
def checkpoint():
    """Return T0 with 256 positions."""
    return tiny_checkpoint(replace(T0, max_positions=CONTEXT))


@pytest.fixture(scope="module")
def executor(backend, checkpoint):
    """Return a function (row, phase) -> its interpreter, each once."""
    made = {}

    def make(row, phase):
        if (row, phase) not in made:
            scales = fixed_scales(checkpoint)
            network = build_network(backend, checkpoint, VARIANTS[row], scales, phase, CONTEXT)
            made[row, phase] = Interpreter(network)
        return made[row, phase]

    return make


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return Hugging Face's float32 logits of TOKENS."""
    return reference.logits(reference.torch_model(checkpoint, torch.float32), TOKENS)


def steps_after(loop, decoded, tokens):
    """Put the K and V rows of a prefill into a loop, and step through the tokens that follow."""
    length = decoded.logits.shape[1]
    loop.start(torch.from_numpy(tokens)[:, None])
    for part, rows in enumerate((decoded.keys, decoded.values)):
        loop.cache[:, part, :, 0, :, :length] = torch.from_numpy(rows).transpose(0, 1)
    loop.seek(length)
    for _ in range(tokens.shape[1] - length):
        loop.step()
    return loop.decoded()


@pytest.mark.parametrize("row", NOISE_NATS)
@pytest.mark.parametrize("length", [1, 3, 255])
def test_N04_text_padded_to_256(executor, checkpoint, expected, row, length):
    """Valid rows are the unpadded reference's, K and V finite; the next step is at ``length``."""
    prefill, architecture = executor(row, "prefill"), checkpoint.architecture
    text = TOKENS[0, :length]
    decoded = decoder.prefill(prefill, architecture, padded([text], CONTEXT))

    assert kl_nats(expected[:, :length], decoded.logits[:, :length]).mean() < NOISE_NATS[row]
    assert np.isfinite(decoded.keys).all()
    assert np.isfinite(decoded.values).all()
    last = last_rows(
        lambda ids: decoder.prefill(prefill, architecture, ids).logits, [text], (CONTEXT,)
    )
    assert np.array_equal(last[0], decoded.logits[0, length - 1])
    valid = replace(
        decoded,
        logits=decoded.logits[:, :length],
        keys=decoded.keys[..., :length, :],
        values=decoded.values[..., :length, :],
    )
    loop = DecodeLoop(executor(row, "decode"), architecture, 1, CONTEXT)
    next_step = steps_after(loop, valid, TOKENS[:, : length + 1]).logits[:, length]
    assert kl_nats(expected[:, length], next_step).max() < NOISE_NATS[row]


@pytest.mark.parametrize("row", NOISE_NATS)
@pytest.mark.parametrize("phase", PHASES)
def test_N04_N05_all_256_positions(executor, checkpoint, expected, row, phase):
    """A text that fills the cache is the reference's at every position, in both phases."""
    run = {"prefill": decoder.prefill, "decode": decoder.decode}[phase]
    obtained = run(executor(row, phase), checkpoint.architecture, TOKENS).logits
    kl = kl_nats(expected, obtained)
    assert kl.mean() < NOISE_NATS[row]
    assert kl.max() < 100 * NOISE_NATS[row]


@pytest.mark.parametrize("row", NOISE_NATS)
@pytest.mark.parametrize("length", [1, 5, 200])
def test_N05_prefill_then_steps(executor, checkpoint, expected, row, length):
    """Prefill of 1, 5 or 200 tokens and steps from there give what prefill of all gives."""
    architecture, total = checkpoint.architecture, max(6, length + 20)
    start = decoder.prefill(executor(row, "prefill"), architecture, TOKENS[:, :length])
    loop = DecodeLoop(executor(row, "decode"), architecture, 1, CONTEXT)
    obtained = steps_after(loop, start, TOKENS[:, :total]).logits[:, length:]
    assert kl_nats(expected[:, length:total], obtained).mean() < NOISE_NATS[row]


@pytest.mark.parametrize("phase", PHASES)
def test_N05_masks_are_bool_without_a_causal_flag(executor, phase):
    """Every attention layer has a mask of bool and no causal flag, which exclude each other."""
    network = executor("fp16", phase).network
    trt, definition = network.backend.trt, network.definition
    found = 0
    for index in range(definition.num_layers):
        layer = definition.get_layer(index)
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer
            found += 1
            assert layer.attention.mask.dtype == trt.DataType.BOOL
            assert layer.attention.causal_kind == trt.CausalMaskKind.NONE
    assert found == 2


@pytest.mark.parametrize("left", [np.nan, 6e4], ids=str)
def test_R02_a_short_text_after_one_of_200(executor, checkpoint, left):
    """3 tokens and 5 steps are bitwise the same alone, after 200 tokens and in a poisoned cache."""
    architecture, text = checkpoint.architecture, TOKENS[:, 100:108]
    prefill, decode = executor("fp16", "prefill"), executor("fp16", "decode")
    start = decoder.prefill(prefill, architecture, text[:, :3])
    alone = steps_after(DecodeLoop(decode, architecture, 1, CONTEXT), start, text)

    used = DecodeLoop(decode, architecture, 1, CONTEXT)
    long = decoder.prefill(prefill, architecture, TOKENS[:, :200])
    steps_after(used, long, TOKENS)
    after = steps_after(used, decoder.prefill(prefill, architecture, text[:, :3]), text)
    used.cache.fill_(left)
    poisoned = steps_after(used, start, text)

    for name, expected in vars(alone).items():
        for obtained in (after, poisoned):
            assert np.array_equal(vars(obtained)[name], expected, equal_nan=name == "logits"), name
    assert np.isfinite(poisoned.keys).all()


def test_R03_one_token_too_many(executor, checkpoint):
    """257 tokens, and 250 with 10 steps, are refused with the limit and the length, unrun."""
    architecture = checkpoint.architecture
    long = np.zeros((1, 257), np.int32)
    with pytest.raises(RunError, match="257 tokens, the prefill network takes 256"):
        decoder.prefill(executor("fp16", "prefill"), architecture, long)
    with pytest.raises(RunError, match="260 tokens, the decode network takes 256"):
        decoder.decode(executor("fp16", "decode"), architecture, long.repeat(2, 1)[:, :260])
    with pytest.raises(RunError, match="260 steps, expected 1 to 256"):
        DecodeLoop(executor("fp16", "decode"), architecture, 1, 260)
    loop = DecodeLoop(executor("fp16", "decode"), architecture, 1, 256)
    with pytest.raises(RunError, match="260 tokens, room for 256"):
        loop.start(torch.zeros((1, 1, 260), dtype=torch.int32))


@pytest.mark.parametrize("phase", PHASES)
def test_R03_cache_beyond_the_position_table(backend, phase):
    """A checkpoint of 128 positions has no network of 256."""
    short = tiny_checkpoint(replace(T0, max_positions=128))
    with pytest.raises(BuildError, match=r"context 256: .* has 128 positions; choose 1 to 128"):
        build_network(backend, short, VARIANTS["fp16"], None, phase, CONTEXT)
