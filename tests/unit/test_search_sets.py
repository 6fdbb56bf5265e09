"""The command that runs the gate for a search: what it runs, keeps and returns."""

import json

import pytest

from gptneo_trt.search import search
from gptneo_trt.variant import KINDS
from tests import search_sets
from tests.unit.stored_results import FILE, stored_results


@pytest.fixture
def gate(monkeypatch):
    """Stand in for the gate's runs, which need a GPU: each writes a real run's results."""
    commands = []

    class Ended:
        returncode = 0

    def run(command, **_):
        commands.append(command)
        folder = next(
            each.partition("=")[2] for each in command if each.startswith("--gate-report")
        )
        file = search_sets.Path(folder) / "results.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(stored_results()), encoding="utf-8")
        return Ended

    monkeypatch.setattr(search_sets.subprocess, "run", run)
    return commands, Ended


def variants(command):
    """Return the rows of a run."""
    return next(each for each in command if each.startswith("--variants"))[11:].split(",")


def test_one_kind_each_and_then_what_was_proposed(gate, tmp_path, capsys):
    """The second run has the front of the first; the report is printed and kept."""
    commands, _ = gate
    arguments = ["--target", "h200", "--report", str(tmp_path), "--", "--gate-cache=x"]
    assert search_sets.main(arguments) == 0
    first, second = commands
    assert variants(first) == ["fp16", *(f"fp8-{kind}" for kind in KINDS), "fp8"]
    assert variants(second) == ["fp16", *search([stored_results()]).proposals()]
    assert all(command[-1] == "--gate-cache=x" for command in commands)
    assert (tmp_path / "search.md").read_text(encoding="utf-8") == capsys.readouterr().out


def test_an_earlier_run_is_not_made_again(gate, tmp_path):
    """Only the proposed sets are run."""
    commands, _ = gate
    arguments = ["--target", "h200", "--from", str(FILE), "--report", str(tmp_path)]
    assert search_sets.main([*arguments, "--at-most", "1"]) == 0
    assert len(commands) == 1
    assert variants(commands[0])[1:] == search([stored_results()]).proposals(1)


def test_a_red_run_is_red(gate, tmp_path):
    """What it measured is told all the same."""
    _, ended = gate
    ended.returncode = 1
    assert search_sets.main(["--target", "h200", "--report", str(tmp_path)]) == 1
    assert (tmp_path / "search.md").is_file()


def test_a_red_run_of_what_was_proposed_is_red(gate, tmp_path):
    """Though the rows of one kind were green before."""
    _, ended = gate
    ended.returncode = 1
    arguments = ["--target", "h200", "--from", str(FILE), "--report", str(tmp_path)]
    assert search_sets.main(arguments) == 1


def test_a_run_without_results_is_an_error(monkeypatch, gate, tmp_path, capsys):
    """It names the file that is missing."""
    _, ended = gate
    monkeypatch.setattr(search_sets.subprocess, "run", lambda *_, **__: ended)
    assert search_sets.main(["--target", "h200", "--report", str(tmp_path)]) == 1
    assert "results.json" in capsys.readouterr().err


def test_only_a_gpu_has_times(capsys):
    """The CPU's target is refused."""
    with pytest.raises(SystemExit):
        search_sets.main(["--target", "cpu"])
    assert "invalid choice: 'cpu'" in capsys.readouterr().err
