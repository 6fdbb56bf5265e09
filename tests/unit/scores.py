"""Checkpoints by how large their attention scores are, which takes Hugging Face's model to see."""

import numpy as np
import torch

from gptneo_trt import reference
from tests.unit.tiny import changed


def largest_score(checkpoint, tokens):
    """Return the largest |q.k| of any head, layer and pair of positions, from hooks."""
    model = reference.torch_model(checkpoint, torch.float32)
    found = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.register_forward_hook(
                lambda module, inputs, output, name=name: found.update({name: output})
            )
    reference.logits(model, tokens)
    heads = checkpoint.architecture.num_heads
    largest = 0.0
    for name, query in found.items():
        if name.endswith("q_proj"):
            key = found[name.replace("q_proj", "k_proj")]
            split = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key)]
            largest = max(largest, float((split[0] @ split[1].transpose(-1, -2)).abs().max()))
    return largest


def with_scores(checkpoint, tokens, wanted):
    """Return the checkpoint with q_proj and k_proj scaled so that |q.k| reaches ``wanted``."""
    factor = np.float32(np.sqrt(wanted / largest_score(checkpoint, tokens)))
    names = [name for name in checkpoint.weights if ".q_proj." in name or ".k_proj." in name]
    return changed(checkpoint, dict.fromkeys(names, lambda weight: weight * factor))
