"""The gate as a run of pytest: what it collects, when it is red, what it prints and writes.

Each run is a child process on the stubs of gate_stubs.py; a row of seeds changes what they give.
"""

import json
import re

import pytest
from gate_stubs import ROOT, Stubs, contents, line_of, run_gate, run_pytest

from gptneo_trt import baselines
from gptneo_trt.data import Cell
from gptneo_trt.known_failures import KNOWN_FAILURES
from gptneo_trt.variants import VARIANTS

ROWS_OF_A_RUN = ("fp16", "fp8")
# A gate test and what follows the row in its ids.
IDS = {
    "test_build.py::test_plan_builds": ("prefill-build", "decode-build"),
    "test_build.py::test_plan_size_is_within_its_limits": ("prefill-plan_mib", "decode-plan_mib"),
    "test_build.py::test_plan_size_is_the_stored_one": (
        "prefill-regression/plan_mib",
        "decode-regression/plan_mib",
    ),
    "test_build.py::test_exactly_the_intended_projections_are_quantized": (
        "prefill-quantized_projections",
        "decode-quantized_projections",
    ),
    "test_quality.py::test_everything_is_finite": ("prefill-non_finite", "decode-non_finite"),
    "test_quality.py::test_loss_is_within_the_limits": tuple(
        f"{phase}-{metric}"
        for phase in ("prefill", "decode")
        for metric in ("kl_mean_nats", "float32/kl_mean_nats", "top1_frac", "perplexity_ratio")
    ),
    "test_quality.py::test_next_token_is_within_the_limits": (
        "prefill-next_token/kl_mean_nats",
        "prefill-next_token/top1_frac",
    ),
    "test_quality.py::test_loss_is_the_stored_one": tuple(
        f"{phase}-regression/{metric}"
        for phase in ("prefill", "decode")
        for metric in ("kl_mean_nats", "nll_mean_nats", "top1_disagreement_frac")
    ),
    "test_quality.py::test_loss_on_sampled_text_is_the_stored_one": (
        "prefill-regression/sampled/kl_mean_nats",
    ),
    "test_quality.py::test_decode_agrees_with_prefill": ("decode-agreement/kl_mean_nats",),
    "test_quality.py::test_ship_decision_holds": ("both-ship",),
}
CELLS_OF_A_ROW = sum(len(ids) for ids in IDS.values())
QUANTIZED_IDS = {  # of rows in FP8 alone
    "test_build.py::test_calibrated_ranges_are_the_stored_ones": (
        "both-regression/activation_amax",
    ),
}
CELLS_OF_A_QUANTIZED_ROW = CELLS_OF_A_ROW + 1
CELLS_OF_BOTH = CELLS_OF_A_ROW + CELLS_OF_A_QUANTIZED_ROW  # of ROWS_OF_A_RUN
BUILD_CELLS_OF_A_ROW = 8


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """Return a function that runs the gate on stubs, with fp16 and fp8 stored; see run_gate."""

    def run(*arguments, stored=ROWS_OF_A_RUN, **options):
        root = tmp_path_factory.mktemp("root")
        return run_gate(root, *arguments, stored=stored, **options)

    return run


def outcome(text, row, test, ending):
    """Return what the short summary says of a test, for example "FAILED".

    None where it says nothing by name: the test passed, or was skipped.
    """
    name = re.escape(f"::{test}[{row}-{ending}]")
    found = re.findall(rf"^(FAILED|ERROR|XFAIL|XPASS) \S*{name}", text, re.MULTILINE)
    assert len(found) <= 1
    return found[0] if found else None


# What is asked for


def test_unknown_row_is_a_usage_error_that_lists_the_rows():
    """A mistyped row is not an empty, green run."""
    found = run_pytest("--variants", "fp16,fp99,fp8-qvk", "tests/gate")

    assert found.status == pytest.ExitCode.USAGE_ERROR
    expected = f"--variants: unknown rows ['fp8-qvk', 'fp99']; the rows are: {', '.join(VARIANTS)}"
    assert expected in found.text


