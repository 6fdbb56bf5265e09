"""The hardware gate, and the gate on engines: what cannot run is refused, named, and never green.

Refusals are asked for in this process. Whole runs are child processes on the stubs of
gate_stubs.py, but for one, which sees no GPU.
"""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from gate_stubs import B200, H200, Options, contents, line_of, run_gate, run_pytest

from gptneo_trt import backend
from gptneo_trt.backend import Backend
from gptneo_trt.checkpoint import STUDY_CHECKPOINT
from gptneo_trt.errors import BuildError, RunError
from tests.gate import cells, hardware, selection

H20 = replace(H200, name="NVIDIA H20")
RTX_16, RTX_17 = "tensorrt_rtx-1.6.1.120", "tensorrt_rtx-1.7.1.116"
NOT_SUPPORTED = "[ERROR] TensorRT-RTX does not support this compute capability"


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """Return a function (marker, GPU, flavour and version, ...) -> refusal of a run, or None.

    It takes stand-ins for the build and the load of the probe, and whether a row is stored.
    """

    def ask(target, gpu, tensorrt=RTX_16, *, build=None, load=None, stored=True, **options):
        flavour, _, version = tensorrt.partition("-")
        named = Backend(flavour, version, None)
        plan = SimpleNamespace(path=None, kernels=None)
        monkeypatch.setattr(cells, "ROOT", tmp_path)
        monkeypatch.setattr(selection, "gpu_at_hand", lambda: gpu)
        for module in (selection, hardware):
            monkeypatch.setattr(module, "backend_named", lambda name: named)
        monkeypatch.setattr(hardware, "build_plan", build or (lambda request, cache: plan))
        monkeypatch.setattr(hardware, "load", load or (lambda backend, plan, kernels: None))
        if stored:
            folder = tmp_path / "baselines" / target / tensorrt / "bundled"
            folder.mkdir(parents=True)
            (folder / "fp16.json").touch()
        given = {"tensorrt": flavour, "model": "bundled", "gate_cache": tmp_path / "cache"}
        return hardware.refusal(Options(target, **given | options))

    return ask


def refusing(error):
    """Return a stand-in for a build or a load that raises."""

    def stand_in(*arguments):
        raise error

    return stand_in


def never(*arguments):
    """Stand in for what must not be reached."""
    pytest.fail("reached")


# Refusals


def test_the_right_gpu_and_tensorrt_are_not_refused(refusal):
    """An H200 with a TensorRT that loads the probe, and baselines of both: engines can run."""
    assert refusal("h200", H200) is None


def test_the_target_cpu_is_never_refused(monkeypatch):
    """Nothing is looked for, and nothing is built."""
    monkeypatch.setattr(selection, "gpu_at_hand", never)
    monkeypatch.setattr(hardware, "build_plan", never)

    assert hardware.refusal(Options("cpu")) is None


@pytest.mark.parametrize(
    ("target", "gpu", "message"),
    [
        ("b200", None, "needed an NVIDIA B200, found no GPU; do: .*, or `pytest -m cpu` anywhere"),
        ("b200", H200, r"needed an NVIDIA B200, found NVIDIA H200 \(.*9\.0\).*`pytest -m h200` "),
        ("h200", B200, r"needed an NVIDIA H200, found NVIDIA B200 \(.*10\.0\).*`pytest -m b200` "),
        ("h200", H20, r"needed an NVIDIA H200, found NVIDIA H20 \([^`]*, or `pytest -m cpu` "),
    ],
    ids=["none", "h200-for-b200", "b200-for-h200", "h20-for-h200"],
)
def test_P02_another_gpu_or_none_is_refused_before_anything_is_built(refusal, target, gpu, message):
    """P-02: what was needed, what was found, and the marker that runs here."""
    found = refusal(target, gpu, build=never)

    assert re.match(f"target {target}: {message}", found)


