"""Keep calibrated scales in a file: Scales <-> JSON; needs neither torch nor ModelOpt."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from gptneo_trt.data import Checkpoint, Scales, TextSet
from gptneo_trt.errors import CalibrationError
from gptneo_trt.whole_file import whole_file

# Any positive range gives the same plan; a power of two keeps the weights' rounding visible.
CONSTANT_AMAX = 4.0


def constant_scales(checkpoint: Checkpoint, modules: Sequence[str]) -> Scales:
    """Return one and the same range for every module: what a random checkpoint is built with.

    Its activations mean nothing, so there is nothing to calibrate; plan size and speed do not
    depend on the value. (A calibrated 125m plan is 4 MiB larger: TensorRT-RTX 1.6 writes each
    activation scale into the source of the kernel that applies it, and keeps one a scale.)
    """
    amax = dict.fromkeys(modules, CONSTANT_AMAX)
    return Scales(amax, "constant", checkpoint.sha256, "", 0, "")


def scales_path(cache: Path, checkpoint: Checkpoint, text: TextSet) -> Path:
    """Return where calibrated scales are kept: a name over all that shapes them.

    Checkpoint, token ids, ModelOpt's version and the source of ``calibrate``.
    """
    try:
        version = metadata.version("nvidia-modelopt")
    except metadata.PackageNotFoundError:
        version = "absent"
    source = Path(__file__).with_name("calibrate.py").read_bytes()
    parts = (checkpoint.sha256, text.token_ids_sha256, version, hashlib.sha256(source).hexdigest())
    return cache / "scales" / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()}.json"


def write_scales(path: Path, scales: Scales) -> None:
    """Write scales as JSON, whole or not at all."""
    content = {**vars(scales), "activation_amax": dict(scales.activation_amax)}
    text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_scales(
    path: Path, checkpoint: Checkpoint, text: TextSet, modules: Sequence[str]
) -> Scales | None:
    """Return stored scales when they are of this checkpoint, text and set of modules.

    None means that there are none of these: calibrate. Values are checked again on reading.

    Raises:
        CalibrationError: the file cannot be read, or holds a value that is no range.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["activation_amax"] = {k: float(v) for k, v in content["activation_amax"].items()}
        content["notes"] = tuple(content["notes"])
        scales = Scales(**content)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"{path}: not a scales file: {error}; delete it") from error
    of_this = (
        scales.checkpoint_sha256 == checkpoint.sha256
        and scales.text_sha256 == text.sha256
        and scales.tokens == text.tokens
        and set(scales.activation_amax) == set(modules)
    )
    if not of_this:
        return None
    wrong = sorted(m for m, amax in scales.activation_amax.items() if not 0 < amax < np.inf)
    if wrong:
        raise CalibrationError(f"{path}: ranges of {wrong} are not positive; delete it")
    return scales


def ranges_sha256(ranges: Mapping[str, float]) -> str:
    """Return the SHA-256 of module -> range, whatever the order of the modules."""
    exact = {module: float(amax).hex() for module, amax in ranges.items()}
    return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()


def values_from_ranges(ranges: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a baseline, ``scales/<module>/amax``, of module -> range."""
    return {f"scales/{module}/amax": amax for module, amax in ranges.items()}


def ranges_from_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return module -> range of the values of a baseline; none of one that has no ranges."""
    return {
        name.removeprefix("scales/").removesuffix("/amax"): value
        for name, value in values.items()
        if name.startswith("scales/") and name.endswith("/amax")
    }
