"""The gate as a run of pytest: what it collects, when it is red, what it prints and writes.

Each run is a child process on this repository's own conftest files, gate tests and pytest.ini.
Only the slow stages are stubs: plans and measurements are those of the stored baselines, and a
row of SEEDS changes what they give.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptneo_trt import baselines
from gptneo_trt.data import Cell
from gptneo_trt.variants import VARIANTS

ROOT = Path(__file__).parents[2]
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
    "test_quality.py::test_decode_agrees_with_prefill": ("decode-agreement/kl_mean_nats",),
    "test_quality.py::test_ship_decision_holds": ("both-ship",),
}
CELLS_OF_A_ROW = sum(len(ids) for ids in IDS.values())
BUILD_CELLS_OF_A_ROW = 8

# A plugin that is loaded before the conftest files, so that they import the stubs.
STUBS = '''
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gptneo_trt import baselines, checkpoint, plans, texts
from gptneo_trt.data import Measurement, Metrics, Plan, Scales, TokenMetrics
from gptneo_trt.errors import BuildError, CheckpointError
from tests.gate import measurer

STORED, ROOT = (Path(os.environ[name]) for name in ("GATE_STORED", "GATE_ROOT"))
SEEDS = json.loads(os.environ["GATE_SEEDS"])
WINDOWS = {"prefill": 256, "decode": 128}
KEY = baselines.read(STORED, "fp16").key


def text_set(name, *rest):
    key = KEY["texts"][name]
    return SimpleNamespace(
        name=name,
        sha256=key["sha256"],
        tokens=key["tokens"],
        token_ids_sha256=key["token_ids_sha256"],
        key=lambda: key,
    )


def build_plan(request, cache):
    if SEEDS.get(f"plan/{request.variant.name}/{request.phase}") == "refused":
        raise BuildError(f"{request.title}: refused", ("[ERROR] no kernel",))
    values = baselines.read(STORED, request.variant.name).values
    return Plan(Path("stub.plan"), values[f"{request.phase}/plan_mib"], 1.0, False, ())


def token_metrics(stored, phase, factor):
    values = {name: array.astype(np.float64) for name, array in stored.tokens.items()}
    kl, nll, disagreement = (
        values[f"{phase}/regression/{name}"]
        for name in ("kl_mean_nats", "nll_mean_nats", "top1_disagreement_frac")
    )
    rows = len(kl) // WINDOWS[phase]
    padded = np.full((rows, WINDOWS[phase]), np.nan)
    padded[:, :-1] = nll.reshape(rows, -1)
    text = np.repeat(np.arange(rows, dtype=np.int32), WINDOWS[phase])
    same = disagreement == 0
    return TokenMetrics(kl * factor, padded.ravel(), padded.ravel(), same, text, same)


def measured(variant, phase, factor=1.0, changes=None):
    stored = baselines.read(STORED, variant)
    tokens, metrics = token_metrics(stored, phase, factor), {}
    for name, value in stored.values.items():
        where, _, metric = name.rpartition("/")
        if where.startswith(f"{phase}/") and where.count("/") == 2:
            row = metrics.setdefault(where.removeprefix(f"{phase}/"), {})
            row[metric] = value * factor if metric.startswith("kl_") else value
            row[metric] = (changes or {}).get(metric, row[metric])
    metrics = {name: Metrics(values, tokens) for name, values in metrics.items()}
    agreement = {"kl_mean_nats": stored.values["decode/agreement/kl_mean_nats"]}
    return Measurement(None, metrics, Metrics(agreement, tokens) if phase == "decode" else None)


class Measurer:
    def __init__(self, setup, workers):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def calibrate(self, text, modules):
        amax = dict.fromkeys(modules, 8.0)
        return Scales(amax, "max", KEY["checkpoint_sha256"], text.sha256, text.tokens, "0")

    def submit(self, variant, scales):
        pass

    def result(self, variant, phase):
        seed = SEEDS.get(f"{variant.name}/{phase}")
        if seed == "type error":
            raise TypeError("unsupported operand")
        if seed == "skip":
            pytest.skip("no device")
        if seed == "nan":
            return Measurement("logits: NaN at text 0, token 3", {})
        if seed == "as fp16":
            return measured("fp16", phase)
        if seed == "three times the loss":
            return measured(variant.name, phase, factor=3.0)
        if seed == "infinite perplexity":
            infinite = {"perplexity": float("inf"), "perplexity_ratio": float("inf")}
            return measured(variant.name, phase, changes=infinite)
        assert seed is None, seed
        return measured(variant.name, phase)


def checkpoint_from_source(source):
    if SEEDS.get("checkpoint") == "crash":
        raise RuntimeError("disk on fire")
    if SEEDS.get("checkpoint") == "refused":
        raise CheckpointError("bundled: no config.json")
    if SEEDS.get("checkpoint") == "skip":
        pytest.skip("no device")
    return load(source)


load = checkpoint.checkpoint_from_source
checkpoint.checkpoint_from_source = checkpoint_from_source
texts.text_set, plans.build_plan, measurer.Measurer = text_set, build_plan, Measurer


def pytest_configure(config):
    for plugin in config.pluginmanager.get_plugins():
        if getattr(plugin, "__file__", None) == os.path.join(os.getcwd(), "conftest.py"):
            plugin.ROOT = ROOT


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Stand in for a test that returns before it judges anything."""
    return True if pyfuncitem.name == SEEDS.get("returns early") else None