def test_a_gpu_that_cannot_be_opened_is_refused_with_its_error(monkeypatch):
    """A driver that torch cannot use is not the absence of a GPU."""
    error = RunError("GPU 0: torch counts it but cannot open it")
    monkeypatch.setattr(selection, "gpu_at_hand", refusing(error))

    assert hardware.refusal(Options("h200")) == f"target h200: {error}"


def test_P02_a_flavour_that_is_not_installed_is_refused_with_its_install_command(monkeypatch):
    """P-02: the GPU is there, the target's flavour is not."""
    monkeypatch.setattr(selection, "gpu_at_hand", lambda: B200)
    monkeypatch.setitem(sys.modules, "tensorrt", None)

    found = hardware.refusal(Options("b200"))

    assert found.startswith("target b200: TensorRT flavour 'tensorrt' cannot be imported: ")
    assert found.endswith(f"do: {backend.FLAVOURS['tensorrt']}")


def test_N08_a_tensorrt_that_refuses_the_gpu_is_refused_as_the_known_failure(refusal):
    """N-08: TensorRT-RTX 1.7 builds the probe, and does not load it on compute capability 9.0."""
    found = refusal("h200", H200, RTX_17, load=refusing(RunError(NOT_SUPPORTED)))

    first, known, remedy = found.splitlines()
    assert first == (
        "target h200: needed a TensorRT that runs on NVIDIA H200 (compute capability 9.0), found "
        f"{RTX_17}: {NOT_SUPPORTED}"
    )
    assert known.startswith("known failure tensorrt_rtx-1.7-cc9.0: ")
    assert remedy.startswith("do: install a version that runs there (pip install 'tensorrt-rtx==")


@pytest.mark.parametrize(
    ("target", "gpu", "tensorrt", "text"),
    [
        ("h200", H200, RTX_17, "out of memory"),
        ("b200", B200, RTX_17, NOT_SUPPORTED),
        ("h200", H200, RTX_16, NOT_SUPPORTED),
    ],
    ids=["other-message", "other-gpu", "other-version"],
)
def test_another_refusal_is_no_known_failure(refusal, target, gpu, tensorrt, text):
    """TensorRT's own words stand alone: no row is named for what it is not about."""
    found = refusal(target, gpu, tensorrt, load=refusing(RunError(text)))

    assert text in found
    assert "known failure" not in found


def test_a_probe_that_does_not_build_is_refused(refusal):
    """A TensorRT that builds nothing here would fail every cell."""
    error = BuildError("variant fp16, decode: the builder died of SIGSEGV")

    found = refusal("h200", H200, build=refusing(error), load=never)

    assert f"found {RTX_16}: {error}\ndo: " in found


def test_the_probe_is_a_plan_of_the_floor_for_this_gpu(monkeypatch, tmp_path):
    """The installed TensorRT-RTX builds it, without a GPU, and it is loaded with its kernels."""
    loaded = []
    monkeypatch.setattr(selection, "gpu_at_hand", lambda: H200)
    monkeypatch.setattr(hardware, "load", lambda *arguments: loaded.append(arguments))
    options = {"model": str(tmp_path), "gate_cache": tmp_path}

    assert hardware.refusal(Options("h200", **options)) is None

    ((named, plan, kernels),) = loaded
    assert named.flavour == "tensorrt_rtx"
    assert plan.stat().st_size > 0
    assert kernels.parent == plan.parent


# Baselines


def test_no_baselines_of_this_version_are_refused_by_folder_and_versions(refusal, tmp_path):
    """What is stored is named: a run with nothing to compare would fail every regression."""
    for version in ("tensorrt_rtx-1.5.0.1", "tensorrt_rtx-1.4.0.76"):
        (tmp_path / "baselines" / "h200" / version / "bundled").mkdir(parents=True)

    assert refusal("h200", H200, stored=False) == (
        f"target h200: needed baselines/h200/{RTX_16}/bundled, found baselines of "
        "tensorrt_rtx-1.4.0.76, tensorrt_rtx-1.5.0.1; do: install one of those versions, or "
        "measure here with --update-baselines and commit"
    )


def test_a_target_without_any_baselines_is_refused(refusal):
    """B-04: nothing stored is said, and nothing is written."""
    assert "found baselines of no version; do: " in refusal("h200", H200, stored=False)