@pytest.mark.parametrize("expression", ["gatte", "cpu or gatte"])
def test_P02_unknown_marker_in_an_expression_is_a_usage_error(expression):
    """``-m gatte`` deselects everything otherwise, and a typo in an "or" most of it."""
    found = run_pytest("-m", expression, "--variants", "fp16", "tests/gate/test_build.py")

    assert found.status == pytest.ExitCode.USAGE_ERROR
    assert "Unknown marker(s) in '-m' expression: gatte" in found.text


def test_P02_mistyped_mark_is_an_error(tmp_path):
    """A test that carries a mistyped mark is not deselected in silence."""
    case = tmp_path / "test_case.py"
    case.write_text("import pytest\n\n@pytest.mark.cpuu\ndef test_it():\n    pass\n")

    found = run_pytest("-c", str(ROOT / "pytest.ini"), "-m", "cpu", str(case), folder=tmp_path)

    assert found.status == pytest.ExitCode.INTERRUPTED
    assert "'cpuu' not found in `markers` configuration option" in found.text


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_P02_nothing_selected_is_not_green(target):
    """``-k`` that matches nothing ends with pytest's "no tests collected"."""
    found = run_pytest("-m", target, "-k", "nothing_matches", "tests/gate/test_build.py")

    assert found.status == pytest.ExitCode.NO_TESTS_COLLECTED


def test_two_targets_are_a_usage_error():
    """A run is on one GPU: of two targets one would be left out in silence."""
    found = run_pytest("-m", "h200 or b200", "tests/gate/test_build.py")

    assert found.status == pytest.ExitCode.USAGE_ERROR
    assert "obtained targets b200, h200, expected one a run" in found.text


def ids_of(row):
    """Return a gate test -> what follows the row in its ids, in the order of the files."""
    ids = IDS | (QUANTIZED_IDS if VARIANTS[row].quantized else {})
    return dict(sorted(ids.items(), key=lambda item: item[0].partition("::")[0]))


def collected(text):
    """Return the ids that ``--collect-only -q`` printed, without the folder."""
    return [
        line.removeprefix("tests/gate/")
        for line in text.splitlines()
        if line.startswith("tests/gate/")
    ]


def test_collection_is_a_test_a_row_phase_and_metric(gate):
    """The ids are the cells, row by row, the floor first, whatever the order asked for."""
    found = gate("--collect-only", "-q", "--variants", "fp8,fp16", "tests/gate")

    expected = [
        f"{test}[{row}-{ending}]"
        for row in ROWS_OF_A_RUN
        for test, endings in ids_of(row).items()
        for ending in endings
    ]
    assert collected(found.text) == expected
    assert found.status == 0


def test_random_weights_have_no_quality_cells(gate):
    """What is meaningless is not collected, rather than skipped."""
    arguments = ("--collect-only", "-q", "--variants", "fp8", "tests/gate")

    found = gate(*arguments, "--model", "random:gpt-neo-125m")

    assert len(collected(found.text)) == 2 * BUILD_CELLS_OF_A_ROW  # fp16 beside fp8
    assert all(each.startswith("test_build.py::") for each in collected(found.text))
    assert found.status == 0


def test_only_quality_cells_of_random_weights_is_not_green():
    """Asking for nothing but what does not exist measures nothing."""
    found = run_pytest("--model", "random:gpt-neo-125m", "tests/gate/test_quality.py")

    assert found.status == pytest.ExitCode.NO_TESTS_COLLECTED


def test_unit_tests_and_the_gate_can_be_named_in_any_order(gate):
    """``pytest tests/unit tests/gate`` is the same selection as the other way round."""
    arguments = ("--collect-only", "-q", "--variants", "fp16", "tests/unit/test_verdicts.py")

    found = gate(*arguments, "tests/gate", target="")

    assert found.status == 0
    assert len(collected(found.text)) == CELLS_OF_A_ROW


# A green run


