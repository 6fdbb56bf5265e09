"""Weights: exactly the parameters of the architecture, from the file that decides, or an error."""

import json
import pickle
import shlex
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from tiny import CONFIG, T0, tiny_checkpoint, write_folder, write_shards

from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.errors import CheckpointError

UNTIED = CONFIG | {"tie_word_embeddings": False}
SECOND_SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def tiny():
    """Return T0 in memory."""
    return tiny_checkpoint()


def load(folder):
    """Return the checkpoint in a folder."""
    return checkpoint_from_source(str(folder))


def assert_refused(folder, *words):
    """Assert that loading is a CheckpointError with all of these words."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert [word for word in words if word not in str(caught.value)] == []


def test_single_file_round_trip(tmp_path, tiny):
    """A single file gives the same names, values and hash as what was written."""
    obtained = load(write_folder(tmp_path, tiny.weights))
    assert obtained.architecture == T0
    assert obtained.sha256 == tiny.sha256
    assert obtained.files == ("config.json", "model.safetensors")
    assert all(np.array_equal(obtained.weights[name], tiny.weights[name]) for name in tiny.weights)


def test_L01_tied_without_head(tmp_path, tiny):
    """(a) Tied: no lm_head.weight among the weights, the embedding is the head."""
    obtained = load(write_folder(tmp_path, tiny.weights))
    assert obtained.architecture.tied_head
    assert "lm_head.weight" not in obtained.weights


def test_L01_untied_with_own_head(tmp_path):
    """(b) Untied: its own lm_head.weight is kept."""
    untied = tiny_checkpoint(replace(T0, tied_head=False))
    obtained = load(write_folder(tmp_path, untied.weights, UNTIED))
    assert not obtained.architecture.tied_head
    head = obtained.weights["lm_head.weight"]
    assert np.array_equal(head, untied.weights["lm_head.weight"])
    assert not np.array_equal(head, obtained.weights["transformer.wte.weight"])


def test_L01_untied_without_head(tmp_path, tiny):
    """(c) Untied without lm_head.weight is an error: nothing is tied silently."""
    folder = write_folder(tmp_path, tiny.weights, UNTIED)
    assert_refused(folder, "lm_head.weight", "tie_word_embeddings is false")


@pytest.mark.parametrize("flag", [{}, {"tie_word_embeddings": True}])
def test_L01_tied_with_another_head(tmp_path, tiny, flag):
    """(d) A head that differs from the embedding while tied is an error naming both."""
    head = tiny.weights["transformer.wte.weight"] + np.float32(1)
    folder = write_folder(tmp_path, tiny.weights | {"lm_head.weight": head}, CONFIG | flag)
    assert_refused(folder, "lm_head.weight", "transformer.wte.weight", "tie_word_embeddings")


def test_L01_tied_with_the_same_head(tmp_path, tiny):
    """A stored head that equals the embedding while tied is left out, with a note."""
    head = tiny.weights["transformer.wte.weight"].copy()
    obtained = load(write_folder(tmp_path, tiny.weights | {"lm_head.weight": head}))
    assert obtained.sha256 == tiny.sha256
    assert any("lm_head.weight" in note for note in obtained.notes)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_L04_mask_buffers_are_left_out(tmp_path, tiny, dtype, prefix):
    """Mask buffers of old files change no weight, and each is noted."""
    mask = np.tril(np.ones((1, 1, 64, 64))).astype(dtype)
    buffers = {
        f"{prefix}h.{layer}.attn.attention.{name}": value
        for layer in range(2)
        for name, value in (("bias", mask), ("masked_bias", np.array(-1e9, np.float32)))
    }
    obtained = load(write_folder(tmp_path, tiny.weights | buffers))
    assert obtained.sha256 == tiny.sha256
    assert all(any(name in note for note in obtained.notes) for name in buffers)


def test_L04_names_without_prefix(tmp_path, tiny):
    """Names of a base model get the prefix, with a note."""
    bare = {name.removeprefix("transformer."): array for name, array in tiny.weights.items()}
    obtained = load(write_folder(tmp_path, bare))
    assert obtained.sha256 == tiny.sha256
    assert any("'transformer.'" in note for note in obtained.notes)


def test_L04_both_names_of_one_parameter(tmp_path, tiny):
    """A parameter under both names is an error, whichever would win."""
    array = tiny.weights["transformer.ln_f.bias"]
    folder = write_folder(tmp_path, tiny.weights | {"ln_f.bias": array})
    assert_refused(folder, "ln_f.bias and transformer.ln_f.bias", "expected one")


def test_L04_unknown_missing_and_misshapen_together(tmp_path, tiny):
    """Unknown, missing and misshapen tensors are all named in one message."""
    weights = tiny.weights | {
        "foo.weight": np.zeros(3, np.float32),
        "transformer.ln_f.weight": np.ones(31, np.float32),
    }
    del weights["transformer.h.1.mlp.c_fc.bias"]
    words = "foo.weight: obtained [3]", "transformer.h.1.mlp.c_fc.bias: obtained nothing"
    assert_refused(write_folder(tmp_path, weights), *words, "obtained [31], expected [32]")


def test_L06_two_shards_are_the_single_file(tmp_path, tiny):
    """A complete sharded copy has the same hash as the single file."""
    write_shards(tmp_path, tiny.weights)
    obtained = load(tmp_path)
    assert obtained.sha256 == tiny.sha256
    assert SECOND_SHARD in obtained.files


def test_L06_missing_shard(tmp_path, tiny):
    """(a) A shard that the index names and that is not there is named."""
    write_shards(tmp_path, tiny.weights)
    (tmp_path / SECOND_SHARD).unlink()
    assert_refused(tmp_path, SECOND_SHARD, "no such file")


def test_L06_index_names_what_the_shard_lacks(tmp_path, tiny):
    """(b) A tensor that its shard lacks is named, with the shard."""
    lost = write_shards(tmp_path, tiny.weights)
    save_file({n: tiny.weights[n] for n in lost[1:]}, tmp_path / SECOND_SHARD)
    assert_refused(tmp_path, lost[0], SECOND_SHARD)


@pytest.mark.parametrize("stray", ["model-00003-of-00003.safetensors", "model.safetensors"])
def test_L06_the_index_decides(tmp_path, tiny, stray):
    """(c, d) A file beside the index that it does not name is ignored, with a note."""
    write_shards(tmp_path, tiny.weights)
    save_file({name: array + 1 for name, array in tiny.weights.items()}, tmp_path / stray)
    obtained = load(tmp_path)
    assert obtained.sha256 == tiny.sha256
    assert any(stray in note for note in obtained.notes)
    assert stray not in obtained.files


@pytest.mark.parametrize("change", [-8, 8])
def test_L06_file_of_another_size(tmp_path, tiny, change):
    """(e) A shard cut or grown by 8 bytes is named, with both sizes."""
    write_shards(tmp_path, tiny.weights)
    shard = tmp_path / SECOND_SHARD
    content = shard.read_bytes()
    shard.write_bytes(content[:change] if change < 0 else content + bytes(change))
    assert_refused(tmp_path, SECOND_SHARD, f"{len(content) + change} bytes", f"{len(content)}")


def test_L06_the_same_tensor_in_both_shards(tmp_path, tiny):
    """(f) The index decides which copy is read; the other is noted."""
    second = write_shards(tmp_path, tiny.weights)
    first = sorted(set(tiny.weights) - set(second))
    copy = {n: tiny.weights[n] for n in second} | {first[0]: tiny.weights[first[0]] + 1}
    save_file(copy, tmp_path / SECOND_SHARD)
    obtained = load(tmp_path)
    assert obtained.sha256 == tiny.sha256
    assert any(first[0] in note for note in obtained.notes)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": ["b"]}}', "[" * 9999]
)
def test_malformed_index(tmp_path, tiny, content):
    """A malformed index is named; the single file is not taken instead."""
    write_folder(tmp_path, tiny.weights)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert_refused(tmp_path, "model.safetensors.index.json", "expected")


def test_index_does_not_leave_the_folder(tmp_path, tiny):
    """A shard name with a folder in it is refused."""
    write_shards(tmp_path / "inner", tiny.weights)
    index = tmp_path / "inner" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    write_folder(tmp_path, tiny.weights, file_name="other.safetensors")
    assert_refused(tmp_path / "inner", "../other.safetensors")


class CallsWhenUnpickled:
    """Write a file named by PROOF when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return (open, (str(self.proof), "w"))


