"""What a run found, with the tables that judged it -> ``results.json`` and the reports."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from gptneo_trt import results
from gptneo_trt.data import Checkpoint
from gptneo_trt.variants import VARIANTS, variant_named
from gptneo_trt.verdicts import EXPLORED
from tests.gate import limits
from tests.gate.run import GateRun


def results_of(run: GateRun) -> dict[str, object]:
    """Return the content of ``results.json``; every report is made from it alone."""
    more = {
        "hashes": run.hashes,
        "known_failures": run.known_failures,
        "references": run.references,
        "rows": _rows(run.checkpoint, {variant for variant, _, _ in run.expected}),
        "shape": run.shape,
        "ship_limits": {
            name: {"direction": bound.direction, "value": float(bound.value)}
            for name, bound in limits.SHIP_LIMITS.items()
        },
        "timing": run.timing,
        "token_profiles": run.profiles,
    }
    return results.results(
        run.checkpoint, run.provenance, run.cells, run.expected, run.values, more
    )


def write_reports(folder: Path, run: GateRun) -> list[str]:
    """Write ``results.json``, ``report.md`` and ``report.html``; return a line a file."""
    # Only here: most runs write no report, and jinja2 takes a while.
    from gptneo_trt import render

    path = results.write_results(folder, results_of(run))
    return [str(path), *render.write_reports(folder, results.read_results(path))]


def _rows(checkpoint: Checkpoint, selected: Collection[str]) -> dict[str, dict[str, object]]:
    """Return row -> summary, decision and what it builds: of VARIANTS, selected or not, and more.

    A row that the table does not have, because it was described, is an explored one.
    """
    explored = sorted(set(selected) - set(VARIANTS))
    decisions = dict.fromkeys(explored, EXPLORED) | limits.DECISIONS.get(checkpoint.name, {})
    described = {name: asdict(variant_named(name)) for name in (*VARIANTS, *explored)}
    return {
        name: {
            "summary": row.pop("summary"),
            "decision": decisions.get(row.pop("name"), ""),
            "settings": row,
        }
        for name, row in described.items()
    }
