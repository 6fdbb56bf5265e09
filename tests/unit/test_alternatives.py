"""Alternatives: what runs instead of an engine gives Hugging Face's logits, and runs as stated."""

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny import T0, kl_nats, tiny_checkpoint

from gptneo_trt import alternatives, reference
from gptneo_trt.alternatives import ALTERNATIVES, Alternative
from gptneo_trt.errors import RunError
from gptneo_trt.static_step import seeded_token_ids, static_step

SHAPE = (2, 16)  # batch and context
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def token_ids(t0):
    """Return int64 [*SHAPE], the texts of every alternative."""
    return seeded_token_ids(t0, SHAPE)


@pytest.fixture(scope="module")
def expected(t0, token_ids):
    """Return float32 [*SHAPE, V], Hugging Face's logits in float32."""
    return reference.logits(reference.torch_model(t0, torch.float32), token_ids)


@pytest.mark.parametrize("context", [0, 1, 65])
def test_context_that_does_not_fit(t0, context):
    """A context without a past, or beyond the position table, is refused everywhere."""
    for make in (
        partial(static_step, compiled=False),
        alternatives.hugging_face_step,
        partial(alternatives.hugging_face_prefill, compiled=False),
    ):
        with pytest.raises(RunError, match=f"obtained {context} tokens, expected 2 to 64"):
            make(t0, (1, context), CPU, torch.float32)


def test_hugging_face_step_gives_the_last_logits(t0, expected):
    """One token after the cache of the others gives the last logits of a whole forward."""
    forward = alternatives.hugging_face_step(t0, SHAPE, CPU, torch.float32)
    np.testing.assert_allclose(forward.outputs(), expected[:, -1], rtol=0, atol=1e-4)


def test_hugging_face_step_does_not_grow(t0):
    """Each step sees the same past of context - 1 tokens: equal logits, and one row more."""
    forward = alternatives.hugging_face_step(t0, (3, 64), CPU, torch.float32)
    first = forward.logits
    past = forward._past
    for _ in range(3):
        assert torch.equal(forward.step(), first)
        assert past.get_seq_length() == 64
    forward.prepare()
    assert past.get_seq_length() == 63


def test_hugging_face_prefill_gives_all_logits(t0, expected):
    """The eager forward gives the logits of every token, call after call."""
    forward = alternatives.hugging_face_prefill(t0, SHAPE, CPU, torch.float32, compiled=False)
    forward.step()
    assert forward.outputs().dtype == np.float32
    np.testing.assert_allclose(forward.outputs(), expected, rtol=0, atol=1e-4)


