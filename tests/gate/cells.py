"""Turn gate tests into cells: which rows, phases and metrics a run asks for, and why not others.

A test is marked ``cells`` with the phases and metrics it runs for, and with what it needs:

    quality=True    logits that mean something: not random weights, not a row only built
    hardware=True   an engine on a GPU
    plan=True       a plan; a row that is known not to build has none
    stage="build"   it is here that a known failure of this stage shows
    rows="floor"    the fp16 row alone; "quantized" or "exact": rows that quantize, or do not;
                    "calibrated": rows that quantize activations
    limited=True    a limit of its own, which a row that is only explored has not
    text="sampled"  a text set that not every source of texts has
    stored=False    nothing to compare with: a row that is only explored, or another shape
    batched=True    a batch of several texts
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from gptneo_trt import baselines
from gptneo_trt.data import Cell, Checkpoint
from gptneo_trt.errors import BaselineError
from gptneo_trt.known_failures import STAGE_ERRORS
from gptneo_trt.network import PHASES
from gptneo_trt.targets import Target
from gptneo_trt.text_sources import SOURCES
from gptneo_trt.variant import Variant
from gptneo_trt.variants import FLOOR, is_explored, variant_named
from gptneo_trt.verdicts import Key
from tests.gate import limits
from tests.gate.run import BASELINE_PREFIX
from tests.gate.selection import (
    backend_of,
    known_failure_of,
    model_of,
    selected_names,
    target_of,
    text_source_of,
)
from tests.gate.shape import shape_of

ROOT = Path(__file__).parents[2]
STAGES = ("build", "deserialize", "run")
# Metric judged against the stored run -> the value that a published baseline has for it.
PUBLISHED_VALUES = {
    "plan_mib": "plan_mib",
    "kl_mean_nats": "prose/bf16/kl_mean_nats",
    "nll_mean_nats": "prose/bf16/perplexity",
    "speedup_x": "speedup_x",
}
# What a test's marker says of the rows it runs for.
ROWS: Mapping[str, Callable[[Variant], bool]] = {
    "all": lambda variant: True,
    "floor": lambda variant: variant.name == FLOOR,
    "quantized": lambda variant: bool(variant.quantized),
    "calibrated": lambda variant: variant.is_calibrated,
    "exact": lambda variant: not variant.quantized,
}
# fp16's time over its own is 1, whoever measured the other rows.
FP16_TO_ITSELF = (FLOOR, f"{BASELINE_PREFIX}speedup_x")


class OutsideShipLimitsError(AssertionError):
    """A row misses the ship limits."""


class SlowerThanPyTorchError(AssertionError):
    """PyTorch is faster than the fp16 engine, as limits.SLOWER says."""


def errored(key: Key, error: BaseException, verdict: str = "failed") -> Cell:
    """Return the cell of a test that ended with an error before it could judge."""
    return Cell(*key, None, None, None, verdict, f"{type(error).__name__}: {error}")


def parameters_of(config: pytest.Config, marker: pytest.Mark) -> Iterator[object]:
    """Yield (variant, phase, metric) of every cell that a test marked ``cells`` owes."""
    target = target_of(config)
    wants = marker.kwargs
    if wants.get("hardware") and not target.needs_gpu:
        return
    for name in selected_names(config):
        for phase in wants["phases"]:
            for metric in wants["metrics"]:
                if _is_asked(config, wants, name, phase, metric):
                    marks = [getattr(pytest.mark, target.name)]
                    marks += _xfails(config, wants, name, phase)
                    marks += _ship_xfails(config, name, metric)
                    marks += _slower_xfails(config, metric)
                    identity = f"{name}-{phase}-{metric}"
                    row = variant_named(name)
                    yield pytest.param(row, phase, metric, id=identity, marks=marks)


def _is_asked(config: pytest.Config, wants: dict, name: str, phase: str, metric: str) -> bool:
    """Return whether a row owes a cell of this metric."""
    if not ROWS[wants.get("rows", "all")](variant_named(name)):
        return False
    shape = shape_of(config)
    is_stored = shape.is_stored and not is_explored(name)
    if metric.startswith(BASELINE_PREFIX) and not is_stored:
        return False
    if wants.get("stored", is_stored) != is_stored or (wants.get("limited") and is_explored(name)):
        return False
    if wants.get("batched") and shape.batch == 1:
        return False
    if wants.get("text", "prose") not in SOURCES[text_source_of(config)]:
        return False
    model = model_of(config)
    only_built = name in limits.BUILD_ONLY.get(model, ())
    if wants.get("quality") and (model.startswith("random:") or only_built):
        return False
    if only_built and (wants.get("hardware") or metric.startswith(BASELINE_PREFIX)):
        return False
    if _is_out_of_reach(config, wants, name, phase):
        return False
    return not _is_unpublished(config, name, phase, metric)


def _is_out_of_reach(config: pytest.Config, wants: dict, name: str, phase: str) -> bool:
    """Return whether a known failure of an earlier stage keeps a row from this cell.

    The phases of a row are measured together: decode is held against prefill's logits.
    """
    target, own = target_of(config), wants.get("stage")
    reached = STAGES[: STAGES.index(own)] if own in STAGES else STAGES
    if not target.needs_gpu or not (wants.get("hardware") or wants.get("quality")):
        reached = tuple(stage for stage in reached if stage == "build" and wants.get("plan"))
    phases = PHASES if phase == "both" or wants.get("quality") else (phase,)
    return any(known_failure_of(config, name, each, stage) for each in phases for stage in reached)


def _xfails(
    config: pytest.Config, wants: dict, name: str, phase: str
) -> list[pytest.MarkDecorator]:
    """Return the strict xfail of a known failure, bound to its error and its message."""
    stage = wants.get("stage")
    failure = known_failure_of(config, name, phase, stage) if stage else None
    if failure is None:
        return []
    reason = (
        f"{failure.id}: {failure.summary} (confirmed: {failure.confirmed}); if it passes: fixed, "
        "remove the row"
    )
    raises = pytest.RaisesExc(STAGE_ERRORS[failure.stage], match=failure.message)
    return [pytest.mark.xfail(strict=True, raises=raises, reason=reason)]


def _ship_xfails(config: pytest.Config, name: str, metric: str) -> list[pytest.MarkDecorator]:
    """Return the xfail of a ship decision: strict of a studied row, either way of an explored."""
    explored = is_explored(name)
    decision = limits.DECISIONS.get(model_of(config), {}).get(name)
    if metric != "ship" or not (explored or decision == limits.STUDIED):
        return []
    reason = "explored: misses the ship limits"
    if not explored:
        reason = f"{decision}: misses the ship limits; if it passes: revisit the decision"
    return [pytest.mark.xfail(strict=not explored, raises=OutsideShipLimitsError, reason=reason)]


def _slower_xfails(config: pytest.Config, metric: str) -> list[pytest.MarkDecorator]:
    """Return the strict xfail of a bound that fp16 is known to miss, next to PyTorch."""
    if limits.slower(target_of(config), model_of(config), shape_of(config), metric) is None:
        return []
    reason = "slower than PyTorch; if it passes: revisit, remove the row of limits.SLOWER"
    return [pytest.mark.xfail(strict=True, raises=SlowerThanPyTorchError, reason=reason)]


def baseline_folder(target: Target, backend_target: str, model: str, sha256: str = "") -> Path:
    """Return ``baselines/<target>/<flavour>-<version>/<model>``.

    Args:
        target: of the run.
        backend_target: flavour and version.
        model: name of the checkpoint.
        sha256: of the checkpoint, which names one that is a folder.
    """
    name = model.replace(":", "-").replace("/", "--")
    if Path(model).is_dir():
        name = f"local-{sha256[:12]}"
    return ROOT / "baselines" / target.name / backend_target / name


def folder_of(target: Target, backend_target: str, checkpoint: Checkpoint) -> Path:
    """Return the folder of baselines of a checkpoint."""
    return baseline_folder(target, backend_target, checkpoint.name, checkpoint.sha256)


def _is_unpublished(config: pytest.Config, name: str, phase: str, metric: str) -> bool:
    """Return whether the baseline was published elsewhere, without a value for this metric."""
    backend, target = backend_of(config), target_of(config)
    if not metric.startswith(BASELINE_PREFIX) or not target.needs_gpu or backend is None:
        return False
    if config.getoption("--update-baselines") or (name, metric) == FP16_TO_ITSELF:
        return False
    folder = baseline_folder(target, backend.target, model_of(config))
    published = _published_values(folder, name)
    value = PUBLISHED_VALUES.get(metric.removeprefix(BASELINE_PREFIX))
    return published is not None and f"{phase}/{value}" not in published


@cache
def _published_values(folder: Path, name: str) -> frozenset[str] | None:
    """Return the names of a published baseline's values; None of a measured or missing one."""
    try:
        found = baselines.read(folder, name)
    except BaselineError:  # whoever needs it says so
        return None
    return frozenset(found.values) if found.is_published else None
