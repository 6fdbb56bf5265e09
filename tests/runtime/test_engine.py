"""Engines on a GPU give what their networks give, at every length, and again, and nothing else."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gptneo_trt import decoder, reference
from gptneo_trt.data import Decoded
from gptneo_trt.decoder import DecodeLoop
from gptneo_trt.engine import Engine
from gptneo_trt.errors import RunError
from gptneo_trt.network import PHASES
from gptneo_trt.runtime import load
from tests.gate.engines import REPEATS
from tests.gate.measurer import CONTEXT
from tests.unit.tiny import kl_nats

pytestmark = pytest.mark.runtime

TOKENS = np.random.default_rng(5).integers(0, 64, (2, CONTEXT)).astype(np.int32)
LONG, SHORT = TOKENS[:1, :200], TOKENS[1:, :8]  # SHORT: a prompt of 3 tokens and 5 steps
# float16 rounds T0 2e-5 nats away from float32, interpreted, and an engine rounds other sums than
# the interpreter. A window that is one off costs above 1e-2 (tests/unit/test_decoder.py).
NOISE_NATS = 1e-4
# K and V of T0 are below 9, where float16 has steps of 0.008; interpreted they are 0.06 off.
CACHE_NOISE = 0.2
RUN = {"prefill": decoder.prefill, "decode": decoder.decode}


@pytest.fixture(scope="module")
def architecture(checkpoints):
    """Return T0's."""
    return checkpoints["t0"].architecture


@pytest.fixture(scope="module")
def expected(checkpoints):
    """Return Hugging Face's float32 logits of TOKENS."""
    return reference.logits(reference.torch_model(checkpoints["t0"], torch.float32), TOKENS)


def same(obtained: Decoded, expected: Decoded) -> bool:
    """Return whether logits, K and V are bitwise the same."""
    pairs = zip(vars(obtained).values(), vars(expected).values(), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)


def finite(obtained: Decoded) -> bool:
    """Return whether logits, K and V hold numbers alone."""
    return all(np.isfinite(array).all() for array in vars(obtained).values())


# What a network gives


@pytest.mark.parametrize("phase", PHASES)
def test_engine_gives_what_its_network_gives(
    engine_of, interpreter_of, architecture, expected, phase
):
    """Logits, K and V of 2 texts of 256 tokens are the interpreter's, within float16's noise."""
    obtained = RUN[phase](engine_of(phase), architecture, TOKENS)
    interpreted = RUN[phase](interpreter_of(phase), architecture, TOKENS)
    for logits in (interpreted.logits, expected):
        assert kl_nats(logits, obtained.logits).mean() < NOISE_NATS
        assert np.mean(logits.argmax(-1) == obtained.logits.argmax(-1)) > 0.99
    np.testing.assert_allclose(obtained.keys, interpreted.keys, atol=CACHE_NOISE, rtol=0)
    np.testing.assert_allclose(obtained.values, interpreted.values, atol=CACHE_NOISE, rtol=0)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("length", [1, 3, CONTEXT])
def test_N04_every_length_fits(engine_of, architecture, expected, length, phase):
    """1, 3 and 256 tokens give the reference's logits, and nothing that is not a number."""
    obtained = RUN[phase](engine_of(phase), architecture, TOKENS[:, :length])
    assert finite(obtained)
    assert obtained.logits.shape == (2, length, 64)
    assert obtained.keys.shape == obtained.values.shape == (2, 2, 2, length, 16)
    assert kl_nats(expected[:, :length], obtained.logits).mean() < NOISE_NATS


def test_N04_padding_on_the_right_changes_nothing(engine_of, architecture):
    """3 tokens padded to 256: the padding has no influence, and the valid rows are those of 3."""
    engine, padded = engine_of("prefill"), []
    for pad in (0, 60):
        tokens = np.full((2, CONTEXT), pad, np.int32)
        tokens[:, :3] = TOKENS[:, :3]
        padded.append(decoder.prefill(engine, architecture, tokens))
    first, second = padded
    assert np.array_equal(first.logits[:, :3], second.logits[:, :3])
    assert np.array_equal(first.keys[..., :3, :], second.keys[..., :3, :])
    assert np.array_equal(first.values[..., :3, :], second.values[..., :3, :])
    assert not np.array_equal(first.logits[:, 3:], second.logits[:, 3:])
    assert finite(first)
    assert finite(second)
    short = decoder.prefill(engine, architecture, TOKENS[:, :3])
    assert kl_nats(short.logits, first.logits[:, :3]).max() < NOISE_NATS


