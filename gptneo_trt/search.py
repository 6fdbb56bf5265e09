"""Measured rows of one kind each -> the sets of projections that are worth building.

``python -m gptneo_trt.search RESULTS [MORE ...]`` reads the ``results.json`` of runs on one GPU and
prints which sets lie on the front of quality and speed, what was measured of them, and whether any
may ship and is faster. ``--names`` prints what is to be measured next, for ``--variants``;
``python -m tests.search_sets`` runs the gate for both.

A set is one kind of projection or more at a number of edge layers that stay in fp16. Its place is
predicted from the rows of one kind each: what a kind adds to fp16's KL and to fp16's time is added
up, times the share of layers that are quantized. That is a guess where to look. How far it is off
the sets that were measured is printed with it, and the answer is made of measured sets alone.
"""

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from gptneo_trt.claims import floor_ratio
from gptneo_trt.decisions import OUTCOMES, decisions, kl_limit
from gptneo_trt.errors import MetricError, VariantError
from gptneo_trt.report import PHASES
from gptneo_trt.results import read_results
from gptneo_trt.speeds import FASTER, speed_groups, speedups, unbeaten
from gptneo_trt.variant import HEAD, KINDS, Variant
from gptneo_trt.variants import FLOOR, MEMBER, SETTING, VALUE, VARIANTS, variant_named
from gptneo_trt.verdicts import WITHIN

Results = Mapping[str, Any]  # content of results.json
BASE = "fp8"  # the row whose sets are searched
AT_MOST = 6  # sets that are proposed a phase
SHOWN = 8  # sets that are named of those that were not measured
NAMING = ("name", "summary")  # fields that do not change what is built


@dataclass(frozen=True)
class Place:
    """Hold where a row lies in one phase.

    Attributes:
        loss_x: its KL to the bf16 reference over the fp16 row's.
        speed_x: fp16's device time over its own.
    """

    loss_x: float
    speed_x: float


Places = Mapping[str, Mapping[str, Place]]  # row -> phase -> place


@dataclass(frozen=True)
class Search:
    """Hold what is known of every set.

    Attributes:
        sets: row -> variant, of all sets in the order of their size.
        predicted: where they are expected.
        measured: where those that were measured are.
        outcomes: row -> one of OUTCOMES, of the sets whose quality was judged.
        faster: row -> phases in which the whole interval of its ratio is above 1.
        limit: largest ``loss_x`` that may ship; None where the runs do not say.
    """

    sets: Mapping[str, Variant]
    predicted: Places
    measured: Places
    outcomes: Mapping[str, str]
    faster: Mapping[str, Collection[str]]
    limit: float | None

    def front(self, phase: str) -> list[str]:
        """Return the sets than which none is predicted both better and faster, best first."""
        places = {name: where[phase] for name, where in self.predicted.items()}
        return unbeaten({name: (own.loss_x, own.speed_x) for name, own in places.items()})

    def is_guessed(self, name: str) -> bool:
        """Return whether the prediction of a set is more than its own measurement."""
        return len(self.sets[name].quantized) > 1 or self.sets[name].float_edge_layers > 0

    def is_hoped_for(self, name: str) -> bool:
        """Return whether a set is predicted within the KL that may ship, and faster in a phase."""
        places = self.predicted[name].values()
        if self.limit is None or any(place.loss_x > self.limit for place in places):
            return False
        return any(place.speed_x > 1 for place in places)

    def proposals(self, at_most: int = AT_MOST) -> list[str]:
        """Return the sets of both fronts that were not measured, spread evenly over each."""
        found: list[str] = []
        for phase in PHASES:
            front = [name for name in self.front(phase) if phase not in self.measured.get(name, ())]
            spread = np.linspace(0, len(front) - 1, min(at_most, len(front)))
            found += [front[round(place)] for place in spread]
        return list(dict.fromkeys(found))


