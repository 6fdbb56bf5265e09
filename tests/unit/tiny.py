"""T0, the tiny checkpoint of the public cases, and how it is written to a folder."""

import json
from dataclasses import replace

import numpy as np
from safetensors.numpy import save_file
from scipy.special import log_softmax

from gptneo_trt.checkpoint import random_checkpoint, weights_sha256
from gptneo_trt.data import Architecture, Scales
from gptneo_trt.variants import VARIANTS

T0 = Architecture(
    vocab_size=64,
    hidden_size=32,
    num_heads=2,
    intermediate_size=128,
    max_positions=64,
    window_size=4,
    attention_layers=("global", "local"),
)
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


def fixed_scales(checkpoint, amax=8.0):
    """Return one made-up range for every projection: enough to build, not to be accurate."""
    modules = VARIANTS["fp8-all"].quantized_modules(checkpoint.architecture.num_layers)
    return Scales(dict.fromkeys(modules, amax), "max", checkpoint.sha256, "", 1, "")


def kl_nats(expected, obtained):
    """Return float64 [..., T], KL(expected || obtained) at every position of [..., T, V]."""
    logs = [log_softmax(logits.astype(np.float64), axis=-1) for logits in (expected, obtained)]
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)


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
