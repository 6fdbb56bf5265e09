"""Which cells a run owes: rows of a model, phases and metrics of a test, and what keeps one out.

The marks are those of the gate's own tests; flavour, version and GPU are made up.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
from gate_stubs import B200, H200, Options

from gptneo_trt.backend import Backend
from gptneo_trt.checkpoint import STUDY_CHECKPOINT
from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import BuildError, CrashError, RunError
from gptneo_trt.network import PHASES
from gptneo_trt.targets import TARGETS
from gptneo_trt.variants import VARIANTS
from tests.gate import cells, limits, selection, test_build, test_engine, test_quality, test_speed
from tests.selftest.judging import gate_tests

MODULES = (test_build, test_engine, test_quality, test_speed)
MARKS = [
    mark
    for module in MODULES
    for test in gate_tests(module)
    for mark in test.pytestmark
    if mark.name == "cells"
]
DEFAULT = tuple(name for name in VARIANTS if name not in limits.MATRIX)
MINE, FP32 = "fp8:quantized=c_fc+v_proj", "dequantize_type=fp32"  # a row that is described
KNOWN_BUILD = "Error Code 4: element types of two inputs differ: FP8 and Half"
KNOWN_LOAD = "this version does not support this compute capability"
BOTH = set(PHASES)
SAMPLED = "regression/sampled/kl_mean_nats"
RANDOM = "random:gpt-neo-125m"
OTHER_SHAPES = {"batch": {"batch": 4}, "context": {"context": 1024}}


@pytest.fixture
def run(monkeypatch):
    """Return a function (marker, flavour and version, GPU, options) -> Options of a run there."""

    def options(target, tensorrt="", gpu=None, **given):
        flavour, _, version = (tensorrt or f"{TARGETS[target].flavour}-0").partition("-")
        monkeypatch.setattr(selection, "gpu_at_hand", lambda: gpu)
        monkeypatch.setattr(
            selection, "backend_named", lambda name: Backend(flavour, version, SimpleNamespace())
        )
        return Options(target, tensorrt=flavour, **given)

    return options


@pytest.fixture
def on_b200(run):
    """Return a run of the study's checkpoint where the study was made."""
    return run("b200", "tensorrt-11.4.0.106", B200)


def asked(options, marks=MARKS):
    """Return (row, phase, metric) -> pytest's parameters of every cell that a run owes."""
    found = [each for mark in marks for each in cells.parameters_of(options, mark)]
    keys = [(variant.name, phase, metric) for variant, phase, metric in (p.values for p in found)]
    assert [key for key, count in Counter(keys).items() if count > 1] == []
    return dict(zip(keys, found, strict=True))


def of_row(owed, row):
    """Return metric -> phases, of one row."""
    found = {}
    for variant, phase, metric in owed:
        if variant == row:
            found.setdefault(metric, set()).add(phase)
    return found


def xfails(owed):
    """Return key -> its xfail mark, of the cells that are expected to fail; ship's left out."""
    marks = {key: each.marks for key, each in owed.items() if key[2] != "ship"}
    return {key: mark for key in marks for mark in marks[key] if mark.name == "xfail"}


# Rows