def test_hugging_face_prefill_compiles_without_a_graph_break(t0, expected, monkeypatch):
    """The compiled forward is the model with fixed shapes, whole, its cache included."""
    options = {"backend": "aot_eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, **options))
    forward = alternatives.hugging_face_prefill(t0, SHAPE, CPU, torch.float32, compiled=True)
    np.testing.assert_allclose(forward.outputs(), expected, rtol=0, atol=1e-4)


def test_advice_to_compute_in_tf32_is_not_taken(t0, monkeypatch):
    """Where warnings are errors, torch.compile's advice for float32 products stops nothing."""

    def compile_with_advice(model, **options):
        def forward(*arguments, **keywords):
            warnings.warn("TensorFloat32 tensor cores for float32 matrix ...", stacklevel=1)
            return model(*arguments, **keywords)

        return forward

    monkeypatch.setattr(torch, "compile", compile_with_advice)
    precision = torch.get_float32_matmul_precision()
    alternatives.hugging_face_prefill(t0, SHAPE, CPU, torch.float32, compiled=True)
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_read_moves_the_weights_bytes(dtype, tied):
    """Bytes read plus written are those of all weights, a tied head once, rounded up to two."""
    checkpoint = tiny_checkpoint(replace(T0, tied_head=tied))
    model = reference.torch_model(checkpoint, torch.float32)
    elements = sum(parameter.numel() for parameter in model.parameters())
    read = alternatives.weights_read(checkpoint, CPU, dtype)
    assert read.bytes_moved == dtype.itemsize * (elements + elements % 2)
    assert read.source.nbytes == read.destination.nbytes == read.bytes_moved // 2


def test_weights_read_of_an_odd_number(t0):
    """An odd number of elements counts one more, never one less."""
    checkpoint = replace(t0, weights={"a": np.ones((3, 3), np.float32), "b": np.ones(4)})
    assert alternatives.weights_read(checkpoint, CPU, torch.float16).bytes_moved == 2 * 14


def test_weights_read_copies(t0):
    """A step fills the destination with the weights; preparing clears what is put out."""
    read = alternatives.weights_read(t0, CPU, torch.float32)
    assert not read.outputs().any()
    read.step()
    assert torch.equal(read.source, read.destination)
    first = next(iter(t0.weights.values())).ravel()[:1024]
    assert np.array_equal(read.outputs(), first)
    read.prepare()
    assert not read.outputs().any()


def test_rows_are_told_apart_by_name_and_phase():
    """Every row has its own name and phase, and says what it needs."""
    assert [(row.phase, row.name) for row in ALTERNATIVES] == [
        ("decode", "hugging_face_eager"),
        ("decode", "static_graph"),
        ("decode", "static_compiled_graph"),
        ("decode", "weights_read"),
        ("prefill", "hugging_face_eager"),
        ("prefill", "hugging_face_compiled"),
    ]
    assert all(row.summary and "GPU" in row.needs for row in ALTERNATIVES)
    # What multiplies may round otherwise the next time; a copy may not.
    assert [row.name for row in ALTERNATIVES if not row.spread] == ["weights_read"]
    assert all(("compile" in row.name) == ("compiler" in row.needs) for row in ALTERNATIVES)


@pytest.mark.parametrize(
    ("name", "phase"), [("static", "decode"), ("static_graph", "prefill"), ("fp16", "decode")]
)
def test_unknown_row_lists_the_rows(t0, name, phase):
    """A name that the phase does not have is refused with the rows that there are."""
    message = rf"no alternative '{name}' in '{phase}'.*static_graph \(decode\).*compiled \(prefill"
    with pytest.raises(RunError, match=message):
        alternatives.alternative(name, phase, t0, SHAPE, CPU)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_hugging_faces_rows_are_the_bf16_reference(t0, token_ids, phase):
    """What is timed gives the logits of the reference that quality is compared with."""
    timed = alternatives.alternative("hugging_face_eager", phase, t0, SHAPE, CPU)
    timed.prepare()
    timed.replay()
    expected = reference.logits(reference.torch_model(t0, torch.bfloat16), token_ids)
    expected = expected[:, -1] if phase == "decode" else expected
    assert (timed.name, timed.spread) == ("hugging_face_eager", 2**-5)
    assert timed.outputs().shape == expected.shape
    assert timed.outputs().dtype == np.float32
    assert kl_nats(expected, timed.outputs()).mean() < 5e-3


@pytest.mark.parametrize("row", [row for row in ALTERNATIVES if row.graph], ids=lambda r: r.name)
def test_R05_rows_under_a_graph_need_a_gpu(t0, row):
    """A row that is a graph is refused without a GPU, by its name, before any work."""
    with pytest.raises(RunError, match=rf"CUDA graph of {row.name}: .* device cpu"):
        alternatives.alternative(row.name, row.phase, t0, SHAPE, CPU)


def test_static_row_is_the_float16_step_captured(t0, expected, monkeypatch):
    """The row's replay is what the capture returns, and its outputs are the last logits."""
    captured = []
    monkeypatch.setattr(alternatives, "_expect_gpu", lambda name, device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a new stream")
    monkeypatch.setattr(
        alternatives,
        "captured",
        lambda function, *how: captured.append((function, how)) or function,
    )
    timed = alternatives.alternative("static_graph", "decode", t0, SHAPE, CPU)
    timed.prepare()
    timed.replay()
    ((function, how),) = captured
    assert timed.replay is function
    assert timed.spread == 2**-8
    assert how == ("a new stream", alternatives.WARMUPS, "alternative static_graph, decode")
    assert function.__self__.keys[0].dtype == torch.float16
    assert kl_nats(expected[:, -1], timed.outputs()).max() < 5e-3


def test_row_that_cannot_be_made_says_what_it_needs(t0, monkeypatch):
    """A failure of PyTorch, such as a missing compiler, is an error that names the needs."""

    def fail(checkpoint, shape, device):
        raise RuntimeError("Failed to find C compiler")

    row = Alternative("slow", "decode", "a row", "a C compiler", False, fail)
    monkeypatch.setattr(alternatives, "ALTERNATIVES", (row,))
    with pytest.raises(RunError, match=r"slow, decode: Failed to find.*it needs a C compiler"):
        alternatives.alternative("slow", "decode", t0, SHAPE, CPU)
