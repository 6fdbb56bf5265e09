"""The decoder on the interpreter: Hugging Face's logits, by prefill and step by step."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scores import largest_score, with_scores
from tiny import (
    WINDOW_MUTANTS,
    fixed_scales,
    kl_nats,
    tiny_checkpoint,
    with_divided_queries,
)

from gptneo_trt import decoder, metrics, reference
from gptneo_trt.errors import RunError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import PHASES, build_network
from gptneo_trt.texts import text_set
from gptneo_trt.variants import VARIANTS

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = np.random.default_rng(5).integers(0, 61, (2, 64)).astype(np.int32)
# Interpreted float16 is about 6e-6 nats from float32 on the first 12 tokens, 6e-5 on all 64.
NOISE_NATS = 1e-4
FP32_LOGITS = 1e-3


@pytest.fixture(scope="module")
def expected(t0):
    """Return Hugging Face's float32 logits of TOKENS."""
    return reference.logits(reference.torch_model(t0, torch.float32), TOKENS)


@pytest.fixture(scope="module")
def executor(backend):
    """Return a function that interprets a checkpoint, each combination once."""
    made = {}

    def make(checkpoint, row="fp16", phase="prefill", context=64):
        key = (checkpoint.sha256, checkpoint.architecture, row, phase, context)
        if key not in made:
            scales = fixed_scales(checkpoint)
            network = build_network(backend, checkpoint, VARIANTS[row], scales, phase, context)
            made[key] = Interpreter(network)
        return made[key]

    return make


@pytest.fixture(scope="module")
def run(executor):
    """Return a function that runs tokens [N, T] through one phase of a row."""

    def run_phase(checkpoint, tokens, row="fp16", phase="prefill"):
        phases = {"prefill": decoder.prefill, "decode": decoder.decode}
        made = executor(checkpoint, row, phase, checkpoint.architecture.max_positions)
        return phases[phase](made, checkpoint.architecture, tokens)

    return run_phase


def float32_logits(checkpoint, tokens):
    """Return Hugging Face's float32 logits."""
    return reference.logits(reference.torch_model(checkpoint, torch.float32), tokens)


@pytest.mark.parametrize("phase", PHASES)
def test_bundled_checkpoint_equals_hugging_face(run, bundled, phase):
    """Interpreted float32 logits of 256 prose tokens are Hugging Face's at every position."""
    text = text_set("prose", "bundled", bundled.tokenizer_file, 256)
    tokens = text.token_ids[0][None]
    obtained = run(bundled, tokens, "fp32", phase).logits
    np.testing.assert_allclose(obtained, float32_logits(bundled, tokens), atol=FP32_LOGITS, rtol=0)


@pytest.mark.parametrize("length", [1, 12, 64])
@pytest.mark.parametrize("phase", PHASES)
def test_N01_tiny_checkpoint_equals_hugging_face(run, t0, expected, phase, length):
    """T0's float32 logits are Hugging Face's from one token to the full position table."""
    obtained = run(t0, TOKENS[:, :length], "fp32", phase).logits
    np.testing.assert_allclose(obtained, expected[:, :length], atol=FP32_LOGITS, rtol=0)


@pytest.mark.parametrize("phase", PHASES)
def test_N01_float16_is_near_at_every_position(run, t0, expected, phase):
    """The float16 row is within its noise on average, and nowhere as far as a mutant is."""
    kl = kl_nats(expected, run(t0, TOKENS, "fp16", phase).logits)
    assert kl.mean() < NOISE_NATS
    assert kl.max() < 100 * NOISE_NATS


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("change", WINDOW_MUTANTS.values(), ids=WINDOW_MUTANTS)
def test_N01_window_mutants_are_rejected(run, t0, expected, phase, change):
    """A network with another window is as good until the window acts, and then far off."""
    mutant = replace(t0, architecture=replace(t0.architecture, **change))
    kl = kl_nats(expected[:, :12], run(mutant, TOKENS[:, :12], "fp16", phase).logits)
    first = 3 if change.get("window_size") == 3 else 4
    assert kl[:, :first].max() < NOISE_NATS
    assert kl[:, first:].mean() > 100 * NOISE_NATS


