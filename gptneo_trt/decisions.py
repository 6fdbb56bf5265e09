"""Content of ``results.json`` -> what it decided on shipping each row, and why, in words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gptneo_trt.report import PHASES
from gptneo_trt.variants import FLOOR
from gptneo_trt.verdicts import OUTSIDE, UNDECIDED, WITHIN

Results = Mapping[str, Any]  # content of results.json
SHIP = ("both", "ship")
OUTCOMES = {
    WITHIN: "within the ship limits",
    OUTSIDE: "outside the ship limits",
    UNDECIDED: "inconclusive",
}


class Figure(NamedTuple):
    """Say how a figure is put into words: "KL 3.21 x fp16's"."""

    noun: str
    unit: str
    factor: float = 1.0  # from the stored unit to this one
    form: str = "#.4g"


FIGURES = {  # of the ship limits
    "floor_ratio_x": Figure("KL", f" x {FLOOR}'s"),
    "top1_drop_frac": Figure("top-1", f" points below {FLOOR}'s", 100.0, "#.3g"),
    "perplexity_ratio": Figure("perplexity", " x the reference's"),
}
# As ``verdicts.judge_decision`` writes one.
FIGURE = re.compile(
    r"(\w+): (\w+) (\S+) \((\S+) to (\S+), each bound at \S+ %\), expected at \w+ [^\s;]+"
)


@dataclass(frozen=True)
class Decision:
    """Hold what a run says about shipping one row.

    Attributes:
        variant: the row.
        decision: "shipped" or "studied", as decided before the run; "" where nobody decided.
        outcome: a value of OUTCOMES, or "not measured".
        reason: of the cell, in words; "" where there is none.
        figures: keys of FIGURES that the reason is about.
    """

    variant: str
    decision: str
    outcome: str
    reason: str
    figures: frozenset[str] = frozenset()


def cell_of(results: Results, variant: str, phase: str, metric: str) -> Mapping[str, Any] | None:
    """Return the measured cell of that name, or None."""
    for cell in results["cells"]:
        if (cell["variant"], cell["phase"], cell["metric"]) == (variant, phase, metric):
            return cell if cell["verdict"] != "not measured" else None
    return None


def measured_rows(results: Results) -> list[str]:
    """Return the rows with at least one measured cell, in the order of the report."""
    found = {cell["variant"] for cell in results["cells"] if cell["verdict"] != "not measured"}
    known = [name for name in results.get("rows", {}) if name in found]
    return known + sorted(found - set(known))


def decisions(results: Results) -> list[Decision]:
    """Return one Decision a measured row that somebody decided on, in the report's order."""
    found = []
    for variant in measured_rows(results):
        decision = results.get("rows", {}).get(variant, {}).get("decision", "")
        cell = cell_of(results, variant, *SHIP)
        if cell:
            outcome = OUTCOMES.get(cell["obtained"], str(cell["obtained"]))
            reason = cell["reason"].rpartition(f"{cell['obtained']}: ")[2]
            figures = frozenset(each[2] for each in FIGURE.finditer(reason)) & set(FIGURES)
            found.append(Decision(variant, decision, outcome, in_words(reason), figures))
        elif decision:
            found.append(Decision(variant, decision, "not measured", ""))
    return found


def in_words(reason: str) -> str:
    """Return the reason of a ship decision without names of metrics, each phase named once."""
    told = FIGURE.sub(_figure_in_words, reason)
    for phase in PHASES:
        before, name, after = told.partition(f"{phase}: ")
        told = before + name + after.replace(f"; {name}", ", ")
    return told


def _figure_in_words(found: re.Match[str]) -> str:
    phase, name, *numbers = found.groups()
    if name not in FIGURES:
        return found[0]
    noun, unit, factor, form = FIGURES[name]
    value, lower, upper = (format(factor * float(each), form).rstrip(".") for each in numbers)
    return f"{phase}: {noun} {value}{unit} ({lower} to {upper})"


def kl_limit(results: Results) -> Mapping[str, Any] | None:
    """Return direction and value of what KL over the floor's may ship, where a run stored it."""
    found: Mapping[str, Any] | None = results.get("ship_limits", {}).get("floor_ratio_x")
    return found


def ship_limits(results: Results) -> str:
    """Return the ship limits of a run in words; "" of a run that stored none."""
    told = []
    for name, limit in results.get("ship_limits", {}).items():
        noun, unit, factor, _ = FIGURES.get(name, Figure(name, ""))
        told.append(f"{noun} {limit['direction']} {factor * limit['value']:g}{unit}")
    return ", ".join(told)
