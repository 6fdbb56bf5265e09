"""Calibrate activation ranges with ModelOpt: Hugging Face model, tokens -> Scales.

The recipe is the study's: ``FP8_DEFAULT_CFG`` (E4M3, one scale a tensor, max calibration) on the
bf16 model, restricted to the projections of the rows. Weight scales are not calibrated: they are
amax / 448 at build time.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gptneo_trt.blocks import int4_block
from gptneo_trt.calibrators import (
    E4M3,
    HISTOGRAM_METHODS,
    channel_ranges,
    forward_loop_over,
    histogram_ranges,
    modelopt_quantization,
    modelopt_version,
)
from gptneo_trt.data import Checkpoint, Scales, TextSet
from gptneo_trt.errors import CalibrationError
from gptneo_trt.smoothing import (
    AWQ,
    SMOOTHQUANT,
    readers,
    smoothed_ranges,
    smoothquant_factors,
)

METHOD = "max"
# Bits of a format, ModelOpt's notation.
BITS = {"fp8": E4M3, "int8": 8}


def quantizer_config(
    modules: Sequence[str], number_format: str = "fp8", weight_axis: int | None = None
) -> dict[str, Any]:
    """Return a ModelOpt configuration that enables a format for these modules only.

    It starts from a copy of ``FP8_DEFAULT_CFG``, which also quantizes LayerNorm inputs and
    ``out_proj``: everything is switched off again, then input and weight quantizers of the
    modules are switched on. Later rules win.

    Args:
        modules: module paths.
        number_format: of BITS.
        weight_axis: None for one scale a weight, 0 for one an output channel.
    """
    config = copy.deepcopy(modelopt_quantization().FP8_DEFAULT_CFG)
    config["quant_cfg"].append({"quantizer_name": "*", "enable": False})
    config["quant_cfg"] += [
        {
            "quantizer_name": f"{module}.{part}_quantizer",
            "cfg": {"num_bits": BITS[number_format], "axis": axis},
            "enable": True,
        }
        for module in modules
        for part, axis in (("input", None), ("weight", weight_axis))
    ]
    config["algorithm"] = METHOD
    return config


def quantized_model(
    model: torch.nn.Module,
    modules: Sequence[str],
    token_ids: Sequence[np.ndarray],
    number_format: str = "fp8",
    weight_axis: int | None = None,
) -> torch.nn.Module:
    """Return a quantized and calibrated copy of a model; the model itself is not touched.

    Args:
        model: Hugging Face's, in any type.
        modules: module paths, for example ``transformer.h.0.mlp.c_fc``.
        token_ids: int32 [T] each, one forward pass a text.
        number_format, weight_axis: see ``quantizer_config``.

    Raises:
        CalibrationError: a module does not exist, a weight is not finite, or other quantizers
            than these are on.
    """
    quantization = modelopt_quantization()
    copied = copy.deepcopy(model)
    missing = sorted(set(modules) - {name for name, _ in copied.named_modules()})
    if missing:
        raise CalibrationError(f"modules {missing} do not exist in the model; check the variant")

    bad = sorted(n for n, weight in copied.named_parameters() if not weight.isfinite().all())
    if bad:
        raise CalibrationError(f"weights {bad} hold NaN or infinity; use another checkpoint")

    with torch.no_grad():
        config = quantizer_config(modules, number_format, weight_axis)
        quantization.quantize(copied, config, forward_loop=forward_loop_over(token_ids))
    expected = {f"{module}.{part}_quantizer" for module in modules for part in ("input", "weight")}
    obtained = {
        name
        for name, module in copied.named_modules()
        if type(module).__name__.endswith("Quantizer") and getattr(module, "is_enabled", False)
    }
    if obtained != expected:
        raise CalibrationError(
            f"ModelOpt enabled other quantizers than asked for: missing "
            f"{sorted(expected - obtained)}, unexpected {sorted(obtained - expected)}"
        )
    return copied


def calibrate(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    text: TextSet,
    modules: Sequence[str],
    other_methods: Sequence[str] = (),
) -> Scales:
    """Return the largest absolute input of each module over the calibration text.

    Args:
        model: the bf16 model of the checkpoint; a copy of it is quantized.
        checkpoint: where the model comes from, for the record.
        text: calibration prompts.
        modules: module paths whose input ranges are wanted.
        other_methods: of HISTOGRAM_METHODS, whose ranges are wanted beside the largest inputs, or
            SMOOTHQUANT or AWQ, whose factors are wanted too.

    Raises:
        CalibrationError: no token, or a range that is missing, not finite or not positive; every
            such module is named.
    """
    if text.tokens == 0:
        raise CalibrationError(f"{text.source}: 0 calibration tokens; nothing is written")
    calibrated = quantized_model(model, modules, text.token_ids)
    ranges = {module: _amax(calibrated, module) for module in modules}
    known = {module: amax for module, amax in ranges.items() if amax is not None}
    other, smoothing = _by_other_methods(model, checkpoint, text, known, other_methods)
    found: list[Mapping[str, float | None]] = [ranges, *other.values()]
    wrong = sorted(
        f"{module}: {amax}"
        for each in found
        for module, amax in each.items()
        if amax is None or not np.finfo(np.float32).tiny <= amax < np.inf
    )
    if wrong:
        raise CalibrationError(
            f"{checkpoint.name} on {text.source}: calibrated ranges must be finite and positive, "
            f"obtained {'; '.join(wrong)}; leave these projections out of the variant, or "
            "calibrate on text that reaches them"
        )
    return Scales(
        activation_amax=known,
        method=METHOD,
        checkpoint_sha256=checkpoint.sha256,
        text_sha256=text.sha256,
        tokens=text.tokens,
        modelopt_version=modelopt_version(),
        other_amax=other,
        smoothing=smoothing,
    )


def _by_other_methods(
    model: torch.nn.Module, checkpoint: Checkpoint, text: TextSet, ranges: Mapping[str, float],
    methods: Sequence[str],
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, tuple[float, ...]]]]:  # fmt: skip
    """Return method -> module -> range, and method -> LayerNorm -> factors of its channels.

    ``ranges``: the largest inputs, which smoothing leaves where no LayerNorm makes the input.
    """
    other: dict[str, dict[str, float]] = {}
    factors: dict[str, dict[str, np.ndarray]] = {}
    histograms = [method for method in methods if method in HISTOGRAM_METHODS]
    if histograms:
        other = histogram_ranges(model, list(ranges), text.token_ids, histograms)
    if SMOOTHQUANT in methods:
        factors[SMOOTHQUANT], smooth = _smoothquant(model, checkpoint, text)
        other[SMOOTHQUANT] = {**ranges, **smooth}
    if AWQ in methods:
        factors[AWQ] = awq_factors(model, checkpoint, text.token_ids)
    return other, {
        method: {norm: tuple(each.tolist()) for norm, each in found.items()}
        for method, found in factors.items()
    }


def _smoothquant(
    model: torch.nn.Module, checkpoint: Checkpoint, text: TextSet
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return factors by LayerNorm, and the ranges that the smoothed inputs of its readers have."""
    read = [module for modules in readers(checkpoint).values() for module in modules]
    channels = channel_ranges(model, read, text.token_ids)
    factors = smoothquant_factors(checkpoint, channels)
    return factors, smoothed_ranges(checkpoint, channels, factors)