@pytest.mark.parametrize("phase", PHASES)
def test_N02_scores_are_not_scaled(run, t0, phase):
    """(a) With |q.k| about 5 the network matches; dividing by sqrt(head width) is far off."""
    tokens = TOKENS[:, :12]
    checkpoint = with_scores(t0, tokens, 5.0)
    assert 4 < largest_score(checkpoint, tokens) < 6
    divided = with_divided_queries(checkpoint, 4)
    expected = float32_logits(checkpoint, tokens)
    assert kl_nats(expected, run(checkpoint, tokens, "fp16", phase).logits).max() < NOISE_NATS
    mutant = kl_nats(expected, run(divided, tokens, "fp16", phase).logits)
    assert mutant.mean() > 30 * NOISE_NATS


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", ["fp16", "fp8-all"])
def test_N02_large_scores_stay_finite(run, t0, phase, row):
    """(b) Scores of 7e4, above float16's range, leave logits, K and V finite."""
    tokens = TOKENS[:, :12]
    checkpoint = with_scores(t0, tokens, 7e4)
    assert largest_score(checkpoint, tokens) > 65504
    obtained = run(checkpoint, tokens, row, phase)
    assert all(np.isfinite(array).all() for array in vars(obtained).values())


@pytest.mark.parametrize("phase", PHASES)
def test_N02_large_scores_match_in_float32(run, t0, phase):
    """(b) The same scores in the float32 row give Hugging Face's distribution."""
    tokens = TOKENS[:, :12]
    checkpoint = with_scores(t0, tokens, 7e4)
    obtained = run(checkpoint, tokens, "fp32", phase).logits
    assert kl_nats(float32_logits(checkpoint, tokens), obtained).max() < NOISE_NATS


@pytest.mark.parametrize("phase", PHASES)
def test_N02_large_scores_have_a_normal_kl_in_float16(run, t0, phase):
    """(b) Nor does the float16 row lose more than it does with small scores."""
    tokens = TOKENS[:, :12]
    checkpoint = with_scores(t0, tokens, 7e4)
    kl = kl_nats(float32_logits(checkpoint, tokens), run(checkpoint, tokens, "fp16", phase).logits)
    assert kl.mean() < NOISE_NATS


@pytest.mark.parametrize("phase", PHASES)
def test_N02_float16_scores_are_named_by_tensor_and_position(run, t0, phase, monkeypatch):
    """(b) A mutant that keeps scores in float16 overflows, and the first bad value is named."""
    tokens = TOKENS[:, :12]
    checkpoint = with_scores(t0, tokens, 4e5)  # so high also where they are positive and visible

    def half_scores(query, key, value, attn_mask, scale):
        scores = (query @ key.transpose(-1, -2)).half().float()
        masked = scores.masked_fill(~attn_mask, -torch.inf)
        return masked.softmax(-1) @ value

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", half_scores)
    decoded = run(checkpoint, tokens, "fp16", phase)
    found = metrics.first_non_finite({"keys": decoded.keys, "logits": decoded.logits})
    assert re.fullmatch(r"(keys|logits)\[[\d, ]+\] = nan", found)


@pytest.mark.parametrize("pad", [0, 60])
@pytest.mark.parametrize("row", ["fp32", "fp16"])
def test_N04_padding_on_the_right_changes_nothing(run, t0, row, pad):
    """3 tokens padded to 64 give the rows of the 3 alone, up to the order of a sum."""
    padded = np.full((2, 64), pad, np.int32)
    padded[:, :3] = TOKENS[:, :3]
    long, short = run(t0, padded, row), run(t0, TOKENS[:, :3], row)
    tolerance = {"fp32": 1e-5, "fp16": 1e-2}[row]
    np.testing.assert_allclose(long.logits[:, :3], short.logits, atol=tolerance, rtol=0)
    np.testing.assert_allclose(long.keys[..., :3, :], short.keys, atol=tolerance, rtol=0)
    np.testing.assert_allclose(long.values[..., :3, :], short.values, atol=tolerance, rtol=0)
    assert all(np.isfinite(array).all() for array in vars(long).values())