@pytest.mark.parametrize(
    ("target", "options", "rows"),
    [
        ("cpu", {}, DEFAULT),
        ("h200", {}, DEFAULT),
        ("b200", {}, ("fp16", "fp8", "fp8-out_proj")),
        ("b300", {}, ("fp16", "fp8", "fp8-out_proj")),
        ("b200", {"model": "bundled"}, DEFAULT),
        ("cpu", {"model": STUDY_CHECKPOINT}, ("fp16", "fp8", "fp8-out_proj")),
        ("h200", {"model": "/models/mine"}, DEFAULT),
        ("h200", {"variants": "fp8, fp16"}, ("fp16", "fp8")),
        ("h200", {"variants": "fp8"}, ("fp16", "fp8")),
        ("cpu", {"variants": "fp8", "update_baselines": True}, ("fp8",)),
        ("cpu", {"variants": "fp32"}, ("fp32",)),
        ("h200", {"variants": "fp99,fp8"}, ("fp16", "fp8", "fp99")),
        ("cpu", {"variants": f"{MINE},fp32"}, ("fp32", "fp16", MINE)),
        ("cpu", {"variants": "fp16,fp8", "dequantize": "fp32"}, ("fp16", f"fp8:{FP32}")),
        ("cpu", {"variants": MINE, "dequantize": "fp32"}, ("fp16", f"{MINE}:{FP32}")),
    ],
)
def test_rows_of_a_run(target, options, rows):
    """Those of the target's model unless some are named, fp16 beside any that quantizes."""
    assert tuple(selection.selected_names(Options(target, **options))) == rows


def test_rows_of_random_weights_are_the_study_s():
    """Models without limits of their own are built and timed as the study built them."""
    found = selection.selected_names(Options("h200", model="random:gpt-neo-1.3B"))

    assert set(found) == set(limits.STUDY_ROWS)


@pytest.mark.parametrize("model", ["bundled", "random:gpt-neo-1.3B"])
def test_all_rows_are_those_of_the_matrix_too(model):
    """``--variants all`` leaves out what the checkpoint has too few layers for, and of random
    weights what differs in ranges alone.
    """
    found = selection.selected_names(Options("cpu", model=model, variants="all"))

    default = selection.selected_names(Options("cpu", model=model))
    left_out = {"fp8-edges3-fp16"} if model == "bundled" else set(limits.OTHER_RANGES)
    assert set(found) - set(default) == set(limits.MATRIX) - left_out


def test_a_described_row_owes_what_needs_neither_limit_nor_baseline(run):
    """It is built, checked, measured and held against the ship limits, whichever way it goes."""
    owed = asked(run("cpu", variants=MINE))

    found = of_row(owed, MINE)
    assert found == {
        **dict.fromkeys(("build", "plan_mib", "quantized_projections", "non_finite"), BOTH),
        "agreement/kl_mean_nats": {"decode"},
        "ship": {"both"},
    }
    (ship,) = (mark for mark in owed[MINE, "both", "ship"].marks if mark.name == "xfail")
    assert ship.kwargs["strict"] is False


@pytest.mark.parametrize(("name", "wants"), [("fp8-weights", False), ("int8", True)])
def test_only_quantized_activations_have_ranges_to_compare(run, name, wants):
    """Nothing is calibrated for a row that quantizes weights alone."""
    owed = of_row(asked(run("cpu", variants=name)), name)

    assert ("regression/activation_amax" in owed) == wants


# Cells of a row


def test_a_row_on_the_interpreter_owes_no_cell_of_an_engine(run):
    """-m cpu asks for what needs no GPU."""
    found = of_row(asked(run("cpu", variants="fp8")), "fp8")

    assert found == {
        **dict.fromkeys(("build", "plan_mib", "regression/plan_mib"), BOTH),
        **dict.fromkeys(("quantized_projections", "non_finite", *test_quality.LIMITED), BOTH),
        **dict.fromkeys((f"regression/{name}" for name in test_quality.REGRESSIONS), BOTH),
        **{metric: {"prefill"} for metric in test_quality.NEXT_TOKEN},
        "agreement/kl_mean_nats": {"decode"},
        "regression/activation_amax": {"both"},
        SAMPLED: {"prefill"},
        "ship": {"both"},
    }


@pytest.mark.parametrize(
    ("model", "owes"),
    [("bundled", True), ("/models/mine", True), (STUDY_CHECKPOINT, False), ("random:x", False)],
)
def test_sampled_text_is_asked_for_where_there_is_some(run, model, owes):
    """The study sampled nothing from its checkpoint, so no cell of a hub's model asks for it."""
    owed = asked(run("cpu", model=model, variants="fp8"))

    assert (("fp8", "prefill", SAMPLED) in owed) is owes
    assert ("fp8", "decode", SAMPLED) not in owed


