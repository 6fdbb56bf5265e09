"""Whole runs of the gate: exit status, last lines and results.json, with and without a fault."""

import re

import pytest

from tests.selftest.fault import BOTH
from tests.selftest.gate_faults import OTHER_GPU
from tests.selftest.model_faults import NAN_WEIGHT, SCALED_SCORES

GREEN, RED = "\x1b[32m", "\x1b[31m"


def last_line(run):
    """Return the line that says how much was measured, with its colour."""
    return next(
        line for line in run.output.splitlines() if "measured " in line and " cells" in line
    )


def by_verdict(run):
    """Return verdict -> (phase, metric) of its cells."""
    found = {}
    for cell in run.results["cells"]:
        found.setdefault(cell["verdict"], set()).add((cell["phase"], cell["metric"]))
    return found


@pytest.mark.parametrize("run_name", ["control"])
def test_control_run_is_green(child_run, run_name):
    """Without a fault the run ends with 0, every cell is measured and passes, the line is green."""
    assert child_run.status == 0, child_run.output
    assert set(by_verdict(child_run)) == {"passed"}
    coverage = child_run.results["coverage"]
    assert coverage["measured"] == coverage["expected"] == len(child_run.results["cells"])
    whole = f"measured {coverage['expected']} of {coverage['expected']} cells"
    assert re.search(rf"{re.escape(GREEN)}{whole}", last_line(child_run))


@pytest.mark.parametrize("run_name", [SCALED_SCORES])
def test_run_with_wrong_numbers_is_red(child_run, run_name):
    """A wrong graph builds, is measured whole and fails by its loss; no plan cell is to blame."""
    assert child_run.status == 1, child_run.output
    cell = child_run.cell("prefill", "kl_mean_nats")
    assert cell.verdict == "failed"
    assert re.match(r"obtained \S+, expected at most 0\.0004(;|$)", cell.reason)
    verdicts = by_verdict(child_run)
    assert set(verdicts) == {"passed", "failed"}
    assert verdicts["passed"] >= {
        (phase, metric)
        for phase in BOTH
        for metric in ("build", "plan_mib", "regression/plan_mib", "quantized_projections")
    }
    assert child_run.results["coverage"]["missing"] == []
    assert RED in last_line(child_run)


@pytest.mark.parametrize("run_name", [NAN_WEIGHT])
def test_run_with_a_nan_is_red(child_run, run_name):
    """A NaN fails the cell that looks for it, and what cannot be measured then is listed."""
    assert child_run.status == 1, child_run.output
    verdicts = by_verdict(child_run)
    assert verdicts["failed"] == {("prefill", "non_finite"), ("decode", "non_finite")}
    assert child_run.cell("prefill", "non_finite").reason == "logits[0, 0, 0] = nan"
    assert child_run.cell("prefill", "kl_mean_nats").verdict == "not measured"
    missing = len(verdicts["not measured"])
    coverage = child_run.results["coverage"]
    assert missing == len(coverage["missing"]) == coverage["expected"] - coverage["measured"] > 0
    line = last_line(child_run)
    assert RED in line
    assert (
        f"measured {coverage['measured']} of {coverage['expected']} cells; not measured: " in line
    )


@pytest.mark.parametrize("run_name", ["crashing-builder"])
def test_run_with_a_crashing_builder_is_red(child_run, run_name):
    """A builder that aborts costs its own plan: the signal and its last words are the reason."""
    assert child_run.status == 1, child_run.output
    plan_cells = {("decode", metric) for metric in ("build", "plan_mib", "regression/plan_mib")}
    assert by_verdict(child_run)["failed"] == plan_cells
    for phase, metric in plan_cells:
        reason = child_run.cell(phase, metric).reason
        assert "CrashError: variant fp16, decode, tensorrt_rtx-" in reason
        assert "the builder died of SIGABRT" in reason
        assert "last words" in reason
    assert ("prefill", "build") in by_verdict(child_run)["passed"]
    assert RED in last_line(child_run)


@pytest.mark.parametrize("run_name", [OTHER_GPU])
def test_run_against_a_run_of_another_gpu_is_red(child_run, run_name):
    """A stored run of another GPU fails every comparison with both keys; nothing else fails."""
    assert child_run.status == 1, child_run.output
    failed = by_verdict(child_run)["failed"]
    assert {metric.split("/")[0] for _, metric in failed} == {"regression"}
    for phase, metric in failed:
        reason = child_run.cell(phase, metric).reason
        assert reason.startswith("BaselineError: baseline of fp16 is of something else: ")
        assert 'gpu: stored "NVIDIA H200", current "cpu"' in reason