@pytest.mark.parametrize("empty_file", [False, True])
def test_L07_pickle_is_never_loaded(tmp_path, tiny, empty_file):
    """Only pytorch_model.bin: an error with the conversion command, and no code runs."""
    write_folder(tmp_path, tiny.weights)
    (tmp_path / "model.safetensors").unlink()
    proof = tmp_path / "proof"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(CallsWhenUnpickled(proof)))
    if empty_file:
        (tmp_path / "model.safetensors").touch()
    assert_refused(tmp_path, "pytorch_model.bin", "save_pretrained")
    assert not proof.exists()


def test_L07_the_conversion_that_is_named_converts(tmp_path, tiny, monkeypatch):
    """What the message says to run writes the same weights, offline, whatever the folder's name."""
    folder = write_folder(tmp_path / 'it\'s "a" $(folder)', {})
    (folder / "model.safetensors").unlink()
    parameters = {name: torch.from_numpy(array) for name, array in tiny.weights.items()}
    torch.save(parameters, folder / "pytorch_model.bin")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("network call"))
    with pytest.raises(CheckpointError, match="convert a checkpoint that you trust") as caught:
        load(folder)

    python, option, code, *arguments = shlex.split(str(caught.value).split(" trust with: ")[1])
    monkeypatch.setattr(sys, "argv", [option, *arguments])
    exec(code)

    obtained = load(folder)
    assert (python, option) == ("python", "-c")
    assert obtained.files == ("config.json", "model.safetensors")
    assert all(np.array_equal(obtained.weights[name], tiny.weights[name]) for name in tiny.weights)


