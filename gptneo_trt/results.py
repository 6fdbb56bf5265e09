"""What a run found -> ``results.json``, which every report is made from."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptneo_trt.data import Cell, Checkpoint, Provenance
from gptneo_trt.verdicts import Key, coverage
from gptneo_trt.whole_file import whole_file

SCHEMA = 1
NON_FINITE = ("nan", "inf", "-inf")  # as str() gives them
Values = Mapping[str, float]  # flat names: "prefill/prose/bf16/kl_mean_nats", "prefill/plan_mib"


def _json(value: Any) -> Any:
    """Return a value with "nan", "inf" or "-inf" in place of floats that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _json(each) for name, each in value.items()}
    return value


def read_results(file: Path) -> dict[str, Any]:
    """Return the content of ``results.json``, with the floats that JSON cannot hold.

    Raises:
        OSError, ValueError: no such file, or no JSON.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    content["values"] = {variant: _read(row) for variant, row in content["values"].items()}
    content["cells"] = [_read(cell) for cell in content["cells"]]
    return content


def _read(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same members, the texts of floats that JSON cannot hold as these floats."""
    return {name: float(each) if each in NON_FINITE else each for name, each in row.items()}


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "revision": checkpoint.revision,
        "sha256": checkpoint.sha256,
        "architecture": asdict(checkpoint.architecture),
        "files": list(checkpoint.files),
        "notes": list(checkpoint.notes),
    }


def results(
    checkpoint: Checkpoint,
    provenance: Provenance,
    cells: Sequence[Cell],
    expected: Collection[Key],
    values: Mapping[str, Values],
    optional: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of ``results.json``, schema 1.

    ``cells`` is a list of ``variant``, ``phase``, ``metric``, ``obtained``, ``limit``,
    ``baseline``, ``verdict``, ``reason`` and ``minimum_detectable``, in the metric's unit or null
    where nothing is estimated; ``coverage`` counts ``measured`` and ``expected`` cells and lists
    the ``missing`` ones; ``values`` holds everything measured, judged or not. Members of
    ``optional`` are left out where they are empty: ``known_failures``, a line a cell that failed
    as known; ``references``, what losses are to; ``shape``, batch and context where they are not
    those of the baselines; ``timing``, what latencies are of.
    """
    measured, missing = coverage(expected, cells)
    content = {
        "schema": SCHEMA,
        "target": provenance.target,
        "model": _model(checkpoint),
        "provenance": asdict(provenance),
        "cells": [_json(asdict(cell)) for cell in cells],
        "coverage": {
            "measured": len(measured),
            "expected": len(expected),
            "missing": ["/".join(key) for key in sorted(missing)],
        },
        "values": {variant: _json(row) for variant, row in values.items()},
    }
    return content | {name: _json(part) for name, part in (optional or {}).items() if part}


def write_results(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write ``results.json`` into a folder, whole or not at all; return its path.

    Raises:
        ValueError: a value that JSON cannot hold, such as NaN.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path = folder / "results.json"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
