"""Two runs share one cache: each thing is made once, by one of them, and the other waits for it."""

import subprocess
import sys

import pytest

from tests.child import child_environment
from tests.crash.warm import ROOT
from tests.crash.works import FOUND_MADE, MADE, WORKS

RUN_S = 600.0


@pytest.mark.parametrize("name", ["plan", "scales", "references"])
def test_what_two_processes_need_is_made_once(warm, tmp_path, name):
    """Three processes begin on an empty cache at the same time: one works, two find it done."""
    WORKS[name].prepare(tmp_path)
    warm.start(name, tmp_path, count=3)
    statuses, _ = warm.ended()
    assert sorted(statuses) == [MADE, FOUND_MADE, FOUND_MADE]
    assert WORKS[name].check(tmp_path)
    assert list(tmp_path.rglob(".*")) == []


@pytest.mark.long
def test_two_runs_of_the_gate_on_one_empty_cache_are_green(tmp_path):
    """Both build no more than they need together, and leave no half file."""
    cache = tmp_path / "cache"
    command = [
        sys.executable, "-m", "pytest", "-m", "cpu", "tests/gate", "-p", "no:cacheprovider",
        "--variants", "fp8-v_proj", f"--gate-cache={cache}",
    ]  # fmt: skip
    runs = [
        subprocess.Popen(
            command, cwd=ROOT, env=child_environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]  # fmt: skip
    for run in runs:
        output, _ = run.communicate(timeout=RUN_S)
        assert run.returncode == 0, output
    names = [path.name for path in cache.rglob("*") if path.is_file()]
    counts = {kind: sum(name.endswith(kind) for name in names) for kind in (".plan", ".tmp")}
    assert counts == {".plan": 4, ".tmp": 0}  # fp16 and the row, two phases each
    assert list(cache.rglob(".*")) == []
