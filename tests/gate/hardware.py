"""The hardware gate: what keeps a run on a GPU from measuring anything, found before it starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from gptneo_trt.backend import FLAVOURS, backend_named
from gptneo_trt.checkpoint import random_checkpoint
from gptneo_trt.data import Architecture
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.known_failures import STAGE_ERRORS
from gptneo_trt.plans import PlanRequest, build_plan
from gptneo_trt.runtime import load
from gptneo_trt.targets import Gpu, gpu_mismatch
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate.cells import baseline_folder
from tests.gate.selection import gpu_of, known_failures_here, model_of, target_of
from tests.gate.shape import shape_of

# The smallest network that has every part: what TensorRT refuses here, it refuses of any row.
PROBE = Architecture(
    vocab_size=64,
    hidden_size=64,
    num_heads=2,
    intermediate_size=128,
    max_positions=16,
    window_size=4,
    attention_layers=("global", "local"),
)


def refusal(config: pytest.Config) -> str | None:
    """Return why nothing can be measured here, with what was needed, found, and is to be done.

    None where engines can run, or the target needs none.
    """
    target = target_of(config)
    if not target.needs_gpu:
        return None
    try:
        gpu = gpu_of(config)
        wrong = gpu_mismatch(target, gpu)
        return wrong or _tensorrt_refusal(config, gpu) or _no_baselines(config)
    except GptNeoTrtError as error:
        return f"target {target.name}: {error}"


def _tensorrt_refusal(config: pytest.Config, gpu: Gpu) -> str | None:
    """Return why TensorRT runs no engine on this GPU, from a build and a load of the probe.

    Raises:
        GptNeoTrtError: the flavour cannot be imported.
    """
    backend = backend_named(config.getoption("--tensorrt"))
    checkpoint = replace(random_checkpoint(PROBE, 0), name="the probe of the hardware gate")
    row, runs_on = VARIANTS[FLOOR], gpu.identity
    request = PlanRequest(backend, checkpoint, row, None, "decode", 8, gpu=runs_on)
    try:
        built = build_plan(request, config.getoption("--gate-cache"))
        load(backend, built.path, built.kernels)
    except GptNeoTrtError as error:
        text = str(error)
        rows = known_failures_here(config)
        known = [r for r in rows if isinstance(error, STAGE_ERRORS[r.stage]) and r.matches(text)]
        reason = "".join(f"\nknown failure {row.id}: {row.summary}" for row in known)
        return (
            f"target {target_of(config).name}: needed a TensorRT that runs on {gpu.title}, found "
            f"{backend.target}: {text}{reason}\ndo: install a version that runs there "
            f"({FLAVOURS[backend.flavour]}), or choose another flavour with --tensorrt"
        )
    return None


def _no_baselines(config: pytest.Config) -> str | None:
    """Return that nothing is stored for this target, unless this run stores it or needs none.

    A checkpoint in a folder is stored under its hash: there the cells say what is missing.
    """
    if config.getoption("--update-baselines") or Path(config.getoption("--model")).is_dir():
        return None
    if not shape_of(config).is_stored:
        return None
    target, backend = target_of(config), backend_named(config.getoption("--tensorrt"))
    folder = baseline_folder(target, backend.target, model_of(config))
    if next(folder.glob("*.json"), None):
        return None
    others = sorted(path.name for path in folder.parents[1].glob("*/") if path.is_dir())
    return (
        f"target {target.name}: needed baselines/{'/'.join(folder.parts[-3:])}, found baselines of "
        f"{', '.join(others) or 'no version'}; do: install one of those versions, or measure here "
        "with --update-baselines and commit"
    )