def search(runs: Sequence[Results], base: str = BASE) -> Search:
    """Return what runs on one GPU say of every set of projections of a row.

    Args:
        runs: content of ``results.json`` each, with rows of one kind and whatever else was
            measured. Every row is held against the fp16 of its own run.
        base: row whose other settings all sets have.

    Raises:
        MetricError: no row of one kind was measured in both phases, or the runs are of more than
            one checkpoint or target.
        VariantError: there is no such row.
    """
    _require_one("checkpoint", {run["model"]["sha256"] for run in runs})
    _require_one("target", {run["target"] for run in runs})
    row = variant_named(base)
    measured, faster = _measured(runs)
    alone = {
        kind: measured[name]
        for kind, name in rows_of_one_kind(row).items()
        if len(measured.get(name, {})) == len(PHASES)
    }
    if not alone:
        raise MetricError(
            f"no row of one kind of {base} has a loss and a time in both phases; run the gate on a "
            f"GPU with --variants {','.join(rows_of_one_kind(row).values())}"
        )
    num_layers = len(runs[0]["model"]["architecture"]["attention_layers"])
    sets = _sets(row, tuple(alone), num_layers)
    return Search(
        sets=sets,
        predicted={name: _predicted(each, alone, num_layers) for name, each in sets.items()},
        measured={name: measured[name] for name in sets if name in measured},
        outcomes={each.variant: each.outcome for run in runs for each in decisions(run)},
        faster=faster,
        limit=(kl_limit(runs[0]) or {}).get("value"),
    )


def _measured(
    runs: Sequence[Results],
) -> tuple[dict[str, dict[str, Place]], dict[str, set[str]]]:
    """Return the places of all rows, and the phases in which each is faster than fp16."""
    places: dict[str, dict[str, Place]] = {}
    faster: dict[str, set[str]] = {}
    for run, phase in product(runs, PHASES):
        for name, (ratio, _, _) in speedups(run, phase).items():
            loss = floor_ratio(run, name, phase)
            if loss is not None:
                places.setdefault(name, {})[phase] = Place(loss, ratio)
        for name in speed_groups(run, phase)[FASTER]:
            faster.setdefault(name, set()).add(phase)
    return places, faster


def rows_of_one_kind(base: Variant) -> dict[str, str]:
    """Return kind -> name of the row that quantizes it alone, in all layers."""
    return {kind: row_of(base, (kind,), 0) for kind in KINDS}


def _require_one(what: str, found: Collection[str]) -> None:
    if len(found) > 1:
        raise MetricError(f"runs of more than one {what}: {', '.join(sorted(found))}; search one")


def row_of(base: Variant, kinds: Sequence[str], float_edge_layers: int) -> str:
    """Return the name of a set: of the row that is the same, or one that describes it."""
    wanted = replace(base, quantized=tuple(kinds), float_edge_layers=float_edge_layers)
    for name, row in VARIANTS.items():
        if set(row.quantized) == set(kinds) and all(
            getattr(row, field.name) == getattr(wanted, field.name)
            for field in fields(Variant)
            if field.name not in (*NAMING, "quantized")
        ):
            return name
    name = f"{base.name}{SETTING}quantized{VALUE}{MEMBER.join(kinds)}"
    if float_edge_layers != base.float_edge_layers:
        name += f"{SETTING}float_edge_layers{VALUE}{float_edge_layers}"
    return name