def test_N04_the_padding_itself_has_no_influence(run, t0):
    """Two paddings give bitwise the same valid rows, and other rows beyond them."""
    padded = [np.full((2, 64), pad, np.int32) for pad in (0, 60)]
    for tokens in padded:
        tokens[:, :3] = TOKENS[:, :3]
    first, second = (run(t0, tokens, "fp16") for tokens in padded)
    assert np.array_equal(first.logits[:, :3], second.logits[:, :3])
    assert np.array_equal(first.keys[..., :3, :], second.keys[..., :3, :])
    assert not np.array_equal(first.logits[:, 3:], second.logits[:, 3:])


def step(executor, prefix, token, position, beyond=0.0):
    """Feed one token after a prefix whose K and V rows are put into the cache by hand.

    Rows at and beyond the position hold ``beyond``.
    """
    feeds = {
        "token_ids": torch.tensor(token)[:, None, None],
        "position_ids": torch.full((len(token), 1, 1), position),
    }
    context = executor.context
    for part, rows in (("key", prefix.keys), ("value", prefix.values)):
        texts, layers, heads, length, width = rows.shape
        for layer in range(layers):
            cache = torch.full((texts, 1, heads, context, width), beyond)
            cache[:, 0, :, :length] = torch.from_numpy(rows[:, layer])
            feeds[f"past.h.{layer}.{part}"] = cache
    return executor.run(feeds)


@pytest.mark.parametrize("row", ["fp32", "fp16", "fp8-all"])
def test_N04_cache_beyond_the_position_is_not_read(executor, run, t0, row):
    """Cache rows at and beyond the position may hold 6e4: the outputs are bitwise the same."""
    prefix, decode = run(t0, TOKENS[:, :5], row), executor(t0, row, "decode")
    clean, dirty = (step(decode, prefix, TOKENS[:, 5], 5, beyond) for beyond in (0.0, 6e4))
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_N04_cache_before_the_position_is_read(executor, run, t0):
    """The check above can fail: 6e4 in the row just before the position changes the logits."""
    prefix, decode = run(t0, TOKENS[:, :5], "fp16"), executor(t0, "fp16", "decode")
    clean = step(decode, prefix, TOKENS[:, 5], 5)
    prefix.values[..., 4, :] = 6e4
    assert not torch.equal(clean["logits"], step(decode, prefix, TOKENS[:, 5], 5)["logits"])


@pytest.mark.parametrize("row", ["fp32", "fp16"])
def test_N05_three_ways_to_the_sixth_token(executor, run, t0, expected, row):
    """Prefill of 6, prefill of 5 and a step, and 6 steps agree, also with the reference."""
    prefix = run(t0, TOKENS[:, :5], row)
    one_step = step(executor(t0, row, "decode"), prefix, TOKENS[:, 5], 5)["logits"][:, 0, 0]
    ways = {
        "prefill": run(t0, TOKENS[:, :6], row).logits[:, 5],
        "prefill and a step": one_step.numpy(),
        "decode": run(t0, TOKENS[:, :6], row, "decode").logits[:, 5],
    }
    limit = {"fp32": 1e-9, "fp16": NOISE_NATS}[row]
    for way, obtained in ways.items():
        assert kl_nats(expected[:, 5], obtained).max() < limit, way
        assert kl_nats(ways["prefill"], obtained).max() < limit, way


@pytest.mark.parametrize("position", [4, 6])
def test_N05_another_position_is_rejected(executor, run, t0, expected, position):
    """A step at the wrong position is far from the reference: the check above can fail."""
    prefix = run(t0, TOKENS[:, :5], "fp32")
    obtained = step(executor(t0, "fp32", "decode"), prefix, TOKENS[:, 5], position)
    assert kl_nats(expected[:, 5], obtained["logits"][:, 0, 0].numpy()).mean() > NOISE_NATS


def test_N05_phases_agree_everywhere(run, t0):
    """Prefill and decode give the same logits, K and V at all 64 positions of the table."""
    prefill, decode = (run(t0, TOKENS, "fp32", phase) for phase in PHASES)
    for name, obtained in vars(decode).items():
        np.testing.assert_allclose(obtained, getattr(prefill, name), atol=1e-4, rtol=0)


