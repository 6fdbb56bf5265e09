"""Calibrate activation ranges with ModelOpt: Hugging Face model, tokens -> Scales.

The recipe is the study's: ``FP8_DEFAULT_CFG`` (E4M3, one scale a tensor, max calibration) on the
bf16 model, restricted to the projections of the rows. Weight scales are not calibrated: they are
amax / 448 at build time. The only home of ``modelopt``.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gptneo_trt.blocks import int4_block
from gptneo_trt.data import Checkpoint, Scales, TextSet
from gptneo_trt.errors import CalibrationError
from gptneo_trt.layers import LARGEST
from gptneo_trt.operators import to_fp8, to_int8
from gptneo_trt.smoothing import (
    AWQ,
    SMOOTHQUANT,
    readers,
    smoothed_ranges,
    smoothquant_factors,
)

METHOD = "max"
E4M3 = (4, 3)
# What importing a package raises that does not fit the versions beside it.
BROKEN = (
    ImportError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError
)  # fmt: skip
# Bits of a format, ModelOpt's notation.
BITS = {"fp8": E4M3, "int8": 8}
PERCENTILE = 99.99  # ModelOpt's default
# Method of Scales -> the format whose error is least; None for the percentile, which has none.
HISTOGRAM_METHODS = {"percentile": None, "mse-fp8": "fp8", "mse-int8": "int8"}
FEWEST_BINS = 128  # of a range with the least error, as in ModelOpt


def _modelopt() -> Any:
    """Import ModelOpt late: it takes seconds, and stored scales need none of it.

    Raises:
        CalibrationError: it is not installed, or its configuration has another form.
    """
    try:
        import modelopt
        import modelopt.torch.quantization as quantization

        rules = quantization.FP8_DEFAULT_CFG["quant_cfg"]
    except BROKEN as error:
        raise CalibrationError(
            f"nvidia-modelopt cannot be imported: {type(error).__name__}: {error}; do: pip install "
            "'gptneo-trt[calibration]'"
        ) from error
    if not isinstance(rules, list):
        raise CalibrationError(
            f"nvidia-modelopt {modelopt.__version__}: quant_cfg is a {type(rules).__name__}, "
            "expected a list of rules (0.44 or newer); do: pip install 'nvidia-modelopt>=0.44'"
        )
    return quantization


def modelopt_version() -> str:
    """Return the version of nvidia-modelopt."""
    _modelopt()
    import modelopt

    return str(modelopt.__version__)


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
    config = copy.deepcopy(_modelopt().FP8_DEFAULT_CFG)
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
    quantization = _modelopt()
    copied = copy.deepcopy(model)
    missing = sorted(set(modules) - {name for name, _ in copied.named_modules()})
    if missing:
        raise CalibrationError(f"modules {missing} do not exist in the model; check the variant")

    bad = sorted(n for n, weight in copied.named_parameters() if not weight.isfinite().all())
    if bad:
        raise CalibrationError(f"weights {bad} hold NaN or infinity; use another checkpoint")

    with torch.no_grad():
        config = quantizer_config(modules, number_format, weight_axis)
        quantization.quantize(copied, config, forward_loop=_forward_loop(token_ids))
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


def histogram_ranges(
    model: torch.nn.Module,
    modules: Sequence[str],
    token_ids: Sequence[np.ndarray],
    methods: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Return method -> module -> range of its input, by ModelOpt's histogram calibrator.

    Args:
        model: Hugging Face's, not quantized; it is not changed.
        modules: module paths whose input ranges are wanted.
        token_ids: int32 [T] each, one forward pass a text.
        methods: of HISTOGRAM_METHODS.
    """
    calib = _modelopt().calib
    histograms = {module: calib.HistogramCalibrator(num_bits=E4M3) for module in modules}
    _collect(model, histograms, token_ids)
    found: dict[str, dict[str, float]] = {}
    for method in methods:
        number_format = HISTOGRAM_METHODS[method]
        for module, histogram in histograms.items():
            if number_format is None:
                amax = float(histogram.compute_amax("percentile", percentile=PERCENTILE))
            else:
                counts, edges = histogram._calib_hist.float(), histogram._calib_bin_edges.float()
                amax = least_error_amax(counts, edges, number_format)
            found.setdefault(method, {})[module] = amax
    return found