def step(engine: Engine, prefix: Decoded, token: int, position: int, beyond: float = 0.0) -> dict:
    """Feed one token after a prefix whose K and V rows are put into the cache by hand.

    Rows at and beyond the position hold ``beyond``.
    """
    options = {"dtype": torch.int32, "device": engine.device}
    feeds = {
        "token_ids": torch.full((1, 1, 1), token, **options),
        "position_ids": torch.full((1, 1, 1), position, **options),
    }
    options["dtype"] = engine.cache_type
    for part, rows in (("key", prefix.keys), ("value", prefix.values)):
        _, layers, heads, length, width = rows.shape
        for layer in range(layers):
            cache = torch.full((1, 1, heads, engine.context, width), beyond, **options)
            cache[0, 0, :, :length] = torch.from_numpy(rows[0, layer]).to(**options)
            feeds[f"past.h.{layer}.{part}"] = cache
    outputs = engine.run(feeds)
    return {name: each.to("cpu", copy=True).numpy() for name, each in outputs.items()}


def test_N05_three_ways_to_the_sixth_token(engine_of, architecture, expected):
    """Prefill of 6, prefill of 5 and a step at position 5, and 6 steps agree with the reference."""
    prefill, decode = engine_of("prefill"), engine_of("decode")
    prefix = decoder.prefill(prefill, architecture, TOKENS[:1, :5])
    ways = {
        "prefill": decoder.prefill(prefill, architecture, TOKENS[:1, :6]).logits[0, 5],
        "prefill and a step": step(decode, prefix, TOKENS[0, 5], 5)["logits"][0, 0, 0],
        "decode": decoder.decode(decode, architecture, TOKENS[:1, :6]).logits[0, 5],
    }
    for way, obtained in ways.items():
        assert kl_nats(expected[0, 5], obtained) < NOISE_NATS, way
        assert kl_nats(ways["prefill"], obtained) < NOISE_NATS, way


@pytest.mark.parametrize("position", [4, 6])
def test_N05_another_position_is_rejected(engine_of, architecture, expected, position):
    """A step at the wrong position is far from the reference: the check above can fail."""
    prefix = decoder.prefill(engine_of("prefill"), architecture, TOKENS[:1, :5])
    obtained = step(engine_of("decode"), prefix, TOKENS[0, 5], position)["logits"][0, 0, 0]
    assert kl_nats(expected[0, 5], obtained) > 10 * NOISE_NATS


def test_N05_phases_agree_everywhere(engine_of, architecture):
    """Prefill and decode give the same logits, K and V at all 256 positions."""
    prefill, decode = (RUN[phase](engine_of(phase), architecture, TOKENS) for phase in PHASES)
    kl = kl_nats(prefill.logits, decode.logits)
    assert kl.mean() < NOISE_NATS
    assert kl.max() < 100 * NOISE_NATS
    np.testing.assert_allclose(decode.keys, prefill.keys, atol=CACHE_NOISE, rtol=0)
    np.testing.assert_allclose(decode.values, prefill.values, atol=CACHE_NOISE, rtol=0)


def test_N04_cache_beyond_the_position_is_not_read(engine_of, architecture):
    """What an earlier text left at and beyond the position changes no bit of the outputs.

    Not anything finite, as in the interpreter: TensorRT adds its mask to the scores, and a score
    that overflows float16 stays infinite. ``DecodeLoop.start`` clears the cache, so none does.
    """
    prefix = decoder.prefill(engine_of("prefill"), architecture, TOKENS[:1, :5])
    clean, dirty = (
        step(engine_of("decode"), prefix, TOKENS[0, 5], 5, beyond) for beyond in (0.0, 8.0)
    )
    assert all(clean[name].tobytes() == dirty[name].tobytes() for name in clean)
    prefix.values[..., 4, :] = 6e4
    read = step(engine_of("decode"), prefix, TOKENS[0, 5], 5)
    assert clean["logits"].tobytes() != read["logits"].tobytes()


