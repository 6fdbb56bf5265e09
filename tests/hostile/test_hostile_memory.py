"""Small files that ask for much memory, read by a process that has little."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gptneo_trt.checkpoint import BUNDLED_FOLDER
from tests.child import child_environment
from tests.unit.tiny import CONFIG, tiny_checkpoint, write_folder

ROOT = Path(__file__).parents[2]
PADDING = {
    "strategy": {"Fixed": 10**12},
    "direction": "Right",
    "pad_to_multiple_of": 2**40,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}
CONFIGS = {
    "layers": {"num_layers": 10**9, "attention_types": [[["global"], 10**9]]},
    "vocabulary": {"vocab_size": 2**31 - 1},
    "width": {"hidden_size": 2**31 - 2, "num_heads": 2},
    "positions": {"max_position_embeddings": 2**31 - 1},
}


def tokenizer(**changes):
    """Return the bundled tokenizer.json with other parts."""
    said = json.loads((BUNDLED_FOLDER / "tokenizer.json").read_bytes())
    return json.dumps(said | changes).encode()


def npz(header, body):
    """Return a deflated npz of one array."""
    text = str(header).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body
        archive.writestr("kl_nats.npy", content)
    return buffer.getvalue()


def header(shape, dtype="<f4"):
    """Return what an npy says of itself."""
    return {"descr": dtype, "fortran_order": False, "shape": shape}


FILES = {
    "padding.tokenizer": tokenizer(padding=PADDING),
    "truncation.tokenizer": tokenizer(truncation={"max_length": 1, "stride": 2**40}),
    "normalizer.tokenizer": tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10**6}
    ),
    "zeros.npz": npz(header((10**8,)), bytes(4 * 10**8)),
    "shape.npz": npz(header((10**12,)), bytes(16)),
    "object.npz": npz(header((3,), "|O"), bytes(24)),
}
OUTCOMES = {
    "padding.tokenizer": "TextSet",
    "truncation.tokenizer": "TextSet",
    "normalizer.tokenizer": "normalizer: obtained",
    "zeros.npz": "bytes unpacked, expected at most",
    "shape.npz": "(1000000000000,)",
    "object.npz": "|O",
    "layers": "obtained 1000000000, expected at most 1024",
    "vocabulary": "[2147483647, 32]",
    "width": "expected [2147483646]",
    "positions": "[2147483647, 32]",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return name -> what a process with little memory made of each file."""
    folder = tmp_path_factory.mktemp("bounded")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name, changes in CONFIGS.items():
        write_folder(folder / name, tiny_checkpoint().weights, CONFIG | changes)
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.bounded", str(folder)],
        input=json.dumps(list(OUTCOMES)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the limit is Linux's")
@pytest.mark.parametrize("name", OUTCOMES)
def test_memory_is_in_proportion_to_the_file(found, name):
    """64 times the file and 64 MiB are enough for every file, whatever it says of itself."""
    assert OUTCOMES[name] in found[name]
