"""Read the ``config.json`` of GPT-Neo: what the graph needs, or every reason why not."""

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from gptneo_trt.data import Architecture
from gptneo_trt.errors import CheckpointError

ACTIVATIONS = ("gelu_new", "gelu", "relu")
ATTENTION_NAMES = ("global", "local")
# transformers.GPTNeoConfig's values for what a file may leave out.
DEFAULT_ATTENTION_TYPES = [[["global", "local"], 12]]
DEFAULT_WINDOW_SIZE = 256
DEFAULT_ACTIVATION = "gelu_new"
DEFAULT_EPSILON = 1e-5
# GPT-Neo 2.7B has 32; a pattern is written out up to here.
MAX_LAYERS = 1024
# TensorRT's own limit of a dimension is that of int32.
MAX_SIZE = 2**31 - 1


def architecture_from_config(config: Mapping[str, Any], file_name: str) -> Architecture:
    """Return the architecture that a parsed ``config.json`` describes.

    ``attention_layers`` wins over ``attention_types``, and ``num_hidden_layers`` and
    ``num_attention_heads`` are aliases, as in ``transformers.GPTNeoConfig``, whose defaults
    hold for the attention pattern, ``window_size``, ``activation_function``,
    ``layer_norm_epsilon`` and ``tie_word_embeddings`` (true). A null or absent
    ``intermediate_size`` is 4 * ``hidden_size``. The other sizes have no default here.

    Args:
        config: the parsed file.
        file_name: for messages.

    Raises:
        CheckpointError: anything is missing, malformed or unsupported; all of it at once.
    """
    wrong: list[str] = []
    if config.get("model_type") != "gpt_neo":
        wrong.append(f"model_type: obtained {short(config.get('model_type'))}, expected 'gpt_neo'")
    if config.get("quantization_config") is not None:
        wrong.append("quantization_config: obtained one, expected unquantized weights")
    sizes = {
        "vocab_size": _size(config, ("vocab_size",), wrong),
        "hidden_size": _size(config, ("hidden_size",), wrong),
        "num_heads": _size(config, ("num_heads", "num_attention_heads"), wrong),
        "max_positions": _size(config, ("max_position_embeddings",), wrong),
        "window_size": _size(config, ("window_size",), wrong, DEFAULT_WINDOW_SIZE),
    }
    num_layers = _size(config, ("num_layers", "num_hidden_layers"), wrong, most=MAX_LAYERS)
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden_size and num_heads and hidden_size % num_heads:
        wrong.append(f"hidden_size {hidden_size}: expected a multiple of num_heads {num_heads}")
    sizes["intermediate_size"] = _size(config, ("intermediate_size",), wrong, 4 * hidden_size)
    architecture = Architecture(
        **sizes,
        attention_layers=_attention_layers(config, num_layers, wrong),
        activation=_activation(config, wrong),
        layer_norm_epsilon=_epsilon(config, wrong),
        tied_head=_tied_head(config, wrong),
    )
    if wrong:
        listed = "\n".join(f"  {line}" for line in sorted(wrong))
        raise CheckpointError(f"{file_name} is no usable GPT-Neo configuration:\n{listed}")
    return architecture


def _size(
    config: Mapping[str, Any],
    names: tuple[str, ...],
    wrong: list[str],
    default: int = 0,
    most: int = MAX_SIZE,
) -> int:
    """Return a positive integer under any of its names, ``default`` if null or absent, else 0."""
    found = {name: config[name] for name in names if config.get(name) is not None}
    label = " or ".join(names)
    if not found and default:
        return default
    if not found:
        wrong.append(f"{label}: obtained nothing, expected a positive integer")
        return 0
    if len(found) > 1 and len(set(map(repr, found.values()))) > 1:
        wrong.append(f"{label}: obtained {short(found)}, expected equal values")
    value = next(iter(found.values()))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        wrong.append(f"{label}: obtained {short(value)}, expected a positive integer")
        return 0
    if value > most:
        wrong.append(f"{label}: obtained {value}, expected at most {most}")
        return 0
    return value


def _attention_layers(
    config: Mapping[str, Any], num_layers: int, wrong: list[str]
) -> tuple[str, ...]:
    """Return one of ATTENTION_NAMES a layer."""
    types = config.get("attention_types")
    if config.get("attention_layers") is not None:
        origin, layers = "attention_layers", config["attention_layers"]
    elif types is not None:
        origin, layers = "attention_types", _expanded(types)
    else:
        origin, layers = "default attention_types", _expanded(DEFAULT_ATTENTION_TYPES)
    if not isinstance(layers, list | tuple) or not all(isinstance(name, str) for name in layers):
        obtained = types if layers is None else layers
        wrong.append(
            f"{origin}: obtained {short(obtained)}, expected a list of names (attention_layers) or "
            f'[[["global", "local"], repeats]] (attention_types), at most {MAX_LAYERS} layers'
        )
        return ()
    unknown = [layer for layer, name in enumerate(layers) if name not in ATTENTION_NAMES]
    if unknown:
        wrong.append(
            f"{origin}: obtained {short(layers[unknown[0]])} for layer {unknown[0]}, expected one "
            f"of {list(ATTENTION_NAMES)}; so for {len(unknown)} of {len(layers)} layers"
        )
    if num_layers and len(layers) != num_layers:
        wrong.append(f"{origin}: obtained {len(layers)} layers, expected num_layers {num_layers}")
    return tuple(layers)


def _expanded(types: Any) -> list[str] | None:
    """Return [[names, repeats], ...] as one name a layer; None if malformed or too many."""
    if not isinstance(types, list | tuple):
        return None
    layers: list[str] = []
    for item in types:
        pair = isinstance(item, list | tuple) and len(item) == 2
        if not pair or not isinstance(item[0], list | tuple) or type(item[1]) is not int:
            return None
        if not 0 <= item[1] <= MAX_LAYERS or len(layers) + len(item[0]) * item[1] > MAX_LAYERS:
            return None
        layers += list(item[0]) * item[1]
    return layers


def _activation(config: Mapping[str, Any], wrong: list[str]) -> str:
    name = config.get("activation_function", DEFAULT_ACTIVATION)
    if name not in ACTIVATIONS:
        wrong.append(
            f"activation_function: obtained {short(name)}, expected one of {list(ACTIVATIONS)}"
        )
    return str(name)


def _epsilon(config: Mapping[str, Any], wrong: list[str]) -> float:
    value = config.get("layer_norm_epsilon", DEFAULT_EPSILON)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:
        wrong.append(f"layer_norm_epsilon: obtained {short(value)}, expected above 0, at most 1")
        return DEFAULT_EPSILON
    return float(value)


def _tied_head(config: Mapping[str, Any], wrong: list[str]) -> bool:
    value = config.get("tie_word_embeddings", True)
    if not isinstance(value, bool):
        wrong.append(f"tie_word_embeddings: obtained {short(value)}, expected true or false")
    return bool(value)
