"""Results of a real run on an H200, and parts of it, for tests of what is said of them."""

import copy
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from gptneo_trt.variants import VARIANTS
from tests.gate import limits

FILE = Path(__file__).with_name("h200.results.json")  # the study's 22 rows, at 298994c


@cache
def _stored():
    return json.loads(FILE.read_text(encoding="utf-8"))


def stored_results():
    """Return the run's results, with the rows and ship limits of today."""
    found = copy.deepcopy(_stored())
    decisions = limits.DECISIONS["bundled"]
    found.setdefault("rows", {})
    for name, row in VARIANTS.items():
        settings = asdict(row)
        found["rows"][name] = {
            "summary": settings.pop("summary"),
            "decision": decisions.get(settings.pop("name"), ""),
            "settings": settings,
        }
    found["ship_limits"] = {"floor_ratio_x": {"direction": "at most", "value": 2.0}}
    return found


def measured_only(results, kept):
    """Return the results of a run that selected only these rows."""
    part = copy.deepcopy(results)
    part["cells"] = [cell for cell in results["cells"] if cell["variant"] in kept]
    part["values"] = {name: row for name, row in results["values"].items() if name in kept}
    count = len(part["cells"])
    part["coverage"] = {"measured": count, "expected": count, "missing": []}
    return part


def with_cell(results, variant, phase, metric, /, **changes):
    """Return the results with one cell changed."""
    part = copy.deepcopy(results)
    for cell in part["cells"]:
        if (cell["variant"], cell["phase"], cell["metric"]) == (variant, phase, metric):
            cell.update(changes)
    return part
