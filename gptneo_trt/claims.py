"""Content of ``results.json`` -> what may be said of each row, and what was not measured.

Every sentence is made from measured cells and values, names every row that it is about, and keeps
quality and speed apart. A row without a measured cell is in ``not_measured`` and nowhere else.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptneo_trt.report import PHASES
from gptneo_trt.variants import FLOOR
from gptneo_trt.verdicts import OUTSIDE, UNDECIDED, WITHIN

Results = Mapping[str, Any]  # content of results.json
Values = Mapping[str, float]
SHIP = ("both", "ship")
SPEED_CELLS = ("regression/speedup_x", "speedup_x")  # of a ratio that is stored, and that is not
OUTCOMES = {
    WITHIN: "within the ship limits",
    OUTSIDE: "outside the ship limits",
    UNDECIDED: "inconclusive",
}
# What a run leaves out, and what would have to change: (what, why, when to revisit).
NVFP4 = (
    "NVFP4",
    "no engine of it was timed in this run: it runs on compute capability 10.0 or newer only, with "
    "other kernels, so no other row says anything about it",
    "a GPU of compute capability 10.0 or newer is at hand",
)
OTHER_SHAPES = (
    "other batches and contexts",
    "a run builds networks of one batch and one context",
    "a user serves others: --batch, --context",
)


@dataclass(frozen=True)
class Decision:
    """Hold what a run says about shipping one row.

    Attributes:
        variant: the row.
        decision: "shipped" or "studied", as decided before the run; "" where nobody decided.
        outcome: a value of OUTCOMES, or "not measured".
        reason: of the cell; "" where there is none.
    """

    variant: str
    decision: str
    outcome: str
    reason: str


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
            found.append(Decision(variant, decision, outcome, reason))
        elif decision:
            found.append(Decision(variant, decision, "not measured", ""))
    return found


def quality_claims(results: Results) -> list[str]:
    """Return what the run says of quality, one sentence a group of rows and one a scaled row.

    The figure of a row is its KL over the fp16 row's, in prefill.
    """
    by_outcome: dict[str, list[str]] = {}
    for each in decisions(results):
        by_outcome.setdefault(each.outcome, []).append(each.variant)
    claims = [
        f"{_count(rows)} {outcome} (KL over the {FLOOR} row's, prefill): {_named(results, rows)}."
        for outcome in OUTCOMES.values()
        if (rows := by_outcome.get(outcome))
    ]
    return claims + list(_negative_results(results))


def _named(results: Results, rows: Iterable[str]) -> str:
    """Return the rows, each with its KL over the floor's in prefill where that was judged."""
    told = []
    for variant in rows:
        ratio = results["values"].get(variant, {}).get("prefill/prose/bf16/floor_ratio_x")
        told.append(variant if ratio is None else f"{variant} ({ratio:.1f} x)")
    return ", ".join(told)


def _negative_results(results: Results) -> Iterator[str]:
    """Yield what rows with other activation scales lost: figures, not causes."""
    measured = set(measured_rows(results))
    settings = {name: row.get("settings", {}) for name, row in results.get("rows", {}).items()}
    for variant, own in settings.items():
        factor = own.get("activation_scale_factor", 1.0)
        plain = {**own, "activation_scale_factor": 1.0}
        base = next((name for name, other in settings.items() if other == plain), None)
        if factor == 1.0 or variant not in measured or base not in measured:
            continue
        losses = [_kl(results, name) for name in (variant, base)]
        if None not in losses:
            yield (
                f"{variant} has a KL of {losses[0]:.3g} nats a token, {base} {losses[1]:.3g} "
                f"(prefill). That is a figure for the factor {factor:g}; other scales were not "
                "measured by these rows, and it does not say what the loss comes from."
            )


def _kl(results: Results, variant: str) -> float | None:
    return results["values"].get(variant, {}).get("prefill/prose/bf16/kl_mean_nats")


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