# Again, and after others


def decoded(loop: DecodeLoop, token_ids: np.ndarray) -> Decoded:
    """Decode one text from the start."""
    loop.start(torch.from_numpy(token_ids)[:, None])
    for _ in range(token_ids.shape[1]):
        loop.step()
    return loop.decoded()


@pytest.mark.parametrize("left", [0.0, np.nan, 6e4])
def test_R02_an_earlier_text_leaves_nothing_behind(new_engine, engine_of, architecture, left):
    """8 tokens after 200, with any value in every cache row, are bitwise those of a new engine."""
    alone = decoded(DecodeLoop(new_engine("decode"), architecture, 1, CONTEXT), SHORT)
    loop = DecodeLoop(engine_of("decode"), architecture, 1, CONTEXT)
    decoded(loop, LONG)
    loop.cache.fill_(left)
    assert same(decoded(loop, SHORT), alone)
    assert finite(alone)


def test_R02_a_longer_prefill_leaves_nothing_behind(new_engine, architecture):
    """3 tokens after 200 are bitwise those of a new engine."""
    used = new_engine("prefill")
    decoder.prefill(used, architecture, LONG)
    alone = decoder.prefill(new_engine("prefill"), architecture, SHORT[:, :3])
    assert same(decoder.prefill(used, architecture, SHORT[:, :3]), alone)


def test_R02_a_nan_in_a_valid_row_is_seen(engine_of, architecture):
    """NaN in a row before the position reaches the logits and the new rows of the next layer."""
    loop = DecodeLoop(engine_of("decode"), architecture, 1, CONTEXT)
    decoded(loop, SHORT)
    loop.seek(3)
    loop.cache[..., 2, :] = torch.nan
    loop.step()
    assert torch.isnan(loop.logits[0, 3]).all()
    assert torch.isnan(loop.cache[1, :, ..., 3, :]).all()


OTHER_LENGTHS = (1, 100, 256)
ROWS = {"T0 in fp16": ("fp16", "t0"), "bundled in FP8": ("fp8", "bundled")}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("phase", PHASES)
def test_first_and_hundredth_call_give_the_same_bits(new_engine, checkpoints, phase, row):
    """A new engine's first results come again after a hundred calls of other lengths.

    Of few other lengths: a new one costs a second of compilation, whichever it is.
    """
    engine, architecture = new_engine(phase, *row), checkpoints[row[1]].architecture
    first = RUN[phase](engine, architecture, SHORT)
    if phase == "prefill":
        for call in range(REPEATS):
            decoder.prefill(engine, architecture, LONG[:, : OTHER_LENGTHS[call % 3]])
    else:
        decoder.decode(engine, architecture, LONG[:, :REPEATS])
    assert same(RUN[phase](engine, architecture, SHORT), first)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("phase", PHASES)
def test_two_engines_of_one_plan_give_the_same_bits(new_engine, checkpoints, phase, row):
    """Kernels are not chosen anew when a plan is loaded again, nor while another is loaded."""
    engines = [new_engine(phase, *row) for _ in range(2)]
    one, other = (RUN[phase](each, checkpoints[row[1]].architecture, LONG) for each in engines)
    assert same(one, other)


# What does not fit

