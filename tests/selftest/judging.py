"""Measurements -> cells, by calling the gate's own tests: nothing of a verdict is written here."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from types import ModuleType

import pytest

from gptneo_trt.data import Cell
from gptneo_trt.targets import TARGETS
from gptneo_trt.variants import Variant
from tests.gate import test_quality
from tests.gate.cells import OutsideShipLimitsError
from tests.gate.run import GateRun

Cells = dict[tuple[str, str], Cell]  # (phase, metric) -> cell


class _RedError(Exception):
    """A gate test ends here because its cell did not pass."""


def _cells_marker(test: object) -> pytest.Mark | None:
    marks = getattr(test, "pytestmark", []) if inspect.isfunction(test) else []
    return next((mark for mark in marks if mark.name == "cells"), None)


def gate_tests(module: ModuleType) -> list[Callable[..., None]]:
    """Return the tests of a module that are marked ``cells``, in order."""
    return [test for test in vars(module).values() if _cells_marker(test)]


def wanted_cells(tests: list[Callable[..., None]]) -> set[tuple[str, str]]:
    """Return (phase, metric) of every cell that gate tests judge for one row."""
    asked = [_cells_marker(test).kwargs for test in tests]
    return {key for each in asked for key in product(each["phases"], each["metrics"])}


def judged(tests: list[Callable[..., None]], variant: Variant, **fixtures: object) -> Cells:
    """Run gate tests of a row for all their phases and metrics; return what they judged.

    Args:
        tests: marked ``cells``.
        variant: the row.
        fixtures: what the tests ask for beside variant, phase, metric and where cells go.
    """
    run = GateRun()

    def judge(cell: Cell) -> None:
        run.cells.append(cell)
        if cell.verdict != "passed":
            raise _RedError

    fixtures |= {"variant": variant, "judge": judge, "gate_run": run, "comparing": True}
    fixtures |= {"target": TARGETS["cpu"]}
    for test in tests:
        for phase, metric in sorted(wanted_cells([test])):
            given = fixtures | {"phase": phase, "metric": metric}
            with suppress(_RedError, OutsideShipLimitsError):
                test(**{name: given[name] for name in inspect.signature(test).parameters})
    return {(cell.phase, cell.metric): cell for cell in run.cells}


QUALITY = gate_tests(test_quality)