def test_a_run_like_the_stored_one_is_green_and_writes_nothing(gate, tmp_path):
    """Every cell is measured; a studied row misses its limits as decided; baselines stay."""
    before = contents(ROOT / "baselines")

    found = gate("--variants", "fp16,fp8", f"--gate-report={tmp_path}", "tests/gate")

    assert found.status == 0, found.text
    assert f"measured {CELLS_OF_BOTH} of {CELLS_OF_BOTH} cells\n" in found.text
    assert outcome(found.text, "fp8", "test_ship_decision_holds", "both-ship") == "XFAIL"
    assert outcome(found.text, "fp16", "test_ship_decision_holds", "both-ship") is None
    assert re.search(r"^fp8 .*passed \(studied\)$", found.text, re.MULTILINE)
    assert contents(ROOT / "baselines") == before
    assert contents(found.folder) == found.before
    assert len(contents(found.root / "baselines")) == len(found.before) == 4
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["coverage"] == {
        "measured": CELLS_OF_BOTH, "expected": CELLS_OF_BOTH, "missing": [],
    }  # fmt: skip
    assert {cell["verdict"] for cell in results["cells"]} == {"passed"}
    assert {frozenset(cell) for cell in results["cells"]} == {frozenset(Cell.__annotations__)}


def test_P02_deselected_cells_are_counted(gate):
    """A run of a part says how much it left out."""
    found = gate("--variants", "fp16", "-k", "test_plan_builds", "tests/gate")

    assert found.status == 0
    assert f"measured 2 of 2 cells; {CELLS_OF_A_ROW - 2} more deselected" in found.text


# Red runs


@pytest.fixture(scope="module")
def seeded(gate, tmp_path_factory):
    """Return a run in which each row but fp16 goes wrong in its own way; ``cells``: its report."""
    report = tmp_path_factory.mktemp("report")
    found = gate(
        "--variants",
        "fp16,fp8,fp8-q_proj,fp8-k_proj,fp8-c_fc",
        f"--gate-report={report}",
        "tests/gate",
        stored=("fp16", "fp8", "fp8-q_proj", "fp8-k_proj"),
        seeds={
            "fp8/prefill": "as fp16",
            "fp8/decode": "as fp16",
            "fp8-q_proj/decode": "type error",
            "fp8-k_proj/decode": "skip",
            "plan/fp8-c_fc/prefill": "refused",
            "returns early": "test_plan_builds[fp8-c_fc-decode-build]",
        },
    )
    cells = json.loads((report / "results.json").read_text())["cells"]
    found.cells = {(cell["variant"], cell["phase"], cell["metric"]): cell for cell in cells}
    return found


def test_seeded_run_is_red(seeded):
    """One bad row is enough."""
    assert seeded.status == pytest.ExitCode.TESTS_FAILED


def test_P01_studied_row_within_the_ship_limits_asks_to_revisit_the_decision(seeded):
    """P-01 e: good news is a strict, unexpected pass, and fails by name."""
    assert outcome(seeded.text, "fp8", "test_ship_decision_holds", "both-ship") == "FAILED"
    section = seeded.text.partition("test_ship_decision_holds[fp8-both-ship] ____")[2][:400]
    assert "[XPASS(strict)] studied: " in section
    assert "revisit the decision" in section
    assert re.search(r"^fp8 .*failed \(studied\)$", seeded.text, re.MULTILINE)


def test_P01_type_error_in_the_ship_test_of_a_studied_row_is_failed(seeded):
    """P-01 c: an error that is not a missed limit is not the expected failure."""
    assert outcome(seeded.text, "fp8-q_proj", "test_ship_decision_holds", "both-ship") == "FAILED"
    assert (
        "FAILED tests/gate/test_quality.py::test_ship_decision_holds[fp8-q_proj-both-ship] - "
        in (seeded.text)
    )
    assert "TypeError: unsupported operand" in seeded.text