def test_R02_nothing_of_the_previous_text_is_left(run, t0):
    """Decoding a text after a longer one gives bitwise what it gave before it."""
    first = run(t0, TOKENS[:1, :6], "fp16", "decode")
    run(t0, TOKENS[1:], "fp16", "decode")
    second = run(t0, TOKENS[:1, :6], "fp16", "decode")
    assert all(np.array_equal(vars(first)[name], vars(second)[name]) for name in vars(first))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("vocab_size", [61, 67])
def test_L08_odd_vocabulary(run, t0, phase, vocab_size):
    """A vocabulary that is no multiple of 8 works in float32, float16 and FP8."""
    checkpoint = tiny_checkpoint(replace(t0.architecture, vocab_size=vocab_size))
    tokens = TOKENS[:, :12]
    expected = float32_logits(checkpoint, tokens)
    obtained = {row: run(checkpoint, tokens, row, phase).logits for row in ("fp32", "fp16", "fp8")}
    assert obtained["fp8"].shape == (2, 12, vocab_size)
    np.testing.assert_allclose(obtained["fp32"], expected, atol=FP32_LOGITS, rtol=0)
    assert kl_nats(expected, obtained["fp16"]).max() < NOISE_NATS
    assert NOISE_NATS < kl_nats(expected, obtained["fp8"]).mean() < 1


