"""Limits and tolerances: each is in the snapshot, and none was ever loosened without a reason."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt.verdicts import AT_LEAST, AT_MOST, Bound
from tests import write_limits
from tests.gate import limits, tolerances
from tests.gate.tolerances import EITHER, Tolerance
from tests.write_limits import (
    COMMAND,
    REMOVED,
    ROOT,
    SNAPSHOT,
    LimitsError,
    committed,
    loosened,
    read,
    snapshot,
    text_of,
    unreasoned,
    write,
)

KL = "limits/LIMITS/bundled/fp8/kl_mean_nats"


def row(direction, value, reason="measured"):
    """Return a row of a snapshot."""
    return {"direction": direction, "value": value, "reason": reason}


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Return a function that runs git in a repository without a commit, at ``tmp_path / "own"``."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "own").mkdir()

    def run(*arguments, folder="own"):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path / folder, check=True)

    run("init", "-q", "-b", "main")
    return run


@pytest.fixture
def commit(tmp_path, git):
    """Return a function that commits a snapshot."""

    def commit_rows(rows):
        path = tmp_path / "own" / SNAPSHOT
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(rows))
        git("add", "-A")
        git("commit", "-q", "-m", "limits")

    return commit_rows


# This repository


def test_snapshot_is_that_of_the_tables():
    """Whoever changes a number runs the command, so that the change is seen in a review."""
    path = ROOT / SNAPSHOT
    stored = read(path.read_text()) if path.exists() else {}
    tables = snapshot()

    changed = [
        name for name in stored.keys() | tables.keys() if stored.get(name) != tables.get(name)
    ]

    assert sorted(changed) == [], f"{SNAPSHOT} is not that of the tables; run: {COMMAND}"


def test_no_limit_was_ever_loosened_without_a_new_reason():
    """Over all committed snapshots and the tables as they are now."""
    assert unreasoned([*committed(ROOT), snapshot()]) == []


def test_snapshot_has_every_kind_of_number():
    """Limits of rows, of engines and of what else there is, tolerances, and the decisions."""
    rows = snapshot()

    expected = {
        KL: row(AT_MOST, 1.0e-2, limits.BUNDLED["fp8"].reason),
        "limits/LIMITS/bundled/fp8/top1_frac": row(AT_LEAST, 0.92, limits.BUNDLED["fp8"].reason),
        "limits/DECISIONS/bundled/fp16": row(AT_LEAST, 1.0, limits.BUNDLED["fp16"].reason),
        "limits/DECISIONS/bundled/fp8": row(AT_LEAST, 0.0, limits.BUNDLED["fp8"].reason),
    }
    assert {name: rows.get(name) for name in expected} == expected
    for name in (
        "limits/ENGINES/bundled/fp32/kl_mean_nats",
        "limits/STEP_OVERHEAD/bundled",
        "limits/ALTERNATIVES/alternative/weights_read_x",
        "limits/PLAN_MIB/random:gpt-neo-125m/fp8/decode/0",
        "tolerances/PLAN_SIZE_FRAC",
        "tolerances/REGRESSIONS/prose/kl_mean_nats",
    ):
        assert rows[name]["reason"]


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("tolerances/CONFIDENCE", AT_LEAST),
        ("tolerances/POWER", AT_LEAST),
        ("tolerances/EXCESS_CONFIDENCE", EITHER),
        ("tolerances/DIRECT_TOP1_FRAC", AT_LEAST),
        ("tolerances/ACTIVATION_AMAX_FRAC", AT_MOST),
        ("limits/PLAN_MIB/random:gpt-neo-125m/fp8/decode/0", AT_LEAST),
        ("limits/PLAN_MIB/random:gpt-neo-125m/fp8/decode/1", AT_MOST),
    ],
)
def test_direction_is_the_one_that_is_looser(name, direction):
    """A smallest plan, an agreement and a confidence are looser when smaller."""
    assert snapshot()[name]["direction"] == direction


def test_snapshot_has_the_same_bytes_whatever_the_order():
    """A diff of it shows what changed and nothing else; it is read back whole."""
    rows = snapshot()

    assert text_of(dict(reversed(rows.items()))) == text_of(rows)
    assert read(text_of(rows)) == rows


@pytest.mark.parametrize("value", [0.5, 3, Bound(AT_MOST, 0.5)], ids=repr)
def test_a_number_without_a_reason_is_an_error(monkeypatch, value):
    """A table cannot grow a number that the snapshot does not know."""
    monkeypatch.setattr(tolerances, "ANOTHER_FRAC", {"prose": value}, raising=False)

    with pytest.raises(LimitsError, match=r"ANOTHER_FRAC/prose: .* without a reason; make it a"):
        snapshot()


def test_removed_row_keeps_its_reason(monkeypatch):
    """What is no longer judged is said, and cannot be judged all the same."""
    monkeypatch.setattr(limits, "REMOVED", {"tolerances/OLD_FRAC": "never resolved"})
    assert snapshot()["tolerances/OLD_FRAC"] == row(REMOVED, None, "never resolved")

    monkeypatch.setattr(limits, "REMOVED", {KL: "never resolved"})
    with pytest.raises(LimitsError, match=rf"REMOVED: \['{KL}'\] are still judged"):
        snapshot()


# Looser


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (row(AT_MOST, 1.0), row(AT_MOST, 1.1), "at most 1.1 (measured), expected at most 1 "),
        (row(AT_LEAST, 0.9), row(AT_LEAST, 0.8), "at least 0.8 (measured), expected at least 0.9"),
        (row(AT_MOST, 1.0), row(AT_LEAST, 1.0), "at least 1 (measured), expected at most 1"),
        (row(EITHER, 0.975), row(EITHER, 0.99), "either way 0.99 (measured), expected either"),
        (row(EITHER, 0.975), row(EITHER, 0.95), "either way 0.95 (measured), expected either"),
        (row(AT_MOST, 1.0), row(REMOVED, None), "removed (measured), expected at most 1"),
        (row(AT_MOST, 1.0), None, "nothing, expected at most 1 (measured)"),
    ],
)
def test_a_looser_row_is_named_with_both_sides(old, new, text):
    """Larger, smaller, turned round, or gone."""
    found = loosened({"a": old}, {"a": new} if new else {})

    assert len(found) == 1
    assert found[0].startswith(f"a: looser without a new reason: obtained {text}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (row(AT_MOST, 1.0), row(AT_MOST, 1.0)),
        (row(EITHER, 1.0), row(EITHER, 1.0)),
        (row(AT_MOST, 1.0), row(AT_MOST, 0.9)),
        (row(AT_LEAST, 0.9), row(AT_LEAST, 0.95)),
        (row(AT_MOST, 1.0), row(AT_MOST, 2.0, "another processor")),
        (row(AT_MOST, 1.0), row(REMOVED, None, "measured by another row")),
        (row(REMOVED, None), None),
        (row(REMOVED, None), row(AT_MOST, 1.0)),
        (None, row(AT_MOST, 1.0)),
    ],
)
def test_tighter_newly_reasoned_and_new_rows_pass(old, new):
    """Nothing stands in the way of a better gate, or of a reason."""
    assert loosened({"a": old} if old else {}, {"a": new} if new else {}) == []


@given(st.floats(0, 10), st.floats(0, 10))
def test_one_way_of_a_change_is_looser(one, other):
    """Of two numbers that differ, exactly one is looser than the other, in either direction."""
    for direction in (AT_MOST, AT_LEAST):
        pair = {"a": row(direction, one)}, {"a": row(direction, other)}
        assert len(loosened(*pair)) + len(loosened(*reversed(pair))) == (one != other)


# Written


def test_command_refuses_a_looser_row_and_keeps_the_file(tmp_path):
    """It names the row, both sides and what to do; a reason, or a tighter number, is written."""
    path = write(tmp_path, {"a": row(AT_MOST, 1.0)})
    before = path.read_bytes()

    with pytest.raises(LimitsError, match=r"^a: looser .*\nnot written: say in the row why"):
        write(tmp_path, {"a": row(AT_MOST, 2.0)})
    assert path.read_bytes() == before

    write(tmp_path, {"a": row(AT_MOST, 2.0, "another processor")})
    write(tmp_path, {"a": row(AT_MOST, 1.5, "another processor")})
    assert read(path.read_text())["a"]["value"] == 1.5


def test_command_says_what_it_wrote_or_why_not(tmp_path, monkeypatch, capsys):
    """Its exit status is that of the refusal."""
    monkeypatch.setattr(write_limits, "ROOT", tmp_path)
    assert write_limits.main() == 0
    assert capsys.readouterr().out == f"{SNAPSHOT}\n"
    looser = Tolerance(0.5, tolerances.PLAN_SIZE_FRAC.reason)
    monkeypatch.setattr(tolerances, "PLAN_SIZE_FRAC", looser)

    assert write_limits.main() == 1

    assert capsys.readouterr().err.startswith("tolerances/PLAN_SIZE_FRAC: looser without a new")
    stored = json.loads((tmp_path / SNAPSHOT).read_text())["limits"]
    assert stored["tolerances/PLAN_SIZE_FRAC"]["value"] == 0.01


# History


def test_history_with_a_loosened_row_is_seen(tmp_path, commit):
    """Whatever the last commit and the table agree on: an edited snapshot hides nothing."""
    commit({"a": row(AT_MOST, 1.0), "b": row(AT_LEAST, 0.9)})
    commit({"a": row(AT_MOST, 2.0), "b": row(AT_LEAST, 0.9)})
    versions = committed(tmp_path / "own")

    assert [version["a"]["value"] for version in versions] == [1.0, 2.0]
    assert len(unreasoned([*versions, versions[-1]])) == 1
    assert unreasoned([*versions, {**versions[-1], "a": row(AT_MOST, 1.0)}]) == []
    assert unreasoned([*versions, {**versions[-1], "a": row(AT_MOST, 2.0, "why")}]) == []


def test_reason_and_number_change_together():
    """A new reason in an earlier commit does not pay for a looser number in a later one."""
    versions = [
        {"a": row(AT_MOST, 1.0)},
        {"a": row(AT_MOST, 1.0, "said better")},
        {"a": row(AT_MOST, 2.0, "said better")},
    ]

    assert unreasoned(versions[:2]) == []
    assert len(unreasoned(versions)) == 1


def test_history_without_a_snapshot_has_nothing_to_say(tmp_path, git):
    """The first one is new."""
    git("commit", "-q", "--allow-empty", "-m", "first")

    assert committed(tmp_path / "own") == []
    assert unreasoned([{"a": row(AT_MOST, 1.0)}]) == []


def test_shallow_clone_cannot_vouch_for_the_limits(tmp_path, git, commit):
    """``git clone --depth 1`` has no history: an error that says to fetch it, not a skip."""
    commit({"a": row(AT_MOST, 1.0)})
    commit({"a": row(AT_MOST, 2.0)})
    url = f"file://{tmp_path}/own"
    git("clone", "-q", "--depth", "1", url, str(tmp_path / "shallow"))

    with pytest.raises(
        LimitsError, match=r"obtained a shallow clone, .* do: git fetch --unshallow"
    ):
        committed(tmp_path / "shallow")

    git("fetch", "-q", "--unshallow", folder="shallow")
    assert len(committed(tmp_path / "shallow")) == 2


def test_folder_without_git_cannot_vouch_for_the_limits(tmp_path, monkeypatch):
    """Neither can a copy without .git, nor a machine without git."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(LimitsError, match=r"not a git repository.*; run in a git clone"):
        committed(tmp_path)

    monkeypatch.setenv("PATH", "")
    with pytest.raises(LimitsError, match=r"no history of tests/gate/limits.json.*; run in a git"):
        committed(tmp_path)


def test_nested_tables_are_read_once():
    """A constant that is a row of another one has one name, and what is no number has none."""
    part = {"kl": Tolerance(0.1, "why")}
    module = SimpleNamespace(PART=part, ALL={"x": part}, WORD="a", MIB=1 << 20, _HIDDEN=0.5)

    assert write_limits._tables(module).keys() == {"ALL", "WORD"}
