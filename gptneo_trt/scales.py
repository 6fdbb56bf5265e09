"""Keep calibrated scales in a file: Scales <-> JSON; needs neither torch nor ModelOpt."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from gptneo_trt.data import CONSTANT, Checkpoint, Scales, TextSet
from gptneo_trt.errors import CalibrationError
from gptneo_trt.json_file import object_from_file
from gptneo_trt.smoothing import AWQ, SMOOTHQUANT, readers
from gptneo_trt.whole_file import whole_file, writer_lock

# Any positive range gives the same plan; a power of two keeps the weights' rounding visible.
CONSTANT_AMAX = 4.0
REMEDY = "delete it"
PACKAGES = ("nvidia-modelopt", "torch", "transformers")
FOLDER = Path(__file__).parent
SOURCES = (
    "blocks.py", "calibrate.py", "calibrators.py", "layers.py", "number_formats.py", "nvfp4.py",
    "operators.py", "quantizing.py", "reference.py", "smoothing.py", "supported.py",
)  # fmt: skip
MEMBERS = {
    "activation_amax": dict,
    "method": str,
    "checkpoint_sha256": str,
    "text_sha256": str,
    "tokens": int,
    "modelopt_version": str,
    "notes": list,
    "other_amax": dict,
    "smoothing": dict,
}


def constant_scales(checkpoint: Checkpoint, modules: Sequence[str]) -> Scales:
    """Return one and the same range for every module: what a random checkpoint is built with.

    Its activations mean nothing, so there is nothing to calibrate; plan size and speed do not
    depend on the value. (A calibrated 125m plan is 4 MiB larger: TensorRT-RTX 1.6 writes each
    activation scale into the source of the kernel that applies it, and keeps one a scale.)
    """
    amax = dict.fromkeys(modules, CONSTANT_AMAX)
    factors = (1.0,) * checkpoint.architecture.hidden_size
    smoothing = {name: dict.fromkeys(readers(checkpoint), factors) for name in (SMOOTHQUANT, AWQ)}
    return Scales(amax, CONSTANT, checkpoint.sha256, "", 0, "", smoothing=smoothing)


def scales_path(
    cache: Path, checkpoint: Checkpoint, text: TextSet, other_methods: Sequence[str] = ()
) -> Path:
    """Return where calibrated scales are kept: a name over all that shapes them.

    Checkpoint, token ids, methods beside max, versions of PACKAGES and sources of SOURCES.
    """
    parts = [checkpoint.sha256, text.token_ids_sha256, *other_methods, *map(_version, PACKAGES)]
    for name in SOURCES:
        parts.append(hashlib.sha256((FOLDER / name).read_bytes()).hexdigest())
    return cache / "scales" / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()}.json"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def kept_scales(
    path: Path,
    checkpoint: Checkpoint,
    text: TextSet,
    modules: Sequence[str],
    calibrated: Callable[[], Scales],
) -> Scales:
    """Return stored scales; where there are none of these, calibrate, in one process at a time.

    Args:
        path: see ``scales_path``.
        checkpoint, text, modules: what they must be of.
        calibrated: calibrates.

    Raises:
        CalibrationError: see ``read_scales``.
        StorageError: they cannot be written.
    """
    with writer_lock(path):
        found = read_scales(path, checkpoint, text, modules)
        if found is None:
            found = calibrated()
            write_scales(path, found)
    return found


def write_scales(path: Path, scales: Scales) -> None:
    """Write scales as JSON, whole or not at all."""
    content = vars(scales) | {
        "activation_amax": dict(scales.activation_amax),
        "other_amax": {method: dict(ranges) for method, ranges in scales.other_amax.items()},
        "smoothing": {method: dict(factors) for method, factors in scales.smoothing.items()},
    }
    text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_scales(
    path: Path, checkpoint: Checkpoint, text: TextSet, modules: Sequence[str]
) -> Scales | None:
    """Return stored scales when they are of this checkpoint, text and set of modules.

    None means that there are none of these: calibrate. Values are checked again on reading.

    Reading takes at most MEMORY_FACTOR of ``json_file`` times the size of the file.

    Raises:
        CalibrationError: the file is not one that ``write_scales`` wrote, or holds a value that
            is no range.
    """
    if not path.exists():
        return None
    content = object_from_file(path, CalibrationError, REMEDY)
    wrong = sorted(_mismatches(content))
    if wrong:
        raise CalibrationError(f"{path}: not a scales file: {'; '.join(wrong)}; {REMEDY}")
    changed = {
        "activation_amax": _floats(content["activation_amax"]),
        "notes": tuple(content["notes"]),
        "other_amax": {each: _floats(ranges) for each, ranges in content["other_amax"].items()},
        "smoothing": {
            method: {norm: tuple(map(float, each)) for norm, each in factors.items()}
            for method, factors in content["smoothing"].items()
        },
    }
    scales = Scales(**content | changed)
    of_this = (
        scales.checkpoint_sha256 == checkpoint.sha256
        and scales.text_sha256 == text.sha256
        and scales.tokens == text.tokens
        and set(scales.activation_amax) == set(modules)
    )
    if not of_this:
        return None
    found = (scales.activation_amax, *scales.other_amax.values())
    wrong = sorted({m for ranges in found for m, amax in ranges.items() if not 0 < amax < np.inf})
    if wrong:
        raise CalibrationError(f"{path}: ranges of {wrong} are not positive; {REMEDY}")
    return scales


def _mismatches(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keeps parsed JSON from being what ``write_scales`` writes."""
    for name in content.keys() - MEMBERS.keys():
        yield f"{name}: expected no such member"
    for name, kind in MEMBERS.items():
        if type(content.get(name)) is not kind:
            yield f"{name}: obtained {short(content.get(name))}, expected {kind.__name__}"
    other, notes = content.get("other_amax"), content.get("notes")
    named = {f"other_amax/{method}": ranges for method, ranges in _items(other)}
    for name, ranges in {"activation_amax": content.get("activation_amax"), **named}.items():
        wrong = [each for _, each in _items(ranges) if type(each) not in (int, float)]
        if wrong or type(ranges) is not dict:
            yield f"{name}: obtained {short(ranges)}, expected numbers"
    if isinstance(notes, list) and not all(isinstance(note, str) for note in notes):
        yield f"notes: obtained {short(notes)}, expected strings"
    for method, factors in _items(content.get("smoothing")):
        wrong = [norm for norm, each in _items(factors) if not _are_positive(each)]
        if wrong or type(factors) is not dict:
            yield f"smoothing/{method}: obtained {short(factors)}, expected lists above 0"


def _are_positive(found: Any) -> bool:
    """Return whether this is a list of finite positive numbers."""
    return isinstance(found, list) and all(
        type(each) in (int, float) and 0 < each < np.inf for each in found
    )


def _items(found: Any) -> Iterable[tuple[str, Any]]:
    """Return the items of a dict; none of anything else."""
    return found.items() if isinstance(found, dict) else ()


def _floats(ranges: Mapping[str, float]) -> dict[str, float]:
    return {module: float(amax) for module, amax in ranges.items()}


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
