"""config.json: any damaged one is refused, or describes what was loaded."""

import json

import pytest
from hypothesis import given
from mutations import LONG, QUICK, mutated, outcome

from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import CheckpointError
from gptneo_trt.json_file import MEMORY_FACTOR
from tests.unit.tiny import CONFIG, tiny_checkpoint, write_folder

CONTENT = json.dumps(CONFIG | {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}).encode()
FILES = mutated(CONTENT, ('[[["global"], 1], [["local"], 1]]', "1024", "1025", "64", "32"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with T0, read once so that nothing is imported later."""
    folder = write_folder(tmp_path_factory.mktemp("config"), tiny_checkpoint().weights)
    checkpoint_from_source(str(folder))
    return folder


def check(folder, content):
    """Assert that a config.json is refused, or says what was loaded."""
    (folder / "config.json").write_bytes(content)
    size = sum(path.stat().st_size for path in folder.iterdir())
    found = outcome(lambda: checkpoint_from_source(str(folder)), size, MEMORY_FACTOR)
    if not isinstance(found, Checkpoint):
        assert isinstance(found, CheckpointError)
        return
    said, architecture = json.loads(content), found.architecture
    for name in ("vocab_size", "hidden_size"):
        assert getattr(architecture, name) == said[name]
    assert architecture.max_positions == said["max_position_embeddings"]
    assert architecture.num_layers in (said.get("num_layers"), said.get("num_hidden_layers"))
    assert architecture.num_heads in (said.get("num_heads"), said.get("num_attention_heads"))
    assert architecture.window_size == (said.get("window_size") or 256)
    assert architecture.layer_norm_epsilon == said.get("layer_norm_epsilon", 1e-5)
    assert architecture.tied_head == said.get("tie_word_embeddings", True)


@QUICK
@given(FILES)
def test_mutated_config(folder, content):
    """Our error, or an architecture that is the file's."""
    check(folder, content)


@pytest.mark.long
@LONG
@given(FILES)
def test_many_mutated_configs(folder, content):
    """The same, more often."""
    check(folder, content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_layers": 10**9},
            "num_layers or num_hidden_layers: obtained 1000000000, expected at",
        ),
        ({"attention_types": [[["global"], 10**9]]}, "attention_types: .*at most 1024 layers"),
        ({"attention_types": [[[], 10**38]]}, "attention_types: .*at most 1024 layers"),
        ({"attention_types": [[["global"], -(10**38)]]}, "attention_types: .*at most 1024 layers"),
        ({"vocab_size": 10**12}, "vocab_size: obtained 1000000000000, expected at most 2147483647"),
        (
            {"vocab_size": 2**31 - 1},
            r"wte.weight: obtained \[64, 32\], expected \[2147483647, 32\]",
        ),
        (
            {"num_layers": 1024, "attention_types": [[["global"], 1024]]},
            "obtained 30, expected 12 a layer of num_layers 1024",
        ),
        ({"window_size": 10**12}, "window_size: obtained 1000000000000"),
        ({"layer_norm_epsilon": 1e30}, "layer_norm_epsilon: obtained 1e.30"),
    ],
)
def test_sizes_beyond_the_files(folder, changes, message):
    """A size is bounded before anything of that size is made, and named."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    size = sum(path.stat().st_size for path in folder.iterdir())

    with pytest.raises(CheckpointError, match=message):
        raise outcome(lambda: checkpoint_from_source(str(folder)), size, MEMORY_FACTOR)
