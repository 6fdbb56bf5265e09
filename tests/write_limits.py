"""Write the snapshot of all limits and tolerances: ``python -m tests.write_limits``.

``tests/gate/limits.json`` holds every number of ``limits.py`` and ``tolerances.py`` with the
direction in which it is looser and its reason. A looser number whose reason did not change is
refused, here and over the committed history (``tests/unit/test_write_limits.py``).
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gptneo_trt.verdicts import AT_LEAST, AT_MOST, SHIPPED, Bound
from gptneo_trt.whole_file import whole_file
from tests.gate import limits, tolerances
from tests.gate.limits import Limits
from tests.gate.tolerances import Tolerance

ROOT = Path(__file__).parents[1]
SNAPSHOT = "tests/gate/limits.json"
COMMAND = "python -m tests.write_limits"
REMOVED = "removed"  # in place of a direction
UNITS = ("MIB", "QUANTIZED_BYTES")  # numbers that limit nothing

Row = dict[str, Any]  # "direction", "value" and "reason"
Snapshot = dict[str, Row]


class LimitsError(Exception):
    """A table, its snapshot or its history cannot vouch for the limits."""


def snapshot() -> Snapshot:
    """Return name -> row of every number in the tables, of every decision, and of what was removed.

    Raises:
        LimitsError: a number without a reason, or a removed name that is still there.
    """
    rows: Snapshot = {}
    for module in (limits, tolerances):
        title = module.__name__.rpartition(".")[2]
        for name, table in _tables(module).items():
            rows.update(_rows(f"{title}/{name}", table))
    for checkpoint, decided in limits.DECISIONS.items():
        for variant, word in decided.items():
            reason = limits.LIMITS[checkpoint][variant].reason
            name = f"limits/DECISIONS/{checkpoint}/{variant}"
            rows[name] = _row(AT_LEAST, float(word == SHIPPED), reason)
    both = sorted(rows.keys() & limits.REMOVED.keys())
    if both:
        raise LimitsError(f"REMOVED: {both} are still judged; take them out of REMOVED")
    return rows | {name: _row(REMOVED, None, why) for name, why in limits.REMOVED.items()}


def loosened(old: Mapping[str, Row], new: Mapping[str, Row]) -> list[str]:
    """Return a sorted line a row that is looser in ``new`` and gives the same reason as before."""
    return [
        f"{name}: looser without a new reason: obtained {_text(new.get(name))}, expected "
        f"{_text(row)}"
        for name, row in sorted(old.items())
        if _is_loosened(row, new.get(name))
    ]


def unreasoned(versions: Sequence[Mapping[str, Row]]) -> list[str]:
    """Return what is looser in the last version than it ever came to be with a reason.

    A row is held against its last version that was no looser than the one before, or had a new
    reason. So a limit that was loosened silently stays wrong until it is tight again or reasoned.
    """
    accepted: Snapshot = {}
    for version in versions:
        accepted |= {
            name: row
            for name, row in version.items()
            if name not in accepted or not _is_loosened(accepted[name], row)
        }
    return loosened(accepted, versions[-1]) if versions else []


def read(text: str) -> Snapshot:
    """Return a snapshot from its JSON."""
    return dict(json.loads(text)["limits"])


def text_of(rows: Mapping[str, Row]) -> str:
    """Return the JSON of a snapshot: the same bytes whenever the numbers are the same."""
    document = {"written_by": COMMAND, "limits": rows}
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def committed(root: Path) -> list[Snapshot]:
    """Return every committed version of the snapshot, oldest first, along first parents.

    Raises:
        LimitsError: there is no git, no repository or not the whole history.
    """
    if _git(root, "rev-parse", "--is-shallow-repository").strip() != "false":
        raise LimitsError(
            f"{root}: obtained a shallow clone, expected the whole history of {SNAPSHOT}: whether "
            "a limit was loosened cannot be seen; do: git fetch --unshallow (in CI: fetch-depth 0)"
        )
    wanted = ("log", "--first-parent", "--reverse", "--diff-filter=AM", "--format=%H")
    commits = _git(root, *wanted, "--", SNAPSHOT).split()
    return [read(_git(root, "show", f"{commit}:{SNAPSHOT}")) for commit in commits]


def write(root: Path, rows: Mapping[str, Row]) -> Path:
    """Write the snapshot below a folder; return its path.

    Raises:
        LimitsError: a row is looser than in the file that is there, for the same reason.
    """
    path = root / SNAPSHOT
    wrong = loosened(read(path.read_text(encoding="utf-8")), rows) if path.exists() else []
    if wrong:
        remedy = "say in the row why more is acceptable now (REMOVED for one that is gone)"
        raise LimitsError("\n".join((*wrong, f"not written: {remedy}, or keep the limit")))
    with whole_file(path) as temporary:
        temporary.write_text(text_of(rows), encoding="utf-8")
    return path


def _tables(module: ModuleType) -> dict[str, Any]:
    """Return the constants of a module; those that are a row of another one are left out."""
    found = {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and not name.startswith("_") and name not in UNITS
    }
    mappings = [value for value in found.values() if isinstance(value, Mapping)]
    nested = {id(part) for mapping in mappings for part in mapping.values()}
    return {name: value for name, value in found.items() if id(value) not in nested}


def _rows(name: str, value: object) -> Iterator[tuple[str, Row]]:
    """Yield (name, row) of every number in a constant."""
    if isinstance(value, Limits):
        for metric, bound in value.bounds().items():
            yield f"{name}/{metric}", _row(bound.direction, bound.value, value.reason)
    elif isinstance(value, Bound):
        reason = getattr(value.value, "reason", "")
        yield name, _checked(name, _row(value.direction, value.value, reason))
    elif isinstance(value, Tolerance):
        yield name, _row(value.direction, value, value.reason)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            words = key if isinstance(key, tuple) else (key,)
            yield from _rows("/".join((name, *(str(word) for word in words if word))), part)
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _rows(f"{name}/{index}", part)
    elif isinstance(value, int | float):
        _checked(name, _row(AT_MOST, float(value), ""))


def _row(direction: str, value: float | None, reason: str) -> Row:
    number = None if value is None else float(value)
    return {"direction": direction, "value": number, "reason": reason}


def _checked(name: str, row: Row) -> Row:
    if not row["reason"]:
        raise LimitsError(f"{name}: obtained {row['value']} without a reason; make it a Tolerance")
    return row


def _is_loosened(old: Row, new: Row | None) -> bool:
    """Return whether a row allows more than before, or is gone, and does not say why."""
    if new is None:
        return old["direction"] != REMOVED
    if new["reason"] != old["reason"] or old["direction"] == REMOVED:
        return False
    if new["direction"] != old["direction"]:
        return True
    is_moved = new["value"] != old["value"]
    return is_moved and not Bound(old["direction"], old["value"]).allows(new["value"])


def _text(row: Row | None) -> str:
    if row is None:
        return "nothing"
    value = "" if row["value"] is None else f" {row['value']:.6g}"
    return f"{row['direction']}{value} ({row['reason']})"


def _git(root: Path, *arguments: str) -> str:
    """Return what git says.

    Raises:
        LimitsError: it is not there, or refuses.
    """
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        said = str(error)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()
    raise LimitsError(
        f"{root}: no history of {SNAPSHOT}: whether a limit was loosened cannot be seen: {said}; "
        "run in a git clone of the repository"
    )


def main() -> int:
    """Write the snapshot of the tables; return the exit status."""
    try:
        path = write(ROOT, snapshot())
    except LimitsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