def test_what_ended_early_is_not_measured(seeded):
    """A skip, an unknown error and a test that judged nothing are all missing from the count."""
    line = line_of(seeded.text, "measured ")
    measured, owed, rest = re.match(
        r"measured (\d+) of (\d+) cells; not measured: (.*)$", line
    ).groups()

    # Two rows lack their measurement in decode, and one test judged nothing.
    needs_decode = [
        ending
        for test, endings in IDS.items()
        for ending in endings
        if test.startswith("test_quality") and not ending.startswith("prefill-")
    ]
    assert int(owed) == CELLS_OF_A_ROW + 4 * CELLS_OF_A_QUANTIZED_ROW
    assert int(owed) - int(measured) == 2 * len(needs_decode) + 1
    assert rest.startswith("fp8-c_fc/decode/build, fp8-k_proj/both/ship, fp8-k_proj/decode/agree")
    assert rest.endswith(f" and {2 * len(needs_decode) + 1 - 8} more")


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ("fp16", "passed"),
        ("fp8-q_proj", "not measured"),
        ("fp8-k_proj", "not measured"),
        ("fp8-c_fc", "failed"),
    ],
)
def test_table_shows_the_worst_verdict(seeded, row, verdict):
    """A row that was not measured, refused or has no baseline does not read passed."""
    decision = "shipped" if row == "fp16" else "studied"

    assert line_of(seeded.text, f"{row} ").endswith(f"{verdict} ({decision})")


def test_P01_skipped_ship_test_of_a_studied_row_is_not_measured(seeded):
    """P-01 g: no device is neither the expected failure nor a pass."""
    cell = seeded.cells["fp8-k_proj", "both", "ship"]

    assert cell["verdict"] == "not measured"
    assert cell["reason"] == "Skipped: no device"
    assert outcome(seeded.text, "fp8-k_proj", "test_ship_decision_holds", "both-ship") is None


def test_comparison_that_did_not_pass_says_what_changed(gate):
    """A calibration 16 times too large is seen by its ranges, and blamed for nothing else."""
    found = gate("--variants", "fp8", "tests/gate/test_build.py", seeds={"ranges": 16.0})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    line = line_of(found.text, "fp8/both/regression/activation_amax: failed: obtained 15, ")
    assert "transformer.h.0.attn.attention.k_proj: obtained range 128, stored 8" in line
    assert "; weights: the same; scales: changed (transformer.h." in line
    assert "); network: the same; TensorRT: the same; plan: " in line


def test_P02_test_that_judged_nothing_has_no_cell(seeded):
    """P-02: an early return passes for pytest, and is missing for the gate."""
    assert outcome(seeded.text, "fp8-c_fc", "test_plan_builds", "decode-build") is None
    assert ("fp8-c_fc", "decode", "build") not in seeded.cells


def test_refusal_of_a_plan_is_failed_with_tensorrt_s_words(seeded):
    """The library's own errors are verdicts, printed without a trace."""
    assert outcome(seeded.text, "fp8-c_fc", "test_plan_builds", "prefill-build") == "FAILED"
    assert "BuildError: variant fp8-c_fc, prefill, tensorrt_rtx-" in seeded.text
    assert "  TensorRT: [ERROR] no kernel" in seeded.text


def test_B04_missing_baseline_is_failed_by_name(seeded):
    """B-04: a row without a stored run fails, says how to write one, and none is written."""
    target = "/".join(seeded.folder.parts[-3:])

    assert f"no baseline for {target}/fp8-c_fc; write one with --update-baselines" in seeded.text
    assert "fp8-c_fc" not in baselines.names(seeded.folder)


def test_P02_fixture_that_skips_measures_nothing(gate):
    """P-02: pytest's exit status would be 0; it is red here, and 0 of 8 cells by name."""
    arguments = ("--variants", "fp16", "tests/gate/test_build.py")

    found = gate(*arguments, seeds={"checkpoint": "skip"})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert re.search("^=+ 8 skipped[ ,]", found.text, re.MULTILINE)
    assert "no device" in found.text
    assert line_of(found.text, "measured ") == (
        "measured 0 of 8 cells; not measured: fp16/decode/build, fp16/decode/plan_mib, "
        "fp16/decode/quantized_projections, fp16/decode/regression/plan_mib, fp16/prefill/build, "
        "fp16/prefill/plan_mib, fp16/prefill/quantized_projections, "
        "fp16/prefill/regression/plan_mib"
    )


def test_P02_checkpoint_that_is_refused_measures_nothing(gate):
    """P-02: a library error in a fixture is no measurement of any cell."""
    arguments = ("--variants", "fp16", "tests/gate/test_build.py")

    found = gate(*arguments, seeds={"checkpoint": "refused"})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert "CheckpointError: bundled: no config.json" in found.text
    assert line_of(found.text, "measured ").startswith("measured 0 of 8 cells; not measured: ")


