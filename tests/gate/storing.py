"""Write baselines from a run: each row that is fit for it, from a clean commit alone."""

from dataclasses import asdict

from gptneo_trt import baselines
from gptneo_trt.baselines import Baseline
from gptneo_trt.errors import BaselineError, StorageError
from gptneo_trt.scales import ranges_from_values
from gptneo_trt.variants import FLOOR
from gptneo_trt.verdicts import problems
from tests.gate.run import BASELINE_PREFIX, GateRun

# Of this machine and its caches, not of the engine; and what is of two rows.
UNSTORED = ("build_s", "load_s", "floor_ratio_x", "floor_ratio_lower_x", "floor_ratio_upper_x")


def update_baselines(run: GateRun) -> list[str]:
    """Write a baseline for every row that is fit for it; return a line a change.

    A row is written from a clean commit and a run without deselected cells alone, when every
    cell of its own and of the fp16 row passed, comparisons apart: these cannot be checked while
    what they compare with is being written. fp16 shares checkpoint, texts, reference and decoder
    with every row, and ship decision, floor ratio and time ratio are relative to it: where it
    failed, no figure of the run is sound. Another row that failed says nothing about this one,
    and waits.

    Raises:
        BaselineError: nothing was measured.
    """
    if run.folder is None or run.provenance is None or not run.values:
        raise BaselineError("no baseline written: nothing was measured; select gate tests")
    lines, unsound = [], _unclean(run.provenance.commit) or _incomplete(run.deselected)
    for variant in sorted({variant for variant, _, _ in run.expected}):
        wrong = unsound or _unfit(run, variant)
        if wrong:
            lines.append(f"{variant}: not written: {'; '.join(wrong)}")
        else:
            lines += _write(run, variant)
    return lines


def _unclean(commit: str) -> list[str]:
    """Return why this commit cannot be measured again: what ran is not in it."""
    if commit == "unknown":
        return ["the commit is unknown; run from a git clone"]
    if commit.endswith("-dirty"):
        commit = commit.removesuffix("-dirty")
        return [f"the working tree differs from commit {commit}; commit first"]
    return []


def _incomplete(deselected: int) -> list[str]:
    """Return why a run does not vouch for a row: -k left out cells of some row."""
    if deselected:
        return [f"{deselected} cells were deselected; run all of them, --variants selects rows"]
    return []


def _unfit(run: GateRun, variant: str) -> list[str]:
    """Return what keeps a row from being stored.

    Every cell of it and of fp16 that is not a comparison must have passed, every comparison
    of it needs its figure, and its noise must let the texts resolve each tolerance.
    """
    compared = {key for key in run.expected if key[2].startswith(BASELINE_PREFIX)}
    own = {key for key in run.expected - compared if key[0] in (variant, FLOOR)}
    cells = [cell for cell in run.cells if (cell.variant, cell.phase, cell.metric) in own]
    values = run.values.get(variant, {})
    figures = {*values, *run.tokens.get(variant, {})}
    figures |= {"both/activation_amax"} if ranges_from_values(values) else set()
    missing = [
        f"{variant}/{phase}/{metric}: not measured: no figure to store"
        for row, phase, metric in sorted(compared)
        if row == variant
        and figures.isdisjoint(
            {f"{phase}/{metric}", f"{phase}/{metric.removeprefix(BASELINE_PREFIX)}"}
        )
    ]
    return problems(own, cells) + missing + [*run.unresolved.get(variant, {}).values()]


def _measured(run: GateRun, variant: str) -> Baseline:
    """Return what is to be stored of a row."""
    values = {
        name: value
        for name, value in run.values.get(variant, {}).items()
        if not name.endswith(UNSTORED)
    }
    hashes = run.hashes.get(variant, {})
    more = {"hashes": hashes, "references": run.references, "timing": run.timing}
    provenance = asdict(run.provenance) | {name: part for name, part in more.items() if part}
    return Baseline(run.key, provenance, values, run.tokens.get(variant, {}))


def _write(run: GateRun, variant: str) -> list[str]:
    """Store a row; return a line a change, or why it was not written."""
    new = _measured(run, variant)
    try:
        old = baselines.read(run.folder, variant)
        lost = {*old.values, *old.tokens} - {*new.values, *new.tokens}
        if lost:
            return [
                f"{variant}: not written: this run did not measure {', '.join(sorted(lost))}; "
                "run all gate tests of the row, or delete the file if these are gone for good"
            ]
        changes = [f"{variant}: {line}" for line in baselines.differences(old, new)]
    except BaselineError as error:
        changes = [f"{variant}: new ({error})"]
    try:
        baselines.write(run.folder, variant, new)
    except (BaselineError, StorageError) as error:
        return [f"{variant}: not written: {error}"]
    return changes or [f"{variant}: unchanged"]
