"""Move the range of an activation's channels into the weights that read it, or back.

Each channel of a LayerNorm's output is divided by a factor, and the columns of the products that
read it are multiplied by the same: the function stays, the ranges change. Only inputs that a
LayerNorm makes can be smoothed so: q, k, v and c_fc. Where factors come from:

    smoothquant   narrower activations. Source: G. Xiao et al., "SmoothQuant: Accurate and Efficient
                  Post-Training Quantization for Large Language Models" (2023), equation 4
    awq           weights that matter most lose least. Source: J. Lin et al., "AWQ: Activation-aware
                  Weight Quantization for LLM Compression and Acceleration" (2024), section 3.2;
                  ModelOpt searches them (``calibrate.py``)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import CalibrationError

SMOOTHQUANT, AWQ = "smoothquant", "awq"
STRENGTH = 0.5  # of the paper
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


def smoothquant_factors(
    checkpoint: Checkpoint, channel_amax: Mapping[str, np.ndarray], strength: float = STRENGTH
) -> dict[str, np.ndarray]:
    """Return path of a LayerNorm -> float32 [C], the factor of each channel of its output.

    Args:
        checkpoint: weights and shapes.
        channel_amax: module path -> float32 [C], of the inputs of q, k, v and c_fc at least.
        strength: see ``smoothing_factors``.

    Raises:
        CalibrationError: the ranges of a product are missing, not finite, or of another width.
    """
    factors = {}
    for norm, modules in readers(checkpoint).items():
        _check(checkpoint, channel_amax, modules)
        read = {module: checkpoint.weights[f"{module}.weight"] for module in modules}
        amax = np.maximum.reduce([channel_amax[module] for module in modules])
        factors[norm] = smoothing_factors(amax, read, strength)
    return factors


def readers(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return path of a LayerNorm -> the modules that read its output."""
    return {
        f"transformer.h.{layer}.{norm}": [f"transformer.h.{layer}.{path}" for path in paths]
        for layer in range(checkpoint.architecture.num_layers)
        for norm, paths in READERS.items()
    }


def smoothed_ranges(
    checkpoint: Checkpoint,
    channel_amax: Mapping[str, np.ndarray],
    factors: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Return module path -> largest input of the smoothed checkpoint, of q, k, v and c_fc."""
    return {
        module: float((channel_amax[module] / factors[norm]).max())
        for norm, modules in readers(checkpoint).items()
        for module in modules
    }


def smoothed(checkpoint: Checkpoint, factors: Mapping[str, Sequence[float]]) -> Checkpoint:
    """Return the checkpoint that computes the same from smoother activations.

    Args:
        checkpoint: weights and shapes; it is not changed.
        factors: path of a LayerNorm -> a positive factor of each channel of its output.

    Raises:
        CalibrationError: a LayerNorm without factors, or whose factors are not C positive numbers.
    """
    weights, known = dict(checkpoint.weights), readers(checkpoint)
    for norm, modules in known.items():
        divisor = np.asarray(factors.get(norm, ()), dtype=np.float32)
        if divisor.shape != (checkpoint.architecture.hidden_size,) or not (divisor > 0).all():
            raise CalibrationError(
                f"{checkpoint.name}: {norm}: obtained factors of shape {divisor.shape}, expected "
                f"{checkpoint.architecture.hidden_size} positive numbers; calibrate again"
            )
        for part in ("weight", "bias"):
            weights[f"{norm}.{part}"] = weights[f"{norm}.{part}"].astype(np.float32) / divisor
        for module in modules:
            weight = weights[f"{module}.weight"].astype(np.float32)
            weights[f"{module}.weight"] = weight * divisor
    return replace(checkpoint, weights=weights)


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
