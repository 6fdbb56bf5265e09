"""Measurements -> cells, through the gate's own tests: called here, recorded, never re-written."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from types import ModuleType

from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Cell, Checkpoint, Measurement
from gptneo_trt.variants import Variant
from tests.gate import test_quality
from tests.gate.conftest import OutsideShipLimitsError
from tests.gate.run import GateRun

Cells = dict[tuple[str, str], Cell]  # (phase, metric) -> cell


class Red(Exception):
    """A gate test ended here because its cell did not pass."""


def gate_tests(module: ModuleType) -> list[Callable]:
    """Return the tests of a module that are marked ``cells``, in order."""
    return [test for test in vars(module).values() if _cells_marker(test)]


def _cells_marker(test: object):
    marks = getattr(test, "pytestmark", []) if inspect.isfunction(test) else []
    return next((mark for mark in marks if mark.name == "cells"), None)


def cells_from(tests: list[Callable], variant: Variant, **fixtures: object) -> Cells:
    """Run gate tests of a row for all their phases and metrics; return what they judged."""
    run = GateRun()

    def judge(cell: Cell) -> None:
        run.cells.append(cell)
        if cell.verdict != "passed":
            raise Red

    fixtures |= {"variant": variant, "judge": judge, "gate_run": run, "comparing": True}
    for test in tests:
        asked = _cells_marker(test).kwargs
        for phase, metric in product(asked["phases"], asked["metrics"]):
            given = fixtures | {"phase": phase, "metric": metric}
            names = inspect.signature(test).parameters
            with suppress(Red, OutsideShipLimitsError):
                test(**{name: given[name] for name in names})
    return {(cell.phase, cell.metric): cell for cell in run.cells}


def quality_cells(
    variant: Variant,
    measured: Callable[[Variant, str], Measurement],
    checkpoint: Checkpoint,
    stored: Callable[[Variant], Baseline],
) -> Cells:
    """Return every quality cell of a row."""
    tests = gate_tests(test_quality)
    return cells_from(tests, variant, measured=measured, checkpoint=checkpoint, stored=stored)