def awq_factors(
    model: torch.nn.Module, checkpoint: Checkpoint, token_ids: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Return path of a LayerNorm -> float32 [C], the factors that ModelOpt's AWQ search finds.

    ModelOpt searches them a product, with the weights in the blocks that networks have; products
    that read one LayerNorm get their mean, as in ModelOpt's export.
    """
    quantization, known = modelopt_quantization(), readers(checkpoint)
    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            *(
                {
                    "quantizer_name": f"{module}.weight_quantizer",
                    "cfg": {"num_bits": 4, "block_sizes": {-1: block}},
                    "enable": True,
                }
                for modules in known.values()
                for module in modules
                for block in [int4_block(module, checkpoint.architecture.hidden_size)]
            ),
        ],
        "algorithm": "awq_lite",
    }
    copied = copy.deepcopy(model)
    with torch.no_grad():
        quantization.quantize(copied, config, forward_loop=forward_loop_over(token_ids))

    def multiplier(module: str) -> np.ndarray:
        quantizer: Any = copied.get_submodule(module).input_quantizer
        return np.asarray(quantizer.pre_quant_scale.float().flatten())

    return {
        norm: 1 / np.mean([multiplier(module) for module in modules], axis=0)
        for norm, modules in known.items()
    }


def _amax(model: torch.nn.Module, module: str) -> float | None:
    quantizer: Any = model.get_submodule(module).input_quantizer
    return None if quantizer.amax is None else float(quantizer.amax.float())
