"""SmoothQuant: move the range of an activation's wide channels into the weights that read it.

Each channel of a LayerNorm's output is divided by a factor, and the columns of the products that
read it are multiplied by the same: the function stays, the ranges change. Source: G. Xiao et al.,
"SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (2023),
equation 4. Only inputs that a LayerNorm makes can be smoothed so: q, k, v and c_fc.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gptneo_trt.data import Checkpoint, weights_sha256
from gptneo_trt.errors import CalibrationError

# LayerNorm of a block -> the products that read its output.
READERS = {
    "ln_1": ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    "ln_2": ("mlp.c_fc",),
}


def smoothing_factors(
    activation_amax: np.ndarray, weights: Mapping[str, np.ndarray], strength: float
) -> np.ndarray:
    """Return the factor of each channel, float32 [C]: amax_x^strength / amax_w^(1 - strength).

    A channel that is always 0, in the activation or in all weights, keeps the factor 1.

    Args:
        activation_amax: float32 [C], largest absolute value of each channel.
        weights: name -> float [out, C] of every product that reads it.
        strength: from 0, all range stays with the weights, to 1, all goes to them.
    """
    columns = [np.abs(weight.astype(np.float32)).max(axis=0) for weight in weights.values()]
    weight_amax = np.maximum.reduce(columns)
    used = (activation_amax > 0) & (weight_amax > 0)
    factors = np.ones(len(activation_amax), dtype=np.float32)
    factors[used] = activation_amax[used] ** np.float32(strength)
    factors[used] /= weight_amax[used] ** np.float32(1 - strength)
    return factors


def smoothed(
    checkpoint: Checkpoint, channel_amax: Mapping[str, np.ndarray], strength: float
) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """Return the checkpoint that computes the same from smoother activations, and its ranges.

    Args:
        checkpoint: weights and shapes; it is not changed.
        channel_amax: module path -> float32 [in], of the inputs of q, k, v and c_fc at least.
        strength: see ``smoothing_factors``.

    Returns:
        The checkpoint, and module path -> float32 [in] of its own inputs' channels.

    Raises:
        CalibrationError: the ranges of a product are missing, not finite, or of another width.
    """
    weights, ranges = dict(checkpoint.weights), dict(channel_amax)
    for layer in range(checkpoint.architecture.num_layers):
        for norm, paths in READERS.items():
            block = f"transformer.h.{layer}"
            modules = [f"{block}.{path}" for path in paths]
            _check(checkpoint, channel_amax, modules)
            read = {module: weights[f"{module}.weight"] for module in modules}
            amax = np.maximum.reduce([channel_amax[module] for module in modules])
            factors = smoothing_factors(amax, read, strength)
            for part in ("weight", "bias"):
                name = f"{block}.{norm}.{part}"
                weights[name] = weights[name].astype(np.float32) / factors
            for module, weight in read.items():
                weights[f"{module}.weight"] = weight.astype(np.float32) * factors
                ranges[module] = channel_amax[module] / factors
    sha256 = weights_sha256(checkpoint.architecture, weights)
    note = f"smoothed with strength {strength:g}"
    notes = (*checkpoint.notes, note)
    return replace(checkpoint, weights=weights, sha256=sha256, notes=notes), ranges


def _check(
    checkpoint: Checkpoint, channel_amax: Mapping[str, np.ndarray], modules: list[str]
) -> None:
    """Raise CalibrationError naming every module whose ranges cannot smooth its input."""
    width = checkpoint.architecture.hidden_size
    wrong = []
    for module in modules:
        found = channel_amax.get(module)
        if found is None:
            wrong.append(f"{module}: no ranges of its input's channels")
        elif found.shape != (width,) or not np.isfinite(found).all() or (found < 0).any():
            wrong.append(
                f"{module}: obtained ranges of shape {found.shape}, expected [{width}], finite "
                "and not negative"
            )
    if wrong:
        raise CalibrationError(f"{checkpoint.name}: {'; '.join(wrong)}; calibrate again")
