"""The report: the table's columns, the coverage line, and the exact shape of results.json."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt import report
from gptneo_trt.data import Cell, Provenance

PROVENANCE = Provenance("cpu/made-up-1.0", "4446f63", "2026-01-02T03:04:05+00:00", "pytest -m cpu")
FP16 = {
    "prefill/prose/bf16/kl_mean_nats": 2e-4,
    "decode/prose/bf16/kl_mean_nats": 3e-4,
    "prefill/prose/bf16/kl_p99_nats": 0.0012,
    "prefill/prose/bf16/top1_frac": 0.98,
    "prefill/prose/bf16/perplexity": 58.4567,
    "prefill/plan_mib": 313.6,
    "decode/plan_mib": 313.62,
    "prefill/build_s": 12.34,
    "decode/build_s": 5.0,
}
FP8 = {"prefill/prose/bf16/kl_mean_nats": 7.4e-3}


def cell(variant, verdict, metric="kl_mean_nats", phase="prefill", obtained=0.1):
    """Return a cell of this name and verdict."""
    return Cell(variant, phase, metric, obtained, "at most 1", None, verdict, "made up")


def columns(line):
    """Return the columns of a line of the table, by the widths of the headings."""
    found = {}
    for name, width in report.HEADINGS:
        found[name] = (line[:width] if width else line).strip()
        line = line[width:] if width else ""
    return found


# The table


def test_table_has_a_line_a_row_in_the_given_order():
    """The order is that of the values, which is that of VARIANTS."""
    lines = report.table({"fp8": FP8, "fp16": FP16}, [], FP16, {})

    assert [line.split()[0] for line in lines] == ["variant", "fp8", "fp16"]
    assert columns(lines[0]) == {name: name for name, _ in report.HEADINGS}


def test_table_shows_every_figure_of_a_row():
    """KL, plan and build are given for both phases, the rest for prefill."""
    cells = [cell("fp16", "passed"), cell("fp8", "failed")]

    line = report.table({"fp16": FP16}, cells, FP16, {"fp16": "shipped"})[1]

    assert columns(line) == {
        "variant": "fp16",
        "KL mean": "0.0002 / 0.0003",
        "KL p99": "0.0012",
        "x floor": "1.0",
        "top-1": "0.9800",
        "perplexity": "58.46",
        "plan MiB": "313.60 / 313.62",
        "build s": "12.3 / 5.0",
        "verdict": "passed (shipped)",
    }


def test_table_shows_a_dash_for_what_was_not_measured():
    """A missing figure is never a 0, and a row without a cell is not passed."""
    line = report.table({"fp8": {}}, [], {}, {})[1]

    expected = {name: "-" for name, _ in report.HEADINGS} | {
        "variant": "fp8", "verdict": "not measured", "KL mean": "- / -", "plan MiB": "- / -",
        "build s": "- / -",
    }  # fmt: skip
    assert columns(line) == expected


@pytest.mark.parametrize(
    ("floor", "ratio"),
    [(FP16, "37.0"), ({}, "-"), ({"prefill/prose/bf16/kl_mean_nats": 0.0}, "-")],
    ids=["measured", "absent", "zero"],
)
def test_ratio_to_the_floor(floor, ratio):
    """The ratio is of prefill KLs, and there is none without a floor to divide by."""
    line = report.table({"fp8": FP8}, [], floor, {})[1]

    assert columns(line)["x floor"] == ratio


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "not measured"], "not measured"),
        (["not measured", "inconclusive", "passed"], "inconclusive"),
        (["inconclusive", "failed", "not measured"], "failed"),
        ([], "not measured"),
    ],
)
def test_a_row_has_the_worst_verdict_of_its_cells(verdicts, worst):
    """Only a row whose cells all passed is passed; no cell at all is not measured."""
    assert report.worst_verdict([cell("fp8", verdict) for verdict in verdicts]) == worst


def test_table_counts_only_the_row_s_own_cells():
    """Another row's failure does not colour this one."""
    cells = [cell("fp16", "passed"), cell("fp8", "failed")]

    lines = report.table({"fp16": FP16, "fp8": FP8}, cells, FP16, {})

    assert [columns(line)["verdict"] for line in lines[1:]] == ["passed", "failed"]


