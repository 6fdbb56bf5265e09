"""Workers that interpret rows: one that dies costs its row, and none outlives the run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gptneo_trt.errors import CalibrationError, CrashError
from tests.child import child_environment
from tests.crash.warm import END_S, MARK, ROOT, ends, is_running, processes_with
from tests.gate import measurer
from tests.gate.measurer import Measurer

ENDLESS_S = 60.0


def prepared(setup):
    """Load nothing: what is measured here needs neither torch nor a checkpoint."""


def loaded():
    """Load nothing."""


def died(number):
    """End as native code can."""
    os.kill(os.getpid(), number)


def refused(message):
    """Fail as calibration can."""
    raise CalibrationError(message)


def mistaken():
    """Fail as nobody foresaw."""
    return None + 1


@pytest.fixture
def measuring(monkeypatch):
    """Return a function workers -> Measurer whose workers load nothing."""
    monkeypatch.setattr(measurer, "_prepare", prepared)
    monkeypatch.setattr(measurer, "_load", loaded)
    return lambda workers: Measurer(None, workers)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_costs_its_row(measuring, number, workers):
    """The row names the signal and the seconds; those before and after it are measured."""
    with measuring(workers) as running:
        before = [running._run(f"row {i}", abs, -i) for i in range(3)]
        lost = running._run("variant fp8", died, number)
        after = [running._run(f"row {i}", abs, -i) for i in range(3)]
        assert [each.result(END_S) for each in before + after] == [0, 1, 2] * 2
        text = f"variant fp8: the process that interprets networks died of {number.name}.* after "
        with pytest.raises(CrashError, match=text + r"\d+\.\d s"):
            lost.result(END_S)


def test_rows_that_all_die_are_each_told(measuring):
    """No row waits for a worker that does not come back."""
    with measuring(2) as running:
        lost = [running._run(f"row {i}", died, signal.SIGSEGV) for i in range(4)]
        for index, each in enumerate(lost):
            with pytest.raises(CrashError, match=f"row {index}: .*SIGSEGV"):
                each.result(END_S)


def test_a_worker_that_hangs_costs_its_row(measuring, monkeypatch):
    """It is killed at the limit of a row; another one measures the next row."""
    with measuring(1) as running:
        hung = running._run("id", os.getpid).result(END_S)
        monkeypatch.setattr(measurer, "LIMIT_S", 0.5)
        lost = running._run("variant fp8", time.sleep, ENDLESS_S)
        text = "variant fp8: the process that interprets networks hung and was killed after "
        with pytest.raises(CrashError, match=text + r"\d+\.\d s"):
            lost.result(END_S)
        monkeypatch.setattr(measurer, "LIMIT_S", END_S)
        assert not is_running(hung)
        assert running._run("next row", abs, -1).result(END_S) == 1


def test_what_a_row_raises_is_raised_here(measuring):
    """An error comes back as it is, with the place in the worker; the worker goes on."""
    with measuring(1) as running:
        refusal, mistake = running._run("a", refused, "no range"), running._run("b", mistaken)
        with pytest.raises(CalibrationError, match=r"^no range$"):
            refusal.result(END_S)
        with pytest.raises(TypeError) as caught:
            mistake.result(END_S)
        assert "in mistaken" in caught.value.__notes__[0]
        assert running._run("c", os.getppid).result(END_S) == os.getpid()


def test_a_worker_that_cannot_load_fails_the_row(measuring, monkeypatch):
    """What keeps a worker from loading is raised by each row that needs it."""
    monkeypatch.setattr(measurer, "_prepare", refused)
    with measuring(1) as running, pytest.raises(CalibrationError):
        running._run("row", abs, 1).result(END_S)


def test_the_end_waits_for_no_row(measuring):
    """Leaving ends a worker in the middle of its row, and rows that wait are never begun."""
    started = time.monotonic()
    with measuring(1) as running:
        worker = running._run("id", os.getpid).result(END_S)
        running._run("endless", time.sleep, ENDLESS_S)
        running._run("endless", time.sleep, ENDLESS_S)
    assert time.monotonic() - started < ENDLESS_S / 2
    assert ends(lambda: is_running(worker))


PARENT = f"""
import time
from tests.crash.test_measurer import *
measurer._prepare, measurer._load = prepared, loaded
running = Measurer(None, 2)
assert running._run("row", abs, -1).result({END_S}) == 1
running._run("endless", time.sleep, {ENDLESS_S})
print("ready", flush=True)
time.sleep({ENDLESS_S})
"""


def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    """kill -9 of the run alone ends its workers, busy or idle."""
    mark = str(tmp_path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=child_environment(**{MARK: mark}),
    )
    assert parent.stdout.readline() == b"ready\n"
    entry = f"{MARK}={mark}".encode()
    assert len(set(processes_with(entry))) >= 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ends(lambda: set(processes_with(entry)))
