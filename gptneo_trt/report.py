"""Cells and measured values -> the table at the end of a run, and ``results.json``."""

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
WORST_FIRST = ("failed", "inconclusive", "not measured", "passed")
HEADINGS = (
    ("variant", 21),
    ("KL mean", 21),
    ("KL p99", 10),
    ("x floor", 8),
    ("top-1", 7),
    ("perplexity", 11),
    ("plan MiB", 15),
    ("build s", 10),
    ("verdict", 0),
)
LEGEND = (
    "KL in nats a token to the bf16 reference, prefill / decode; p99, x floor (fp16's KL), top-1 "
    "and perplexity: prefill; plan MiB and build s: prefill / decode"
)

Values = Mapping[str, float]  # flat names: "prefill/prose/bf16/kl_mean_nats", "prefill/plan_mib"


def worst_verdict(cells: Sequence[Cell]) -> str:
    """Return the worst verdict among cells; "not measured" when there is none."""
    found = {cell.verdict for cell in cells}
    return next((verdict for verdict in WORST_FIRST if verdict in found), "not measured")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pair(values: Values, name: str, form: str) -> str:
    return " / ".join(
        _number(values.get(f"{phase}/{name}"), form) for phase in ("prefill", "decode")
    )


def table(
    values: Mapping[str, Values],
    cells: Sequence[Cell],
    floor: Values,
    decisions: Mapping[str, str],
) -> list[str]:
    """Return the lines of the table, a row a variant in the order of ``values``.

    Args:
        values: variant -> flat measured values.
        cells: every judged cell.
        floor: flat values of the variant whose KL is 1 x floor.
        decisions: variant -> "shipped" or "studied".
    """
    kl = "prose/bf16/kl_mean_nats"
    floor_kl = floor.get(f"prefill/{kl}")
    lines = ["".join(name.ljust(width) for name, width in HEADINGS).rstrip()]
    for variant, row in values.items():
        own_kl = row.get(f"prefill/{kl}")
        ratio = own_kl / floor_kl if own_kl is not None and floor_kl else None
        verdict = worst_verdict([cell for cell in cells if cell.variant == variant])
        columns = (
            variant,
            _pair(row, kl, ".3g"),
            _number(row.get("prefill/prose/bf16/kl_p99_nats"), ".3g"),
            _number(ratio, ".1f"),
            _number(row.get("prefill/prose/bf16/top1_frac"), ".4f"),
            _number(row.get("prefill/prose/bf16/perplexity"), ".2f"),
            _pair(row, "plan_mib", ".2f"),
            _pair(row, "build_s", ".1f"),
            f"{verdict} ({decisions[variant]})" if variant in decisions else verdict,
        )
        padded = (text.ljust(width) for text, (_, width) in zip(columns, HEADINGS, strict=True))
        lines.append("".join(padded).rstrip())
    return lines


def coverage_line(expected: Collection[Key], cells: Sequence[Cell]) -> str:
    """Return "measured M of N cells", and which are missing."""
    measured, missing = coverage(expected, cells)
    line = f"measured {len(measured)} of {len(expected)} cells"
    if missing:
        names = ["/".join(key) for key in sorted(missing)]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        line += f"; not measured: {shown}"
    return line


def _json(value: Any) -> Any:
    """Return a value with "nan", "inf" or "-inf" in place of floats that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _json(each) for name, each in value.items()}
    return value


def results(
    checkpoint: Checkpoint,
    provenance: Provenance,
    cells: Sequence[Cell],
    expected: Collection[Key],
    values: Mapping[str, Values],
) -> dict[str, Any]:
    """Return the content of ``results.json``, schema 1.

    ``cells`` is a list of ``variant``, ``phase``, ``metric``, ``obtained``, ``limit``,
    ``baseline``, ``verdict`` and ``reason``; ``coverage`` counts ``measured`` and ``expected``
    cells and lists the ``missing`` ones; ``values`` holds everything measured, judged or not.
    """
    measured, missing = coverage(expected, cells)
    return {
        "schema": SCHEMA,
        "target": provenance.target,
        "model": {
            "name": checkpoint.name,
            "revision": checkpoint.revision,
            "sha256": checkpoint.sha256,
            "architecture": asdict(checkpoint.architecture),
            "files": list(checkpoint.files),
            "notes": list(checkpoint.notes),
        },
        "provenance": asdict(provenance),
        "cells": [_json(asdict(cell)) for cell in cells],
        "coverage": {
            "measured": len(measured),
            "expected": len(expected),
            "missing": ["/".join(key) for key in sorted(missing)],
        },
        "values": {variant: _json(row) for variant, row in values.items()},
    }


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