def test_legend_explains_every_heading_that_is_not_a_word():
    """A reader finds the unit and the phase of each figure below the table."""
    for heading in ("KL", "p99", "x floor", "top-1", "perplexity", "plan MiB", "build s", "nats"):
        assert heading in report.LEGEND


# Coverage


EXPECTED = [("fp8", "prefill", "kl_mean_nats"), ("fp16", "prefill", "kl_mean_nats")]


def test_coverage_line_counts_what_was_judged():
    """Failed and inconclusive cells were measured."""
    cells = [cell("fp16", "failed"), cell("fp8", "inconclusive")]

    assert report.coverage_line(EXPECTED, cells) == "measured 2 of 2 cells"


def test_coverage_line_names_what_is_missing():
    """A cell without a value and a cell that nobody gave are both missing, sorted."""
    assert report.coverage_line(EXPECTED, [cell("fp8", "not measured")]) == (
        "measured 0 of 2 cells; not measured: fp16/prefill/kl_mean_nats, fp8/prefill/kl_mean_nats"
    )


@pytest.mark.parametrize(("missing", "more"), [(8, ""), (9, " and 1 more"), (30, " and 22 more")])
def test_coverage_line_names_eight_and_counts_the_rest(missing, more):
    """A run in which everything is missing has a line that can still be read."""
    expected = [("fp8", "prefill", f"metric{index:02d}") for index in range(missing)]

    line = report.coverage_line(expected, [])

    assert line.startswith(f"measured 0 of {missing} cells; not measured: fp8/prefill/metric00, ")
    assert line.endswith(f"fp8/prefill/metric07{more}")


def test_coverage_ignores_cells_that_nobody_expected():
    """A renamed cell does not make up for the one that vanished."""
    line = report.coverage_line(EXPECTED[:1], [cell("fp8_v2", "passed")])

    assert line == "measured 0 of 1 cells; not measured: fp8/prefill/kl_mean_nats"


# results.json


@pytest.fixture
def results(t0):
    """Return results of one passed and one missing cell."""
    cells = [cell("fp16", "passed")]
    return report.results(t0, PROVENANCE, cells, EXPECTED, {"fp16": FP16})


def test_results_have_exactly_this_shape(results, t0):
    """Members, the eight keys of a cell, and coverage; readers may rely on schema 1."""
    assert results == {
        "schema": 1,
        "target": "cpu/made-up-1.0",
        "model": {
            "name": t0.name,
            "revision": "",
            "sha256": t0.sha256,
            "architecture": asdict(t0.architecture),
            "files": [],
            "notes": list(t0.notes),
        },
        "provenance": {
            "target": "cpu/made-up-1.0",
            "commit": "4446f63",
            "date": "2026-01-02T03:04:05+00:00",
            "command": "pytest -m cpu",
            "versions": {},
            "machine": "",
        },
        "cells": [
            {
                "variant": "fp16",
                "phase": "prefill",
                "metric": "kl_mean_nats",
                "obtained": 0.1,
                "limit": "at most 1",
                "baseline": None,
                "verdict": "passed",
                "reason": "made up",
            }
        ],
        "coverage": {"measured": 1, "expected": 2, "missing": ["fp8/prefill/kl_mean_nats"]},
        "values": {"fp16": FP16},
    }


def test_written_results_are_read_back_equal(results, tmp_path):
    """The file holds the results and nothing lies beside it; its folder is made."""
    path = report.write_results(tmp_path / "a" / "b", results)

    assert path == tmp_path / "a" / "b" / "results.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(results))
    assert [each.name for each in path.parent.iterdir()] == ["results.json"]


@given(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_results_that_json_cannot_hold_are_refused(tmp_path_factory, bad):
    """The bare tokens NaN and Infinity are not written, and the old file stays as it was."""
    folder = tmp_path_factory.mktemp("report")
    report.write_results(folder, {"schema": 1})

    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write_results(folder, {"values": {"fp8": {"kl_mean_nats": bad}}})

    assert json.loads((folder / "results.json").read_text()) == {"schema": 1}
    assert len(list(folder.iterdir())) == 1
