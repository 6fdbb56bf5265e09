"""A folder that carries code: nothing in it is unpickled, imported or run."""

import json
import pickle
import runpy
import shutil

import numpy as np
import pytest
import torch

from gptneo_trt import reference
from gptneo_trt.checkpoint import BUNDLED_FOLDER, checkpoint_from_source
from gptneo_trt.errors import CheckpointError
from gptneo_trt.texts import text_set
from tests.unit.tiny import CONFIG, tiny_checkpoint, write_folder

REMOTE = {
    "auto_map": {
        "AutoConfig": "modeling_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
        "AutoTokenizer": ["modeling_evil.EvilTokenizer", None],
    },
    "trust_remote_code": True,
    "architectures": ["EvilModel"],
    "custom_pipelines": {"text-generation": {"impl": "modeling_evil.EvilPipeline"}},
}
PICKLES = ("pytorch_model.bin", "training_args.bin", "model.ckpt", "model.pt")


class RunsWhenUnpickled:
    """Write a file when it is unpickled."""

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return (open, (str(self.sentinel), "w"))


@pytest.fixture
def sentinel(tmp_path):
    """Return a file that is there once code of the folder has run."""
    return tmp_path / "code-has-run"


@pytest.fixture
def folder(tmp_path, sentinel):
    """Return a folder with T0, a tokenizer, pickles and modules that write the sentinel."""
    folder = write_folder(tmp_path / "evil", tiny_checkpoint().weights, CONFIG | REMOTE)
    shutil.copy(BUNDLED_FOLDER / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(REMOTE))
    code = f"import pathlib\npathlib.Path({str(sentinel)!r}).touch()\n"
    for name in ("modeling_evil.py", "__init__.py", "setup.py", "conftest.py"):
        (folder / name).write_text(code)
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(RunsWhenUnpickled(sentinel)))
    return folder


def test_the_sentinel_would_tell(folder, sentinel):
    """Unpickling a file, or running a module, does write it."""
    pickle.loads((folder / PICKLES[0]).read_bytes()).close()
    assert sentinel.exists()
    sentinel.unlink()
    runpy.run_path(str(folder / "modeling_evil.py"))
    assert sentinel.exists()


def test_code_beside_the_weights_never_runs(folder, sentinel, monkeypatch):
    """Loader, tokenizer and reference take numbers from the folder and nothing else."""
    monkeypatch.chdir(folder)
    checkpoint = checkpoint_from_source(str(folder))
    text_set("prompts", "bundled", checkpoint.tokenizer_file, 256)
    model = reference.torch_model(checkpoint, torch.float32)

    found = reference.logits(model, np.zeros((1, 3), np.int32))

    assert found.shape == (1, 3, 64)
    assert type(model).__module__ == "transformers.models.gpt_neo.modeling_gpt_neo"
    assert checkpoint.files == ("config.json", "model.safetensors", "tokenizer.json")
    assert not sentinel.exists()


@pytest.mark.parametrize("weights", ["none", "empty", "of zeros", "pickle"])
def test_L07_code_never_runs_for_want_of_weights(folder, sentinel, weights):
    """Without usable safetensors the pickle is named, with what to do, and not opened."""
    single = folder / "model.safetensors"
    contents = {"empty": b"", "of zeros": bytes(64), "pickle": (folder / PICKLES[0]).read_bytes()}
    single.unlink() if weights == "none" else single.write_bytes(contents[weights])

    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        checkpoint_from_source(str(folder))

    assert not sentinel.exists()


def test_L07_an_index_of_pickles_is_no_index(folder, sentinel):
    """pytorch_model.bin.index.json names no shard, and a safetensors index no pickle."""
    (folder / "model.safetensors").unlink()
    index = json.dumps({"weight_map": dict.fromkeys(tiny_checkpoint().weights, PICKLES[0])})
    (folder / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="cannot be used, since unpickling can run code"):
        checkpoint_from_source(str(folder))

    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: obtained \d+ bytes without"):
        checkpoint_from_source(str(folder))

    assert not sentinel.exists()
