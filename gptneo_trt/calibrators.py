"""ModelOpt, and its calibrators: what the inputs of modules are over the calibration text.

``modelopt`` is imported here alone, and late.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gptneo_trt.errors import CalibrationError
from gptneo_trt.layers import LARGEST
from gptneo_trt.operators import to_fp8, to_int8

E4M3 = (4, 3)
# What importing a package raises that does not fit the versions beside it.
BROKEN = (
    ImportError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError
)  # fmt: skip
PERCENTILE = 99.99  # ModelOpt's default
# Method of Scales -> the format whose error is least; None for the percentile, which has none.
HISTOGRAM_METHODS = {"percentile": None, "mse-fp8": "fp8", "mse-int8": "int8"}
FEWEST_BINS = 128  # of a range with the least error, as in ModelOpt


def modelopt_quantization() -> Any:
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
    modelopt_quantization()
    import modelopt

    return str(modelopt.__version__)


def forward_loop_over(token_ids: Sequence[np.ndarray]) -> Callable[[torch.nn.Module], None]:
    """Return what shows all texts to a model, one forward pass a text."""

    def forward_loop(model: torch.nn.Module) -> None:
        for ids in token_ids:
            model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)

    return forward_loop


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
    calib = modelopt_quantization().calib
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
    calib = modelopt_quantization().calib
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
            forward_loop_over(token_ids)(model)
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
