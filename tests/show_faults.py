"""Print which gate cell catches which seeded fault: ``python -m tests.show_faults [options]``.

Runs ``tests/selftest`` with the options in a child process, and reads what its tests say of each
fault. ``-m "h200 or selftest"`` seeds engines on that GPU. ``--json FILE`` keeps the table. The
exit status is 0 only when every fault was caught, every control is green, and every test passed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SELF_TESTS = "tests/selftest"
REASON = 72  # characters of a reason that are shown
NO_CELL = {"cell": "", "verdict": "", "reason": "the test ended before it judged: see above"}
NOT_JUDGED = {"kind": "", "target": "", "caught": False, "green": False, "cells": [NO_CELL]}


def faults_of(report: Path) -> Iterator[dict[str, Any]]:
    """Yield what each test of a JUnit file says of its fault; one that says nothing is not caught.

    A strict xfail is expected not to be caught.
    """
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        said = [each for each in case.iter("property") if each.get("name") == "fault"]
        if said:
            found = json.loads(said[0].get("value", ""))
        elif name.startswith("test_fault_") and case.find("skipped") is None:
            found = {"fault": name.partition("[")[2].removesuffix("]")} | NOT_JUDGED
        else:
            continue
        expected = case.find("skipped") is None
        yield found | {"expected": expected, "seconds": float(case.get("time", 0))}


def lines_of(faults: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table, a line a cell, kinds together."""
    rows = [("kind", "fault", "target", "caught by", "verdict", "reason")]
    for fault in sorted(faults, key=lambda each: each["kind"]):
        not_caught = " (NOT CAUGHT)" if fault["expected"] else " (known not to be seen)"
        name = fault["fault"] + ("" if fault["caught"] else not_caught)
        for cell in fault["cells"]:
            reason = " ".join(cell["reason"].split())
            short = reason if len(reason) <= REASON else f"{reason[: REASON - 3]}..."
            rows.append(
                (fault["kind"], name, fault["target"], cell["cell"], cell["verdict"], short)
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def count_of(faults: Sequence[dict[str, Any]]) -> str:
    """Return how many faults were caught, and how many of their controls are green."""
    asked = [fault for fault in faults if fault["expected"]]
    caught, green = (sum(fault[name] for fault in asked) for name in ("caught", "green"))
    unseen = [fault["fault"] for fault in faults if not fault["expected"]]
    known = f"; known not to be seen: {', '.join(unseen)}" if unseen else ""
    return f"caught {caught} of {len(asked)}; controls {green} of {len(asked)} green{known}"


def main(arguments: Sequence[str]) -> int:
    """Run the self-tests, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.show_faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    given, options = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", SELF_TESTS, "-q", f"--junitxml={report}"]
        status = subprocess.run([*command, *options], cwd=ROOT, check=False).returncode
        faults = list(faults_of(report)) if report.is_file() else []
    print("\n".join([*lines_of(faults), count_of(faults)]))
    if given.json:
        given.json.write_text(json.dumps(faults, indent=1), encoding="utf-8")
    asked = [fault for fault in faults if fault["expected"]]
    good = bool(asked) and all(fault["caught"] and fault["green"] for fault in asked)
    return status or (0 if good else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