def test_B01_floor_that_is_not_finite_is_not_what_a_studied_row_is_expected_to_miss(gate):
    """B-01, P-01: with fp16 not selected, no other cell says that its logits were NaN."""
    arguments = ("--variants", "fp8", "tests/gate")

    found = gate(*arguments, seeds={"fp16/prefill": "nan"})

    assert outcome(found.text, "fp8", "test_ship_decision_holds", "both-ship") == "FAILED"
    assert found.status == pytest.ExitCode.TESTS_FAILED


def test_report_of_a_run_with_an_infinite_value_is_written(gate, tmp_path):
    """B-01: the run that most needs its report and its summary has both."""
    arguments = ("--variants", "fp16", f"--gate-report={tmp_path}", "tests/gate")

    found = gate(*arguments, seeds={"fp16/prefill": "infinite perplexity"})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert "non-finite measurement: obtained inf" in found.text
    assert line_of(found.text, "measured ").startswith(f"measured {CELLS_OF_A_ROW} of ")
    assert "Infinity" not in (tmp_path / "results.json").read_text()


# Known failures: P-01 on the rows that quantize out_proj, whose build TensorRT 11.4 refuses

OUT_PROJ = "fp8-out_proj"
KNOWN = "tensorrt-11.4-fp8-out_proj"


def builds(gate, rows, version="11.4.0.106", **options):
    """Run the build cells of some rows on the interpreter's target and a stub TensorRT."""
    flavour = ("--tensorrt", "tensorrt", "-k", "plan_builds and not fp16")
    arguments = ("--variants", rows, *flavour, "tests/gate/test_build.py")
    return gate(*arguments, tensorrt=f"tensorrt-{version}", **options)


@pytest.fixture(scope="module")
def mixed(gate):
    """Return a run in which two cases fail as known, one builds, and three go wrong otherwise."""
    seeds = {
        "plan/fp8-out_proj/prefill": "known",
        "plan/fp8-out_proj/decode": "out of memory",
        "plan/fp8-attention/decode": "known",
        "plan/fp8-all/prefill": "type error",
        "plan/fp8-all/decode": "skip",
    }
    return builds(gate, "fp8-out_proj,fp8-attention,fp8-all", seeds=seeds)


def test_P01_a_known_failure_is_expected_listed_and_counted(gate):
    """P-01 a: XFAIL, green, and said by name with its reason; the cell counts as measured."""
    seeds = {f"plan/{OUT_PROJ}/{phase}": "known" for phase in ("prefill", "decode")}

    found = builds(gate, OUT_PROJ, seeds=seeds)

    assert found.status == 0, found.text
    assert line_of(found.text, f"{OUT_PROJ} ").endswith("passed (studied)")
    for phase in ("prefill", "decode"):
        assert outcome(found.text, OUT_PROJ, "test_plan_builds", f"{phase}-build") == "XFAIL"
        line = line_of(found.text, f"known failure: {OUT_PROJ}/{phase}/build: {KNOWN}: ")
        assert "element types of two inputs differ" in line
        assert KNOWN_FAILURES[KNOWN].confirmed in line
    assert line_of(found.text, "measured ").startswith("measured 2 of 2 cells; ")


@pytest.mark.parametrize(
    ("row", "phase", "expected", "reason"),
    [
        pytest.param("fp8-out_proj", "prefill", "XFAIL", KNOWN, id="a-known"),
        pytest.param("fp8-out_proj", "decode", "FAILED", "out of memory", id="b-out-of-memory"),
        pytest.param("fp8-all", "prefill", "FAILED", "TypeError: unsupported", id="c-type-error"),
        pytest.param("fp8-attention", "prefill", "FAILED", "[XPASS(strict)] ", id="e-success"),
        pytest.param("fp8-all", "decode", None, "no device", id="g-skip"),
    ],
)
def test_P01_only_the_known_message_is_expected(mixed, row, phase, expected, reason):
    """P-01 a, b, c, e, g: another error, a success and a skip are not the known failure."""
    assert outcome(mixed.text, row, "test_plan_builds", f"{phase}-build") == expected
    assert reason in mixed.text
    assert mixed.status == pytest.ExitCode.TESTS_FAILED


