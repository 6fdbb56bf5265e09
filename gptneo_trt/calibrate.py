"""Calibrate activation ranges with ModelOpt: Hugging Face model, tokens -> Scales.

The recipe is the study's: ``FP8_DEFAULT_CFG`` (E4M3, one scale a tensor, max calibration) on the
bf16 model, restricted to the projections of the rows. Weight scales are not calibrated: they are
amax / 448 at build time. The only home of ``modelopt``.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gptneo_trt.data import Checkpoint, Scales, TextSet
from gptneo_trt.errors import CalibrationError

METHOD = "max"
E4M3 = (4, 3)


def _modelopt() -> Any:
    """Import ModelOpt late: it takes seconds, and stored scales need none of it.

    Raises:
        CalibrationError: it is not installed, or its configuration has another form.
    """
    try:
        import modelopt
        import modelopt.torch.quantization as quantization
    except ImportError as error:
        raise CalibrationError(
            f"nvidia-modelopt cannot be imported: {error}; do: pip install "
            "'gptneo-trt[calibration]'"
        ) from error
    rules = quantization.FP8_DEFAULT_CFG.get("quant_cfg")
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


def quantizer_config(modules: Sequence[str]) -> dict[str, Any]:
    """Return a ModelOpt configuration that enables FP8 for these modules only.

    It starts from a copy of ``FP8_DEFAULT_CFG``, which also quantizes LayerNorm inputs and
    ``out_proj``: everything is switched off again, then input and weight quantizers of the
    modules are switched on. Later rules win.
    """
    config = copy.deepcopy(_modelopt().FP8_DEFAULT_CFG)
    config["quant_cfg"].append({"quantizer_name": "*", "enable": False})
    config["quant_cfg"] += [
        {
            "quantizer_name": f"{module}.{part}_quantizer",
            "cfg": {"num_bits": E4M3, "axis": None},
            "enable": True,
        }
        for module in modules
        for part in ("input", "weight")
    ]
    config["algorithm"] = METHOD
    return config


def quantized_model(
    model: torch.nn.Module, modules: Sequence[str], token_ids: Sequence[np.ndarray]
) -> torch.nn.Module:
    """Return a quantized and calibrated copy of a model; the model itself is not touched.

    Args:
        model: Hugging Face's, in any type.
        modules: module paths, for example ``transformer.h.0.mlp.c_fc``.
        token_ids: int32 [T] each, one forward pass a text.

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

    def forward_loop(calibrated: torch.nn.Module) -> None:
        for ids in token_ids:
            calibrated(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)

    with torch.no_grad():
        quantization.quantize(copied, quantizer_config(modules), forward_loop=forward_loop)
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
    model: torch.nn.Module, checkpoint: Checkpoint, text: TextSet, modules: Sequence[str]
) -> Scales:
    """Return the largest absolute input of each module over the calibration text.

    Args:
        model: the bf16 model of the checkpoint; a copy of it is quantized.
        checkpoint: where the model comes from, for the record.
        text: calibration prompts.
        modules: module paths whose input ranges are wanted.

    Raises:
        CalibrationError: no token, or a range that is missing, not finite or not positive; every
            such module is named.
    """
    if text.tokens == 0:
        raise CalibrationError(f"{text.source}: 0 calibration tokens; nothing is written")
    calibrated = quantized_model(model, modules, text.token_ids)
    ranges = {module: _amax(calibrated, module) for module in modules}
    wrong = sorted(
        f"{module}: {amax}"
        for module, amax in ranges.items()
        if amax is None or not np.finfo(np.float32).tiny <= amax < np.inf
    )
    if wrong:
        raise CalibrationError(
            f"{checkpoint.name} on {text.source}: calibrated ranges must be finite and positive, "
            f"obtained {'; '.join(wrong)}; leave these projections out of the variant, or "
            "calibrate on text that reaches them"
        )
    return Scales(
        activation_amax={module: float(amax) for module, amax in ranges.items() if amax},
        method=METHOD,
        checkpoint_sha256=checkpoint.sha256,
        text_sha256=text.sha256,
        tokens=text.tokens,
        modelopt_version=modelopt_version(),
    )


def _amax(model: torch.nn.Module, module: str) -> float | None:
    quantizer: Any = model.get_submodule(module).input_quantizer
    return None if quantizer.amax is None else float(quantizer.amax.float())
