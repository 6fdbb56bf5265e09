"""Content of ``results.json`` -> what may be said of each row, and what was not measured.

Every sentence is made from measured cells and values, names every row that it is about, and keeps
quality and speed apart. A row without a measured cell is in ``not_measured`` and nowhere else.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from gptneo_trt.decisions import (
    FIGURES,
    OUTCOMES,
    Decision,
    decisions,
    kl_limit,
    measured_rows,
)
from gptneo_trt.report import PHASES
from gptneo_trt.speeds import (
    FASTER,
    is_inconclusive,
    judged_alternatives,
    speed_groups,
    speedups,
)
from gptneo_trt.variants import FLOOR
from gptneo_trt.verdicts import OUTSIDE, WITHIN

Results = Mapping[str, Any]  # content of results.json
Values = Mapping[str, float]
EXCESS = tuple(f"{phase}/excess/" for phase in PHASES)  # values of an engine next to its network
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
    "a user serves others: `--batch`, `--context`",
)


def opening(results: Results) -> list[str]:
    """Return which rows may ship and which not, and why: what a reader came for."""
    found = _by_outcome(results)
    within, outside, undecided = (found.get(outcome, []) for outcome in OUTCOMES.values())
    claims = []
    red = {cell["variant"] for cell in results["cells"] if cell["verdict"] != "passed"}
    for told, of_red in (
        ("May ship, every figure within its ship limit", False),
        ("Within its ship limits, but not all of its cells passed", True),
    ):
        rows = [each.variant for each in within if (each.variant in red) == of_red]
        claims += [f"{told}: {', '.join(rows)}."] if rows else []
    if outside:
        claims.append(f"May not ship: {_count(outside)}.{_why_not(results, outside)}")
    if undecided:
        names = ", ".join(each.variant for each in undecided)
        claims.append(f"Not decided, more tokens are needed: {names}.")
    return claims


def _why_not(results: Results, outside: Sequence[Decision]) -> str:
    """Return how many rows miss which limit, and the row that is nearest to the limit of KL."""
    missed = Counter(name for each in outside for name in each.figures)
    told = [f"{FIGURES[name].noun} in {missed[name]}" for name in FIGURES if missed[name]]
    why = f" Outside its limit: {', '.join(told)}." if told else ""
    nearest = _nearest(results)
    if nearest:
        why += f" Nearest: {nearest}, {floor_ratio(results, nearest):.1f} x {FLOOR}'s KL."
    return why


def _by_outcome(results: Results) -> dict[str, list[Decision]]:
    found: dict[str, list[Decision]] = {}
    for each in decisions(results):
        found.setdefault(each.outcome, []).append(each)
    return found


def quality_claims(results: Results) -> list[str]:
    """Return what the run says of quality, one sentence a group of rows and one a scaled row.

    The figure of a row is its KL over the fp16 row's, in prefill; the least comes first.
    """
    by_outcome = _by_outcome(results)
    claims = [
        f"{_count(rows)} {outcome} (KL over the {FLOOR} row's, prefill): "
        f"{_named(results, (each.variant for each in rows))}."
        for outcome in OUTCOMES.values()
        if (rows := by_outcome.get(outcome))
    ]
    return claims + list(_negative_results(results))


def floor_ratio(results: Results, variant: str, phase: str = "prefill") -> float | None:
    """Return a row's KL over the floor's, where that was judged."""
    return results["values"].get(variant, {}).get(f"{phase}/prose/bf16/floor_ratio_x")


def _named(results: Results, rows: Iterable[str]) -> str:
    """Return the rows, the least ratio first, each with it; those without one come last."""
    ratios = {variant: floor_ratio(results, variant) for variant in rows}
    told = [
        (math.inf, name) if ratio is None else (ratio, f"{name} ({ratio:.1f} x)")
        for name, ratio in ratios.items()
    ]
    return ", ".join(text for _, text in sorted(told, key=lambda each: each[0]))


def _nearest(results: Results) -> str:
    """Return the row with the least KL of those whose KL misses its limit; "" without one."""
    ratios = {
        each.variant: ratio
        for each in _by_outcome(results).get(OUTCOMES[OUTSIDE], [])
        if "floor_ratio_x" in each.figures
        and (ratio := floor_ratio(results, each.variant)) is not None
    }
    return min(ratios, key=lambda row: ratios[row], default="")


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
                f"{variant} has a KL of {losses[0]:#.3g} nats a token, {base} {losses[1]:#.3g} "
                f"(prefill). That is a figure for the factor {factor:g}; other scales were not "
                "measured by these rows, and it does not say what the loss comes from."
            )


def _kl(results: Results, variant: str) -> float | None:
    return results["values"].get(variant, {}).get("prefill/prose/bf16/kl_mean_nats")


def speed_claims(results: Results) -> list[str]:
    """Return what the run says of speed: every timed row by name, a sentence a phase and group.

    The fastest comes first. What a user would otherwise run has sentences of its own.
    """
    claims = []
    for phase in PHASES:
        for group, rows in speed_groups(results, phase).items():
            told = ", ".join(f"{variant} ({ratio:.3f} x)" for variant, ratio in rows.items())
            claims += [f"{phase}: {_count(rows)} {group} {FLOOR}: {told}."] if rows else []
        unclear = [row for row in measured_rows(results) if is_inconclusive(results, row, phase)]
        if unclear:
            claims.append(f"{phase}: inconclusive, not counted above: {', '.join(unclear)}.")
        claims += _beside_the_engine(results, phase)
    return claims


def _beside_the_engine(results: Results, phase: str) -> Iterator[str]:
    """Yield what takes less time than fp16's engine, and what takes more, each with its part."""
    times = judged_alternatives(results, phase)
    for told, faster in ((FASTER, True), (f"no {FASTER}", False)):
        found = [
            f"{name} ({value:.2f} x its time)"
            for name, value in times.items()
            if (value < 1) == faster
        ]
        if found:
            yield f"{phase}, without TensorRT: {told} {FLOOR}'s engine: {', '.join(found)}."