def test_a_run_that_writes_baselines_needs_none(refusal):
    """The first run on a target has to be possible."""
    assert refusal("h200", H200, stored=False, update_baselines=True) is None


@pytest.mark.parametrize("shape", [{"batch": 4}, {"context": 1024}], ids=str)
def test_another_batch_or_context_needs_none(refusal, shape):
    """Nothing is compared there, of a model that has baselines or that has none."""
    assert refusal("h200", H200, stored=False, model="random:gpt-neo-1.3B", **shape) is None


def test_a_checkpoint_in_a_folder_is_not_looked_for_by_its_path(refusal, tmp_path):
    """Its baselines are named by its hash, which only the cells know."""
    assert refusal("h200", H200, stored=False, model=str(tmp_path)) is None


@pytest.mark.parametrize(
    ("target", "version", "others"),
    [
        ("b200", "tensorrt-11.4.0.106", None),
        ("b300", "tensorrt-11.1.0.106", None),
        ("b200", "tensorrt-11.1.0.106", "tensorrt-11.4.0.106;"),
        ("b300", "tensorrt-11.10.0.1", "tensorrt-11.1.0.106, tensorrt-11.4.0.106;"),
    ],
)
def test_published_baselines_are_those_of_the_study_s_machines(
    refusal, monkeypatch, target, version, others
):
    """The revision of the hub's checkpoint is no part of the folder's name."""
    gpu = replace(B200, name=f"NVIDIA {target.upper()}")
    root = cells.ROOT

    def load(*arguments):
        monkeypatch.setattr(cells, "ROOT", root)

    found = refusal(target, gpu, version, load=load, stored=False, model=STUDY_CHECKPOINT)

    if others is None:
        assert found is None
    else:
        assert f"/{version}/EleutherAI--gpt-neo-125m, found baselines of {others} do: " in found


# Whole runs that are refused


def test_P02_a_run_without_a_gpu_is_red_and_says_why_in_its_last_lines():
    """P-02: nothing is skipped or failed a cell at a time; 0 of N cells, and what to do."""
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    files = ("tests/gate/test_build.py", "tests/gate/test_quality.py")

    found = run_pytest("-m", "b200", "--color=no", *files, environment=no_gpu)

    assert found.status == pytest.ExitCode.TESTS_FAILED  # not 5, which some CI lets pass
    refused, measured, *_ = found.text.splitlines()[-3:]
    assert refused.startswith("target b200: needed an NVIDIA B200, found no GPU; do: run it on a ")
    assert re.match(r"measured 0 of \d\d+ cells; not measured: fp16/", measured)
    assert "FAILED" not in found.text
    assert "SKIPPED" not in found.text


def test_P02_N08_a_refusal_by_tensorrt_is_red_and_names_the_known_failure(tmp_path):
    """N-08, P-02: a known failure of everything excuses nothing; TensorRT's words and a remedy."""
    options = {"target": "h200", "gpu": H200, "tensorrt": RTX_17, "stored": ("fp16",)}

    found = run_gate(
        tmp_path, "--variants", "fp16", "tests/gate", seeds={"load": NOT_SUPPORTED}, **options
    )

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert NOT_SUPPORTED in line_of(found.text, "target h200: needed a TensorRT that runs on ")
    assert line_of(found.text, "known failure tensorrt_rtx-1.7-cc9.0: ")
    assert "'tensorrt-rtx==1.6.1.120'" in line_of(found.text, "do: ")
    assert line_of(found.text, "measured ").startswith("measured 0 of ")
    assert "XFAIL" not in found.text


OLD_GPU = replace(H200, compute_capability="8.6")  # made up: an H200 that cannot multiply in FP8


