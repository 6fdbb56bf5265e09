"""Provenance: commit, versions, machine, and what it says where one of them is not known."""

import subprocess
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib import metadata

import pytest

from gptneo_trt import provenance as provenances
from gptneo_trt.provenance import provenance
from gptneo_trt.targets import Gpu


def repository(folder):
    """Make a git repository with one commit; return a function that runs git there."""

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(folder), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (folder / "file").write_text("one")
    git("add", "file")
    git("-c", "commit.gpgsign=false", "commit", "-qm", "first", "--no-verify")
    return git


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Return git in a throw-away repository that provenance takes for its own."""
    monkeypatch.setattr(provenances, "ROOT", tmp_path)
    return repository(tmp_path)


def test_every_field_is_filled():
    """Target and command are the caller's, the rest is found out."""
    found = provenance("cpu/made-up-1.0", ["pytest", "-m", "cpu"])

    assert found.target == "cpu/made-up-1.0"
    assert found.command == "pytest -m cpu"
    assert all(value for name, value in asdict(found).items() if name != "gpu")


def test_date_is_now_in_utc():
    """ISO 8601 with its offset, to the second."""
    found = datetime.fromisoformat(provenance("", []).date)

    assert found.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - found) < timedelta(seconds=60)


def test_versions_are_those_of_the_installed_packages():
    """Python's and every package's that shapes a figure; one that is absent is left out."""
    found = provenance("", []).versions

    assert found["numpy"] == metadata.version("numpy")
    assert found["python"].startswith("3.")
    assert set(found) <= {"python", *provenances.PACKAGES}


def test_absent_package_is_left_out(monkeypatch):
    """A package that is not installed has no version, not an empty one."""
    monkeypatch.setattr(provenances, "PACKAGES", ("numpy", "no-such-package-anywhere"))

    assert set(provenance("", []).versions) == {"python", "numpy"}


def test_commit_of_a_clean_tree(git):
    """The commit is whole; an untracked file, such as a cache, does not make it dirty."""
    (provenances.ROOT / "cache").write_text("untracked")

    assert provenance("", []).commit == git("rev-parse", "HEAD")


@pytest.mark.parametrize("staged", [False, True])
def test_commit_of_a_changed_tree_is_dirty(git, staged):
    """Figures from files that differ from the commit say so."""
    (provenances.ROOT / "file").write_text("two")
    if staged:
        git("add", "file")

    assert provenance("", []).commit == git("rev-parse", "HEAD") + "-dirty"


@pytest.mark.parametrize("name", ["conftest.py", "gptneo_trt/new.py", "tests/gate/new.py"])
def test_commit_that_lacks_a_source_file_is_dirty(git, name):
    """Whoever checks it out has not what ran."""
    path = provenances.ROOT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("forgotten")

    assert provenance("", []).commit == git("rev-parse", "HEAD") + "-dirty"


def test_changed_baselines_do_not_make_a_tree_dirty(git):
    """They are what a run writes, not what it measures."""
    stored = provenances.ROOT / "baselines" / "cpu.json"
    stored.parent.mkdir()
    stored.write_text("one")
    git("add", "baselines")
    git("-c", "commit.gpgsign=false", "commit", "-qm", "second", "--no-verify")
    stored.write_text("two")

    assert provenance("", []).commit == git("rev-parse", "HEAD")


def test_commit_outside_a_repository_is_unknown(tmp_path, monkeypatch):
    """A copy without .git has no commit, and that is said."""
    monkeypatch.setattr(provenances, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    assert provenance("", []).commit == "unknown"


def test_commit_without_git_is_unknown(monkeypatch):
    """A machine without git measures all the same."""
    monkeypatch.setenv("PATH", "")

    assert provenance("", []).commit == "unknown"


def test_machine_names_processor_and_cores():
    """What a time or a rounding may depend on."""
    assert provenance("", []).machine.count(",") >= 2
    assert " cores, " in provenance("", []).machine


def test_machine_names_the_gpu_that_ran_the_engines():
    """With its driver, before the processor; none is named where none ran anything."""
    gpu = Gpu("NVIDIA H200", "9.0", "580.1", "GPU-made-up", 140.0)
    processor = provenance("", []).machine

    found = provenance("", [], gpu).machine

    assert found == f"NVIDIA H200 (compute capability 9.0), driver 580.1; {processor}"
    assert "driver" not in processor


def test_gpu_has_its_driver_clocks_and_power_limit():
    """A time depends on them; the UUID of one card is not kept, and no GPU is nothing."""
    told = {"sm_largest_clock_mhz": 1980, "power_limit_w": None}
    gpu = Gpu("NVIDIA H200", "9.0", "580.1", "GPU-made-up", 140.0, told)

    assert provenance("", [], gpu).gpu == told | {
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "driver": "580.1",
    }
    assert provenance("", []).gpu == {}
