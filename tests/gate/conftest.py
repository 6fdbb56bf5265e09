"""Turn rows into tests, tests into cells, and cells into the verdict of the run.

A gate test is one cell. Its marker ``cells`` names the phases and metrics it runs for; it hands
its Cell to the fixture ``judge``, which records it and fails the test unless it passed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptneo_trt import baselines, report
from gptneo_trt.backend import Backend
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Cell, Checkpoint, Measurement, Plan, Provenance, TextSet
from gptneo_trt.errors import BaselineError, GptNeoTrtError
from gptneo_trt.variants import FLOOR, VARIANTS, Variant
from tests.gate import limits
from tests.gate.measurer import CONTEXT, DECODE_TOKENS, PROSE_TEXTS
from tests.gate.run import BASELINE_PREFIX, GateRun
from tests.gate.selection import selected_names

RUN = pytest.StashKey[GateRun]()


class OutsideShipLimitsError(AssertionError):
    """A row misses the ship limits."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked ``cells`` for every selected row, phase and metric."""
    marker = metafunc.definition.get_closest_marker("cells")
    if marker is None:
        return
    model = metafunc.config.getoption("--model")
    quality = marker.kwargs.get("quality", False)
    rows = [
        pytest.param(
            VARIANTS[name],
            phase,
            metric,
            id=f"{name}-{phase}-{metric}",
            marks=_marks(model, name, metric),
        )
        for name in selected_names(metafunc.config)
        for phase in marker.kwargs["phases"]
        for metric in marker.kwargs["metrics"]
        if not (quality and model.startswith("random:"))
    ]
    metafunc.parametrize(("variant", "phase", "metric"), rows)


def _marks(model: str, variant: str, metric: str) -> list[pytest.MarkDecorator]:
    """Return the strict xfail of a studied row's ship decision."""
    decision = limits.DECISIONS.get(model.partition("@")[0], {}).get(variant)
    if metric != "ship" or decision != limits.STUDIED:
        return []
    reason = f"{decision}: misses the ship limits; if it passes: revisit the decision"
    return [pytest.mark.xfail(strict=True, raises=OutsideShipLimitsError, reason=reason)]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a gate test; none of any other test."""
    if item.get_closest_marker("cells") is None:
        return {}
    return dict(getattr(getattr(item, "callspec", None), "params", {}))


def _has_no_rows(item: pytest.Item) -> bool:
    """Return whether this is pytest's stand-in for a test without rows: a model without quality."""
    return not isinstance(_parameters(item).get("variant", FLOOR), str | Variant)