def test_a_folder_with_an_at_sign_is_no_model_of_the_hub(run, tmp_path):
    """As where the checkpoint is loaded: what is a folder is a folder."""
    folder = tmp_path / "owner" / "name@1"
    folder.mkdir(parents=True)

    assert selection.text_source_of(run("cpu", model=str(folder))) == "bundled"
    assert selection.text_source_of(run("cpu", model="owner/name@1")) == "study"


@pytest.mark.parametrize(
    ("row", "own"),
    [
        ("fp8", {"excess/bf16/kl_mean_nats": BOTH, "excess/float32/kl_mean_nats": BOTH}),
        ("fp32", {"direct/kl_mean_nats": BOTH, "direct/top1_frac": BOTH}),
    ],
)
def test_a_row_on_engines_owes_more(run, row, own):
    """Engines load, repeat, forget and have a speed; FP8 has an excess, the rest a difference."""
    on_cpu, on_gpu = (
        of_row(asked(run(target, gpu=gpu, variants=row)), row)
        for target, gpu in (("cpu", None), ("h200", H200))
    )

    engine = (
        "engine/loads",
        "engine/quantized_projections",
        "engine/repeats",
        "regression/speedup_x",
    )
    assert on_gpu == {**on_cpu, **dict.fromkeys(engine, BOTH), "engine/forgets": {"decode"}, **own}


def test_only_the_floor_is_timed_against_what_else_there_is(run):
    """Alternatives and the overhead of a step are of the fp16 engine."""
    owed = asked(run("h200", gpu=H200, variants="fp32,fp16,fp8"))

    timed = {key for key in owed if key[2].startswith(("alternative/", "step_"))}
    assert {row for row, _, _ in timed} == {"fp16"}
    assert {phase for _, phase, _ in timed} == BOTH


@pytest.mark.parametrize(("target", "gpu"), [("cpu", None), ("h200", H200)])
def test_random_weights_owe_no_quality(run, target, gpu):
    """What is meaningless is not asked for: no loss, no excess, no decision."""
    owed = asked(run(target, gpu=gpu, model=RANDOM, variants="fp16,fp8"))

    words = ("kl_", "nll_", "top1_", "perplexity", "finite", "ship", "excess", "direct")
    assert [key for key in owed if any(word in key[2] for word in words)] == []
    assert ("fp8", "decode", "plan_mib") in owed


@pytest.mark.parametrize("options", OTHER_SHAPES.values(), ids=OTHER_SHAPES)
@pytest.mark.parametrize("row", ["fp16", "fp8"])
def test_another_shape_owes_what_needs_no_stored_run(run, options, row):
    """Comparisons are left out; finite values and a ratio that its rounds resolve come in."""
    stored, other = (
        of_row(asked(run("h200", gpu=H200, model=RANDOM, variants="fp16,fp8", **each)), row)
        for each in ({}, options)
    )

    gone = {"regression/plan_mib": BOTH, "regression/speedup_x": BOTH}
    new = {"engine/non_finite": BOTH, "speedup_x": BOTH}
    if "batch" in options and row == "fp16":
        new |= {"engine/places_kl_mean_nats": BOTH}
    assert stored.keys() & new.keys() == set()
    assert stored.items() >= gone.items()
    assert other == {m: phases for m, phases in stored.items() if m not in gone} | new


@pytest.mark.parametrize("options", OTHER_SHAPES.values(), ids=OTHER_SHAPES)
def test_another_shape_without_a_gpu_owes_its_build(run, options):
    """-m cpu builds plans of any shape: nothing of an engine is asked for."""
    owed = of_row(asked(run("cpu", model=RANDOM, variants="fp8", **options)), "fp8")

    assert owed == dict.fromkeys(("build", "plan_mib", "quantized_projections"), BOTH)


