"""Safetensors: any damaged header or body is refused, or says what was loaded."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import LONG, QUICK, mutated, mutated_bytes, mutated_json, outcome
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.errors import CheckpointError
from gptneo_trt.json_file import MEMORY_FACTOR
from gptneo_trt.weights import INDEX_FILE
from tests.unit.tiny import CONFIG, T0, tiny_checkpoint, write_folder, write_shards

SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "window_size": 4}
FRAGMENTS = (
    *('"F32"', '"F16"', '"BF16"', '"F64"', '"U8"', '"BOOL"', '"F8_E4M3"', '"C64"', '"F4"'),
    *("[8, 8]", "[64]", "[0]", "[]", "[8.0, 8]", "[-8, -8]", "[true, 8]", "[16, 8]", "[8, 16]"),
    *("[4294967296, 4294967296]", "[9223372036854775808, 2]", "[0, 18446744073709551615]"),
    *("[0, 128]", "[128, 0]", "[-128, 0]", "[0, 0]", "[0, 256]", "[128, 256]", "128", "16"),
    '{"dtype": "F16", "shape": [8], "data_offsets": [0, 16]}',
)
TYPES = {"F16": "<f2", "F32": "<f4"}


def content_in(dtype):
    """Return a safetensors file of a small GPT-Neo in a type."""
    architecture = replace(T0, max_positions=16, **SMALL)
    weights = tiny_checkpoint(architecture).weights
    if dtype == torch.bfloat16:
        return save_torch(
            {name: torch.from_numpy(each).to(dtype) for name, each in weights.items()}
        )
    return save({name: each.astype(np.float16) for name, each in weights.items()})


def parts(content):
    """Return (header as text, data) of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], content[8 + length :]


def joined(header, data):
    """Return a safetensors file of a header's text and its data."""
    return len(header).to_bytes(8, "little") + header + data


def files(content):
    """Return a strategy of files damaged anywhere, in a part, or with another header."""
    header, data = parts(content)
    lengths = st.sampled_from([0, 1, len(header) - 1, len(header) + 1, 2**32, 2**63, 2**64 - 1])
    return st.one_of(
        mutated_bytes(content),
        mutated_bytes(data).map(lambda body: joined(header, body)),
        mutated_bytes(header).map(lambda text: joined(text, data)),
        mutated_json(json.loads(header), FRAGMENTS).map(lambda text: joined(text, data)),
        lengths.map(lambda length: length.to_bytes(8, "little") + content[8:]),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small GPT-Neo, read in both types: nothing is imported later."""
    config = CONFIG | SMALL | {"max_position_embeddings": 16}
    folder = write_folder(tmp_path_factory.mktemp("safetensors"), {}, config)
    for content in (content_in(torch.float16), content_in(torch.bfloat16)):
        (folder / "model.safetensors").write_bytes(content)
        checkpoint_from_source(str(folder))
    return folder


def check(folder, content):
    """Assert that a file is refused, or holds what was loaded."""
    (folder / "model.safetensors").write_bytes(content)
    size = sum(path.stat().st_size for path in folder.iterdir())
    found = outcome(lambda: checkpoint_from_source(str(folder)), size, MEMORY_FACTOR)
    if isinstance(found, CheckpointError):
        return
    header, data = parts(content)
    said = json.loads(header)
    for name, array in found.weights.items():
        entry = said.get(name, said.get(name.removeprefix("transformer.")))
        start, end = entry["data_offsets"]
        stored = np.frombuffer(data[start:end], TYPES.get(entry["dtype"], "<u2"))
        if entry["dtype"] == "BF16":
            stored = (stored.astype("<u4") << 16).view("<f4")
        assert list(array.shape) == entry["shape"]
        assert np.array_equal(array.reshape(-1), stored)
        assert np.isfinite(array).all()


@QUICK
@given(files(content_in(torch.float16)))
def test_mutated_safetensors(folder, content):
    """Our error, or the file's own values."""
    check(folder, content)


@pytest.mark.long
@LONG
@given(files(content_in(torch.float16)) | files(content_in(torch.bfloat16)))
def test_many_mutated_safetensors(folder, content):
    """The same, more often, and in bfloat16."""
    check(folder, content)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Return (folder with T0 in two shards, the bytes of their index)."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, tiny_checkpoint().weights)
    return folder, (folder / INDEX_FILE).read_bytes()


@QUICK
@given(st.data())
def test_L06_mutated_index(shards, data):
    """Our error, or T0 to the bit: an index never gives a mix."""
    folder, content = shards
    names = ('"model-00001-of-00002.safetensors"', '"config.json"', '"."', '"/dev/zero"')
    (folder / INDEX_FILE).write_bytes(data.draw(mutated(content, names)))
    size = sum(path.stat().st_size for path in folder.iterdir())

    found = outcome(lambda: checkpoint_from_source(str(folder)), size, MEMORY_FACTOR)

    assert isinstance(found, CheckpointError) or found.sha256 == tiny_checkpoint().sha256
