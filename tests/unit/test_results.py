"""results.json: its shape, what it may hold, and that it is written whole."""

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import EXPECTED, FP16, PROVENANCE, cell
from tiny import tiny_checkpoint

from gptneo_trt import results


@pytest.fixture
def t0():
    """Return the tiny checkpoint."""
    return tiny_checkpoint()


@pytest.fixture
def found(t0):
    """Return results of one passed and one missing cell."""
    cells = [cell("fp16", "passed")]
    return results.results(t0, PROVENANCE, cells, EXPECTED, {"fp16": FP16})


def test_results_have_exactly_this_shape(found, t0):
    """Members, the nine keys of a cell, and coverage; readers may rely on schema 1."""
    assert found == {
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
            "gpu": {},
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
                "minimum_detectable": None,
            }
        ],
        "coverage": {"measured": 1, "expected": 2, "missing": ["fp8/prefill/kl_mean_nats"]},
        "values": {"fp16": FP16},
    }


def test_results_hold_optional_members_where_there_is_something_in_them(found, t0):
    """They are additions to schema 1, kept as they were given; an empty one is left out."""
    failures = ["fp8/decode/build: refused by this version"]
    timing = {"regions": {"decode": {"timed": "one step"}}, "rounds": 30, "replays": {"decode": 10}}

    optional = {"known_failures": failures, "references": {}, "timing": timing}
    more = results.results(
        t0, PROVENANCE, [cell("fp16", "passed")], EXPECTED, {"fp16": FP16}, optional
    )

    assert more == found | {"known_failures": failures, "timing": timing}
    assert json.loads(json.dumps(more, allow_nan=False))["timing"] == timing


def test_written_results_are_read_back_equal(found, tmp_path):
    """The file holds the results and nothing lies beside it; its folder is made."""
    path = results.write_results(tmp_path / "a" / "b", found)

    assert path == tmp_path / "a" / "b" / "results.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    assert [each.name for each in path.parent.iterdir()] == ["results.json"]


@given(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_results_that_json_cannot_hold_are_refused(tmp_path_factory, bad):
    """The bare tokens NaN and Infinity are not written, and the old file stays as it was."""
    folder = tmp_path_factory.mktemp("report")
    results.write_results(folder, {"schema": 1})

    with pytest.raises(ValueError, match="not JSON compliant"):
        results.write_results(folder, {"values": {"fp8": {"kl_mean_nats": bad}}})

    assert json.loads((folder / "results.json").read_text()) == {"schema": 1}
    assert len(list(folder.iterdir())) == 1


def test_values_that_json_cannot_hold_are_read_back(t0, tmp_path):
    """NaN and infinity are texts in the file and floats again to whoever reads it."""
    values = {"fp16": {"kl_mean_nats": float("nan"), "perplexity": float("inf"), "plan_mib": 1.0}}
    cells = [
        cell("fp16", "failed", obtained=float("-inf")),
        cell("fp8", "passed", obtained="built"),
    ]
    path = results.write_results(tmp_path, results.results(t0, PROVENANCE, cells, EXPECTED, values))

    found = results.read_results(path)

    row = found["values"]["fp16"]
    assert math.isnan(row["kl_mean_nats"])
    assert (row["perplexity"], row["plan_mib"]) == (math.inf, 1.0)
    assert [each["obtained"] for each in found["cells"]] == [-math.inf, "built"]
