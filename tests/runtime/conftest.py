"""Engines on the target's GPU, of checkpoints that build in seconds: ``-m "h200 or runtime"``.

On a target without a GPU none of these tests is collected.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gptneo_trt.backend import Backend
from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.data import Checkpoint, Plan
from gptneo_trt.engine import Engine
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import build_network
from gptneo_trt.plans import PlanRequest, build_plan
from gptneo_trt.targets import Gpu, Target, gpu_mismatch
from gptneo_trt.variants import VARIANTS
from tests.gate.measurer import CONTEXT
from tests.gate.selection import target_of
from tests.unit.scores import with_scores
from tests.unit.tiny import (
    T0,
    WINDOW_MUTANTS,
    fixed_scales,
    tiny_checkpoint,
    with_architecture,
    with_divided_queries,
)

FOLDER = Path(__file__).parent
SHORT = np.random.default_rng(5).integers(0, 64, (2, 12)).astype(np.int32)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these tests out of a run whose target has no GPU."""
    if target_of(config).needs_gpu:
        return
    here = [item for item in items if item.path.is_relative_to(FOLDER)]
    if here:
        config.hook.pytest_deselected(items=here)
        items[:] = [item for item in items if not item.path.is_relative_to(FOLDER)]


@pytest.fixture(scope="session", autouse=True)
def runs_on(target: Target, gpu: Gpu | None) -> str:
    """Return name and driver of the GPU; fail where it is not the target's."""
    wrong = gpu_mismatch(target, gpu)
    if wrong or gpu is None:
        pytest.fail(wrong or "no GPU", pytrace=False)
    return gpu.identity


@pytest.fixture(scope="session")
def checkpoints() -> dict[str, Checkpoint]:
    """Return T0 with room for 256 positions, what a port makes of it, and the bundled one."""
    t0 = tiny_checkpoint(replace(T0, max_positions=CONTEXT))
    mutants = {name: with_architecture(t0, **change) for name, change in WINDOW_MUTANTS.items()}
    small, large = (with_scores(t0, SHORT, scores) for scores in (5.0, 7e4))
    scores = {
        "scores of 5": small,
        "scores of 5, divided": with_divided_queries(small, 4),
        "scores of 7e4": large,
    }
    return {"t0": t0, **mutants, **scores, "bundled": checkpoint_from_source("bundled")}


@pytest.fixture(scope="session")
def request_of(
    backend: Backend, checkpoints: dict[str, Checkpoint], runs_on: str
) -> Callable[..., PlanRequest]:
    """Return a function (phase, row, checkpoint, batch) -> PlanRequest; T0, fp16, 1 if not said."""

    def make(phase: str, row: str = "fp16", checkpoint: str = "t0", batch: int = 1) -> PlanRequest:
        found = checkpoints[checkpoint]
        scales = fixed_scales(found)
        return PlanRequest(
            backend, found, VARIANTS[row], scales, phase, CONTEXT, gpu=runs_on, batch=batch
        )

    return make


@pytest.fixture(scope="session")
def plan_of(
    request_of: Callable[..., PlanRequest], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Plan]:
    """Return a function like ``request_of`` -> Plan, each built once."""
    folder = tmp_path_factory.mktemp("cache")
    return cache(lambda *asked: build_plan(request_of(*asked), folder))


@pytest.fixture(scope="session")
def new_engine(
    request_of: Callable[..., PlanRequest], plan_of: Callable[..., Plan]
) -> Callable[..., Engine]:
    """Return a function like ``request_of`` -> Engine, a new one each time."""
    return lambda *asked: Engine(request_of(*asked), plan_of(*asked))


@pytest.fixture(scope="session")
def engine_of(new_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """Return a function like ``request_of`` -> Engine, each loaded once."""
    return cache(new_engine)


@pytest.fixture(scope="session")
def interpreter_of(request_of: Callable[..., PlanRequest]) -> Callable[..., Interpreter]:
    """Return a function like ``request_of`` -> Interpreter of the network of that plan."""

    @cache
    def make(*asked: str | int) -> Interpreter:
        request = request_of(*asked)
        network = build_network(
            request.backend, request.checkpoint, request.variant, request.scales, request.phase,
            request.context, request.batch,
        )  # fmt: skip
        return Interpreter(network)

    return make