def test_N08_rows_that_the_gpu_cannot_run_are_not_measured(tmp_path):
    """FP8 below 8.9 is skipped before any work with both versions, counted, and red."""
    broken = {f"plan/fp8/{phase}": "out of memory" for phase in ("prefill", "decode")}

    found = run_gate(
        tmp_path,
        *("--variants", "fp16,fp8", "tests/gate/test_quality.py", "tests/gate/test_build.py"),
        target="h200",
        gpu=OLD_GPU,
        stored=("fp16", "fp8"),
        seeds=broken,
    )

    assert found.status == pytest.ExitCode.TESTS_FAILED
    needed = "needs compute capability 8.9 or newer, device has 8.6 (NVIDIA H200)"
    assert f"fp8: fp8: {needed}" in found.text
    assert "out of memory" not in found.text
    assert "xfailed" not in found.text
    assert "failed" not in found.text.splitlines()[-1]
    missing = line_of(found.text, "measured ").partition("not measured: ")[2]
    assert missing.startswith("fp8/")
    assert "fp16/" not in missing


# Whole runs on stub engines

ROWS = ("fp16", "fp8")
ACCURACY = "tests/gate/test_quality.py::test_loss_is_within_the_limits[fp8-decode-kl_mean_nats]"
SPEED = (
    "tests/gate/test_speed.py::test_speed_against_fp16_is_the_stored_one"
    "[fp8-decode-regression/speedup_x]"
)
NO_BENCHMARKS = {
    "--benchmark-disable": "benchmarks are disabled",
    "--benchmark-skip": "(--benchmark-skip ",
}


def on_h200(root, *arguments, **options):
    """Run the gate on a stub H200, with both rows stored unless said otherwise."""
    options = {"stored": ROWS} | options
    return run_gate(root, "--variants", "fp16,fp8", *arguments, target="h200", gpu=H200, **options)


def test_a_run_like_the_stored_one_is_green(tmp_path):
    """Every cell of the engines, their speed and their excess is measured."""
    found = on_h200(tmp_path, f"--gate-report={tmp_path / 'report'}", "tests/gate")

    assert found.status == 0, found.text
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert results["coverage"]["missing"] == []
    assert results["target"] == f"h200/{found.folder.parent.name}"
    assert results["provenance"]["machine"].startswith(f"{H200.title}, driver {H200.driver}; ")
    assert {cell["verdict"] for cell in results["cells"]} == {"passed"}
    judged = {f"{cell['variant']}/{cell['phase']}/{cell['metric']}" for cell in results["cells"]}
    assert judged >= {
        "fp16/decode/alternative/weights_read_x",
        "fp16/decode/direct/kl_mean_nats",
        "fp8/decode/engine/quantized_projections",
        "fp8/decode/regression/speedup_x",
        "fp8/prefill/excess/bf16/kl_mean_nats",
        "fp8/both/ship",
    }
    assert contents(found.folder) == found.before


def assert_only_accuracy_passed(found):
    """Hold a run of both cases, with -rA, against P-03."""
    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert f"\nPASSED {ACCURACY}\n" in found.text
    assert f"PASSED {SPEED}" not in found.text
    assert "AttributeError" not in found.text


@pytest.mark.parametrize("option", NO_BENCHMARKS)
def test_P03_without_benchmarks_accuracy_is_judged_and_speed_is_not_measured(tmp_path, option):
    """P-03: the one passes, the other says why it has no figure; the run is red."""
    found = on_h200(tmp_path, option, "-rA", ACCURACY, SPEED)

    assert_only_accuracy_passed(found)
    assert NO_BENCHMARKS[option] in found.text
    assert "\nERROR " not in found.text
    assert line_of(found.text, "measured ") == (
        "measured 1 of 2 cells; not measured: fp8/decode/regression/speedup_x"
    )


def test_P03_without_benchmarks_no_baseline_is_written(tmp_path):
    """P-03: a row whose speed was not measured has no new baseline, first or not."""
    arguments = ("--benchmark-disable", "--update-baselines", "tests/gate")

    found = on_h200(tmp_path, *arguments, stored=("fp16",))

    assert found.status == pytest.ExitCode.TESTS_FAILED
    assert contents(found.folder) == found.before
    for row in ROWS:
        assert line_of(found.text, f"baseline {row}: not written: ")