def decided_and_timed(results: Results, phase: str) -> dict[str, bool]:
    """Return row -> whether it is within the ship limits and faster, where both were decided."""
    outcomes = {each.variant: each.outcome for each in decisions(results)}
    return {
        name: outcomes[name] == OUTCOMES[WITHIN] and group == FASTER
        for group, rows in speed_groups(results, phase).items()
        for name in rows
        if outcomes.get(name) in (OUTCOMES[WITHIN], OUTCOMES[OUTSIDE])
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
    found = list(_absent_rows(results))
    missing = results["coverage"]["missing"]
    target, on_a_gpu = results["target"].partition("/")[0], "it runs on a GPU's target"
    if missing:
        shown = ", ".join(missing[:12]) + (f" and {len(missing) - 12} more" * (len(missing) > 12))
        found.append((shown, "cells without a figure in this run", "the run is repeated"))
    is_timed = any(speedups(results, phase) for phase in PHASES)
    if not is_timed:
        found.append(("speed", f"target {target} timed no engine in this run", on_a_gpu))
    if not any(name.startswith(EXCESS) for row in results["values"].values() for name in row):
        why = f"target {target} ran no engine in this run: losses are those of networks"
        if is_timed:
            why = "engines were timed, and their losses not measured, in this run"
            on_a_gpu = "a checkpoint whose losses are judged runs there"
        found.append(("engine excess", why, on_a_gpu))
    if not any(_is_nvfp4(results, row) for phase in PHASES for row in speedups(results, phase)):
        found.append(NVFP4)
    return [*found, OTHER_SHAPES]


def _absent_rows(results: Results) -> Iterator[tuple[str, str, str]]:
    measured = set(measured_rows(results))
    absent = [name for name in results.get("rows", {}) if name not in measured]
    layers = len(results["model"]["architecture"]["attention_layers"])
    edges = {name: _settings(results, name).get("float_edge_layers", 0) for name in absent}
    shallow = [name for name in absent if 2 * edges[name] >= layers]
    if shallow:
        why = f"all {layers} layers of this checkpoint are at an end, which the row leaves in fp16"
        yield ", ".join(shallow), why, "a deeper checkpoint is at hand"
    others = ", ".join(name for name in absent if name not in shallow)
    if others:
        yield others, "rows that this run did not select", "they are selected"


def _is_nvfp4(results: Results, variant: str) -> bool:
    return bool(_settings(results, variant).get("quantized_format") == "nvfp4")


def _settings(results: Results, variant: str) -> Mapping[str, Any]:
    """Return what a row builds; nothing of a run that stored no rows."""
    found: Mapping[str, Any] = results.get("rows", {}).get(variant, {}).get("settings", {})
    return found


def revisit(results: Results) -> list[str]:
    """Return when a decision of this run is to be looked at again, from its own figures."""
    claims, nearest = [], _nearest(results)
    limit = kl_limit(results)
    if nearest and limit:
        claims.append(
            f"The row outside the limits that is nearest is {nearest}: "
            f"{floor_ratio(results, nearest):.1f} x the {FLOOR} row's KL in prefill, where "
            f"{limit['value']:g} x may ship. A calibration or a format that closes that distance "
            'fails the gate with "revisit the decision".'
        )
    inconclusive = [each.variant for each in decisions(results) if each.outcome == "inconclusive"]
    if inconclusive:
        claims.append(f"More tokens are needed to decide on {', '.join(inconclusive)}.")
    return [*claims, "Another checkpoint size, GPU or TensorRT version: run the gate there."]


def _count(rows: Sized) -> str:
    return "1 row" if len(rows) == 1 else f"{len(rows)} rows"