def test_P01_success_of_a_known_failure_says_to_remove_the_row(mixed):
    """P-01 e: good news fails by name, with the row's id and version and what to do."""
    section = mixed.text.partition("test_plan_builds[fp8-attention-prefill-build] ____")[2][:400]

    assert re.search(rf"\[XPASS\(strict\)\] {KNOWN}: .*; if it passes: fixed, remove", section)


def test_P01_success_of_a_known_failure_is_no_passed_cell(mixed):
    """P-01 e: the table says what the test says, and no baseline is written from such a row."""
    assert line_of(mixed.text, "fp8-attention ").endswith("failed (studied)")


def test_P01_known_failures_are_listed_and_a_skip_is_not_measured(mixed):
    """P-01 g: a skip is missing from the count; a TypeError is no verdict on a plan either."""
    listed = re.findall(rf"^known failure: (\S+)/build: {KNOWN}: ", mixed.text, re.MULTILINE)

    assert listed == ["fp8-out_proj/prefill", "fp8-attention/decode"]
    assert mixed.text.count("\nknown failure: ") == 2
    assert line_of(mixed.text, "measured ").startswith(
        "measured 4 of 6 cells; not measured: fp8-all/decode/build, fp8-all/prefill/build; "
    )


def test_P01_fixture_error_under_a_known_failure_is_an_error(gate):
    """P-01 d: what fails before the case is not the case's known failure."""
    found = builds(gate, OUT_PROJ, seeds={"checkpoint": "crash"})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert outcome(found.text, OUT_PROJ, "test_plan_builds", "prefill-build") == "ERROR"
    assert "RuntimeError: disk on fire" in found.text
    assert "known failure: " not in found.text
    assert line_of(found.text, "measured ").startswith("measured 0 of 2 cells; ")


def test_P01_success_under_a_version_outside_the_range_is_plain(gate):
    """P-01 f: on TensorRT 11.1 the case is an ordinary one."""
    found = builds(gate, OUT_PROJ, version="11.1.0.106")

    assert found.status == 0, found.text
    assert re.search(r"^=+ 2 passed, ", found.text, re.MULTILINE)
    assert "known failure: " not in found.text


# Writing baselines


@pytest.fixture(scope="module")
def updated(gate):
    """Return an updating run of three rows: one as stored, one worse than its limits, one new."""
    before = contents(ROOT / "baselines")
    found = gate(
        "--update-baselines",
        "--variants",
        "fp16,fp8,fp8-q_proj",
        "tests/gate",
        stored=("fp16", "fp8", "fp32"),
        seeds={"fp8/prefill": "three times the loss"},
    )
    found.repository = before
    return found


def test_B04_updating_run_fails_and_says_what_to_do(updated):
    """Whoever updates has to run again: the run that wrote a baseline is never the green one."""
    assert updated.status == pytest.ExitCode.TESTS_FAILED
    assert f"baselines written to {updated.folder}: commit them and run again" in updated.text


def test_B04_updating_run_writes_only_rows_that_passed(updated):
    """The row beyond its limits and the row that was not selected keep their files."""
    assert baselines.names(updated.folder) == {"fp16", "fp8", "fp8-q_proj", "fp32"}
    after = contents(updated.folder)
    kept = ("fp8.json", "fp8.tokens.npz", "fp32.json", "fp32.tokens.npz")
    assert {name: after[name] for name in kept} == {name: updated.before[name] for name in kept}
    new = baselines.read(updated.folder, "fp8-q_proj")
    old = Stubs(str(updated.root), "cpu", "", None).baseline("fp8-q_proj")
    assert new.values == old.values
    assert new.key == old.key


def test_B04_updating_run_prints_what_it_wrote_and_what_it_refused(updated):
    """A line a row: unchanged, new, or not written and why."""
    assert "baseline fp16: unchanged" in updated.text
    assert "baseline fp8-q_proj: new (no baseline for cpu/" in updated.text
    refused = line_of(updated.text, "baseline fp8: not written: ")
    assert "fp8/prefill/kl_mean_nats: failed: obtained " in refused


