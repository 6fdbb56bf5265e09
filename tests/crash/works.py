"""What is killed: pieces of work on files, and what a reader finds of them afterwards.

Each runs again and again in one folder, as runs of the gate do with their cache, and between the
runs nothing is cleaned by hand.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import torch

from gptneo_trt import baselines, calibrate, plans, reference, scales
from gptneo_trt.backend import backend_named
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Checkpoint, Scales, TextSet
from gptneo_trt.plans import PlanRequest, build_plan, plan_key
from gptneo_trt.variants import VARIANTS
from tests.gate import references
from tests.gate.references import ScoredTexts
from tests.unit.tiny import fixed_scales, tiny_checkpoint

MADE, FAILED, FOUND_MADE, INTERRUPTED = 0, 1, 10, 130  # exit statuses of a child
ROWS = ("fp16", "fp8", "fp8-c_fc", "fp8-qkv")
STEPS = 50
TOKENS = 20_000  # float32 values a row: a file of 70 kB, as the bundled rows have


@dataclass(frozen=True)
class Work:
    """Describe one piece of work.

    Attributes:
        prepare: what must be there before the first run.
        start: makes a run do something again: what the last one finished is removed or is old.
        run: the work; it is killed somewhere in here. Returns False where another process has
            done it.
        check: reads what a reader accepts, raises AssertionError where that is not whole and right,
            and returns whether the work is done.
    """

    prepare: Callable[[Path], None]
    start: Callable[[Path], None]
    run: Callable[[Path], bool]
    check: Callable[[Path], bool]


@cache
def _checkpoint() -> Checkpoint:
    return tiny_checkpoint()


def _nothing(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def _lone_files(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if path.is_file()]


# Plans


def tiny_request() -> PlanRequest:
    """Return the request of a plan that TensorRT-RTX builds in half a second."""
    checkpoint = _checkpoint()
    row, ranges = VARIANTS["fp8"], fixed_scales(checkpoint)
    return PlanRequest(backend_named("tensorrt_rtx"), checkpoint, row, ranges, "decode", 8)


def _plan(folder: Path) -> Path:
    return folder / "plans" / f"{plan_key(tiny_request())}.plan"


def _build(folder: Path) -> bool:
    return not build_plan(tiny_request(), folder).cached


def _forget_plan(folder: Path) -> None:
    """Remove the side-car: a plan alone is not used. Now and then the weights, too."""
    _plan(folder).with_suffix(".json").unlink(missing_ok=True)
    if os.urandom(1)[0] < 64:
        _remove(folder, "weights/*.safetensors")


def _check_plan(folder: Path) -> bool:
    found, _ = plans._stored_plan(_plan(folder), tiny_request())
    return found is not None


# Scales


def tiny_text() -> TextSet:
    """Return a calibration text of 8 tokens."""
    ids = np.arange(8, dtype=np.int32)
    return TextSet("calibration", "made up", (ids,), "every", "0" * 64, "", "0" * 64, 8)


def _scales_path(folder: Path) -> Path:
    return scales.scales_path(folder, _checkpoint(), tiny_text())


def _modules() -> tuple[str, ...]:
    return VARIANTS["fp8-all"].quantized_modules(_checkpoint().architecture.num_layers)


def _calibrated() -> Scales:
    model = reference.torch_model(_checkpoint(), torch.bfloat16)
    return calibrate.calibrate(model, _checkpoint(), tiny_text(), _modules())


def _calibrate(folder: Path) -> bool:
    made = Mock(side_effect=_calibrated)
    scales.kept_scales(_scales_path(folder), _checkpoint(), tiny_text(), _modules(), made)
    return made.called


def _check_scales(folder: Path) -> bool:
    return (
        scales.read_scales(_scales_path(folder), _checkpoint(), tiny_text(), _modules()) is not None
    )


# Baselines: every value of a row is the number of the update


def _baseline(number: int) -> Baseline:
    return Baseline(
        key={"checkpoint_sha256": "c0ffee"},
        provenance={"commit": str(number)},
        values={"prefill/plan_mib": float(number)},
        tokens={"prefill/kl_nats": np.full(TOKENS, number, np.float32)},
    )


def _write_baselines(folder: Path) -> bool:
    """Write the next number over that of the last row, which is the last to be written."""
    number = int(baselines.read(folder, ROWS[-1]).values["prefill/plan_mib"]) + 1
    for row in ROWS:
        baselines.write(folder, row, _baseline(number))
    return True


def _prepare_baselines(folder: Path) -> None:
    for row in ROWS:
        baselines.write(folder, row, _baseline(0))


def _check_baselines(folder: Path) -> bool:
    """Check that no row is a mix, and that the rows are those of one update or of two in turn."""
    numbers = []
    for row in ROWS:
        found = baselines.read(folder, row)
        number = found.values["prefill/plan_mib"]
        assert np.array_equal(found.tokens["prefill/kl_nats"], np.full(TOKENS, number))
        assert found.provenance == {"commit": str(int(number))}
        numbers.append(number)
    assert sorted(numbers, reverse=True) == numbers
    assert numbers[0] - numbers[-1] <= 1
    return numbers[0] == numbers[-1]


# References


def tiny_texts() -> ScoredTexts:
    """Return texts of 24 tokens."""
    ids = [np.arange(24, dtype=np.int32) + start for start in range(8)]
    return ScoredTexts(np.stack(ids), ids[:3], ids[:2])


def _references(folder: Path) -> bool:
    with patch.object(references, "_computed", side_effect=references._computed) as computed:
        references.reference_logits(_checkpoint(), tiny_texts(), "float32", folder)
    return computed.called


def _check_references(folder: Path) -> bool:
    files = _lone_files(folder / "references", "*.safetensors")
    for path in files:
        found = references._stored(path)
        expected = references._computed(_checkpoint(), tiny_texts(), "float32")
        assert found is not None
        for name in ("prose", "next_token", "sampled"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
    return bool(files)


# A writer that is not careful: this must be caught


def _write_in_place(folder: Path) -> bool:
    with (folder / "plain").open("w") as file:
        for _ in range(STEPS):
            file.write("line\n")
            file.flush()
            time.sleep(0.2 / STEPS)
    return True


def _check_plain(folder: Path) -> bool:
    lines = (folder / "plain").read_text().count("line")
    assert lines == STEPS, f"obtained {lines} lines"
    return True


WORKS = {
    "plan": Work(_nothing, _forget_plan, _build, _check_plan),
    "scales": Work(_nothing, lambda f: _remove(f, "scales/*.json"), _calibrate, _check_scales),
    "baselines": Work(_prepare_baselines, _nothing, _write_baselines, _check_baselines),
    "references": Work(
        _nothing, lambda f: _remove(f, "references/*.safetensors"), _references, _check_references
    ),
    "in place": Work(_nothing, _nothing, _write_in_place, _check_plain),
}
