"""config.json: what is read, what is refused, and that transformers agrees."""

import pytest
from tiny import CONFIG, T0
from transformers import GPTNeoConfig

from gptneo_trt.architecture import architecture_from_config
from gptneo_trt.errors import CheckpointError


def read(**changes):
    """Return the architecture of CONFIG with changes; None removes a field."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    return architecture_from_config(config, "config.json")


def test_tiny_configuration_is_read():
    """T0's fields are read; null intermediate_size is 4 * hidden, an absent tie flag is true."""
    assert architecture_from_config(CONFIG, "config.json") == T0


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([[["global", "local"], 2]], "g l g l"),
        ([[["global"], 2], [["local"], 3]], "g g l l l"),
        ([[["local"], 1], [["global", "local"], 1]], "l g l"),
    ],
)
def test_L02_attention_types_expand_as_in_transformers(types, expected):
    """The nested pattern expands to one name a layer, as GPTNeoConfig expands it."""
    layers = GPTNeoConfig.expand_attention_types_params(types)
    obtained = read(attention_types=types, num_layers=len(layers)).attention_layers
    assert list(obtained) == layers
    assert " ".join(name[0] for name in obtained) == expected


def test_L02_only_attention_layers():
    """A file with names only is enough."""
    layers = ["local", "global", "global", "local"]
    obtained = read(attention_types=None, attention_layers=layers, num_layers=4)
    assert obtained.attention_layers == tuple(layers)


def test_L02_attention_layers_win():
    """A stored attention_layers wins over attention_types."""
    assert read(attention_layers=["local", "local"]).attention_layers == ("local", "local")


def test_L02_default_pattern_has_24_layers():
    """Without either field the pattern is transformers' own, of 24 layers."""
    assert read(attention_types=None, num_layers=24).attention_layers == ("global", "local") * 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 4, "attention_layers": ["global"] * 3}, "3 layers, expected num_layers 4"),
        ({"num_layers": 4, "attention_types": None}, "24 layers, expected num_layers 4"),
        ({"attention_layers": ["global", "sparse"]}, "'sparse' for layer 1"),
        ({"attention_types": [[["x"], 999]]}, "'x' for layer 0, .*; so for 999 of 999 layers"),
        ({"attention_types": [[["local"], -1]]}, r"'local'\], -1\]\], expected"),
        ({"attention_layers": "global"}, "expected a list of names"),
        ({"attention_types": [["global", "local"]]}, r"\[\['global', 'local'\]\], expected"),
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size 30: expected a multiple of.* 4"),
        ({"activation_function": "silu"}, "'silu', expected one of"),
        ({"model_type": "gpt2"}, "'gpt2', expected 'gpt_neo'"),
        ({"vocab_size": "64"}, "vocab_size: obtained '64'"),
        ({"vocab_size": None}, "vocab_size: obtained nothing"),
        ({"num_heads": True}, "num_heads or num_attention_heads: obtained True"),
        ({"num_heads": 2, "num_attention_heads": 4}, "expected equal values"),
        ({"window_size": 0}, "window_size: obtained 0"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon: obtained 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: obtained 'no'"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
    ],
)
def test_L02_what_is_wrong_is_named(changes, message):
    """An unusable field is an error that names the file, the field and both values."""
    with pytest.raises(CheckpointError, match=rf"(?s)^config.json .*{message}"):
        read(**changes)


def test_L02_alias_names():
    """num_hidden_layers and num_attention_heads are the same fields by other names."""
    aliases = {"num_hidden_layers": 2, "num_attention_heads": 2}
    assert read(num_layers=None, num_heads=None, **aliases) == T0


def test_L02_intermediate_size_is_honoured():
    """A stored intermediate_size replaces 4 * hidden_size."""
    assert read(intermediate_size=96).intermediate_size == 96


def test_all_problems_at_once():
    """One message lists every problem, sorted."""
    with pytest.raises(CheckpointError) as caught:
        read(activation_function="silu", model_type="opt", hidden_size=30, num_heads=4)
    lines = str(caught.value).splitlines()[1:]
    assert lines == sorted(lines)
    assert len(lines) == 3