def test_B04_updating_run_of_a_changed_tree_writes_nothing(gate):
    """The commit in the provenance would not be what was measured."""
    found = gate(
        *("--update-baselines", "--variants", "fp16", "tests/gate"),
        seeds={"commit": "4446f63-dirty"},
    )

    assert "fp16: not written: the working tree differs from commit 4446f63; commit first" in (
        found.text
    )
    assert contents(found.folder) == found.before


def test_updating_run_stores_the_noise_of_each_comparison(updated):
    """Every metric that is judged token by token has the noise of a second roll beside it."""
    new = baselines.read(updated.folder, "fp8-q_proj")
    assert {f"{name}/noise" for name in new.tokens} <= new.values.keys()
    assert "prefill/regression/sampled/kl_mean_nats" in new.tokens


def test_updating_run_refuses_a_row_whose_noise_hides_its_tolerance(gate):
    """A threshold that the texts cannot resolve is refused when it is written."""
    seeds = {"second roll/fp8/prefill": "noisy"}

    found = gate("--update-baselines", "--variants", "fp16,fp8", "tests/gate", seeds=seeds)

    refused = line_of(found.text, "baseline fp8: not written: ")
    for name in ("kl_mean_nats", "sampled/kl_mean_nats"):
        expected = f"prefill/regression/{name}: the sample cannot resolve the tolerance: obtained "
        assert expected in refused
    assert contents(found.folder)["fp8.json"] == found.before["fp8.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--update-baselines", "--summation-order=1"], "--update-baselines: obtained --summat"),
        (["--summation-order=-1"], "--summation-order: obtained -1, expected 0 or more"),
    ],
    ids=["update", "negative"],
)
def test_order_of_summation_that_cannot_be_used(gate, options, message):
    """What is stored is the natural order; a number below 0 is none."""
    found = gate("--variants", "fp16", *options)

    assert found.status == pytest.ExitCode.USAGE_ERROR
    assert message in found.text
    assert contents(found.folder) == found.before


def test_a_row_has_the_ranges_of_its_own_calibration(gate):
    """They are calibrated where a row asks for them, and compared with its stored ones."""
    found = gate(
        "--variants", "fp16,fp8,fp8-mse", "tests/gate/test_build.py",
        stored=(*ROWS_OF_A_RUN, "fp8-mse"),
    )  # fmt: skip

    assert found.status == 0, found.text
    assert "with ModelOpt: max, mse-fp8 " in found.text


@pytest.mark.parametrize("option", ["--summation-order=3", "--dequantize=fp32"])
def test_options_that_shape_figures_are_part_of_the_command(gate, tmp_path, option):
    """Whoever reads the results sees that they are not those of a plain run."""
    for options, expected in (([], False), ([option], True)):
        gate("--variants", "fp16", f"--gate-report={tmp_path}", "tests/gate", *options)
        results = json.loads((tmp_path / "results.json").read_text())
        assert (option in results["provenance"]["command"]) is expected


def test_updating_run_skips_the_comparison(updated):
    """What is being replaced is not compared with, and counts as not measured."""
    assert "baselines are being written" in updated.text
    assert "not measured: fp16/decode/regression/kl_mean_nats, " in line_of(
        updated.text, "measured "
    )


def test_updating_run_leaves_the_repository_alone(updated):
    """The stubbed folder is the only one that is written."""
    assert contents(ROOT / "baselines") == updated.repository
    assert str(updated.root) in str(updated.folder)


def test_B04_environment_does_not_update():
    """B-04: only the flag writes; no variable is looked at."""
    sources = [ROOT / "conftest.py", *(ROOT / "tests/gate").glob("*.py")]
    sources.append(ROOT / "gptneo_trt/baselines.py")

    assert [path.name for path in sources if "environ" in path.read_text()] == []


def test_updating_run_that_measured_nothing_shows_why(gate):
    """The errors and the summary are printed, not a traceback of the update."""
    found = gate(
        "--update-baselines",
        "--variants",
        "fp16",
        "tests/gate/test_build.py",
        seeds={"checkpoint": "crash"},
    )

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert "no baseline written: nothing was measured" in found.text
    assert "RuntimeError: disk on fire" in found.text
    assert line_of(found.text, "measured ").startswith("measured 0 of 8 cells")