def test_no_weights_at_all(tmp_path, tiny):
    """A folder with only config.json says what was expected."""
    (write_folder(tmp_path, tiny.weights) / "model.safetensors").unlink()
    assert_refused(tmp_path, "model.safetensors", "expected")


@pytest.mark.parametrize(("rows", "vocab_size"), [(72, 64), (64, 72)])
def test_L08_vocabulary_differs(tmp_path, rows, vocab_size):
    """Embedding rows that differ from vocab_size are an error with both numbers."""
    other = tiny_checkpoint(replace(T0, vocab_size=rows))
    folder = write_folder(tmp_path, other.weights, CONFIG | {"vocab_size": vocab_size})
    words = f"[{rows}, 32]", f"[{vocab_size}, 32]", f"vocab_size {vocab_size} in config.json"
    assert_refused(folder, "transformer.wte.weight", *words)


def test_L08_odd_vocabulary(tmp_path):
    """50257 rows, no multiple of 8, load as they are."""
    odd = tiny_checkpoint(replace(T0, vocab_size=50257))
    obtained = load(write_folder(tmp_path, odd.weights, CONFIG | {"vocab_size": 50257}))
    assert obtained.weights["transformer.wte.weight"].shape == (50257, 32)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_C02_not_finite(tmp_path, tiny, value):
    """(e) One NaN or infinity in a weight is an error naming the tensor."""
    name = "transformer.h.1.mlp.c_fc.weight"
    array = tiny.weights[name].copy()
    array[-1, -1] = value
    assert_refused(write_folder(tmp_path, tiny.weights | {name: array}), name, "obtained 1 NaN")


def test_bfloat16_is_widened_exactly(tmp_path, tiny):
    """bfloat16 files become float32 with the same values."""
    narrow = {name: torch.from_numpy(a).bfloat16() for name, a in tiny.weights.items()}
    folder = write_folder(tmp_path, tiny.weights)
    save_torch_file(narrow, folder / "model.safetensors")
    obtained = load(folder).weights
    assert {array.dtype for array in obtained.values()} == {np.dtype(np.float32)}
    assert all(torch.equal(torch.from_numpy(obtained[n]).bfloat16(), narrow[n]) for n in narrow)


def test_float16_stays_float16(tmp_path, tiny):
    """float16 files are kept as stored, and hash differently from float32."""
    narrow = {name: array.astype(np.float16) for name, array in tiny.weights.items()}
    obtained = load(write_folder(tmp_path, narrow))
    assert {array.dtype for array in obtained.weights.values()} == {np.dtype(np.float16)}
    assert obtained.sha256 != tiny.sha256


def test_other_types_are_refused_by_name(tmp_path, tiny):
    """float64 is refused, naming the tensor and the type."""
    name = "transformer.ln_f.bias"
    wide = tiny.weights | {name: tiny.weights[name].astype(np.float64)}
    assert_refused(write_folder(tmp_path, wide), name, "F64", "BF16")


@pytest.mark.parametrize("content", [b"", b"\x08", bytes(16)])
def test_no_safetensors_header(tmp_path, tiny, content):
    """A file that is no safetensors file is named, with its size."""
    (write_folder(tmp_path, tiny.weights) / "model.safetensors").write_bytes(content)
    pattern = rf"model.safetensors: obtained {len(content)} bytes"
    with pytest.raises(CheckpointError, match=pattern):
        load(tmp_path)
