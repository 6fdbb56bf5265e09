"""Count the cells that a run owes and has: its last lines, its report and its exit status.

A plugin of the root's ``conftest.py``, not of the gate's: under pytest-xdist the process that
prints collects nothing. Its workers collect the same cells, judge a part each, and send what they
found when they end; a worker that dies sends nothing, so its cells are missing and the run is red.
"""

import pickle
from typing import Any

import pytest

from gptneo_trt import report
from gptneo_trt.errors import BaselineError
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate import limits
from tests.gate.reporting import write_reports
from tests.gate.run import GateRun
from tests.gate.selection import target_of
from tests.gate.shape import shape_of
from tests.gate.storing import update_baselines

RUN = pytest.StashKey[GateRun]()
SENT = "gate"  # name of a worker's run in what pytest-xdist carries to the process that prints


def is_worker(config: pytest.Config) -> bool:
    """Return whether pytest-xdist runs this process, and another one prints."""
    return hasattr(config, "workerinput")


def _counted(config: pytest.Config) -> GateRun | None:
    """Return the run, where there is something to report of one."""
    run = config.stash.get(RUN, None)
    return run if run and run.expected and not config.getoption("collectonly") else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add what a worker of pytest-xdist found; one that crashed has sent nothing."""
    sent = getattr(node, "workeroutput", {}).get(SENT)
    if sent:
        node.config.stash.setdefault(RUN, GateRun()).add(pickle.loads(sent))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was asked for, and fail a run that is not green or that wrote baselines."""
    config = session.config
    run = _counted(config)
    if run is None:
        return
    if is_worker(config):
        config.workeroutput[SENT] = pickle.dumps(run.portable())
        return
    if config.getoption("--update-baselines"):
        run.written = _written(run)
    folder = config.getoption("--gate-report")
    if folder and run.checkpoint and run.provenance:
        run.reports = write_reports(folder, run)
    unfinished = run.problems() or config.getoption("--update-baselines")
    if unfinished and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _written(run: GateRun) -> list[str]:
    try:
        return update_baselines(run)
    except BaselineError as error:
        return [str(error)]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table, what was written, and how much was measured."""
    run = _counted(config)
    if run is None:
        return
    target = run.provenance.target if run.provenance else target_of(config).name
    model = run.checkpoint.name if run.checkpoint else config.getoption("--model")
    terminalreporter.section(f"gate: {model}{shape_of(config).title()} on {target}")
    if not run.refusal:
        for line in _tables(run, model):
            terminalreporter.write_line(line)
    lines = [*report.improvements(run.cells)]
    lines += [f"known failure: {line}" for line in run.known_failures]
    lines += [f"baseline {line}" for line in run.written]
    for line in lines:
        terminalreporter.write_line(line)
    if config.getoption("--update-baselines") and run.folder:
        terminalreporter.write_line(
            f"baselines written to {run.folder}: commit them and run again without "
            "--update-baselines; this run fails",
            red=True,
        )
    for line in run.reports:
        terminalreporter.write_line(f"report: {line}")
    for line in run.refusal.splitlines():
        terminalreporter.write_line(line, red=True)
    left_out = f"; {run.deselected} more deselected" if run.deselected else ""
    green = not run.problems()
    line = report.coverage_line(run.expected, run.cells) + left_out
    terminalreporter.write_line(line, green=green, red=not green)


def _tables(run: GateRun, model: str) -> list[str]:
    """Return the lines of the tables, rows in the order of VARIANTS, explored ones last."""
    names = {name for name, _, _ in run.expected}
    order = [*VARIANTS, *sorted(names - VARIANTS.keys())]
    rows = {name: run.values.get(name, {}) for name in order if name in names}
    decisions = limits.DECISIONS.get(model, {})
    return report.tables(rows, run.cells, run.values.get(FLOOR, {}), decisions)
