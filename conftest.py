"""The session fixtures that join the stages of ``gptneo_trt``.

The fixtures are the pipeline: checkpoint -> scales -> plan, and -> network -> executor -> logits
-> metrics (in worker processes, ``tests/gate/measure.py``). Each stage runs once a variant and
phase; a stage that failed fails again with the same error for whoever asks.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gptneo_trt import checkpoint as checkpoints
from gptneo_trt import provenance as provenances
from gptneo_trt.backend import Backend, backend_named
from gptneo_trt.data import Checkpoint, Measurement, Plan, Provenance, Scales, TextSet
from gptneo_trt.memory import builds_at_once, memory_left
from gptneo_trt.network import PHASES
from gptneo_trt.plans import PlanRequest, build_plan
from gptneo_trt.scales import constant_scales, kept_scales, scales_path
from gptneo_trt.targets import Gpu, Target
from gptneo_trt.text_sources import SOURCES
from gptneo_trt.texts import text_set
from gptneo_trt.variant import Variant
from gptneo_trt.variants import FLOOR, VARIANTS, every_module, variant_named
from tests.gate.cells import folder_of
from tests.gate.measurer import CONTEXT, Measurer, Setup
from tests.gate.selection import (
    gpu_of,
    selected_names,
    target_of,
    text_source_of,
    unsupported_here,
)
from tests.gate.shape import Shape, shape_of

if TYPE_CHECKING:
    from tests.gate.engines import EnginePipeline

pytest_plugins = ("tests.gate.options", "tests.gate.counting")


@pytest.fixture(scope="session")
def variants(pytestconfig: pytest.Config) -> list[Variant]:
    """Return the selected rows that can run here: for another one nothing is done."""
    names = selected_names(pytestconfig)
    return [variant_named(name) for name in names if not unsupported_here(pytestconfig, name)]


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> Target:
    """Return what ``-m`` asks for."""
    return target_of(pytestconfig)


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config, target: Target) -> Gpu | None:
    """Return the GPU that runs engines; None on the target cpu."""
    return gpu_of(pytestconfig) if target.needs_gpu else None


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Backend:
    """Return the TensorRT flavour that builds."""
    return backend_named(pytestconfig.getoption("--tensorrt"))


@pytest.fixture(scope="session")
def checkpoint(pytestconfig: pytest.Config) -> Checkpoint:
    """Return the checkpoint of ``--model``."""
    return checkpoints.checkpoint_from_source(pytestconfig.getoption("--model"))


@pytest.fixture(scope="session")
def shape(pytestconfig: pytest.Config) -> Shape:
    """Return the batch and the context of what is built and timed."""
    return shape_of(pytestconfig)


@pytest.fixture(scope="session")
def run_provenance(
    pytestconfig: pytest.Config, target: Target, backend: Backend, gpu: Gpu | None, shape: Shape
) -> Provenance:
    """Return where this run's figures come from."""
    # The options that shape figures; the others name folders of this machine.
    options = [f"--model={_model_name(pytestconfig)}", f"--tensorrt={backend.flavour}"]
    if pytestconfig.getoption("--variants"):
        options.append(f"--variants={pytestconfig.getoption('--variants')}")
    if pytestconfig.getoption("--dequantize") == "fp32":
        options.append("--dequantize=fp32")
    if pytestconfig.getoption("--summation-order"):
        options.append(f"--summation-order={pytestconfig.getoption('--summation-order')}")
    command = ["pytest", "-m", target.name, *options, *shape.options()]
    return provenances.provenance(f"{target.name}/{backend.target}", command, gpu)


def _model_name(config: pytest.Config) -> str:
    model = str(config.getoption("--model"))
    return Path(model).name if Path(model).is_dir() else model


@pytest.fixture(scope="session")
def baseline_folder(target: Target, checkpoint: Checkpoint, backend: Backend) -> Path:
    """Return ``baselines/<target>/<flavour>-<version>/<model>``."""
    return folder_of(target, backend.target, checkpoint)


@pytest.fixture(scope="session")
def texts(pytestconfig: pytest.Config, checkpoint: Checkpoint) -> dict[str, TextSet]:
    """Return the texts that calibrate and judge a checkpoint; none for random weights."""
    if not checkpoint.has_quality:
        return {}
    source, shapes = text_source_of(pytestconfig), checkpoint.architecture
    return {
        name: text_set(name, source, checkpoint.tokenizer_file, CONTEXT, shapes.vocab_size)
        for name in SOURCES[source]
    }


@pytest.fixture(scope="session")
def setup(pytestconfig: pytest.Config, target: Target, checkpoint: Checkpoint) -> Setup:
    """Return what a process that measures has to load."""
    return Setup(
        pytestconfig.getoption("--model"),
        pytestconfig.getoption("--tensorrt"),
        text_source_of(pytestconfig),
        pytestconfig.getoption("--gate-cache"),
        keep_logits=target.needs_gpu,
        summation_order=pytestconfig.getoption("--summation-order"),
        checkpoint_sha256=checkpoint.sha256,
    )


@pytest.fixture(scope="session")
def measurer(
    pytestconfig: pytest.Config, setup: Setup, variants: list[Variant]
) -> Iterator[Measurer]:
    """Return what interprets networks, in worker processes that start to load at once."""
    workers = min(pytestconfig.getoption("--workers"), len(rows_with_floor(variants)))
    with Measurer(setup, workers) as measuring:
        yield measuring


