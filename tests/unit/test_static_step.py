"""The static step: Hugging Face's logits token by token, at fixed addresses, compiled whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import T0, changed, tiny_checkpoint

from gptneo_trt import reference
from gptneo_trt.errors import RunError
from gptneo_trt.static_step import StaticStep, seeded_token_ids, static_step

CONTEXT = 16
SHAPE = (2, CONTEXT)  # batch and context
CPU = torch.device("cpu")
ARCHITECTURES = {
    "tied, gelu_new": T0,
    "untied, gelu": replace(T0, tied_head=False, activation="gelu"),
    "one layer, relu": replace(T0, attention_layers=("local",), activation="relu"),
}


@pytest.fixture(scope="module")
def expected(t0):
    """Return float32 [*SHAPE, V], Hugging Face's logits in float32."""
    model = reference.torch_model(t0, torch.float32)
    return reference.logits(model, seeded_token_ids(t0, SHAPE))


def decoded(static):
    """Return float32 [B, context, V] of a step fed the texts token by token."""
    logits = []
    for position in range(static.token_ids.shape[1]):
        static.prepare(position)
        logits.append(static.step().numpy().copy())
    return np.stack(logits, axis=1)


def poison(static, value=6e4):
    """Fill the whole cache, as a long earlier text could."""
    for cache in (*static.keys, *static.values):
        cache.fill_(value)


def test_text_is_fixed_and_within_the_vocabulary(t0):
    """The ids are the same on every call, as many as asked for, and known to the model."""
    ids = seeded_token_ids(t0, (4, 64))
    assert np.array_equal(ids, seeded_token_ids(t0, (4, 64)))
    assert np.array_equal(ids[:1], seeded_token_ids(t0, (1, 64)))
    assert len(np.unique(ids, axis=0)) == 4
    assert (ids.shape, ids.dtype) == ((4, 64), np.int64)
    assert 0 <= ids.min() < ids.max() < 64


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@pytest.mark.parametrize("rows", [0.0, 6e4, -6e4])
@pytest.mark.parametrize("batch", [1, 3])
def test_N01_R02_static_step_gives_hugging_faces_logits(architecture, rows, batch):
    """Token by token, at every position, whatever an earlier text left in the cache."""
    checkpoint = tiny_checkpoint(architecture)
    static = StaticStep(checkpoint, (batch, CONTEXT), CPU, torch.float32)
    model = reference.torch_model(checkpoint, torch.float32)
    poison(static, rows)
    expected = reference.logits(model, static.token_ids.numpy())
    np.testing.assert_allclose(decoded(static), expected, rtol=0, atol=1e-4)


def test_static_step_writes_its_own_row_alone(t0):
    """A step at position 5 changes row 5 of every K and V of each text, in place, and no other."""
    static = StaticStep(t0, SHAPE, CPU, torch.float32)
    caches = [*static.keys, *static.values]
    addresses = [cache.data_ptr() for cache in caches]
    poison(static)
    static.prepare(5)
    static.step()
    assert [cache.data_ptr() for cache in (*static.keys, *static.values)] == addresses
    assert len(caches) == 2 * T0.num_layers
    for cache in caches:
        assert cache.shape == (2, 2, CONTEXT, 16)
        assert (cache != 6e4).any(dim=(1, 3)).nonzero().tolist() == [[0, 5], [1, 5]]


def test_static_step_reuses_its_logits(t0):
    """The logits stay at one address, float32, and the same step gives them again, bitwise."""
    static = static_step(t0, SHAPE, CPU, torch.float16, compiled=False)
    first = static.step().clone()
    assert static.step() is static.logits
    assert torch.equal(static.logits, first)
    assert first.dtype == torch.float32


def test_static_step_stands_at_the_last_row(t0, expected):
    """A step that is made ready decodes the last token over the true rows of the others."""
    static = static_step(t0, SHAPE, CPU, torch.float32, compiled=False)
    static.step()
    np.testing.assert_allclose(static.outputs(), expected[:, -1], rtol=0, atol=1e-4)
    static.prepare(3)
    static.step()
    np.testing.assert_allclose(static.outputs(), expected[:, 3], rtol=0, atol=1e-4)
    static.prepare()
    static.step()
    np.testing.assert_allclose(static.outputs(), expected[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("position", [-1, CONTEXT])
def test_R03_position_outside_the_cache(t0, position):
    """A position that the cache has no row for is refused, and nothing is written."""
    static = StaticStep(t0, SHAPE, CPU, torch.float32)
    with pytest.raises(RunError, match=f"obtained {position}, expected 0 to 15"):
        static.prepare(position)
    assert static.position.item() == 0


def test_N02_static_step_keeps_large_scores_in_float32(t0):
    """Scores above float16's range, unscaled as GPT-Neo's are, give finite float16 logits."""
    larger = dict.fromkeys(
        (f"transformer.h.{i}.attn.attention.{part}_proj.weight" for i in (0, 1) for part in "qk"),
        lambda weight: weight * 64,
    )
    checkpoint = changed(t0, larger)
    static = StaticStep(checkpoint, SHAPE, CPU, torch.float16)
    logits = decoded(static)
    query = torch.nn.functional.linear(
        torch.ones(32), torch.tensor(checkpoint.weights[next(iter(larger))])
    )
    assert (query @ query) / T0.num_heads > torch.finfo(torch.float16).max
    assert np.isfinite(logits).all()


def test_static_step_compiles_without_a_graph_break(t0, expected):
    """torch.compile takes the step whole, and what it takes gives the same logits and rows."""
    eager, compiled = (StaticStep(t0, SHAPE, CPU, torch.float32) for _ in range(2))
    compiled.compile(backend="aot_eager")
    np.testing.assert_allclose(decoded(compiled), expected, rtol=0, atol=1e-4)
    decoded(eager)
    for mine, theirs in zip(compiled.keys, eager.keys, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_static_step_is_compiled_after_the_cache_is_filled(t0, monkeypatch):
    """``compiled`` asks for one graph of fixed shapes, and the filling steps are not compiled."""
    calls = []

    def compile_later(function, **options):
        calls.append(options)
        return lambda: calls.append("run")

    monkeypatch.setattr(torch, "compile", compile_later)
    static = static_step(t0, SHAPE, CPU, torch.float32, compiled=True)
    assert calls == [{"fullgraph": True, "dynamic": False}]
    assert (static.keys[0][0, 0] != 0).any(dim=-1).tolist() == [True] * (CONTEXT - 1) + [False]
    static.step()
    assert calls[1:] == ["run"]