WRONG_TOKENS = {
    "too long": (np.zeros((1, 257), np.int32), "257 tokens, the .* network takes 256; shorten"),
    "empty": (np.zeros((1, 0), np.int32), r"token ids of shape \(1, 0\), expected \[N, T\]"),
    "vocab_size": (np.array([[1, 64]]), "token ids 1 to 64, expected 0 to 63"),
    "negative": (np.array([[-1, 3]]), "token ids -1 to 3, expected 0 to 63"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("tokens", "message"), WRONG_TOKENS.values(), ids=WRONG_TOKENS)
def test_R03_texts_that_do_not_fit_are_refused(engine_of, architecture, phase, tokens, message):
    """Limit and value are named before anything runs, and the next text is right, bitwise."""
    engine = engine_of(phase)
    expected = RUN[phase](engine, architecture, SHORT)
    with pytest.raises(RunError, match=f"variant fp16, {phase}: {message}"):
        RUN[phase](engine, architecture, tokens)
    assert same(RUN[phase](engine, architecture, SHORT), expected)


@pytest.mark.parametrize("length", [0, 257])
def test_R03_lengths_that_do_not_fit_do_not_reach_tensorrt(engine_of, architecture, length):
    """The engine itself refuses them too, and its next run is right, bitwise."""
    engine = engine_of("prefill")
    expected = decoder.prefill(engine, architecture, SHORT)
    ids = torch.zeros((1, 1, length), dtype=torch.int32, device=engine.device)
    with pytest.raises(RunError, match=f"token_ids: {length} tokens, expected 1 to 256"):
        engine.run({"token_ids": ids, "position_ids": ids})
    assert same(decoder.prefill(engine, architecture, SHORT), expected)


def test_R03_a_prompt_and_more_steps_than_the_cache_has_rows_are_refused(engine_of, architecture):
    """A prompt of 250 and 10 steps need 260 rows: that is said before the first step."""
    with pytest.raises(RunError, match="decode: 260 steps, expected 1 to 256; build with a larger"):
        DecodeLoop(engine_of("decode"), architecture, 1, 260)


# What was built

FP8_ROWS = [("prefill", "fp16"), ("prefill", "fp8"), ("decode", "fp8"), ("decode", "fp8-v_proj")]


@pytest.mark.parametrize(("phase", "row"), FP8_ROWS)
def test_C03_exactly_the_intended_projections_run_in_fp8(engine_of, checkpoints, phase, row):
    """The inspector of the engine shows FP8 products where the row says, and nowhere else."""
    engine = engine_of(phase, row, "bundled")
    layers = checkpoints["bundled"].architecture.num_layers
    assert engine.quantized_modules() == tuple(sorted(engine.variant.quantized_modules(layers)))


DAMAGES = {
    "cut in half": lambda content: content[: len(content) // 2],
    "0 bytes": lambda content: b"",
    "first 16 bytes changed": lambda content: bytes(16) + content[16:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_R06_a_damaged_plan_is_named(backend, plan_of, engine_of, architecture, tmp_path, damage):
    """The file, the TensorRT of its side-car and the one at hand are named; others still load."""
    path = tmp_path / "damaged.plan"
    path.write_bytes(damage(plan_of("decode").path.read_bytes()))
    side_car = {"flavour": backend.flavour, "version": "1.5.0.114", "gpu": None}
    path.with_suffix(".json").write_text(json.dumps(side_car))
    with pytest.raises(
        RunError,
        match=rf"^plan damaged\.plan, built by {backend.flavour}-1\.5\.0\.114: "
        rf"deserialize_cuda_engine of {backend.target} returned None; .*\n  TensorRT: \[ERROR\] ",
    ):
        load(backend, path)
    assert finite(decoder.decode(engine_of("decode"), architecture, SHORT))


def test_R06_kernels_of_random_bytes_are_replaced(
    backend, request_of, plan_of, engine_of, architecture, tmp_path
):
    """They cost a compilation: the engine gives the same bits, and the new file is read next."""
    request, plan = request_of("prefill"), plan_of("prefill")
    assert plan.kernels.exists() != backend.builds_for_gpu_at_hand
    if not plan.kernels.exists():
        pytest.skip(f"{backend.flavour} compiles its kernels into the plan")
    garbage, kernels = np.random.default_rng(0).bytes(4096), tmp_path / "some.kernels"
    kernels.write_bytes(garbage)
    compiled = Engine(request, replace(plan, kernels=kernels))
    expected = decoder.prefill(engine_of("prefill"), architecture, SHORT)
    assert same(decoder.prefill(compiled, architecture, SHORT), expected)
    assert kernels.read_bytes() != garbage
    written = kernels.stat().st_ino
    read = Engine(request, replace(plan, kernels=kernels))
    assert kernels.stat().st_ino == written
    assert same(decoder.prefill(read, architecture, SHORT), expected)
