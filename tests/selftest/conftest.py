"""The gate's pipeline on the bundled checkpoint, and whole runs of the gate in child processes.

Whatever ``--model``, ``--variants`` and ``--tensorrt`` say, a fault is seeded into the bundled
checkpoint and judged against the baselines that are stored here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptneo_trt.backend import Backend, backend_named
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Cell, Checkpoint, Measurement, Scales, TextSet
from gptneo_trt.scales import read_scales, scales_path, write_scales
from gptneo_trt.targets import TARGETS
from gptneo_trt.texts import text_set
from gptneo_trt.variants import VARIANTS, Variant
from tests.gate.cells import folder_of
from tests.gate.measure import Pipeline
from tests.gate.measurer import CONTEXT, Setup
from tests.gate.run import GateRun, baseline_key, stored_baseline
from tests.selftest import faults
from tests.selftest.judging import QUALITY, Cells, judged

ROOT = Path(__file__).parents[2]
FLAVOUR = "tensorrt_rtx"
NEXT_TOKEN_STEP = 8  # one question or prompt in eight: they take most of a prefill's time
CHILD_S = 300

# Name -> plugin, fault, what is collected. They share a cache and run in this order: the builder
# must crash before another run has built its plan.
RUNS = {
    "crashing-builder": ("tests.selftest.crashing_builder", "", "tests/gate/test_build.py"),
    "control": ("", "", "tests/gate"),
    faults.SCALED_SCORES: ("tests.selftest.faults", faults.SCALED_SCORES, "tests/gate"),
    faults.NAN_WEIGHT: ("tests.selftest.faults", faults.NAN_WEIGHT, "tests/gate"),
}


@dataclass(frozen=True)
class ChildRun:
    """Hold what a whole run of the gate left behind.

    Attributes:
        status: exit status.
        output: standard output, with colours.
        results: ``results.json``.
    """

    status: int
    output: str
    results: dict[str, Any]

    def cell(self, phase: str, metric: str) -> Cell:
        """Return the only cell of this phase and metric."""
        cells = [Cell(**cell) for cell in self.results["cells"]]
        (found,) = (cell for cell in cells if (cell.phase, cell.metric) == (phase, metric))
        return found


def _child_run(name: str, folder: Path) -> ChildRun:
    plugin, fault, collected = RUNS[name]
    plugins = ["-p", plugin] if plugin else []
    report = folder / name
    options = [
        *("-m", "cpu", "--variants", "fp16", "--workers", "0"),
        *(f"--gate-cache={folder / 'cache'}", f"--gate-report={report}"),
        *("-q", "--color=yes", "-p", "no:cacheprovider"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, collected],
        cwd=ROOT,
        env=environment | {faults.VARIABLE: fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    results = report / "results.json"
    assert results.is_file(), done.stdout
    return ChildRun(done.returncode, done.stdout, json.loads(results.read_text("utf-8")))


@pytest.fixture(scope="session", autouse=True)
def child_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[ChildRun]]]:
    """Start the whole runs that are asked for, one after another beside the tests of here."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {spec.params.get("run_name") for spec in specs if spec}
    folder = tmp_path_factory.mktemp("gate")
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield {name: pool.submit(_child_run, name, folder) for name in RUNS if name in asked}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def child_run(child_runs: dict[str, Future[ChildRun]], run_name: str) -> ChildRun:
    """Return the whole run that the test is parametrized with, once it has ended."""
    return child_runs[run_name].result()


@pytest.fixture(scope="session")
def pipeline(pytestconfig: pytest.Config) -> Iterator[Pipeline]:
    """Return the gate's pipeline, with fewer questions and prompts."""
    threads = torch.get_num_threads()
    cache = pytestconfig.getoption("--gate-cache")
    made = Pipeline(Setup("bundled", FLAVOUR, "bundled", cache))
    made.next_token_texts = made.next_token_texts[::NEXT_TOKEN_STEP]
    yield made
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(pipeline: Pipeline) -> Checkpoint:
    """Return the bundled checkpoint."""
    return pipeline.checkpoint


@pytest.fixture(scope="session")
def backend() -> Backend:
    """Return the flavour whose baselines are stored."""
    return backend_named(FLAVOUR)


@pytest.fixture(scope="session")
def texts(checkpoint: Checkpoint) -> dict[str, TextSet]:
    """Return the bundled texts."""
    file, vocabulary = checkpoint.tokenizer_file, checkpoint.architecture.vocab_size
    return {
        name: text_set(name, "bundled", file, CONTEXT, vocabulary)
        for name in ("calibration", "prose", "questions", "prompts")
    }


@pytest.fixture(scope="session")
def gate_run(backend: Backend, checkpoint: Checkpoint, texts: dict[str, TextSet]) -> GateRun:
    """Return what ``stored_baseline`` reads: key and folder of the baselines."""
    cpu = TARGETS["cpu"]
    key = baseline_key(cpu, backend, None, checkpoint, texts)
    return GateRun(key=key, folder=folder_of(cpu, backend.target, checkpoint))


@pytest.fixture(scope="session")
def stored(gate_run: GateRun) -> Callable[[Variant], Baseline]:
    """Return a function variant -> Baseline, of the target cpu."""
    return partial(stored_baseline, gate_run)


@pytest.fixture(scope="session")
def scales(
    pytestconfig: pytest.Config,
    pipeline: Pipeline,
    checkpoint: Checkpoint,
    texts: dict[str, TextSet],
) -> Scales:
    """Return the calibrated ranges; those of the gate where its cache has them."""
    text = texts["calibration"]
    modules = VARIANTS["fp8-all"].quantized_modules(checkpoint.architecture.num_layers)
    path = scales_path(pytestconfig.getoption("--gate-cache"), checkpoint, text)
    found = read_scales(path, checkpoint, text, modules)
    if found is None:
        found = pipeline.calibrate(text, modules)
        write_scales(path, found)
    return found


@dataclass(frozen=True)
class Measured:
    """Hold both phases of a row, and the prefill logits that decode was held against."""

    phases: dict[str, Measurement]
    logits: np.ndarray


@pytest.fixture(scope="session")
def control(pipeline: Pipeline, scales: Scales) -> Callable[[Variant], Measured]:
    """Return a function variant -> Measured without a fault, measured once."""
    rows: dict[str, Measured] = {}

    def get(variant: Variant) -> Measured:
        if variant.name not in rows:
            prefill, logits = pipeline.measure_prefill(variant, scales)
            decode = pipeline.measure_decode(variant, scales, logits)
            rows[variant.name] = Measured({"prefill": prefill, "decode": decode}, logits)
        return rows[variant.name]

    return get


@pytest.fixture(scope="session")
def quality(
    control: Callable[[Variant], Measured],
    checkpoint: Checkpoint,
    stored: Callable[[Variant], Baseline],
) -> Callable[[Variant, dict[str, Measurement]], Cells]:
    """Return a function (variant, phase -> Measurement) -> every quality cell of the row."""

    def cells(variant: Variant, phases: dict[str, Measurement]) -> Cells:
        def measured(row: Variant, phase: str) -> Measurement:
            return phases[phase] if row == variant else control(row).phases[phase]

        return judged(QUALITY, variant, measured=measured, checkpoint=checkpoint, stored=stored)

    return cells
