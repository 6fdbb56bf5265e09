"""The gate's pipeline on the bundled checkpoint, and whole runs of the gate in child processes.

Whatever ``--model``, ``--variants`` and ``--tensorrt`` say, a fault is seeded into the bundled
checkpoint and judged against the baselines that are stored here.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gptneo_trt.data import Cell
from gptneo_trt.targets import Target
from tests.child import child_environment
from tests.gate.selection import target_of
from tests.selftest import faults
from tests.selftest.bench import Bench
from tests.selftest.catching import not_caught, not_green, told
from tests.selftest.fault import Fault
from tests.selftest.gate_faults import OTHER_GPU
from tests.selftest.judging import Cells
from tests.selftest.model_faults import NAN_WEIGHT, SCALED_SCORES

ROOT = Path(__file__).parents[2]
CHILD_S = 300

# Name -> plugin, fault, what is collected. They share a cache and run in this order: the builder
# must crash before another run has built its plan.
RUNS = {
    "crashing-builder": ("tests.selftest.crashing_builder", "", "tests/gate/test_build.py"),
    "control": ("", "", "tests/gate"),
    SCALED_SCORES: ("tests.selftest.faults", SCALED_SCORES, "tests/gate"),
    NAN_WEIGHT: ("tests.selftest.faults", NAN_WEIGHT, "tests/gate"),
    OTHER_GPU: ("tests.selftest.faults", OTHER_GPU, "tests/gate/test_quality.py"),
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs a GPU where the target has none."""
    needs_gpu = collection_path.name == "test_engine_faults.py"
    return True if needs_gpu and not target_of(config).needs_gpu else None


def _child_run(name: str, folder: Path) -> ChildRun:
    plugin, fault, collected = RUNS[name]
    plugins = ["-p", plugin] if plugin else []
    report = folder / name
    options = [
        *("-m", "cpu", "--variants", "fp16", "--workers", "0"),
        *(f"--gate-cache={folder / 'cache'}", f"--gate-report={report}"),
        *("-q", "--color=yes", "-p", "no:cacheprovider"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, collected],
        cwd=ROOT,
        env=child_environment(**{faults.VARIABLE: fault}),
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
def bench(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Return what runs parts of the gate on the CPU with and without a fault."""
    threads = torch.get_num_threads()
    yield Bench(pytestconfig.getoption("--gate-cache"), tmp_path_factory.mktemp("faults"))
    torch.set_num_threads(threads)


@pytest.fixture
def expect_caught(
    request: pytest.FixtureRequest, target: Target
) -> Callable[[Fault, Cells, Cells], None]:
    """Return a function (fault, cells with it, cells without) that tells ``tests.show_faults``.

    It fails unless every cell of the fault has its verdict and reason, and passes without it.
    """

    def expect(fault: Fault, cells: Cells, control: Cells) -> None:
        wrong = not_caught(fault, cells) + not_green(fault, control)
        request.node.user_properties.append(("fault", told(fault, target.name, cells, control)))
        assert wrong == []

    return expect