@pytest.mark.parametrize(("target", "gpu"), [("cpu", None), ("h200", H200), ("b200", B200)])
def test_every_cell_carries_its_target_s_marker_and_name(run, target, gpu):
    """-m selects by the marker; the id of a test is its row, phase and metric."""
    owed = asked(run(target, gpu=gpu, model="bundled", variants="fp16,fp8"))

    assert {each.id for each in owed.values()} == {"-".join(key) for key in owed}
    for each in owed.values():
        assert TARGETS.keys() & {mark.name for mark in each.marks} == {target}


def test_P01_only_the_decision_of_a_studied_row_is_expected_to_fail(run):
    """A strict xfail, bound to missed limits: P-01."""
    owed = asked(run("cpu", variants="fp16,fp8"))

    marks = {key: mark for key, each in owed.items() for mark in each.marks if mark.name == "xfail"}
    assert list(marks) == [("fp8", "both", "ship")]
    assert marks["fp8", "both", "ship"].kwargs["strict"]
    assert marks["fp8", "both", "ship"].kwargs["raises"] is cells.OutsideShipLimitsError


def test_P01_where_pytorch_is_known_to_be_faster_a_cell_is_expected_to_fail(run):
    """A strict xfail at the shape of a row of SLOWER, and nowhere else."""
    known = {key[:4] for key in limits.SLOWER}
    assert known
    for target, model, batch, context in known | {
        ("b200", RANDOM, 1, 1024),
        ("h200", RANDOM, 2, 64),
    }:
        shape = {"batch": batch, "context": context}
        gpu = H200 if target == "h200" else B200
        owed = asked(run(target, gpu=gpu, model=model, variants="fp16,fp8", **shape))
        marks = {
            key: mark.kwargs
            for key, each in owed.items()
            for mark in each.marks
            if mark.name == "xfail"
        }
        expected = {key[4] for key in limits.SLOWER if key[:4] == (target, model, batch, context)}
        assert marks.keys() == {("fp16", "decode", metric) for metric in expected}
        for each in marks.values():
            assert each["strict"]
            assert each["raises"] is cells.SlowerThanPyTorchError


# Published baselines


def regressions(owed, row):
    """Return "phase/metric" of the cells that are held against the stored row."""
    return {
        f"{phase}/{metric.removeprefix('regression/')}"
        for variant, phase, metric in owed
        if variant == row and metric.startswith("regression/")
    }


def test_B02_a_published_row_owes_what_was_published(on_b200):
    """B-02: no cell without a stored value is asked for, and no stored value is left out."""
    owed = asked(on_b200)

    published = {"decode/plan_mib", "decode/kl_mean_nats", "decode/nll_mean_nats"}
    speed = {"decode/speedup_x", "prefill/speedup_x"}
    assert regressions(owed, "fp8") == published | speed
    assert regressions(owed, "fp16") == published | speed  # to itself: 1, whoever measured the rest
    assert {phase for phase in PHASES if ("fp8", phase, "kl_mean_nats") in owed} == BOTH


def test_a_run_that_writes_baselines_owes_everything(run):
    """What was published for want of a machine is measured once there is one."""
    options = run("b200", "tensorrt-11.4.0.106", B200, update_baselines=True, variants="fp8")

    assert len(regressions(asked(options), "fp8")) == 11


def test_a_row_without_a_baseline_owes_every_comparison(run):
    """B-04: missing is no reason to ask for less; the cells say "no baseline"."""
    options = run("b300", "tensorrt-11.9.0.1", B200, variants="fp8")

    assert len(regressions(asked(options), "fp8")) == 11


def test_a_measured_baseline_owes_every_comparison(run, monkeypatch):
    """Only a published baseline may lack a value: of a measured one the cell fails."""
    measured = {"decode/plan_mib": 9.0}
    baseline = SimpleNamespace(values=measured, is_published=False)
    monkeypatch.setattr(cells.baselines, "read", lambda folder, name: baseline)
    options = run("h200", "tensorrt_rtx-1.6.0.0", H200, variants="fp8")

    assert len(regressions(asked(options), "fp8")) == 12