def _sets(base: Variant, kinds: Sequence[str], num_layers: int) -> dict[str, Variant]:
    """Return every set of these kinds at every number of edge layers."""
    found = {}
    for size in range(1, len(kinds) + 1):
        for members in combinations(kinds, size):
            # The head is in no layer: a set of it alone is the same at any number of edges.
            edges = range((num_layers + 1) // 2) if set(members) != {HEAD} else range(1)
            for edge in edges:
                name = row_of(base, members, edge)
                found[name] = variant_named(name)
    return found


def _predicted(
    variant: Variant, alone: Mapping[str, Mapping[str, Place]], num_layers: int
) -> dict[str, Place]:
    """Return what the kinds alone add up to, in each phase."""
    share = 1 - 2 * variant.float_edge_layers / num_layers
    parts = {kind: 1.0 if kind == HEAD else share for kind in variant.quantized}
    found = {}
    for phase in PHASES:
        places = {kind: alone[kind][phase] for kind in parts}
        loss = sum(part * (places[kind].loss_x - 1) for kind, part in parts.items())
        time = sum(part * (1 / places[kind].speed_x - 1) for kind, part in parts.items())
        # Kinds that each take little off cannot take off everything.
        found[phase] = Place(1 + loss, 1 / max(1 + time, np.finfo(float).eps))
    return found


def report(found: Search) -> Iterator[str]:
    """Yield the lines of a Markdown report: both fronts, how far off the guess was, the answer."""
    for phase in PHASES:
        yield f"Front of {phase}, by prediction, from the least loss to the most speed:"
        yield ""
        yield "| set | KL over fp16's: predicted / measured | fp16's time over its own | |"
        yield "| --- | --- | --- | --- |"
        for name in found.front(phase):
            guess, place = found.predicted[name][phase], found.measured.get(name, {}).get(phase)
            told = (f"{place.loss_x:.2f}", f"{place.speed_x:.3f}") if place else ("-", "-")
            outcome = found.outcomes.get(name, "not measured") if place else "not measured"
            yield (
                f"| {name} | {guess.loss_x:.2f} / {told[0]} | {guess.speed_x:.3f} / {told[1]} | "
                f"{outcome} |"
            )
        yield ""
    yield from _errors(found)
    yield from _answer(found)


def _errors(found: Search) -> Iterator[str]:
    """Yield how far off the guess was, over the measured sets that it was not made from."""
    for phase in PHASES:
        pairs = {
            name: (found.predicted[name][phase], where[phase])
            for name, where in found.measured.items()
            if phase in where and found.is_guessed(name)
        }
        if pairs:
            loss = {name: guess.loss_x / own.loss_x - 1 for name, (guess, own) in pairs.items()}
            speed = {name: guess.speed_x / own.speed_x - 1 for name, (guess, own) in pairs.items()}
            yield (
                f"{phase}: of the {len(pairs)} measured sets that it was not made from, the guess "
                f"was off in KL by {_off(loss)}, in speed by {_off(speed)}."
            )


def _off(errors: Mapping[str, float]) -> str:
    """Return the median and the largest of relative errors, with its row."""
    median = np.median([abs(each) for each in errors.values()])
    worst = max(errors, key=lambda name: abs(errors[name]))
    return f"{median:.0%} in the median and {errors[worst]:+.0%} at most ({worst})"


def _answer(found: Search) -> Iterator[str]:
    """Yield whether a set is within the ship limits, faster than fp16, or both."""
    outcomes = {name: found.outcomes[name] for name in found.measured if name in found.outcomes}
    rows = {
        outcome: [name for name, own in outcomes.items() if own == outcome]
        for outcome in OUTCOMES.values()
    }
    told = "; ".join(f"{outcome}: {', '.join(each) or 'none'}" for outcome, each in rows.items())
    yield f"Built and measured: {len(outcomes)} of {len(found.sets)} sets; {told}."
    for phase in PHASES:
        faster = [name for name in outcomes if phase in found.faster.get(name, ())]
        both = [name for name in faster if name in rows[OUTCOMES[WITHIN]]]
        yield (
            f"{phase}: faster than {FLOOR}: {', '.join(faster) or 'none'}; that and within the "
            f"ship limits: {', '.join(both) or 'none'}."
        )
    unknown = [name for name in found.sets if name not in outcomes]
    if unknown and found.limit is not None:
        hoped = [name for name in unknown if found.is_hoped_for(name)]
        told = ", ".join(hoped[:SHOWN]) or "none"
        more = f" and {len(hoped) - SHOWN} more" if len(hoped) > SHOWN else ""
        yield (
            f"Not measured: {len(unknown)} sets. Predicted to have at most {found.limit:g} x "
            f"{FLOOR}'s KL in both phases and to be faster in one: {told}{more}."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the search over some runs; return 0 wherever it was made, whatever it found."""
    parser = argparse.ArgumentParser(prog="python -m gptneo_trt.search")
    parser.add_argument("results", type=Path, nargs="+", help="results.json of one run or more")
    parser.add_argument("--base", default=BASE, help=f"row whose sets are searched ({BASE})")
    parser.add_argument("--at-most", type=int, default=AT_MOST, help="proposals a phase")
    parser.add_argument("--names", action="store_true", help="print what to measure next")
    options = parser.parse_args(arguments)
    try:
        found = search([read_results(each) for each in options.results], options.base)
    except (MetricError, VariantError, OSError, ValueError) as error:
        parser.error(str(error))
    if options.names:
        print(",".join(found.proposals(options.at_most)))
    else:
        print("\n".join(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