def channel_ranges(
    model: torch.nn.Module, modules: Sequence[str], token_ids: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Return module -> float32 [in], the largest value of each channel of its input."""
    calib = _modelopt().calib
    found = {module: calib.MaxCalibrator(8, -1, unsigned=False) for module in modules}
    _collect(model, found, token_ids)
    return {module: each.compute_amax().float().flatten().numpy() for module, each in found.items()}


def _collect(
    model: torch.nn.Module, calibrators: Mapping[str, Any], token_ids: Sequence[np.ndarray]
) -> None:
    """Show the inputs of modules to ModelOpt's calibrators, one forward pass a text."""

    def collects(calibrator: Any) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        return lambda _, inputs: calibrator.collect(inputs[0].float())

    hooks = [
        model.get_submodule(module).register_forward_pre_hook(collects(calibrator))
        for module, calibrator in calibrators.items()
    ]
    try:
        with torch.no_grad():
            _forward_loop(token_ids)(model)
    finally:
        for hook in hooks:
            hook.remove()


def least_error_amax(counts: torch.Tensor, edges: torch.Tensor, number_format: str) -> float:
    """Return the range with which rounding a histogram has the smallest mean squared error.

    Every bin from FEWEST_BINS on is a candidate, as in ModelOpt's HistogramCalibrator, whose own
    search fails for FP8 in 0.46: it calls ``scaled_e4m3`` with too few arguments.

    Args:
        counts: float32 [B], of absolute values.
        edges: float32 [B + 1].
        number_format: "fp8" or "int8".
    """
    centers = (edges[1:] + edges[:-1]) / 2
    candidates = centers[min(FEWEST_BINS, len(centers) - 1) :, None]
    scales = candidates / LARGEST[number_format]
    rounded = {"fp8": to_fp8, "int8": to_int8}[number_format](centers / scales) * scales
    errors = ((rounded - centers) ** 2 * counts).sum(dim=1)
    return float(candidates[errors.argmin()])


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
    other: dict[str, dict[str, float]] = {}
    smoothing: dict[str, dict[str, tuple[float, ...]]] = {}
    histograms = [method for method in other_methods if method in HISTOGRAM_METHODS]
    if histograms:
        other = histogram_ranges(model, modules, text.token_ids, histograms)
    if SMOOTHQUANT in other_methods:
        factors, smooth = _smoothquant(model, checkpoint, text)
        other[SMOOTHQUANT] = known | smooth
        smoothing[SMOOTHQUANT] = {norm: tuple(each.tolist()) for norm, each in factors.items()}
    if AWQ in other_methods:
        factors = awq_factors(model, checkpoint, text.token_ids)
        smoothing[AWQ] = {norm: tuple(each.tolist()) for norm, each in factors.items()}
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
    quantization, known = _modelopt(), readers(checkpoint)
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
        quantization.quantize(copied, config, forward_loop=_forward_loop(token_ids))

    def multiplier(module: str) -> np.ndarray:
        quantizer: Any = copied.get_submodule(module).input_quantizer
        return np.asarray(quantizer.pre_quant_scale.float().flatten())

    return {
        norm: 1 / np.mean([multiplier(module) for module in modules], axis=0)
        for norm, modules in known.items()
    }


def _forward_loop(token_ids: Sequence[np.ndarray]) -> Callable[[torch.nn.Module], None]:
    """Return what shows all texts to a model, one forward pass a text."""

    def forward_loop(model: torch.nn.Module) -> None:
        for ids in token_ids:
            model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)

    return forward_loop


def _amax(model: torch.nn.Module, module: str) -> float | None:
    quantizer: Any = model.get_submodule(module).input_quantizer
    return None if quantizer.amax is None else float(quantizer.amax.float())
