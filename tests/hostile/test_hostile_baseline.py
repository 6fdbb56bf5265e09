"""Baselines: any damaged JSON or .tokens.npz is refused, or says what was read."""

import hashlib
import io
import json
import math
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import LONG, QUICK, mutated, mutated_bytes, outcome

from gptneo_trt import baselines, json_file, token_values
from gptneo_trt.baselines import Baseline
from gptneo_trt.errors import BaselineError

SAMPLE = Baseline(
    key={"checkpoint_sha256": "c0ffee", "texts": {"prose": {"sha256": "aa", "tokens": 4}}},
    provenance={"commit": "4446f63", "versions": {"numpy": "2.4.6"}},
    values={"prefill/prose/bf16/kl_mean_nats": 0.0022, "prefill/plan_mib": 313.6},
    tokens={
        "prefill/prose/bf16/kl_nats": np.array([0.001, 0.002, 0.003, 0.0028], np.float32),
        "decode/prose/bf16/kl_nats": np.zeros(2000, np.float32),
    },
)


def stored(folder):
    """Return the bytes of the two files of SAMPLE."""
    baselines.write(folder, "row", SAMPLE)
    return (folder / "row.json").read_bytes(), (folder / "row.tokens.npz").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder that holds SAMPLE as "row"."""
    folder = tmp_path_factory.mktemp("baseline")
    stored(folder)
    baselines.read(folder, "row")
    return folder


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Return the bytes of the two files of SAMPLE."""
    return stored(tmp_path_factory.mktemp("sample"))


def check_json(folder, content):
    """Assert that a JSON is refused, or says what was read."""
    (folder / "row.json").write_bytes(content)
    size = sum(path.stat().st_size for path in folder.iterdir())
    found = outcome(lambda: baselines.read(folder, "row"), size, json_file.MEMORY_FACTOR)
    if isinstance(found, BaselineError):
        return
    said = json.loads(content)
    assert (found.key, found.provenance) == (said["key"], said["provenance"])
    assert found.values == {name: float(value) for name, value in said["values"].items()}
    assert all(math.isfinite(value) for value in found.values.values())
    baselines.differences(found, SAMPLE)


def check_tokens(folder, content):
    """Assert that token values of the right hash are refused, or what numpy reads in the file."""
    path = folder / "row.tokens.npz"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    found = outcome(
        lambda: token_values.read_tokens(path, digest), len(content), token_values.MEMORY_FACTOR
    )
    if isinstance(found, BaselineError):
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert len(archive.namelist()) == len(found)
        for name, array in zip(archive.namelist(), found.values(), strict=True):
            stored = np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
            assert (array.dtype, stored.dtype) == (np.float32, np.float32)
            assert array.tobytes() == stored.tobytes()


@QUICK
@given(st.data())
def test_mutated_baseline(folder, sample, data):
    """Our error, or the file's own values."""
    check_json(folder, data.draw(mutated(sample[0])))


@pytest.mark.long
@LONG
@given(st.data())
def test_many_mutated_baselines(folder, sample, data):
    """The same, more often."""
    check_json(folder, data.draw(mutated(sample[0])))


@QUICK
@given(st.data())
def test_mutated_tokens(folder, sample, data):
    """Our error, or the same values as numpy reads."""
    check_tokens(folder, data.draw(mutated_bytes(sample[1]) | mutated_member()))


@pytest.mark.long
@LONG
@given(st.data())
def test_many_mutated_tokens(folder, sample, data):
    """The same, more often."""
    check_tokens(folder, data.draw(mutated_bytes(sample[1]) | mutated_member()))


@st.composite
def mutated_member(draw):
    """Draw an archive that is whole, of an array that is not."""
    array = np.arange(3, dtype=np.float32)
    member = io.BytesIO()
    np.save(member, array)
    header = draw(
        st.sampled_from(
            [
                "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
                "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
                "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
                "{'descr': '<f8', 'fortran_order': True, 'shape': (3,), }",
                "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'shape': (1,)}",
                "(" * 5000,
                "[" * 60 + "]" * 60,
                "{'descr': '" + "<f4," * 500 + "', 'fortran_order': False, 'shape': (3,), }",
            ]
        )
    )
    written = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    content = draw(st.just(written + array.tobytes()) | mutated_bytes(member.getvalue()))
    return archive_of({"kl_nats.npy": content}, draw(st.sampled_from([0, 8, 12, 14])))


def archive_of(members, compression=zipfile.ZIP_DEFLATED):
    """Return an npz of these bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive_of({"a.npy": bytes(64 << 20)}), "67108864 bytes unpacked, expected at most"),
        (archive_of({"a.npy": b""}, zipfile.ZIP_LZMA), "compress_type=lzma.* expected a plain"),
        (archive_of({"a.npy": b"\x80\x04N."}), r"tokens/a: obtained b'', expected float32"),
        (
            archive_of({"a.npy": b"x"}).replace(b"a.npy", b"\0.npy"),
            "an array without a name or twice, expected each once",
        ),
        (archive_of({"a": b"x", "a.npy": b"x"}), "an array without a name or twice"),
    ],
    ids=["bomb", "lzma", "pickle", "no name", "one name"],
)
def test_archives_that_are_not_unpacked(folder, content, message):
    """What an entry says of itself is read before the entry."""
    path, digest = folder / "row.tokens.npz", hashlib.sha256(content).hexdigest()
    path.write_bytes(content)

    found = outcome(
        lambda: token_values.read_tokens(path, digest), len(content), token_values.MEMORY_FACTOR
    )

    with pytest.raises(BaselineError, match=message):
        raise found
