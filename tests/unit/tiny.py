"""T0, the tiny checkpoint of the public cases, how it is written to a folder, and E4M3."""

import json
from dataclasses import replace

import numpy as np
from safetensors.numpy import save_file
from scipy.special import log_softmax

from gptneo_trt.checkpoint import BUNDLED_FOLDER, random_checkpoint, weights_sha256
from gptneo_trt.data import Architecture
from gptneo_trt.scales import constant_scales
from gptneo_trt.variants import every_module

T0 = Architecture(
    vocab_size=64,
    hidden_size=32,
    num_heads=2,
    intermediate_size=128,
    max_positions=64,
    window_size=4,
    attention_layers=("global", "local"),
)
# What a port gets wrong -> T0 with it: other weights are the same.
WINDOW_MUTANTS = {
    "local as global": {"attention_layers": ("global", "global")},
    "global as local": {"attention_layers": ("local", "local")},
    "window 5": {"window_size": 5},
    "window 3": {"window_size": 3},
}
CONFIG = {
    "model_type": "gpt_neo",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": None,
    "max_position_embeddings": 64,
    "window_size": 4,
    "attention_types": [[["global", "local"], 1]],
    "activation_function": "gelu_new",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tiny_checkpoint(architecture=T0, seed=0):
    """Return a checkpoint whose biases and LayerNorms are not trivial either."""
    checkpoint = random_checkpoint(architecture, seed, std=0.3)
    generator = np.random.default_rng(seed + 1)
    weights = {
        name: array + generator.normal(0, 0.1, array.shape).astype(np.float32)
        for name, array in checkpoint.weights.items()
    }
    return replace(checkpoint, weights=weights, sha256=weights_sha256(architecture, weights))


def changed(checkpoint, changes):
    """Return the checkpoint with some weights replaced: name -> function of the old array."""
    weights = dict(checkpoint.weights)
    weights |= {name: change(weights[name]) for name, change in changes.items()}
    return replace(
        checkpoint, weights=weights, sha256=weights_sha256(checkpoint.architecture, weights)
    )


def with_architecture(checkpoint, **changes):
    """Return the checkpoint with the same weights and another architecture."""
    architecture = replace(checkpoint.architecture, **changes)
    sha256 = weights_sha256(architecture, checkpoint.weights)
    return replace(checkpoint, architecture=architecture, sha256=sha256)


def with_divided_queries(checkpoint, factor):
    """Return the checkpoint whose scores are divided, as by the square root of a head's width."""
    queries = [name for name in checkpoint.weights if ".q_proj." in name]
    return changed(checkpoint, dict.fromkeys(queries, lambda weight: weight / np.float32(factor)))


def fixed_scales(checkpoint, amax=8.0):
    """Return one made-up range for every projection: enough to build, not to be accurate."""
    modules = every_module(checkpoint.architecture.num_layers)
    scales = constant_scales(checkpoint, modules)
    ranges = dict.fromkeys(modules, amax)
    others = dict.fromkeys(("percentile", "mse-fp8", "mse-int8", "smoothquant"), ranges)
    return replace(scales, activation_amax=ranges, method="max", other_amax=others)


def ragged_feeds(phase, batch, context, seed=0):
    """Return the inputs of a batch of T0 [1, B, ...]; tokens, positions and caches all differ.

    Positions of a prefill, which fills the context, are in no order: every text has a mask of its
    own. Those of a step are spread from 0 to the last one. Caches are float16.
    """
    generator = np.random.default_rng(seed)
    if phase == "prefill":
        positions = generator.permuted(np.tile(np.arange(context), (batch, 1)), axis=1)
    else:
        positions = np.linspace(0, context - 1, batch).astype(int)[:, None]
    arrays = {
        "token_ids": generator.integers(0, T0.vocab_size, positions.shape, dtype=np.int32),
        "position_ids": positions.astype(np.int32),
    }
    if phase == "decode":
        shape = (batch, T0.num_heads, context, T0.head_width)
        for name in (f"past.h.{i}.{part}" for i in (0, 1) for part in ("key", "value")):
            arrays[name] = generator.normal(size=shape).astype(np.float16)
    return {name: array[None] for name, array in arrays.items()}


def kl_nats(expected, obtained):
    """Return float64 [..., T], KL(expected || obtained) at every position of [..., T, V]."""
    logs = [log_softmax(logits.astype(np.float64), axis=-1) for logits in (expected, obtained)]
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)


def e4m3_values():
    """Return float64 [127], every E4M3 value from 0 to 448 in the order of its byte.

    Source: OCP 8-bit Floating Point Specification 1.0: 4 bits of exponent with bias 7, 3 of
    mantissa, subnormals in steps of 2^-9; byte 127 is NaN, and there is no infinity.
    """
    exponent, mantissa = np.divmod(np.arange(127), 8)
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal)


def round_to_e4m3(values):
    """Return float64 of the shape of ``values``: the nearest E4M3 value, even bytes win ties."""
    table = e4m3_values()
    size = np.minimum(np.abs(values).astype(np.float64), table[-1])
    above = np.minimum(np.searchsorted(table, size), len(table) - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - size, size - table[below]
    tie_above = (to_above == to_below) & (above % 2 == 0)
    nearest = np.where((to_above < to_below) | tie_above, above, below)
    return np.copysign(table[nearest], values)


def write_folder(folder, weights, config=CONFIG, file_name="model.safetensors"):
    """Write config.json and one safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / file_name)
    return folder


def write_shards(folder, weights, config=CONFIG):
    """Write two shards and their index; return the names in the second shard."""
    names = sorted(weights)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        write_folder(folder, {name: weights[name] for name in half}, config, shard)
        weight_map |= dict.fromkeys(half, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return halves[1]


def small_tokenizer():
    """Return the bundled tokenizer.json with its first 300 tokens only."""
    said = json.loads((BUNDLED_FOLDER / "tokenizer.json").read_bytes())
    model = said["model"]
    model["vocab"] = {token: each for token, each in model["vocab"].items() if each < 300}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    return said
