"""Sources of checkpoints: bundled, folder, random, and the hub without a network."""

import json
import shutil
import time

import numpy as np
import pytest
from huggingface_hub import constants
from tiny import CONFIG, T0, tiny_checkpoint, write_folder

from gptneo_trt import checkpoint
from gptneo_trt.checkpoint import STUDY_CHECKPOINT, checkpoint_from_source, random_checkpoint
from gptneo_trt.errors import CheckpointError

REPO, REVISION = STUDY_CHECKPOINT.split("@")
OTHER_REVISION = "f" * 40


@pytest.fixture
def offline_cache(tmp_path, monkeypatch):
    """Return an empty hub cache; HF_HUB_OFFLINE=true, and any network call fails the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("network call"))
    return tmp_path / "hub"


def cache(folder, revision):
    """Put T0 into the cache as a snapshot without a refs folder."""
    snapshot = folder / ("models--" + REPO.replace("/", "--")) / "snapshots" / revision
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    return write_folder(snapshot, tiny_checkpoint().weights)


def test_bundled_checkpoint():
    """The bundled checkpoint loads anywhere: 6 layers, float16, its tokenizer, a quality."""
    obtained = checkpoint_from_source("bundled")
    assert obtained.has_quality
    assert obtained.architecture.attention_layers == ("global", "local") * 3
    assert obtained.architecture.window_size == 64
    assert obtained.tokenizer_file.name == "tokenizer.json"
    assert {array.dtype for array in obtained.weights.values()} == {np.dtype(np.float16)}
    assert obtained.files == ("config.json", "model.safetensors", "tokenizer.json")


def test_folder_without_tokenizer_is_noted(tmp_path):
    """A folder needs no tokenizer.json, but its lack is noted."""
    obtained = checkpoint_from_source(str(write_folder(tmp_path, tiny_checkpoint().weights)))
    assert obtained.tokenizer_file is None
    assert any("tokenizer.json" in note for note in obtained.notes)
    assert (obtained.name, obtained.revision) == (str(tmp_path), "")


@pytest.mark.parametrize("content", ["{", "[]", "", '"gpt_neo"'])
def test_malformed_config(tmp_path, content):
    """A config.json that is no JSON object is an error naming the file."""
    (write_folder(tmp_path, tiny_checkpoint().weights) / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config.json: .* expected a JSON object"):
        checkpoint_from_source(str(tmp_path))


def test_folder_without_config(tmp_path):
    """A folder without config.json is named."""
    with pytest.raises(CheckpointError, match=r"no config.json in .*save_pretrained"):
        checkpoint_from_source(str(tmp_path))


@pytest.mark.parametrize("source", [REPO, "./nowhere", "/nowhere", "", "gpt-neo-125m"])
def test_unpinned_or_unknown_source(source):
    """A hub id without a revision, or a folder that is not there, says to pin."""
    with pytest.raises(CheckpointError, match=r"no such folder and no revision.*pin it as"):
        checkpoint_from_source(source)


@pytest.mark.parametrize("name", ["gpt-neo-125m", "gpt-neo-1.3B", "gpt-neo-2.7B"])
def test_random_shapes(name, monkeypatch):
    """The random sources have the real shapes and no quality verdict."""
    monkeypatch.setattr(checkpoint, "random_checkpoint", lambda *args, name: (args[0], name))
    architecture, obtained_name = checkpoint_from_source(f"random:{name}")
    expected = {"125m": (12, 768, 12), "1.3B": (24, 2048, 16), "2.7B": (32, 2560, 20)}
    layers, hidden, heads = expected[name.removeprefix("gpt-neo-")]
    assert (architecture.num_layers, architecture.hidden_size) == (layers, hidden)
    assert (architecture.num_heads, architecture.vocab_size) == (heads, 50257)
    assert (architecture.window_size, architecture.max_positions) == (256, 2048)
    assert obtained_name == f"random:{name}"


@pytest.mark.parametrize("name", ["", "gpt-neo-20B", "gpt-neo-125m@1"])
def test_unknown_random_shape(name):
    """Another name after random: lists those there are."""
    with pytest.raises(CheckpointError, match=r"expected one of random:gpt-neo-125m"):
        checkpoint_from_source(f"random:{name}")


def test_random_checkpoint_is_seeded():
    """A seed gives the same hash each time, another seed another; no quality."""
    first, again, other = (random_checkpoint(T0, seed) for seed in (0, 0, 1))
    assert first.sha256 == again.sha256 != other.sha256
    assert not first.has_quality


def test_random_checkpoint_is_initialised_as_gpt_neo():
    """Matrices are normal with std 0.02, biases 0, LayerNorm weights 1."""
    weights = random_checkpoint(T0, seed=0).weights
    assert weights["transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert not weights["transformer.h.0.mlp.c_fc.bias"].any()
    assert (weights["transformer.h.1.ln_2.weight"] == 1).all()


def test_hash_covers_architecture_and_every_weight(tmp_path):
    """Another window, or one changed value, is another hash."""
    tiny = tiny_checkpoint()
    wider = checkpoint_from_source(
        str(write_folder(tmp_path, tiny.weights, CONFIG | {"window_size": 5}))
    )
    changed = tiny.weights | {"transformer.ln_f.bias": tiny.weights["transformer.ln_f.bias"] + 1}
    hashes = {tiny.sha256, wider.sha256, checkpoint.weights_sha256(T0, changed)}
    assert len(hashes) == 3


def test_D03_cached_snapshot_without_refs(offline_cache):
    """(b, e) A cached commit is used without a network call, refs folder or not."""
    cache(offline_cache, REVISION)
    obtained = checkpoint_from_source(STUDY_CHECKPOINT)
    assert (obtained.name, obtained.revision) == (REPO, REVISION)
    assert obtained.sha256 == tiny_checkpoint().sha256


@pytest.mark.parametrize("cached", [(), (OTHER_REVISION,)])
@pytest.mark.parametrize("wanted", [REVISION, "main"])
def test_D03_another_revision_is_never_taken(offline_cache, cached, wanted):
    """(a, c, d) An error within seconds names repo, revision, what is cached and the remedy."""
    for revision in cached:
        cache(offline_cache, revision)
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        checkpoint_from_source(f"{REPO}@{wanted}")
    message = str(caught.value)
    words = (REPO, repr(wanted), ", ".join(cached) or "none", "local folder", "hf download")
    assert [word for word in words if word not in message] == []
    assert time.monotonic() - started < 5


def test_D03_branch_is_no_pin(offline_cache):
    """(c) "main" is refused even where a commit is cached."""
    cache(offline_cache, REVISION)
    with pytest.raises(CheckpointError, match=f"no commit of 40 digits.*{REVISION}"):
        checkpoint_from_source(f"{REPO}@main")


def test_D03_id_without_owner(offline_cache):
    """(f) An id without its owner says so."""
    with pytest.raises(CheckpointError, match="lacks its owner"):
        checkpoint_from_source(f"gpt-neo-125m@{REVISION}")


def test_copy_of_the_bundled_folder_is_the_same_checkpoint(tmp_path):
    """The hash is of the content: a copy elsewhere has the same one."""
    copy = shutil.copytree(checkpoint.BUNDLED_FOLDER, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["attention_layers"] = None
    (copy / "config.json").write_text(json.dumps(config))
    assert checkpoint_from_source(str(copy)).sha256 == checkpoint_from_source("bundled").sha256