@pytest.fixture(scope="session")
def scales(
    pytestconfig: pytest.Config,
    checkpoint: Checkpoint,
    texts: dict[str, TextSet],
    variants: list[Variant],
    request: pytest.FixtureRequest,
) -> Scales | None:
    """Return the input ranges of every projection, calibrated once and kept in the cache.

    None where no selected row reads any.
    """
    methods = {row.calibration_method for row in variants if row.reads_scales}
    if not methods:
        return None
    modules = every_module(checkpoint.architecture.num_layers)
    if not checkpoint.has_quality:
        return constant_scales(checkpoint, modules)
    measurer, text = request.getfixturevalue("measurer"), texts["calibration"]
    others = sorted(methods - {"max"})
    path = scales_path(pytestconfig.getoption("--gate-cache"), checkpoint, text, others)

    def calibrated() -> Scales:
        told = (
            f"calibrating {len(modules)} projections with ModelOpt: {', '.join(('max', *others))} "
        )
        progress(pytestconfig, told)
        return measurer.calibrate(text, modules, others)

    return kept_scales(path, checkpoint, text, modules, calibrated)


@pytest.fixture(scope="session")
def plan_request(
    backend: Backend, checkpoint: Checkpoint, scales: Scales | None, gpu: Gpu | None, shape: Shape
) -> Callable[[Variant, str], PlanRequest]:
    """Return a function (variant, phase) -> PlanRequest."""

    def request(variant: Variant, phase: str) -> PlanRequest:
        used = scales if variant.reads_scales else None
        runs_on = gpu.identity if gpu else ""
        return PlanRequest(
            backend, checkpoint, variant, used, phase, shape.context, gpu=runs_on, batch=shape.batch
        )

    return request


@pytest.fixture(scope="session")
def plan(
    pytestconfig: pytest.Config,
    target: Target,
    checkpoint: Checkpoint,
    plan_request: Callable[[Variant, str], PlanRequest],
    variants: list[Variant],
) -> Iterator[Callable[[Variant, str], Plan]]:
    """Return a function (variant, phase) -> Plan; all selected plans are built ahead of it."""
    cache = pytestconfig.getoption("--gate-cache")
    rows = rows_with_floor(variants) if target.needs_gpu else variants
    builds = builds_at_once(checkpoint, os.cpu_count() or 1, memory_left())
    with ThreadPoolExecutor(max_workers=builds) as pool:
        ahead = {
            (row.name, phase): pool.submit(build_plan, plan_request(row, phase), cache)
            for row in rows
            for phase in PHASES
        }
        yield lambda variant, phase: ahead[variant.name, phase].result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def interpreted(
    pytestconfig: pytest.Config,
    target: Target,
    variants: list[Variant],
    scales: Scales | None,
    measurer: Measurer,
) -> Callable[[Variant, str], Measurement]:
    """Return a function (variant, phase) -> Measurement of the interpreter, which runs ahead."""
    rolls_twice = pytestconfig.getoption("--update-baselines") and not target.needs_gpu
    for row in rows_with_floor(variants):
        measurer.submit(row, scales)
        if rolls_twice and row in variants:
            measurer.submit_second_roll(row, scales)
    return measurer.result


@pytest.fixture(scope="session")
def second_roll(
    pytestconfig: pytest.Config, target: Target, request: pytest.FixtureRequest
) -> Callable[[Variant, str], Measurement] | None:
    """Return a function (variant, phase) -> Measurement of a selected row in another order.

    None unless baselines are written. An engine's other order of summation is the interpreter's.
    """
    if not pytestconfig.getoption("--update-baselines"):
        return None
    interpreted = request.getfixturevalue("interpreted")
    return interpreted if target.needs_gpu else request.getfixturevalue("measurer").second_roll


@pytest.fixture(scope="session")
def engines(
    setup: Setup,
    plan: Callable[[Variant, str], Plan],
    plan_request: Callable[[Variant, str], PlanRequest],
) -> "EnginePipeline":
    """Return what runs networks through engines, on the GPU."""
    # Only here: without a GPU this process does not wait for torch.
    from gptneo_trt.engine import Engine
    from tests.gate.engines import EnginePipeline

    return EnginePipeline(
        setup, lambda variant, phase: Engine(plan_request(variant, phase), plan(variant, phase))
    )


@pytest.fixture(scope="session")
def measurement(
    pytestconfig: pytest.Config,
    target: Target,
    variants: list[Variant],
    request: pytest.FixtureRequest,
) -> Callable[[Variant, str], Measurement]:
    """Return a function (variant, phase) -> Measurement, of engines where the target has a GPU."""
    measure = request.getfixturevalue("interpreted")
    if target.needs_gpu:
        measure = request.getfixturevalue("engines").measurement
    rows, shown = rows_with_floor(variants), set()

    def measured(variant: Variant, phase: str) -> Measurement:
        found = measure(variant, phase)
        if variant.name not in shown:
            shown.add(variant.name)
            progress(pytestconfig, f"[{len(shown)}/{len(rows)}] {_summary(variant, found)}")
        return found

    return measured


def rows_with_floor(variants: list[Variant]) -> list[Variant]:
    """Return the rows with fp16 in front, which others are held against."""
    floor = VARIANTS[FLOOR]
    return [floor, *(row for row in variants if row != floor)]


def _summary(variant: Variant, measurement: Measurement) -> str:
    """Return one line about a row that was measured."""
    if measurement.non_finite:
        return f"{variant.name}: {measurement.non_finite}"
    values = measurement.metrics["prose/bf16"].values
    loss, error = values["kl_mean_nats"], values["kl_mean_stderr_nats"]
    return f"{variant.name}: KL {loss:.3g} +- {error:.1g} nats, top-1 {values['top1_frac']:.3f} "


def progress(config: pytest.Config, line: str) -> None:
    """Write a line to the terminal at once, in spite of pytest's capture."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        sys.stdout.write(f"\n{line}")
        sys.stdout.flush()
