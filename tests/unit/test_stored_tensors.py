"""One safetensors file: what a header says is checked before it is believed."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from gptneo_trt.errors import CheckpointError
from gptneo_trt.stored_tensors import arrays_in_file, tensors_in_file

FIRST, LAST = np.arange(6, dtype=np.float16).reshape(2, 3), np.ones(4, np.float16)
CONTENT = save({"first": FIRST, "last": LAST})


def parts(content):
    """Return (header as text, data) of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], content[8 + length :]


def joined(header, data):
    """Return a safetensors file of a header's text and its data."""
    return len(header).to_bytes(8, "little") + header + data


def read(path, content):
    """Return (name -> tensor, name -> values) of a file of these bytes."""
    path.write_bytes(content)
    tensors = tensors_in_file(path, "copy it")
    return tensors, arrays_in_file(path, tensors, "copy it")


@pytest.fixture
def path(tmp_path):
    """Return where the file is."""
    return tmp_path / "model.safetensors"


def test_values_are_read_as_they_are_stored(path):
    """Type, shape and values of every tensor."""
    tensors, arrays = read(path, CONTENT)
    assert (tensors["first"].dtype, tensors["first"].shape) == ("F16", (2, 3))
    assert np.array_equal(arrays["first"], FIRST)
    assert arrays["last"].dtype == np.float16


def test_bfloat16_beside_float16(path):
    """Only what is bfloat16 is widened."""
    values = {"narrow": torch.ones(3).bfloat16() / 3, "half": torch.ones(3).half() / 3}
    _, arrays = read(path, save_torch(values))
    assert (arrays["narrow"].dtype, arrays["half"].dtype) == (np.float32, np.float16)
    assert np.array_equal(arrays["narrow"], values["narrow"].float().numpy())


def entry(shape, start, end):
    """Return a tensor of a header."""
    return {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": 1, "a": 2}', r"its header: .*duplicate keys \['a'\]"),
        (b"[" * 100_000, "its header: .*nested too deeply"),
        (json.dumps({"a": entry([-1], 0, 2)}).encode(), "its header: obtained {'a'"),
        (json.dumps({"a": entry([True], 0, 2)}).encode(), "its header: obtained {'a'"),
        (json.dumps({"a": entry([1.0], 0, 2)}).encode(), "its header: obtained {'a'"),
        (json.dumps({"a": entry([2**62, 4], 0, 2)}).encode(), "model.safetensors: .*; copy it"),
        (json.dumps({"a": entry([1], 2, 0)}).encode(), r"obtained \d+ bytes, expected \d+"),
        (json.dumps({"a": [1]}).encode(), r"its header: obtained {'a': \[1\]}"),
        (json.dumps({"a": entry([1], 0, 2) | {"b": 1}}).encode(), "its header: obtained {'a'"),
    ],
    ids=["twice", "deep", "negative", "bool", "float", "huge", "backwards", "list", "more"],
)
def test_headers_that_lie(path, header, message):
    """A malformed header is named with the file and what to do."""
    with pytest.raises(CheckpointError, match=message):
        read(path, joined(header, bytes(2)))


@pytest.mark.parametrize("change", ["overlap", "gap", "shape"])
def test_header_that_contradicts_itself(path, change):
    """Tensors that overlap, leave a gap or are of another size are our error with the file."""
    header, data = parts(CONTENT)
    said = json.loads(header)
    if change == "overlap":
        said["first"]["data_offsets"] = [8, 20]
    if change == "gap":
        said["last"]["data_offsets"][0] += 2
    if change == "shape":
        said["last"]["shape"] = [3]

    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*; copy it"):
        read(path, joined(json.dumps(said).encode(), data))


@pytest.mark.parametrize("length", [0, 2**32, 2**63, 2**64 - 1])
def test_length_of_a_header_that_is_not_there(path, length):
    """No more is read than the file has."""
    with pytest.raises(CheckpointError, match=rf"expected one of {length} bytes; copy it"):
        read(path, length.to_bytes(8, "little") + CONTENT[8:])


def test_file_that_may_not_be_read(path, monkeypatch):
    """A file of somebody else is our error."""

    def refuse(*_):
        raise PermissionError("Permission denied")

    path.write_bytes(CONTENT)
    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(CheckpointError, match="obtained Permission denied, expected a readable"):
        tensors_in_file(path, "copy it")
