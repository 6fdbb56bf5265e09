"""Content of ``results.json`` -> which rows are faster than fp16, and what else is."""

from collections.abc import Mapping
from typing import Any

from gptneo_trt.decisions import cell_of, measured_rows
from gptneo_trt.report import alternatives
from gptneo_trt.variants import FLOOR

Results = Mapping[str, Any]  # content of results.json
FASTER, AS_FAST, SLOWER = "faster than", "as fast as", "slower than"  # fp16
CELLS = ("regression/speedup_x", "speedup_x")  # of a ratio that is stored, and that is not
READ = "weights_read"  # the alternative that is no way to run the model, but a bound


def speedups(results: Results, phase: str) -> dict[str, tuple[float, float, float]]:
    """Return row -> (ratio, lower, upper) of fp16's time over its own, where it was timed.

    Only of rows whose comparison was measured: a disturbed figure is none.
    """
    names = [f"{phase}/speedup_{part}x" for part in ("", "lower_", "upper_")]
    found = {}
    for variant in measured_rows(results):
        row = results["values"].get(variant, {})
        if variant != FLOOR and all(name in row for name in names):
            found[variant] = (row[names[0]], row[names[1]], row[names[2]])
    return found


def speed_groups(results: Results, phase: str) -> dict[str, dict[str, float]]:
    """Return FASTER, AS_FAST, SLOWER -> row -> ratio, the fastest first; none is inconclusive."""
    groups: dict[str, dict[str, float]] = {FASTER: {}, AS_FAST: {}, SLOWER: {}}
    timed = sorted(speedups(results, phase).items(), key=lambda row: -row[1][0])
    for variant, (ratio, lower, upper) in timed:
        if not is_inconclusive(results, variant, phase):
            group = FASTER if lower > 1 else SLOWER if upper < 1 else AS_FAST
            groups[group][variant] = ratio
    return groups


def is_inconclusive(results: Results, variant: str, phase: str) -> bool:
    """Return whether a row's ratio was measured, and cannot be judged."""
    cells = (cell_of(results, variant, phase, metric) for metric in CELLS)
    return any(cell is not None and cell["verdict"] == "inconclusive" for cell in cells)


def judged_alternatives(results: Results, phase: str) -> dict[str, float]:
    """Return what a user would otherwise run -> its time over fp16's, the fastest first.

    A disturbed figure is none.
    """
    times = alternatives(results["values"].get(FLOOR, {}), phase)
    cells = {name: cell_of(results, FLOOR, phase, f"alternative/{name}_x") for name in times}
    return {
        name: times[name]
        for name, cell in cells.items()
        if name != READ and cell is not None and cell["verdict"] != "inconclusive"
    }


def unbeaten(places: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the rows than which none has both at most the loss and at least the speed.

    Args:
        places: row -> (loss, speed).

    Returns:
        Rows from the least loss to the most speed; the first of equals.
    """
    found: list[str] = []
    for row in sorted(places, key=lambda name: (places[name][0], -places[name][1])):
        if not found or places[row][1] > places[found[-1]][1]:
            found.append(row)
    return found