# Rows only built


def test_a_row_only_built_owes_its_build_alone(run):
    """Where the study could build out_proj nothing of its quality has a source."""
    found = of_row(asked(run("b300", "tensorrt-11.1.0.106", B200)), "fp8-out_proj")

    assert found == dict.fromkeys(("build", "plan_mib", "quantized_projections"), BOTH)


# Known failures


def test_a_row_that_is_known_not_to_build_owes_its_build_and_its_network(on_b200):
    """The build is expected to fail; its plan is not asked for, the network is."""
    owed = asked(on_b200)

    assert of_row(owed, "fp8-out_proj") == dict.fromkeys(("build", "quantized_projections"), BOTH)
    assert set(xfails(owed)) == {("fp8-out_proj", phase, "build") for phase in PHASES}


@pytest.mark.parametrize("row", ["fp8-out_proj", "fp8-attention", "fp8-all"])
def test_no_later_cell_of_a_known_failure_is_asked_for(run, row):
    """Engines, their loss and the decision of both phases need the plan that is not there."""
    options = run("b200", "tensorrt-11.4.0.106", B200, model="bundled", variants=row)

    found = of_row(asked(options), row)

    assert found == dict.fromkeys(("build", "quantized_projections"), BOTH)


def test_on_the_interpreter_only_what_needs_a_plan_is_left_out(run):
    """The network of a row that does not build is evaluated all the same."""
    there, here = (
        of_row(asked(run("cpu", tensorrt, variants="fp8-out_proj")), "fp8-out_proj")
        for tensorrt in ("tensorrt-11.1.0.106", "tensorrt-11.4.0.106")
    )

    assert there.keys() - here.keys() == {"plan_mib", "regression/plan_mib"}
    assert here == {metric: phases for metric, phases in there.items() if metric in here}
    assert here["ship"] == {"both"}


def test_a_failure_to_load_leaves_the_plan_in(run):
    """TensorRT-RTX 1.7 builds for compute capability 9.0 and does not load there."""
    owed = asked(run("h200", "tensorrt_rtx-1.7.1.116", H200, variants="fp16,fp8"))

    plan = ("build", "plan_mib", "regression/plan_mib", "quantized_projections")
    for row in ("fp16", "fp8"):
        assert of_row(owed, row) == dict.fromkeys((*plan, "engine/loads"), BOTH)
    assert {metric for _, _, metric in xfails(owed)} == {"engine/loads"}
    assert len(xfails(owed)) == 4


def test_a_failure_to_run_a_phase_leaves_what_needs_no_logits_of_it(run):
    """INT8 weights load on an H200, prefill does not run: decode is timed, no loss is judged."""
    owed = asked(run("h200", "tensorrt_rtx-1.6.1.120", H200, variants="int8-weights"))

    found = of_row(owed, "int8-weights")
    assert found == {
        **dict.fromkeys(("build", "plan_mib", "regression/plan_mib"), BOTH),
        **dict.fromkeys(("quantized_projections", "engine/loads", "engine/repeats"), BOTH),
        "engine/forgets": {"decode"},
        "engine/quantized_projections": {"decode"},
        "regression/speedup_x": {"decode"},
    }
    assert list(xfails(owed)) == [("int8-weights", "prefill", "engine/repeats")]
    elsewhere = asked(
        run("b200", "tensorrt_rtx-1.6.1.120", B200, model="bundled", variants="int8-weights")
    )
    assert len(of_row(elsewhere, "int8-weights")) > len(found)


