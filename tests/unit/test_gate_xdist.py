"""The gate under ``pytest -n 2``: a worker judges, the process that started it reports."""

import json
import re
from importlib.util import find_spec

import pytest
from gate_stubs import H200, contents, line_of, run_gate

pytestmark = pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")

XDIST = ("-p", "xdist.plugin", "-n", "2")
ROWS = ("fp16", "fp8")
QUALITY = "tests/gate/test_quality.py"
ACCURACY = f"{QUALITY}::test_loss_is_within_the_limits[fp8-decode-kl_mean_nats]"
SPEED = (
    "tests/gate/test_speed.py::test_speed_against_fp16_is_the_stored_one"
    "[fp8-decode-regression/speedup_x]"
)


def on_cpu(root, *arguments, **options):
    """Run the gate's two rows on the target cpu, both stored unless said otherwise."""
    return run_gate(root, "--variants", "fp16,fp8", *arguments, **{"stored": ROWS} | options)


@pytest.mark.parametrize("distribution", [(), ("--dist", "worksteal")], ids=["groups", "worksteal"])
def test_P02_a_green_run_reports_what_one_process_reports(tmp_path, distribution):
    """Table, coverage line, exit status and results.json do not depend on the workers."""
    for name, options in (("alone", ()), ("two", (*XDIST, *distribution))):
        root = tmp_path / name
        root.mkdir()
        found = on_cpu(root, *options, f"--gate-report={root / 'report'}", "tests/gate")
        assert found.status == 0, found.text
        assert line_of(found.text, "fp8 ")
        assert line_of(found.text, f"report: {root / 'report' / 'results.json'}")
        assert contents(found.folder) == found.before

    alone, two = (
        json.loads((tmp_path / name / "report" / "results.json").read_text())
        for name in ("alone", "two")
    )
    assert two["coverage"] == alone["coverage"]
    assert two["coverage"]["measured"] == two["coverage"]["expected"] > 50
    assert two["values"] == alone["values"]
    assert two["hashes"] == alone["hashes"]
    key = ("variant", "phase", "metric", "verdict", "reason")
    assert sorted([cell[name] for name in key] for cell in two["cells"]) == sorted(
        [cell[name] for name in key] for cell in alone["cells"]
    )


@pytest.mark.parametrize("seed", ["skip", "type error"])
def test_P02_what_a_worker_did_not_measure_is_missing_from_the_count(tmp_path, seed):
    """A skip and an error in a worker are named in the last line, and the run is red."""
    found = on_cpu(tmp_path, *XDIST, QUALITY, seeds={"fp8/decode": seed})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    missing = line_of(found.text, "measured ").partition("not measured: ")[2]
    assert "fp8/decode/non_finite" in missing
    assert "fp8/prefill/" not in missing


def test_P02_a_worker_that_dies_leaves_its_cells_missing(tmp_path):
    """Whatever it had judged is gone with it: nothing is taken for measured that was not sent."""
    dying = "test_next_token_is_within_the_limits[fp16-prefill-next_token/top1_frac]"

    found = on_cpu(tmp_path, *XDIST, QUALITY, seeds={"dies": dying})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert f"FAILED {QUALITY}::{dying}" in found.text
    line = line_of(found.text, "measured ")
    measured, expected = map(int, re.match(r"measured (\d+) of (\d+) cells; not", line).groups())
    assert measured < expected


def test_P02_deselected_cells_are_counted_once(tmp_path):
    """Each worker deselects the same cells."""
    alone = on_cpu(tmp_path, "-k", "non_finite", QUALITY)
    two = on_cpu(tmp_path, *XDIST, "-k", "non_finite", QUALITY)

    assert line_of(two.text, "measured ") == line_of(alone.text, "measured ")


@pytest.mark.parametrize("options", [(), ("--benchmark-skip",)], ids=["alone", "skip"])
def test_P03_accuracy_is_judged_and_speed_is_not_measured(tmp_path, options):
    """pytest-benchmark disables itself under -n: the one passes, the other has no figure."""
    found = run_gate(
        tmp_path,
        *("--variants", "fp16,fp8", *XDIST, *options, "-rA", ACCURACY, SPEED),
        target="h200",
        gpu=H200,
        stored=ROWS,
    )

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert f"\nPASSED {ACCURACY}" in found.text
    assert f"PASSED {SPEED}" not in found.text
    assert "AttributeError" not in found.text
    assert line_of(found.text, "measured ") == (
        "measured 1 of 2 cells; not measured: fp8/decode/regression/speedup_x"
    )


def test_P02_a_run_without_a_gpu_is_red_and_says_why(tmp_path):
    """The refusal is one of the last lines, as without workers."""
    found = run_gate(tmp_path, *XDIST, "--variants", "fp16", QUALITY, target="h200")

    assert found.status == pytest.ExitCode.TESTS_FAILED
    refused, measured = (
        next(line for line in found.text.splitlines() if line.startswith(start))
        for start in ("target h200: needed an NVIDIA H200, found no GPU; do: ", "measured ")
    )
    assert refused
    assert measured.startswith("measured 0 of ")
    assert "INTERNALERROR" not in found.text


def test_P03_baselines_are_not_written(tmp_path):
    """Nothing is timed under -n, so the option is refused before anything runs."""
    found = on_cpu(tmp_path, *XDIST, "--update-baselines", "tests/gate")

    assert found.status == pytest.ExitCode.USAGE_ERROR
    assert "--update-baselines: obtained -n, expected one process" in found.text
    assert contents(found.folder) == found.before
