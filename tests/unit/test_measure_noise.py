"""Noise of repeated runs: the largest spread a metric, its row, and every false alarm."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import measure_noise
from tests.gate import tolerances
from tests.measure_gate import Cost
from tests.measure_noise import Run, document, main, red_cells, spreads, table

COST = Cost(99.0, 167.0, 2.9, 0)
KL, TOP1 = "prefill/prose/float32/kl_mean_nats", "decode/prose/float32/top1_frac"


def results(values, cells=(), missing=()):
    """Return what a run wrote."""
    names = ("variant", "phase", "metric", "verdict")
    return {
        "cells": [dict(zip(names, cell, strict=True)) for cell in cells],
        "coverage": {"missing": list(missing)},
        "values": values,
        "provenance": {"commit": "4446f63"},
    }


def run_of(**values):
    """Return a green run with these values of its row fp8."""
    return results({"fp8": values})


def test_spread_is_of_the_row_that_differs_most():
    """Largest less smallest value over their mean, next to the tolerance of the regression."""
    runs = [
        results({"fp16": {KL: 0.0010}, "fp8": {KL: 0.0100}}),
        results({"fp16": {KL: 0.0011}, "fp8": {KL: 0.0102}}),
        results({"fp16": {KL: 0.0012}, "fp8": {KL: 0.0101}}),
    ]

    (found,) = spreads(runs)

    assert (found.metric, found.row) == ("prose/float32/kl_mean_nats", "fp16/prefill")
    assert found.spread == pytest.approx(0.0002 / 0.0011)
    assert (found.least, found.most, found.runs) == (0.0010, 0.0012, 3)
    assert found.tolerance == tolerances.REGRESSIONS["prose", "kl_mean_nats"]


def test_spread_of_a_fraction_is_in_its_unit():
    """Top-1 is a fraction already: its tolerance is a difference."""
    (found,) = spreads([run_of(**{TOP1: 0.94}), run_of(**{TOP1: 0.95})])

    assert found.spread == pytest.approx(0.01)
    assert found.tolerance == tolerances.REGRESSIONS["prose", "top1_disagreement_frac"]


def test_what_only_one_run_has_has_no_spread():
    """Nor has a value that is not finite, which is stored as text."""
    runs = [run_of(**{KL: 0.01, TOP1: 0.9}), run_of(**{KL: "nan"}), {}]

    assert spreads(runs) == []


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=6))
def test_spread_is_zero_exactly_where_all_are_equal(values):
    """It is never negative, and at most the number of runs, for values above 0."""
    (found,) = spreads([run_of(**{"decode/speedup_x": value}) for value in values])

    assert (found.spread == 0) == (len(set(values)) == 1)
    assert 0 <= found.spread <= len(values)


def test_red_cells_are_named_once():
    """A cell that did not pass, and one that is missing altogether."""
    cells = [
        ("fp8", "decode", "speedup_x", "inconclusive"),
        ("fp8", "decode", "build", "not measured"),
        ("fp8", "prefill", "build", "passed"),
    ]
    found = red_cells(results({}, cells, missing=["fp8/decode/build", "fp8/both/ship"]))

    assert found == (
        "fp8/decode/speedup_x: inconclusive",
        "fp8/decode/build: not measured",
        "fp8/both/ship: not measured",
    )


def test_a_run_without_results_is_red():
    """It ended before it wrote any: that is no green run."""
    assert red_cells({}) == ("no results.json: the run ended before anything was judged",)


def test_table_has_a_line_a_run_and_a_metric():
    """With its false alarms, and the tolerance in the unit of the spread."""
    runs = [
        Run(COST, (), run_of(**{KL: 0.0100, "decode/latency_us": 100.0, TOP1: 0.940})),
        Run(
            Cost(50.0, 89.0, 2.5, 1),
            ("fp8/decode/speedup_x: failed",),
            run_of(**{KL: 0.0102, "decode/latency_us": 110.0, TOP1: 0.945}),
        ),
    ]

    assert [" ".join(line.split()) for line in table(runs)] == [
        "run 1: exit status 0, 99 s, green",
        "run 2: exit status 1, 50 s, 1 red cells",
        "fp8/decode/speedup_x: failed",
        "metric spread tolerance least to most, row",
        "prose/float32/kl_mean_nats 1.98 % 12 % 0.01 to 0.0102, fp8/prefill, 2 runs",
        "prose/float32/top1_frac 0.005 0.025 0.94 to 0.945, fp8/decode, 2 runs",
        "latency_us 9.52 % - 100 to 110, fp8/decode, 2 runs",
    ]


def test_document_holds_the_figures_and_their_commit():
    """What ``--json`` writes can be read again."""
    run = Run(COST, ("fp8/both/ship: failed",), run_of(**{KL: 0.01}))

    found = json.loads(json.dumps(document("cpu", [run, run])))

    assert found["target"] == "cpu"
    assert found["runs"][0]["red"] == ["fp8/both/ship: failed"]
    assert found["runs"][0]["provenance"] == {"commit": "4446f63"}
    assert found["spreads"][0]["spread"] == 0


@pytest.fixture
def gate(monkeypatch):
    """Return the commands that are run instead of the gate; the second run gives another KL."""
    commands = []

    def run(command):
        commands.append(command)
        (folder,) = (each.partition("=")[2] for each in command if "--gate-report" in each)
        content = run_of(**{KL: 0.01 + 0.001 * (len(commands) == 2)})
        with open(f"{folder}/results.json", "w", encoding="utf-8") as file:
            json.dump(content, file)
        return COST

    monkeypatch.setattr(measure_noise, "measure", run)
    return commands


def test_each_run_has_its_own_cache_and_order(gate, tmp_path, capsys):
    """``--fresh`` builds every plan again; what follows ``--`` is pytest's; all is written."""
    file = tmp_path / "noise.json"
    options = ["--repeats", "3", "--fresh", "--orders", "--json", str(file)]

    assert main([*options, "--", "--variants=fp8"]) == 0

    caches = {each for command in gate for each in command if "--gate-cache" in each}
    orders = [each for command in gate for each in command if "--summation-order" in each]
    assert len(caches) == 3
    assert orders == ["--summation-order=1", "--summation-order=2", "--summation-order=3"]
    assert all("--variants=fp8" in command for command in gate)
    assert "9.68 %" in capsys.readouterr().out
    assert len(json.loads(file.read_text("utf-8"))["runs"]) == 3


def test_runs_share_the_cache_unless_they_are_fresh(gate):
    """Neither a cache nor an order is given: the gate's own are used."""
    assert main(["--target", "h200", "--repeats", "1"]) == 0

    (command,) = gate
    assert command[command.index("-m", 2) + 1] == "h200"
    assert not any("--gate-cache" in each or "--summation" in each for each in command)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "h200", "--orders"], "only the interpreter of the target cpu"),
        (["--repeats", "0"], "obtained 0, expected at least 1"),
        (["--target", "h20"], "invalid choice: 'h20'"),
    ],
)
def test_what_cannot_be_run_is_refused(gate, options, words, capsys):
    """Before anything runs."""
    with pytest.raises(SystemExit):
        main(options)
    assert words in capsys.readouterr().err
    assert not gate


def test_a_false_alarm_fails_the_command(gate, monkeypatch):
    """So does a run whose exit status is not 0."""
    monkeypatch.setattr(measure_noise, "red_cells", lambda results: ("fp8/both/ship: failed",))

    assert main(["--repeats", "1"]) == 1