@pytest.mark.parametrize(
    ("target", "tensorrt", "gpu"),
    [
        ("b200", "tensorrt_rtx-1.7.1.116", B200),
        ("h200", "tensorrt_rtx-1.6.1.120", H200),
        ("b200", "tensorrt-11.10.0.1", B200),
        ("b300", "tensorrt-11.1.0.106", B200),
    ],
)
def test_another_version_or_gpu_has_no_known_failure(run, target, tensorrt, gpu):
    """The mark holds for the versions and GPUs of its row alone; 11.10 is not 11.1."""
    owed = asked(run(target, tensorrt, gpu, model="bundled", variants="fp16,fp8-out_proj"))

    assert xfails(owed) == {}
    assert of_row(owed, "fp8-out_proj")["ship"] == {"both"}


@pytest.mark.parametrize(
    ("options", "metric", "right", "wrong"),
    [
        (
            ("b200", "tensorrt-11.4.0.106", B200),
            "build",
            BuildError(KNOWN_BUILD),
            [
                BuildError("out of memory"),
                CrashError("the builder died of SIGSEGV", (KNOWN_BUILD,)),
                TypeError(KNOWN_BUILD),
                RunError(KNOWN_BUILD),
            ],
        ),
        (
            ("h200", "tensorrt_rtx-1.7.1.116", H200),
            "engine/loads",
            RunError(KNOWN_LOAD),
            [RunError("out of memory"), BuildError(KNOWN_LOAD), AssertionError(KNOWN_LOAD)],
        ),
    ],
    ids=["build", "deserialize"],
)
def test_P01_an_expected_failure_is_bound_to_error_and_message(run, options, metric, right, wrong):
    """P-01: strict; the right text of another error, and another text, are failures."""
    owed = asked(run(*options, model="bundled", variants="fp8-out_proj"))

    mark = xfails(owed)["fp8-out_proj", "decode", metric]

    assert mark.kwargs["strict"]
    assert mark.kwargs["raises"].matches(right)
    assert [error for error in wrong if mark.kwargs["raises"].matches(error)] == []
    assert mark.kwargs["reason"].endswith("; if it passes: fixed, remove the row")


def test_a_flavour_that_is_not_installed_has_no_known_failure(monkeypatch):
    """Which failures are known depends on a version that is not there; the refusal says so."""

    def backend_named(flavour):
        raise BuildError(f"TensorRT flavour {flavour!r} cannot be imported")

    monkeypatch.setattr(selection, "backend_named", backend_named)

    owed = asked(Options("b200", variants="fp8-out_proj"))

    assert xfails(owed) == {}
    assert selection.known_failures_here(Options("b200")) == []


def test_no_gpu_is_looked_for_where_nothing_is_known_to_fail(run, monkeypatch):
    """A collection on an ordinary TensorRT does not wait for torch."""
    options = run("cpu", "tensorrt_rtx-1.6.1.120")
    monkeypatch.setattr(selection, "gpu_at_hand", lambda: pytest.fail("looked for a GPU"))

    assert asked(options)


# Folders


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("bundled", "bundled"),
        ("EleutherAI/gpt-neo-125m", "EleutherAI--gpt-neo-125m"),
        ("random:gpt-neo-125m", "random-gpt-neo-125m"),
    ],
)
def test_folder_of_a_model(model, folder):
    """Target, flavour and version, model: no name with a separator of paths."""
    checkpoint = Checkpoint(model, "", None, {}, "c0ffee" * 8)

    found = cells.folder_of(TARGETS["h200"], "tensorrt_rtx-1.6.1.120", checkpoint)

    assert found == cells.ROOT / "baselines" / "h200" / "tensorrt_rtx-1.6.1.120" / folder


def test_folder_of_a_checkpoint_in_a_folder_is_named_by_its_hash(tmp_path):
    """Two checkpoints in folders of one name are not compared."""
    checkpoint = Checkpoint(str(tmp_path), "", None, {}, "0123456789abcdef")

    found = cells.folder_of(TARGETS["cpu"], "tensorrt_rtx-1.6.1.120", checkpoint)

    assert found.name == "local-0123456789ab"
