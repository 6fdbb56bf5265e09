"""Measurements -> cells, by calling the gate's own tests: nothing of a verdict is written here."""

import inspect
from collections.abc import Callable, Collection, Iterable
from itertools import product
from types import ModuleType

import pytest

from gptneo_trt.data import Cell
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.targets import TARGETS
from gptneo_trt.variant import Variant
from tests.gate.cells import OutsideShipLimitsError, SlowerThanPyTorchError, errored
from tests.gate.run import GateRun
from tests.gate.shape import STORED_SHAPE

Cells = dict[tuple[str, str], Cell]  # (phase, metric) -> cell


class _RedError(Exception):
    """A gate test ends here because its cell did not pass."""


def _cells_marker(test: object) -> pytest.Mark | None:
    marks = getattr(test, "pytestmark", []) if inspect.isfunction(test) else []
    return next((mark for mark in marks if mark.name == "cells"), None)


def gate_tests(module: ModuleType) -> list[Callable[..., None]]:
    """Return the tests of a module that are marked ``cells``, in order."""
    return [test for test in vars(module).values() if _cells_marker(test)]


def tests_of(modules: Iterable[ModuleType], metric: str) -> list[Callable[..., None]]:
    """Return the gate tests that judge cells of a metric."""
    tests = [test for module in modules for test in gate_tests(module)]
    return [test for test in tests if metric in _cells_marker(test).kwargs["metrics"]]


def wanted_cells(tests: list[Callable[..., None]]) -> set[tuple[str, str]]:
    """Return (phase, metric) of every cell that gate tests judge for one row."""
    asked = [_cells_marker(test).kwargs for test in tests]
    return {key for each in asked for key in product(each["phases"], each["metrics"])}


def judged(
    tests: list[Callable[..., None]],
    variant: Variant,
    only: Collection[tuple[str, str]] | None = None,
    **fixtures: object,
) -> Cells:
    """Run gate tests of a row; return what they judged, or the cell of the error they ended with.

    Args:
        tests: marked ``cells``.
        variant: the row.
        only: (phase, metric) of the cells that are wanted; None wants all of these tests.
        fixtures: what the tests ask for beside variant, phase, metric and where cells go.
    """
    run = GateRun()

    def judge(cell: Cell) -> None:
        run.cells.append(cell)
        if cell.verdict != "passed":
            raise _RedError

    given = {"target": TARGETS["cpu"], "comparing": True, "shape": STORED_SHAPE} | fixtures
    given |= {"variant": variant, "judge": judge, "gate_run": run}
    for test in tests:
        for phase, metric in sorted(wanted_cells([test])):
            if only is not None and (phase, metric) not in only:
                continue
            given |= {"phase": phase, "metric": metric}
            try:
                test(**{name: given[name] for name in inspect.signature(test).parameters})
            except (_RedError, OutsideShipLimitsError, SlowerThanPyTorchError):
                continue
            except GptNeoTrtError as error:
                run.cells.append(errored((variant.name, phase, metric), error))
    return {(cell.phase, cell.metric): cell for cell in run.cells}
