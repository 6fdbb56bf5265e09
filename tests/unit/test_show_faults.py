"""What ``tests.show_faults`` prints of a JUnit file, and when it fails."""

import json
import subprocess
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from gptneo_trt.data import Cell
from tests import show_faults
from tests.selftest.catching import not_caught, not_green, told
from tests.selftest.fault import Fault

KEY = ("prefill", "kl_mean_nats")
FAULT = Fault("made-up", "network", "a made-up fault", lambda patch: None, KEY[1], "obtained 2,")


def cells(verdict, reason="obtained 2, expected at most 1"):
    """Return the fault's cell as it was judged."""
    return {KEY: Cell("fp16", *KEY, 2.0, "at most 1", None, verdict, reason)}


def told_of(verdict="failed", control="passed"):
    """Return what the test of the fault says."""
    return told(FAULT, "cpu", cells(verdict), cells(control))


@pytest.fixture
def report(tmp_path):
    """Return a function ((name, what it says, outcome), ...) -> JUnit file."""

    def write(*cases):
        suite = ElementTree.Element("testsuite")
        for name, said, outcome in cases:
            case = ElementTree.SubElement(suite, "testcase", name=name, time="1.5")
            if said:
                listed = ElementTree.SubElement(case, "properties")
                ElementTree.SubElement(listed, "property", name="fault", value=said)
            if outcome:
                ElementTree.SubElement(case, outcome)
        path = tmp_path / "report.xml"
        ElementTree.ElementTree(suite).write(path)
        return path

    return write


@pytest.mark.parametrize(
    ("verdict", "reason", "wrong"),
    [
        ("failed", "obtained 2, expected at most 1", []),
        ("passed", "obtained 2, expected at most 1", ["expected failed"]),
        ("failed", "another reason", ["another reason, expected obtained 2,"]),
    ],
)
def test_a_fault_is_caught_by_verdict_and_reason(verdict, reason, wrong):
    """A cell that passes, or fails for another reason, does not catch it."""
    found = not_caught(FAULT, cells(verdict, reason))
    assert len(found) == len(wrong)
    assert all(part in line for part, line in zip(wrong, found, strict=True))


def test_a_cell_that_was_not_judged_catches_nothing_and_is_no_control():
    """A missing cell is named on both sides."""
    for found in (not_caught(FAULT, {}), not_green(FAULT, {})):
        assert len(found) == 1
        assert "no such cell was judged" in found[0]


def test_table_has_a_line_a_cell_and_names_what_was_not_caught(report):
    """Fault, target, cell, verdict and reason; a test that said nothing is not caught."""
    path = report(
        ("test_fault_turns_its_cell_red[made-up]", told_of(), ""),
        ("test_fault_turns_its_cell_red[silent]", "", "error"),
        ("test_control_is_green[fp16]", "", ""),
    )
    faults = list(show_faults.faults_of(path))
    head, *lines = show_faults.lines_of(faults)
    assert head.split() == ["kind", "fault", "target", "caught", "by", "verdict", "reason"]
    assert [line.split()[:2] for line in lines] == [["silent", "(NOT"], ["network", "made-up"]]
    assert "fp16/prefill/kl_mean_nats  failed" in lines[1]
    assert show_faults.count_of(faults) == "caught 1 of 2; controls 1 of 2 green"


@pytest.mark.parametrize(
    ("said", "outcome", "status", "expected"),
    [
        (told_of(), "", 0, 0),
        (told_of(), "", 1, 1),
        (told_of(verdict="passed"), "", 0, 1),
        (told_of(control="failed"), "", 0, 1),
        (told_of(verdict="passed"), "skipped", 0, 1),  # nothing but a known one is no evidence
        ("", "", 0, 1),
    ],
)
def test_exit_status_is_zero_only_when_all_is_caught(
    said, outcome, status, expected, report, monkeypatch, tmp_path
):
    """A failed test, a fault that is not caught, a red control or no fault at all fails."""
    made = report(("test_fault_turns_its_cell_red[made-up]", said, outcome))

    def run(command, **_):
        (option,) = [each for each in command if each.startswith("--junitxml=")]
        made.rename(option.partition("=")[2])
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    assert show_faults.main(["--json", str(tmp_path / "faults.json")]) == expected
    assert isinstance(json.loads((tmp_path / "faults.json").read_text()), list)
