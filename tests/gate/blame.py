"""Say what changed between the stored run and this one: whom to blame for a figure that moved.

Weights and TensorRT are in the key, so they are the same wherever a comparison was made at all;
the sentence names them because its reader does not know that.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Cell
from gptneo_trt.errors import BaselineError, GptNeoTrtError
from gptneo_trt.network import PHASES
from gptneo_trt.scale_verdicts import range_ratios
from gptneo_trt.scales import ranges_from_values
from gptneo_trt.variant import Variant
from gptneo_trt.variants import variant_named
from tests.gate.run import BASELINE_PREFIX, GateRun, stored_baseline

SHOWN = 3  # projections whose ranges changed most; more would hide the rest of the sentence
SAME, CHANGED = "the same", "changed"


def changes(stored: Baseline, current: Baseline, phases: Sequence[str]) -> str:
    """Return what is the same and what is not, of everything that an engine is made of.

    Args:
        stored: the baseline.
        current: key, provenance["hashes"] and values of this run, as far as they are known.
        phases: whose networks and plans.
    """
    parts = {
        "weights": _compared(stored.key, current.key, ("checkpoint_sha256",)),
        "scales": _scales(stored, current),
        "network": _built(stored, current, phases, "network"),
        "TensorRT": _compared(stored.key, current.key, ("flavour", "version")),
        "plan": _built(stored, current, phases, "plan"),
    }
    return "; ".join(f"{part}: {found}" for part, found in parts.items())


def with_changes(cell: Cell, run: GateRun, read: Callable[[Variant, str], object]) -> Cell:
    """Return a cell whose reason says what changed, if it is a comparison that did not pass.

    One that could not be compared at all, without a baseline or with one of another key, has its
    reason already.

    Args:
        cell: any.
        run: what was found so far.
        read: gives ``run`` the hashes of a row's network in one phase; called where they are
            missing, because other cells of the row are judged later or in another process.
    """
    if cell.verdict == "passed" or not cell.metric.startswith(BASELINE_PREFIX):
        return cell
    try:
        stored = stored_baseline(run, variant_named(cell.variant))
    except BaselineError:
        return cell
    phases = PHASES if cell.phase == "both" else (cell.phase,)
    for phase in phases:
        if f"{phase}/network" not in run.hashes.get(cell.variant, {}):
            with suppress(GptNeoTrtError):  # the cells of the network say what is wrong with it
                read(variant_named(cell.variant), phase)
    hashes, values = run.hashes.get(cell.variant, {}), run.values.get(cell.variant, {})
    current = Baseline(run.key, {"hashes": hashes}, values, {})
    return replace(cell, reason=f"{cell.reason}; {changes(stored, current, phases)}")


def _hashes(baseline: Baseline) -> Mapping[str, str]:
    """Return the hashes of a baseline; none of one that is published, or from before there were."""
    return baseline.provenance.get("hashes", {})


def _compared(old: Mapping, new: Mapping, names: tuple[str, ...]) -> str:
    """Return whether all these entries are equal on both sides, or which side lacks one."""
    if any(name not in old for name in names):
        return "not stored"
    if any(name not in new for name in names):
        return "not read in this run"
    return SAME if all(old[name] == new[name] for name in names) else CHANGED


def _built(stored: Baseline, current: Baseline, phases: Sequence[str], what: str) -> str:
    names = tuple(f"{phase}/{what}" for phase in phases)
    return _compared(_hashes(stored), _hashes(current), names)


def _scales(stored: Baseline, current: Baseline) -> str:
    """Return what became of the calibrated ranges, and of which projections."""
    old, new = _hashes(stored), _hashes(current)
    if new and "scales" not in old and "scales" not in new:
        return "none"
    found = _compared(old, new, ("scales",))
    if found != CHANGED:
        return found
    before, after = ranges_from_values(stored.values), ranges_from_values(current.values)
    moved = [(module, ratio) for module, ratio in range_ratios(after, before) if ratio != 1]
    named = [f"{module} x {ratio:.4g}" for module, ratio in moved[:SHOWN]]
    named += [f"{len(moved) - SHOWN} more"] if len(moved) > SHOWN else []
    named += [f"{module} alone is new" for module in sorted(after.keys() - before.keys())]
    named += [f"{module} is gone" for module in sorted(before.keys() - after.keys())]
    return f"{CHANGED} ({', '.join(named)})" if named else CHANGED