def _key(item: pytest.Item) -> tuple[str, str, str] | None:
    parameters = _parameters(item)
    if "metric" not in parameters:
        return None
    return parameters["variant"].name, parameters["phase"], parameters["metric"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the gate row by row, the floor first, so that results appear as rows are measured."""
    items[:] = [item for item in items if not _has_no_rows(item)]
    order = [FLOOR, *VARIANTS]

    def place(item: pytest.Item) -> int:
        key = _key(item)
        return -1 if key is None else order.index(key[0])

    items.sort(key=place)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count gate cells that were left out by -k or -m."""
    cells = [item for item in items if not _has_no_rows(item) and _key(item)]
    if cells:  # -k and -m come before the collection is finished
        cells[0].config.stash.setdefault(RUN, GateRun()).deselected += len(cells)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember which cells this run owes."""
    run = session.config.stash.setdefault(RUN, GateRun())
    run.expected = {key for item in session.items if (key := _key(item))}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record a cell for a test that ended before it could judge one."""
    made = yield
    key, run = _key(item), item.config.stash[RUN]
    if key and call.excinfo and not run.has_cell(key):
        error = call.excinfo.value
        judged = call.when == "call" and isinstance(error, GptNeoTrtError)
        verdict = "failed" if judged else "not measured"
        reason = f"{type(error).__name__}: {error}"
        run.cells.append(Cell(*key, None, None, None, verdict, reason))
        if isinstance(error, GptNeoTrtError) and made.failed:
            made.longrepr = _told_once(run, reason)
    return made


def _told_once(run: GateRun, reason: str) -> str:
    """Return what to print of a refusal: thing and remedy without a trace, in full once."""
    if reason not in run.told:
        run.told.add(reason)
        return reason
    return f"{reason[:60]}... (as above)" if len(reason) > 60 else reason


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was asked for, and fail a run that is not green or that wrote baselines."""
    run, config = session.config.stash.get(RUN, None), session.config
    if run is None or not run.expected or config.getoption("collectonly"):
        return
    if config.getoption("--update-baselines"):
        run.written = _written(run)
    folder = config.getoption("--gate-report")
    if folder and run.checkpoint and run.provenance:
        report.write_results(folder, run.report())
    unfinished = run.problems() or config.getoption("--update-baselines")
    if unfinished and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _written(run: GateRun) -> list[str]:
    try:
        return run.update_baselines()
    except BaselineError as error:
        return [str(error)]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table, what was written, and how much was measured."""
    run = config.stash.get(RUN, None)
    if run is None or not run.expected or config.getoption("collectonly"):
        return
    target = run.provenance.target if run.provenance else "no target"
    model = run.checkpoint.name if run.checkpoint else config.getoption("--model")
    terminalreporter.section(f"gate: {model} on {target}")
    decisions = limits.DECISIONS.get(model, {})
    names = {name for name, _, _ in run.expected}
    rows = {name: run.values.get(name, {}) for name in VARIANTS if name in names}
    for line in report.table(rows, run.cells, run.values.get(FLOOR, {}), decisions):
        terminalreporter.write_line(line)
    terminalreporter.write_line(report.LEGEND)
    for line in run.written:
        terminalreporter.write_line(f"baseline {line}")
    if config.getoption("--update-baselines") and run.folder:
        terminalreporter.write_line(
            f"baselines written to {run.folder}: commit them and run again without "
            "--update-baselines; this run fails",
            red=True,
        )
    if config.getoption("--gate-report") and run.checkpoint and run.provenance:
        terminalreporter.write_line(f"report: {config.getoption('--gate-report')}/results.json")
    left_out = f"; {run.deselected} more deselected" if run.deselected else ""
    green = not run.problems()
    line = report.coverage_line(run.expected, run.cells) + left_out
    terminalreporter.write_line(line, green=green, red=not green)


@pytest.fixture(scope="session")
def gate_run(
    pytestconfig: pytest.Config,
    checkpoint: Checkpoint,
    run_provenance: Provenance,
    baseline_key: dict[str, object],
    baseline_folder: Path,
) -> GateRun:
    """Return the record of this run."""
    run = pytestconfig.stash[RUN]
    run.checkpoint, run.provenance = checkpoint, run_provenance
    run.key, run.folder = baseline_key, baseline_folder
    return run


@pytest.fixture(scope="session")
def baseline_key(
    checkpoint: Checkpoint, backend: Backend, texts: dict[str, TextSet]
) -> dict[str, object]:
    """Return what must be equal before a stored run is compared with this one."""
    return {
        "checkpoint_sha256": checkpoint.sha256,
        "context": CONTEXT,
        "decode_tokens": DECODE_TOKENS,
        "flavour": backend.flavour,
        "gpu": "cpu",
        "prose_texts": PROSE_TEXTS,
        "texts": {name: text.key() for name, text in texts.items()},
        "version": backend.version,
    }


@pytest.fixture(scope="session")
def planned(gate_run: GateRun, plan) -> Callable[[Variant, str], Plan]:
    """Return a function (variant, phase) -> Plan that keeps its figures."""

    def get(variant: Variant, phase: str) -> Plan:
        built = plan(variant, phase)
        gate_run.add_plan(variant.name, phase, built)
        return built

    return get


@pytest.fixture(scope="session")
def measured(gate_run: GateRun, measurement) -> Callable[[Variant, str], Measurement]:
    """Return a function (variant, phase) -> Measurement that keeps its figures."""

    def get(variant: Variant, phase: str) -> Measurement:
        found = measurement(variant, phase)
        gate_run.add_measurement(variant.name, phase, found)
        return found

    return get


@pytest.fixture(scope="session")
def stored(gate_run: GateRun) -> Callable[[Variant], Baseline]:
    """Return a function variant -> Baseline of this very checkpoint, texts and target.

    Raises:
        BaselineError: there is none, or its key differs; both sides of each difference are named.
    """

    def get(variant: Variant) -> Baseline:
        found = baselines.read(gate_run.folder, variant.name)
        wrong = baselines.key_differences(found.key, gate_run.key)
        if wrong:
            raise BaselineError(
                f"baseline of {variant.name} is of something else: {'; '.join(wrong)}; compare "
                "like with like, or write it again with --update-baselines"
            )
        return found

    return get


@pytest.fixture
def judge(gate_run: GateRun, pytestconfig: pytest.Config) -> Callable[[Cell], None]:
    """Return a function that records a cell and fails the test unless the cell passed."""

    def record(cell: Cell) -> None:
        gate_run.cells.append(cell)
        if cell.verdict != "passed":
            name = f"{cell.variant}/{cell.phase}/{cell.metric}"
            pytest.fail(f"{name}: {cell.verdict}: {cell.reason}", pytrace=False)

    return record


@pytest.fixture
def comparing(pytestconfig: pytest.Config, metric: str) -> bool:
    """Return whether this metric is compared with a stored run now, not written."""
    return not (metric.startswith(BASELINE_PREFIX) and pytestconfig.getoption("--update-baselines"))