'''


def pytest_in(*arguments, environment=None, folder=ROOT):
    """Run pytest in a child process on this repository; return its status and output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "200",
        **(environment or {}),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return SimpleNamespace(status=run.returncode, text=run.stdout + run.stderr)


@pytest.fixture(scope="session")
def stored_folder(backend):
    """Return the stored runs of the bundled checkpoint on the installed TensorRT."""
    return ROOT / "baselines" / "cpu" / backend.target / "bundled"


@pytest.fixture(scope="module")
def gate(tmp_path_factory, stored_folder):
    """Return a function that runs the gate on stubs: (arguments, seeds, rows stored before).

    Its result has ``status``, ``text``, ``root`` (where baselines/ is) and ``folder`` (of the
    stored rows there).
    """
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "gate_stubs.py").write_text(STUBS)

    def run(*arguments, seeds=None, stored=ROWS_OF_A_RUN):
        root = tmp_path_factory.mktemp("root")
        folder = root / stored_folder.relative_to(ROOT)
        for row in stored:
            baselines.write(folder, row, baselines.read(stored_folder, row))
        environment = {
            "PYTHONPATH": os.pathsep.join((str(plugins), str(ROOT))),
            "GATE_STORED": str(stored_folder),
            "GATE_ROOT": str(root),
            "GATE_SEEDS": json.dumps(seeds or {}),
        }
        cache = ["--gate-cache", str(root / "cache")]
        # Colours off: pytest's own words are matched below.
        command = ["-p", "gate_stubs", "-m", "cpu", "--color=no", *cache, *arguments]
        found = pytest_in(*command, environment=environment)
        return SimpleNamespace(**vars(found), root=root, folder=folder)

    return run


def bytes_of(folder):
    """Return relative path -> hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


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
    found = pytest_in("--variants", "fp16,fp99,fp8-qvk", "tests/gate")

    assert found.status == pytest.ExitCode.USAGE_ERROR
    expected = f"--variants: unknown rows ['fp8-qvk', 'fp99']; the rows are: {', '.join(VARIANTS)}"
    assert expected in found.text


def test_unknown_marker_in_an_expression_is_a_usage_error():
    """``-m gatte`` deselects everything otherwise, and a typo in an "or" most of it."""
    found = pytest_in("-m", "cpu or gatte", "--variants", "fp16", "tests/gate/test_build.py")

    assert found.status == pytest.ExitCode.USAGE_ERROR
    assert "Unknown marker(s) in '-m' expression: gatte" in found.text


def test_mistyped_mark_is_an_error(tmp_path):
    """A test that carries a mistyped mark is not deselected in silence."""
    case = tmp_path / "test_case.py"
    case.write_text("import pytest\n\n@pytest.mark.cpuu\ndef test_it():\n    pass\n")

    found = pytest_in("-c", str(ROOT / "pytest.ini"), "-m", "cpu", str(case), folder=tmp_path)

    assert found.status == pytest.ExitCode.INTERRUPTED
    assert "'cpuu' not found in `markers` configuration option" in found.text


def test_nothing_selected_is_not_green():
    """``-k`` that matches nothing ends with pytest's "no tests collected"."""
    found = pytest_in("-m", "cpu", "-k", "nothing_matches", "tests/gate/test_build.py")

    assert found.status == pytest.ExitCode.NO_TESTS_COLLECTED


def collected(text):
    """Return the ids that ``--collect-only -q`` printed, without the folder."""
    return [
        line.removeprefix("tests/gate/")
        for line in text.splitlines()
        if line.startswith("tests/gate/")
    ]


def test_collection_is_a_test_a_row_phase_and_metric():
    """The ids are the cells, row by row, the floor first, whatever the order asked for."""
    found = pytest_in("--collect-only", "-q", "--variants", "fp8,fp16", "-m", "cpu", "tests/gate")

    expected = [
        f"{test}[{row}-{ending}]"
        for row in ROWS_OF_A_RUN
        for test, endings in IDS.items()
        for ending in endings
    ]
    assert collected(found.text) == expected
    assert found.status == 0


def test_random_weights_have_no_quality_cells():
    """What is meaningless is not collected, rather than skipped."""
    arguments = ("--collect-only", "-q", "--variants", "fp8", "tests/gate")

    found = pytest_in(*arguments, "--model", "random:gpt-neo-125m")

    assert len(collected(found.text)) == BUILD_CELLS_OF_A_ROW
    assert all(each.startswith("test_build.py::") for each in collected(found.text))
    assert found.status == 0


def test_only_quality_cells_of_random_weights_is_not_green():
    """Asking for nothing but what does not exist measures nothing."""
    found = pytest_in("--model", "random:gpt-neo-125m", "tests/gate/test_quality.py")

    assert found.status == pytest.ExitCode.NO_TESTS_COLLECTED


def test_unit_tests_and_the_gate_can_be_named_in_any_order():
    """``pytest tests/unit tests/gate`` is the same selection as the other way round."""
    arguments = ("--collect-only", "-q", "--variants", "fp16", "tests/unit/test_verdicts.py")

    found = pytest_in(*arguments, "tests/gate")

    assert found.status == 0
    assert len(collected(found.text)) == CELLS_OF_A_ROW


# A green run


def test_a_run_like_the_stored_one_is_green_and_writes_nothing(gate, tmp_path):
    """Every cell is measured; a studied row misses its limits as decided; baselines stay."""
    before = bytes_of(ROOT / "baselines")

    found = gate("--variants", "fp16,fp8", f"--gate-report={tmp_path}", "tests/gate")

    assert found.status == 0, found.text
    assert f"measured {2 * CELLS_OF_A_ROW} of {2 * CELLS_OF_A_ROW} cells\n" in found.text
    assert outcome(found.text, "fp8", "test_ship_decision_holds", "both-ship") == "XFAIL"
    assert outcome(found.text, "fp16", "test_ship_decision_holds", "both-ship") is None
    assert re.search(r"^fp8 .*passed \(studied\)$", found.text, re.MULTILINE)
    assert bytes_of(ROOT / "baselines") == before
    stored = {f"{row}{end}" for row in ROWS_OF_A_RUN for end in (".json", ".tokens.npz")}
    assert set(bytes_of(found.root / "baselines")) == {
        str((found.folder / name).relative_to(found.root / "baselines")) for name in stored
    }
    assert (
        bytes_of(found.folder).items()
        <= bytes_of(ROOT / found.folder.relative_to(found.root)).items()
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["coverage"] == {
        "measured": 2 * CELLS_OF_A_ROW, "expected": 2 * CELLS_OF_A_ROW, "missing": [],
    }  # fmt: skip
    assert {cell["verdict"] for cell in results["cells"]} == {"passed"}
    assert {frozenset(cell) for cell in results["cells"]} == {frozenset(Cell.__annotations__)}


def test_deselected_cells_are_counted(gate):
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


def line_of(text, start):
    """Return the only line of a text that starts so."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    assert len(lines) == 1, lines
    return lines[0]


def test_seeded_run_is_red(seeded):
    """One bad row is enough."""
    assert seeded.status == pytest.ExitCode.TESTS_FAILED


def test_studied_row_within_the_ship_limits_asks_to_revisit_the_decision(seeded):
    """P-01 e: good news is a strict, unexpected pass, and fails by name."""
    assert outcome(seeded.text, "fp8", "test_ship_decision_holds", "both-ship") == "FAILED"
    section = seeded.text.partition("test_ship_decision_holds[fp8-both-ship] ____")[2][:400]
    assert "[XPASS(strict)] studied: " in section
    assert "revisit the decision" in section
    assert re.search(r"^fp8 .*failed \(studied\)$", seeded.text, re.MULTILINE)


def test_type_error_in_the_ship_test_of_a_studied_row_is_failed(seeded):
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
    assert int(owed) == 5 * CELLS_OF_A_ROW
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


def test_skipped_ship_test_of_a_studied_row_is_not_measured(seeded):
    """P-01 g: no device is neither the expected failure nor a pass."""
    cell = seeded.cells["fp8-k_proj", "both", "ship"]

    assert cell["verdict"] == "not measured"
    assert cell["reason"] == "Skipped: no device"
    assert outcome(seeded.text, "fp8-k_proj", "test_ship_decision_holds", "both-ship") is None


def test_test_that_judged_nothing_has_no_cell(seeded):
    """P-02: an early return passes for pytest, and is missing for the gate."""
    assert outcome(seeded.text, "fp8-c_fc", "test_plan_builds", "decode-build") is None
    assert ("fp8-c_fc", "decode", "build") not in seeded.cells


def test_refusal_of_a_plan_is_failed_with_tensorrt_s_words(seeded):
    """The library's own errors are verdicts, printed without a trace."""
    assert outcome(seeded.text, "fp8-c_fc", "test_plan_builds", "prefill-build") == "FAILED"
    assert "BuildError: variant fp8-c_fc, prefill, tensorrt_rtx-" in seeded.text
    assert "  TensorRT: [ERROR] no kernel" in seeded.text


def test_missing_baseline_is_failed_by_name(seeded):
    """B-04: a row without a stored run fails, says how to write one, and none is written."""
    target = "/".join(seeded.folder.parts[-3:])

    assert f"no baseline for {target}/fp8-c_fc; write one with --update-baselines" in seeded.text
    assert "fp8-c_fc" not in baselines.names(seeded.folder)


@pytest.mark.parametrize(
    ("seed", "count", "reason"),
    [("crash", "8 errors", "RuntimeError: disk on fire"), ("skip", "8 skipped", "no device")],
)
def test_fixture_that_fails_or_skips_measures_nothing(gate, seed, count, reason):
    """P-01 d, P-02: ERROR or SKIPPED, red either way, and 0 of 8 cells by name."""
    arguments = ("--variants", "fp16", "tests/gate/test_build.py")

    found = gate(*arguments, seeds={"checkpoint": seed})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert re.search(rf"^=+ {count} in ", found.text, re.MULTILINE)
    assert reason in found.text
    assert line_of(found.text, "measured ") == (
        "measured 0 of 8 cells; not measured: fp16/decode/build, fp16/decode/plan_mib, "
        "fp16/decode/quantized_projections, fp16/decode/regression/plan_mib, fp16/prefill/build, "
        "fp16/prefill/plan_mib, fp16/prefill/quantized_projections, "
        "fp16/prefill/regression/plan_mib"
    )


def test_checkpoint_that_is_refused_measures_nothing(gate):
    """P-02: a library error in a fixture is no measurement of any cell."""
    arguments = ("--variants", "fp16", "tests/gate/test_build.py")

    found = gate(*arguments, seeds={"checkpoint": "refused"})

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert "CheckpointError: bundled: no config.json" in found.text
    assert line_of(found.text, "measured ").startswith("measured 0 of 8 cells; not measured: ")


def test_floor_that_is_not_finite_is_not_what_a_studied_row_is_expected_to_miss(gate):
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


# Writing baselines


@pytest.fixture(scope="module")
def updated(gate, stored_folder):
    """Return an updating run of three rows: one as stored, one worse than its limits, one new."""
    found = gate(
        "--update-baselines",
        "--variants",
        "fp16,fp8,fp8-q_proj",
        "tests/gate",
        stored=("fp16", "fp8", "fp32"),
        seeds={"fp8/prefill": "three times the loss"},
    )
    found.before = bytes_of(ROOT / "baselines")
    return found


def test_updating_run_fails_and_says_what_to_do(updated):
    """Whoever updates has to run again: the run that wrote a baseline is never the green one."""
    assert updated.status == pytest.ExitCode.TESTS_FAILED
    assert f"baselines written to {updated.folder}: commit them and run again" in updated.text


def test_updating_run_writes_only_rows_that_passed(updated, stored_folder):
    """The row beyond its limits and the row that was not selected keep their files."""
    assert baselines.names(updated.folder) == {"fp16", "fp8", "fp8-q_proj", "fp32"}
    before, after = bytes_of(stored_folder), bytes_of(updated.folder)
    kept = ("fp8.json", "fp8.tokens.npz", "fp32.json", "fp32.tokens.npz")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    new, old = (baselines.read(each, "fp8-q_proj") for each in (updated.folder, stored_folder))
    assert new.values == old.values
    assert new.key == old.key


def test_updating_run_prints_what_it_wrote_and_what_it_refused(updated):
    """A line a row: unchanged, new, or not written and why."""
    assert "baseline fp16: unchanged" in updated.text
    assert "baseline fp8-q_proj: new (no baseline for cpu/" in updated.text
    refused = line_of(updated.text, "baseline fp8: not written: ")
    assert "fp8/prefill/kl_mean_nats: failed: obtained " in refused


def test_updating_run_skips_the_comparison(updated):
    """What is being replaced is not compared with, and counts as not measured."""
    assert "baselines are being written" in updated.text
    assert "not measured: fp16/decode/regression/kl_mean_nats, " in line_of(
        updated.text, "measured "
    )


def test_updating_run_leaves_the_repository_alone(gate, updated):
    """The stubbed folder is the only one that is written."""
    assert bytes_of(ROOT / "baselines") == updated.before
    assert str(updated.root) in str(updated.folder)


def test_environment_does_not_update():
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