ARCHITECTURES = {
    "untied head": {"tied_head": False},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu"},
    "epsilon": {"layer_norm_epsilon": 0.1},
    "narrow MLP": {"intermediate_size": 40},
    "one head": {"num_heads": 1},
    "all global": {"attention_layers": ("global", "global")},
    "all local": {"attention_layers": ("local",)},
    "window 1": {"window_size": 1},
    "wide window": {"window_size": 64},
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("change", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_L01_other_architectures_equal_hugging_face(run, t0, phase, change):
    """Heads, activations, epsilons, widths and windows of other checkpoints are followed."""
    checkpoint = tiny_checkpoint(replace(t0.architecture, **change))
    tokens = TOKENS[:, :12]
    obtained = run(checkpoint, tokens, "fp32", phase).logits
    expected = float32_logits(checkpoint, tokens)
    np.testing.assert_allclose(obtained, expected, atol=FP32_LOGITS, rtol=0)


def test_exact_gelu_is_not_the_tanh_form(run, t0):
    """Building "gelu_new" for a "gelu" checkpoint is seen: the check above can fail."""
    exact = tiny_checkpoint(replace(t0.architecture, activation="gelu"))
    mutant = replace(exact, architecture=t0.architecture)
    expected = float32_logits(exact, TOKENS)
    assert np.abs(run(mutant, TOKENS, "fp32").logits - expected).max() > FP32_LOGITS


WRONG_TOKENS = {
    "too long": (np.zeros((1, 9), np.int32), "9 tokens, the .* network takes 8; shorten"),
    "no token": (np.zeros((1, 0), np.int32), r"shape \(1, 0\), expected \[N, T\]"),
    "no text": (np.zeros((0, 3), np.int32), r"shape \(0, 3\), expected \[N, T\]"),
    "one axis": (np.zeros(3, np.int32), r"shape \(3,\), expected \[N, T\]"),
    "vocab_size": (np.array([[1, 64]]), "token ids 1 to 64, expected 0 to 63"),
    "negative": (np.array([[-1, 3]]), "token ids -1 to 3, expected 0 to 63"),
    "fractions": (np.array([[1.5, 3.0]]), "token ids of type float64, expected integers"),
    "no number": (np.array([[np.nan, 3.0]]), "token ids of type float64, expected integers"),
    "two at once": (np.full((1, 9), 64), "9 tokens, .*token ids 64 to 64, expected 0 to 63"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("tokens", "message"), WRONG_TOKENS.values(), ids=WRONG_TOKENS)
def test_R03_texts_that_do_not_fit_are_refused(executor, t0, phase, tokens, message):
    """A text that does not fit is refused with limit and value; the next one runs as before."""
    made = executor(t0, "fp16", phase, 8)
    decode = {"prefill": decoder.prefill, "decode": decoder.decode}[phase]
    expected = decode(made, t0.architecture, TOKENS[:, :8])
    with pytest.raises(RunError, match=f"variant fp16, {phase}: .*{message}"):
        decode(made, t0.architecture, tokens)
    obtained = decode(made, t0.architecture, TOKENS[:, :8])
    assert np.array_equal(obtained.logits, expected.logits)


def test_R03_a_full_context_fits(executor, run, t0):
    """A text as long as the context runs in both phases: the limit is not one too low."""
    for phase, decode in (("prefill", decoder.prefill), ("decode", decoder.decode)):
        obtained = decode(executor(t0, "fp16", phase, 8), t0.architecture, TOKENS[:, :8])
        wide = run(t0, TOKENS[:, :8], "fp16", phase)
        assert kl_nats(wide.logits, obtained.logits).max() < NOISE_NATS


def test_phases_are_not_mixed_up(executor, t0):
    """Prefill refuses an executor of decode, and the other way round."""
    with pytest.raises(RunError, match="phase 'decode', expected 'prefill'"):
        decoder.prefill(executor(t0, phase="decode"), t0.architecture, TOKENS)
    with pytest.raises(RunError, match="phase 'prefill', expected 'decode'"):
        decoder.decode(executor(t0), t0.architecture, TOKENS)


class Narrow:
    """Run an executor that takes so many texts at once, and count its calls."""

    def __init__(self, executor, batches_at_once):
        self.executor, self.batches_at_once, self.calls = executor, batches_at_once, []

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def run(self, feeds, into=None):
        """Count and pass on."""
        self.calls.append(len(feeds["token_ids"]))
        return self.executor.run(feeds, into)


@pytest.mark.parametrize("phase", PHASES)
def test_texts_go_in_groups(executor, t0, phase):
    """5 texts through an executor of 2 run as 2, 2 and 1, in order, with the same results."""
    tokens = TOKENS[0, :60].reshape(5, 12)
    decode = {"prefill": decoder.prefill, "decode": decoder.decode}[phase]
    narrow = Narrow(executor(t0, "fp32", phase), 2)
    obtained = decode(narrow, t0.architecture, tokens)
    steps = 1 if phase == "prefill" else 12
    assert narrow.calls == [2] * steps + [2] * steps + [1] * steps
    expected = decode(executor(t0, "fp32", phase), t0.architecture, tokens)
    for name, array in vars(obtained).items():
        np.testing.assert_allclose(array, getattr(expected, name), atol=1e-4, rtol=0)


# The loop


@pytest.fixture
def loop_of(executor, t0):
    """Return a function that makes a loop of T0 in float16 for one text of so many steps."""
    return lambda steps=8: decoder.DecodeLoop(
        executor(t0, "fp16", "decode", 8), t0.architecture, 1, steps
    )


def steps(loop, tokens):
    """Decode tokens [T] from the start and return a copy of what came out."""
    loop.start(torch.from_numpy(tokens)[None, None])
    for _ in tokens:
        loop.step()
    return loop.decoded()


def same(obtained, expected):
    """Return whether logits, K and V are bitwise the same."""
    return all(
        vars(obtained)[name].tobytes() == each.tobytes() for name, each in vars(expected).items()
    )


@pytest.mark.parametrize("left", [0.0, np.nan, 6e4])
def test_R02_start_forgets_whatever_is_in_the_cache(loop_of, left):
    """A short text after a long one, with any value in every row, gives what it gives alone."""
    alone = steps(loop_of(), TOKENS[0, :3])
    loop = loop_of()
    steps(loop, TOKENS[1, :8])
    loop.cache.fill_(left)
    loop.logits.fill_(left)
    assert same(steps(loop, TOKENS[0, :3]), alone)
    assert alone.logits.shape == (1, 3, 64)


def test_R02_a_nan_in_a_valid_row_is_seen(loop_of):
    """The check above can fail: NaN in a row before the position reaches logits, K and V."""
    loop = loop_of()
    steps(loop, TOKENS[0, :8])
    loop.seek(3)
    loop.cache[..., 2, :] = torch.nan
    loop.step()
    assert torch.isnan(loop.logits[0, 3]).all()
    assert torch.isnan(loop.cache[1, :, ..., 3, :]).all()


def test_there_are_no_logits_where_no_step_has_been(loop_of):
    """Rows of steps that are still to come hold NaN, which no comparison passes."""
    loop = loop_of()
    steps(loop, TOKENS[1, :8])
    loop.start(torch.from_numpy(TOKENS[0, :5])[None, None])
    loop.step()
    loop.step()
    assert torch.isfinite(loop.logits[:, :2]).all()
    assert torch.isnan(loop.logits[:, 2:]).all()
    assert {name: each.shape for name, each in vars(loop.decoded()).items()} == {
        "logits": (1, 2, 64),
        "keys": (1, 2, 2, 2, 16),
        "values": (1, 2, 2, 2, 16),
    }


@pytest.mark.parametrize("length", [3, 8])
def test_R03_a_step_beyond_the_text_is_refused(loop_of, length):
    """After the last token nothing more is decoded, however much room there is."""
    loop, tokens = loop_of(), TOKENS[0, :length]
    before = steps(loop, tokens)
    with pytest.raises(
        RunError, match=f"variant fp16, decode: all {length} steps are done; start again"
    ):
        loop.step()
    assert same(loop.decoded(), before)
    assert same(steps(loop, tokens), before)


@pytest.mark.parametrize("wanted", [0, 9])
def test_R03_a_loop_longer_than_the_cache_is_refused(loop_of, wanted):
    """As many steps as the cache has rows fit, one more does not, and none is no loop."""
    with pytest.raises(
        RunError, match=f"variant fp16, decode: {wanted} steps, expected 1 to 8; build with a la"
    ):
        loop_of(wanted)


def test_a_loop_needs_a_decode_network(executor, t0):
    """A prefill network has no cache to step through."""
    with pytest.raises(RunError, match="phase 'prefill', expected 'decode'"):
        decoder.DecodeLoop(executor(t0), t0.architecture, 1, 8)


@pytest.mark.parametrize("room", [3, 5, 8])
def test_a_text_may_be_shorter_than_the_room_for_it(loop_of, room):
    """The room for steps does not change what a text gives."""
    assert same(steps(loop_of(room), TOKENS[0, :3]), steps(loop_of(8), TOKENS[0, :3]))


def test_seek_repeats_a_step_with_the_cache_as_it_is(loop_of):
    """Position, token and rows are those of the first time, so that a step can be timed again."""
    loop = loop_of()
    expected = steps(loop, TOKENS[0, :8])
    for position in (6, 2, 7):
        loop.seek(position)
        assert loop.feeds["position_ids"].item() == position
        loop.logits.fill_(torch.nan)
        loop.step()
        assert loop.logits[0, position].numpy().tobytes() == expected.logits[0, position].tobytes()
    assert same(replace(loop.decoded(), logits=expected.logits), expected)


def test_a_step_leaves_every_tensor_where_it_is(loop_of):
    """Inputs, cache and logits keep their addresses: a captured step can be replayed."""
    loop = loop_of()
    tensors = [*loop.feeds.values(), loop.cache, loop.logits]
    addresses = [tensor.data_ptr() for tensor in tensors]
    steps(loop, TOKENS[0, :8])
    assert [
        tensor.data_ptr() for tensor in (*loop.feeds.values(), loop.cache, loop.logits)
    ] == addresses


class Repeating(Narrow):
    """Call a step a few times before it is repeated, as an engine that captures it does."""

    def repeat(self, function):
        """Call, and return the function."""
        for _ in range(3):
            function()
        return function


def test_R02_steps_of_a_capture_leave_nothing_behind(executor, loop_of, t0):
    """What a step did before it could be repeated is forgotten, also without ``start``."""
    loop = decoder.DecodeLoop(
        Repeating(executor(t0, "fp16", "decode", 8), 1), t0.architecture, 1, 8
    )
    assert torch.isnan(loop.logits).all()
    assert not loop.cache.any()
    assert loop.feeds["position_ids"].item() == 0
    assert same(steps(loop, TOKENS[0, :3]), steps(loop_of(), TOKENS[0, :3]))
