"""Whether a fault was caught and its control is green; and the line about it for the table."""

import json
import re

from gptneo_trt.data import Cell
from tests.selftest.fault import Fault
from tests.selftest.judging import Cells

MISSING = "no such cell was judged"


def _verdict(cells: Cells, key: tuple[str, str]) -> str:
    return cells[key].verdict if key in cells else MISSING


def not_caught(fault: Fault, cells: Cells) -> list[str]:
    """Return a line a cell that did not turn red as the fault says."""
    lines = []
    for key in fault.cells:
        cell = cells.get(key)
        if cell is None or cell.verdict != fault.verdict:
            lines.append(f"{'/'.join(key)}: {cell or MISSING}, expected {fault.verdict}")
        elif not re.match(fault.reason, cell.reason):
            lines.append(f"{'/'.join(key)}: {cell.reason}, expected {fault.reason}")
    return lines


def not_green(fault: Fault, control: Cells) -> list[str]:
    """Return a line a cell of the fault that does not pass without it."""
    return [
        f"{'/'.join(key)}: without the fault {control.get(key, MISSING)}, expected passed"
        for key in fault.cells
        if _verdict(control, key) != "passed"
    ]


def told(fault: Fault, target: str, cells: Cells, control: Cells) -> str:
    """Return JSON for ``tests.show_faults``: the fault, its cells, and what else turned red."""
    red = [cell for key, cell in cells.items() if cell.verdict != "passed"]
    return json.dumps(
        {
            "fault": fault.name,
            "kind": fault.kind,
            "breaks": fault.breaks,
            "target": target,
            "caught": not_caught(fault, cells) == [],
            "green": not_green(fault, control) == [],
            "cells": [_shown(cells[key]) for key in fault.cells if key in cells],
            "red_cells": len(red),
        }
    )


def _shown(cell: Cell) -> dict[str, str]:
    return {
        "cell": f"{cell.variant}/{cell.phase}/{cell.metric}",
        "verdict": cell.verdict,
        "reason": cell.reason,
    }