def speed_claims(results: Results) -> list[str]:
    """Return what the run says of speed: every timed row by name, a sentence a phase and group."""
    claims = []
    for phase in PHASES:
        groups: dict[str, list[str]] = {"faster than": [], "slower than": [], "as fast as": []}
        for variant, (ratio, lower, upper) in speedups(results, phase).items():
            group = "as fast as"
            if is_inconclusive(results, variant, phase):
                continue
            if lower > 1:
                group = "faster than"
            elif upper < 1:
                group = "slower than"
            groups[group].append(f"{variant} ({ratio:.3f} x)")
        claims += [
            f"{phase}: {_count(rows)} {group} {FLOOR}: {', '.join(rows)}."
            for group, rows in groups.items()
            if rows
        ]
        unclear = [row for row in measured_rows(results) if is_inconclusive(results, row, phase)]
        if unclear:
            claims.append(f"{phase}: inconclusive, not counted above: {', '.join(unclear)}.")
    return claims


def is_inconclusive(results: Results, variant: str, phase: str) -> bool:
    """Return whether a row's time was measured and shows neither this nor that."""
    cells = (cell_of(results, variant, phase, metric) for metric in SPEED_CELLS)
    return any(cell is not None and cell["verdict"] == "inconclusive" for cell in cells)


def decided_and_timed(results: Results, phase: str) -> dict[str, bool]:
    """Return row -> whether it is within the ship limits and faster, where both were decided."""
    outcomes = {each.variant: each.outcome for each in decisions(results)}
    return {
        name: outcomes[name] == OUTCOMES[WITHIN] and lower > 1
        for name, (_, lower, _) in speedups(results, phase).items()
        if outcomes.get(name) in (OUTCOMES[WITHIN], OUTCOMES[OUTSIDE])
        and not is_inconclusive(results, name, phase)
    }


def summary(results: Results) -> list[str]:
    """Return whether a measured row has both: within the ship limits, and faster, a phase each."""
    claims = []
    for phase in PHASES:
        judged = decided_and_timed(results, phase)
        both = [name for name, has_both in judged.items() if has_both]
        told = f"have both: {', '.join(both)}" if both else "none has both"
        if judged:
            claims.append(
                f"Of {len(judged)} rows whose quality was decided and whose {phase} was timed, "
                f"{told} (within the ship limits, and faster than {FLOOR})."
            )
    return claims


def not_measured(results: Results) -> list[tuple[str, str, str]]:
    """Return (what, why, when to revisit) of everything that this run says nothing about."""
    measured, found = set(measured_rows(results)), []
    absent = [name for name in results.get("rows", {}) if name not in measured]
    if absent:
        found.append((", ".join(absent), "rows that this run did not select", "they are selected"))
    missing = results["coverage"]["missing"]
    if missing:
        shown = ", ".join(missing[:12]) + (f" and {len(missing) - 12} more" * (len(missing) > 12))
        found.append((shown, "cells without a figure in this run", "the run is repeated"))
    if not any(speedups(results, phase) for phase in PHASES):
        target = results["target"].partition("/")[0]
        found.append(
            ("speed", f"target {target} timed no engine in this run", "it runs on a GPU's target")
        )
    if not any(_is_nvfp4(results, row) for phase in PHASES for row in speedups(results, phase)):
        found.append(NVFP4)
    return [*found, OTHER_SHAPES]


def _is_nvfp4(results: Results, variant: str) -> bool:
    row = results.get("rows", {}).get(variant, {})
    return bool(row.get("settings", {}).get("quantized_format") == "nvfp4")


def revisit(results: Results) -> list[str]:
    """Return when a decision of this run is to be looked at again, from its own figures."""
    claims = []
    studied = [each for each in decisions(results) if each.outcome == OUTCOMES[OUTSIDE]]
    ratios = {
        each.variant: ratio
        for each in studied
        if (ratio := results["values"][each.variant].get("prefill/prose/bf16/floor_ratio_x"))
    }
    limit = results.get("ship_limits", {}).get("floor_ratio_x")
    if ratios and limit:
        nearest = min(ratios, key=lambda name: ratios[name])
        claims.append(
            f"The row outside the limits that is nearest is {nearest}: {ratios[nearest]:.1f} x the "
            f"{FLOOR} row's KL in prefill, where {limit['value']:g} x may ship. A calibration or a "
            'format that closes that distance fails the gate with "revisit the decision".'
        )
    inconclusive = [each.variant for each in decisions(results) if each.outcome == "inconclusive"]
    if inconclusive:
        claims.append(f"More tokens are needed to decide on {', '.join(inconclusive)}.")
    return [*claims, "Another checkpoint size, GPU or TensorRT version: run the gate there."]


def _count(rows: Sequence[str]) -> str:
    return "1 row" if len(rows) == 1 else f"{len(rows)} rows"
