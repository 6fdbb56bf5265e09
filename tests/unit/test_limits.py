"""The gate's limits: a reason for every number, and the key sets of the tables that must agree."""

import math
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import T0, tiny_checkpoint

from gptneo_trt import alternatives, baselines
from gptneo_trt.checkpoint import (
    RANDOM_POSITIONS,
    RANDOM_SHAPES,
    STUDY_CHECKPOINT,
    random_architecture,
)
from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import BaselineError
from gptneo_trt.known_failures import known_failure
from gptneo_trt.network import PHASES
from gptneo_trt.targets import TARGETS
from gptneo_trt.variants import FLOOR, VARIANTS
from gptneo_trt.verdicts import AT_LEAST, AT_MOST, Bound, judge_limit
from gptneo_trt.weights import parameter_shapes
from tests.gate import cells, limits, test_speed, tolerances
from tests.gate.shape import LEAST_CONTEXT
from tests.selftest.judging import gate_tests

BASELINES = Path(__file__).parents[2] / "baselines"
STORED = BASELINES / "cpu/tensorrt_rtx-1.6.1.120/bundled"
# What --model may say without a folder, by the name of its folder of baselines.
MODELS = {
    cells.baseline_folder(TARGETS["cpu"], "", name).name: name
    for name in (*limits.LIMITS, *(f"random:{shape}" for shape in RANDOM_SHAPES))
}
ALL_FOLDERS = sorted(BASELINES.glob("*/*/*"))
MEASURED = [path for path in ALL_FOLDERS if MODELS.get(path.name) == "bundled"]
KL_ERROR = "kl_mean_stderr_nats"
T_95 = 1.7959  # Student's t at 95 %, 12 texts
FOLDERS = [path for path in ALL_FOLDERS if MODELS.get(path.name) in limits.LIMITS]
# FP8 weights alone stay in fp16 in a plan of TensorRT-RTX 1.6.
QUANTIZED = sorted(
    name for name, row in VARIANTS.items() if len(row.quantized) >= 5 and name != "fp8-weights"
)
TOO_DEEP = {"fp8-edges3-fp16"}  # of the bundled checkpoint's six layers it leaves none
CHECKPOINTS = sorted(limits.LIMITS)
ROWS = [(name, row) for name in CHECKPOINTS for row in limits.LIMITS[name]]
EVERY_ROW = [
    *(pytest.param(limits.LIMITS[name][row], id=f"{name}-{row}") for name, row in ROWS),
    *(pytest.param(found, id=f"engine-{'-'.join(key)}") for key, found in limits.ENGINES.items()),
]
# Every constant that is a number.
NUMBERS = sorted(name for name, value in vars(limits).items() if isinstance(value, float))
CPU, H200 = TARGETS["cpu"], TARGETS["h200"]
GPT_NEO_125M = random_architecture("random:gpt-neo-125m")


@pytest.fixture(scope="module")
def stored():
    """Return variant -> flat values of the stored run."""
    return {name: baselines.read(STORED, name).values for name in baselines.names(STORED)}


def value_of(values, phase, metric):
    """Return a stored value under the name that limits.py gives it."""
    *prefix, name = metric.split("/")
    place = {(): "prose/bf16", ("float32",): "prose/float32", ("next_token",): "next_token/bf16"}
    return values.get(f"{phase}/{place[tuple(prefix)]}/{name}")


def of_shape(architecture, name):
    """Return a checkpoint of zeros that takes no memory."""
    zero = np.float32(0)
    shapes = parameter_shapes(architecture)
    weights = {each: np.broadcast_to(zero, shape) for each, shape in shapes.items()}
    return Checkpoint(name, "", architecture, weights, "")


# Completeness


def test_variants_limits_decisions_and_baselines_name_the_same_rows():
    """A row that one of the four tables lacks would be built, or judged, by nobody."""
    rows = set(VARIANTS) - TOO_DEEP

    assert set(limits.BUNDLED) == rows
    assert set(limits.DECISIONS["bundled"]) == rows
    assert baselines.names(STORED) == rows


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "/".join(path.parts[-3:]))
def test_every_folder_of_stored_runs_is_complete(folder):
    """Wherever runs are stored, each row has its JSON and its token values; default rows all do.

    A GPU may not run every row of the matrix.
    """
    model, stored = MODELS[folder.name], baselines.names(folder)
    expected = {f"{row}{suffix}" for row in stored for suffix in (".json", ".tokens.npz")}

    assert {path.name for path in folder.iterdir()} == expected
    assert stored <= set(limits.LIMITS[model])
    assert stored >= set(limits.LIMITS[model]) - set(limits.MATRIX)


def test_every_folder_of_stored_runs_is_of_a_target_and_a_model():
    """A folder of another name would be read by no run, and held by no test."""
    names = {path.name for path in ALL_FOLDERS if not path.name.startswith("local-")}

    assert names <= MODELS.keys()
    assert {path.parts[-3] for path in ALL_FOLDERS} <= TARGETS.keys()
    assert {MODELS[path.name] for path in FOLDERS} == limits.LIMITS.keys()


def test_stored_runs_measured_the_same_things(stored):
    """No stored row lacks a value that another one has, but for the ranges of what it quantizes."""
    names = [
        {name for name in values if not name.startswith("scales/")} for values in stored.values()
    ]

    assert all(each == names[0] for each in names)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_limits_and_decisions_of_a_checkpoint_name_the_same_rows(name):
    """Whoever has limits is decided on, and both are rows that can be built."""
    assert set(limits.LIMITS[name]) == set(limits.DECISIONS[name])
    assert set(limits.LIMITS[name]) <= set(VARIANTS)


def test_every_decided_checkpoint_has_limits_and_a_floor():
    """The ship limits are relative to fp16, which is itself shipped."""
    assert set(limits.DECISIONS) == set(limits.LIMITS)
    assert all(limits.DECISIONS[name][FLOOR] == limits.SHIPPED for name in CHECKPOINTS)


def test_decisions_are_known_words():
    """A mistyped decision would be neither asserted nor expected to fail."""
    decided = {word for rows in limits.DECISIONS.values() for word in rows.values()}

    assert decided == {limits.SHIPPED, limits.STUDIED}


# Every number


@pytest.mark.parametrize("found", EVERY_ROW)
def test_limits_are_positive_finite_and_have_a_reason(found):
    """Each number of a row bounds something, and a sentence says why it is what it is."""
    numbers = [getattr(found, field.name) for field in fields(found) if field.name != "reason"]

    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert len(found.reason.split()) >= 5


@pytest.mark.parametrize("found", EVERY_ROW)
def test_limits_can_judge_their_metric(found):
    """No limit is one that verdicts calls nonsensical, and each end is itself acceptable."""
    for metric, bound in found.bounds().items():
        cell = judge_limit("fp8", "prefill", metric, bound.value, bound)
        assert cell.verdict == "passed", cell.reason


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_positive_and_finite(name):
    """No size is turned off, or turned into one that allows anything."""
    assert 0 < getattr(limits, name) < 10


def test_every_limit_is_bounded_in_its_direction():
    """A KL and a perplexity ratio may be at most, an agreement at least, its number."""
    found = limits.Limits(0.1, 0.2, 0.3, 1.4, 0.5, 0.6, "made up for this test")

    assert found.bounds() == {
        "kl_mean_nats": Bound(AT_MOST, 0.1),
        "float32/kl_mean_nats": Bound(AT_MOST, 0.2),
        "top1_frac": Bound(AT_LEAST, 0.3),
        "perplexity_ratio": Bound(AT_MOST, 1.4),
        "next_token/kl_mean_nats": Bound(AT_MOST, 0.5),
        "next_token/top1_frac": Bound(AT_LEAST, 0.6),
    }


@pytest.mark.parametrize("row", limits.BUNDLED)
def test_stored_run_is_within_its_limits(stored, row):
    """What was accepted as a baseline would pass the limits of today."""
    for phase, (metric, bound) in product(PHASES, limits.BUNDLED[row].bounds().items()):
        value = value_of(stored[row], phase, metric)
        if phase == "decode" and metric.startswith("next_token/"):
            assert value is None
        else:
            assert judge_limit(row, phase, metric, value, bound).verdict == "passed"


@pytest.mark.parametrize("row", limits.BUNDLED)
def test_stored_decode_agrees_with_prefill(stored, row):
    """The stored agreement is within the tolerance that the row's own loss gives."""
    own_loss = stored[row]["decode/prose/float32/kl_mean_nats"]

    assert stored[row]["decode/agreement/kl_mean_nats"] <= tolerances.agreement_nats(own_loss, CPU)


# Looking up


def test_limits_of_a_row():
    """A row's limits and decision are those of its checkpoint."""
    bundled, study = (SimpleNamespace(name=name) for name in CHECKPOINTS[::-1])

    for target in (CPU, H200):
        assert limits.limits_of(bundled, VARIANTS["fp8"], target) is limits.BUNDLED["fp8"]
        assert limits.limits_of(study, VARIANTS["fp8"], target) is limits.STUDY["fp8"]
    assert limits.decision_of(study, VARIANTS["fp16"]) == limits.SHIPPED
    assert limits.decision_of(study, VARIANTS["fp8"]) == limits.STUDIED


@pytest.mark.parametrize("key", limits.ENGINES, ids="-".join)
def test_engines_have_limits_of_their_own_where_they_differ_from_the_network(key):
    """On the interpreter a row keeps the limits of its network, which are the tighter ones."""
    name, row = key
    checkpoint = SimpleNamespace(name=name)

    network, engine = (
        limits.limits_of(checkpoint, VARIANTS[row], target) for target in (CPU, H200)
    )

    assert network is limits.LIMITS[name][row]
    assert engine is limits.ENGINES[key]
    assert engine.float32_kl_mean_nats > network.float32_kl_mean_nats


@pytest.mark.parametrize(
    "look_up",
    [
        partial(limits.limits_of, target=CPU),
        partial(limits.limits_of, target=H200),
        limits.decision_of,
    ],
    ids=["limits-cpu", "limits-h200", "decision"],
)
@pytest.mark.parametrize(
    ("name", "row", "obtained"),
    [
        ("/models/mine", "fp8", r"\[\]"),
        ("EleutherAI/gpt-neo-125m", "fp8-qkv", r"\['fp16', 'fp8'\]"),
    ],
)
def test_no_limits_is_an_error_that_names_what_to_add(look_up, name, row, obtained):
    """An unknown checkpoint or row is never without limits in silence."""
    message = (
        rf"^{name}: no limits for variant {row}, obtained rows {obtained}; add one with its "
        r"reason to tests/gate/limits\.py, or select rows with --variants$"
    )
    with pytest.raises(BaselineError, match=message):
        look_up(SimpleNamespace(name=name), VARIANTS[row])


# Rows of a model


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("bundled", set(limits.BUNDLED) - set(limits.MATRIX)),
        (STUDY_CHECKPOINT, {"fp16", "fp8", "fp8-out_proj"}),
        (STUDY_CHECKPOINT.partition("@")[0], {"fp16", "fp8", "fp8-out_proj"}),
        ("random:gpt-neo-125m", set(limits.STUDY_ROWS)),
        ("random:gpt-neo-2.7B", set(limits.STUDY_ROWS)),
        ("/models/mine", set(VARIANTS) - set(limits.MATRIX)),
    ],
)
def test_rows_of_a_model(model, rows):
    """A model with limits has its own rows, random weights the study's; the matrix is asked for."""
    found = limits.rows_of(model)

    assert set(found) == rows
    assert len(found) == len(rows)


def test_rows_named_for_models_exist():
    """A row that was renamed would be built by nobody."""
    only_built = {row for rows in limits.BUILD_ONLY.values() for row in rows}

    assert set(limits.STUDY_ROWS) | only_built <= VARIANTS.keys()
    assert FLOOR in limits.STUDY_ROWS


@pytest.mark.parametrize("name", limits.BUILD_ONLY)
def test_a_row_only_built_has_no_limits(name):
    """With limits of its quality it would be judged like any other row."""
    assert set(limits.BUILD_ONLY[name]).isdisjoint(limits.LIMITS[name])


# Speed


def asked_for(start):
    """Return the (phase, metric) of the speed tests' cells whose metric starts so."""
    marks = (test.pytestmark for test in gate_tests(test_speed))
    cells_of = [mark.kwargs for own in marks for mark in own if mark.name == "cells"]
    return {
        key
        for each in cells_of
        for key in product(each["phases"], each["metrics"])
        if key[1].startswith(start)
    }


def test_every_alternative_has_a_bound_and_every_bound_is_asked_for():
    """What is timed is judged, and no bound is of something that nobody times."""
    asked = {metric for _, metric in asked_for("alternative/")}

    assert {metric for name, metric in limits.ALTERNATIVES if name == ""} == asked
    assert {metric for _, metric in limits.ALTERNATIVES} == asked
    assert {name for name, _ in limits.ALTERNATIVES} <= {"", *MODELS.values()}


def test_every_alternative_of_the_library_is_timed():
    """A row that a test forgets would not be in the speed table."""
    rows = {
        (phase, metric.removeprefix("alternative/").removesuffix("_x"))
        for phase, metric in asked_for("alternative/")
    }

    assert rows == {(row.phase, row.name) for row in alternatives.ALTERNATIVES}


@pytest.mark.parametrize("key", limits.ALTERNATIVES, ids="-".join)
def test_bounds_of_alternatives_can_be_judged(key):
    """A ratio of times is above 0, and each end is itself acceptable."""
    bound = limits.ALTERNATIVES[key]

    assert 0 < bound.value < math.inf
    assert judge_limit(FLOOR, "decode", key[1], bound.value, bound).verdict == "passed"


def test_nothing_is_faster_than_reading_the_weights(t0):
    """All others must be slower than the engine; the read of its weights must not."""
    found = {metric: limits.alternative(t0, metric) for _, metric in limits.ALTERNATIVES}

    assert found.pop("alternative/weights_read_x").direction == AT_MOST
    assert {bound.direction for bound in found.values()} == {AT_LEAST}


def test_a_model_s_own_bound_comes_first(monkeypatch):
    """A row of a model replaces the general one for that model alone."""
    metric = "alternative/static_graph_x"
    own = {("bundled", metric): Bound(AT_LEAST, 2.0)}
    monkeypatch.setattr(limits, "ALTERNATIVES", {**limits.ALTERNATIVES, **own})

    found = [limits.alternative(SimpleNamespace(name=name), metric) for name in ("bundled", "x")]

    assert found == [Bound(AT_LEAST, 2.0), limits.ALTERNATIVES["", metric]]


def test_a_bound_that_nobody_gave_is_an_error(t0):
    """A new alternative is not unbounded in silence."""
    with pytest.raises(KeyError, match="alternative/telepathy_x"):
        limits.alternative(t0, "alternative/telepathy_x")


@pytest.mark.parametrize("key", limits.SLOWER, ids=str)
def test_a_known_miss_is_of_a_run_that_can_be_asked_for_and_is_bounded(key):
    """Target, model, shape and metric exist; what is excused is below the bound, and not much."""
    target, model, batch, context, metric = key
    assert TARGETS[target].needs_gpu
    assert batch >= 1
    assert LEAST_CONTEXT <= context <= RANDOM_POSITIONS
    assert random_architecture(model)
    bound, least = limits.alternative(SimpleNamespace(name=model), metric), limits.SLOWER[key]
    assert bound.direction == least.direction == AT_LEAST
    assert 0.5 < least < bound.value


@pytest.mark.parametrize("name", limits.STEP_OVERHEAD)
def test_step_overhead_is_of_a_model_that_can_be_named(name):
    """A step takes its engine's time and more."""
    assert name in MODELS.values()
    assert limits.step_overhead(SimpleNamespace(name=name)) == limits.STEP_OVERHEAD[name] > 1


def test_step_overhead_of_another_model_is_the_loosest():
    """How shallow its engine is nobody has said."""
    found = limits.step_overhead(SimpleNamespace(name="/models/mine"))

    assert found == max(limits.STEP_OVERHEAD.values())


def test_limits_of_the_stored_shape_are_not_those_of_another(t0):
    """What was measured at batch 1 and context 256 bounds that alone; the formula bounds all."""
    named, other = (replace(t0, name=name) for name in ("random:gpt-neo-125m", "random:another"))
    for row, phase in product(("fp16", "fp8"), PHASES):
        asked = VARIANTS[row], phase
        by_formula = limits.plan_mib(other, *asked)
        assert limits.plan_mib(named, *asked) == limits.PLAN_MIB[named.name, row, phase]
        assert limits.plan_mib(named, *asked, is_stored_shape=False) == by_formula
    assert limits.step_overhead(named) < limits.step_overhead(other)
    assert limits.step_overhead(named, is_stored_shape=False) == limits.step_overhead(other)


# What was published


@pytest.fixture(scope="module")
def published():
    """Return (folder, row) -> flat values of every published row."""
    names = [(folder, row) for folder in FOLDERS for row in baselines.names(folder)]
    found = {(folder, row): baselines.read(folder, row) for folder, row in names}
    return {key: each.values for key, each in found.items() if each.is_published}


def test_published_rows_are_within_the_study_s_limits(published):
    """A machine that repeats the study's own figures passes."""
    for (_, row), values in published.items():
        bounds = limits.STUDY[row].bounds()
        prose = {
            name: values[f"decode/prose/bf16/{name}"]
            for name in ("kl_mean_nats", "perplexity", "reference_perplexity")
        }
        ratio = prose["perplexity"] / prose["reference_perplexity"]
        assert bounds["kl_mean_nats"].allows(prose["kl_mean_nats"])
        assert bounds["perplexity_ratio"].allows(ratio)


@pytest.mark.parametrize("row", limits.STUDY)
def test_study_s_limits_are_a_quarter_above_the_worst_published_loss(published, row):
    """The headroom is what the reason says."""
    losses = [
        values["decode/prose/bf16/kl_mean_nats"]
        for (_, name), values in published.items()
        if name == row
    ]

    assert limits.STUDY[row].kl_mean_nats == pytest.approx(1.25 * max(losses), rel=0.01)


@pytest.mark.parametrize("name", ["kl_mean_nats", "perplexity"])
def test_published_machines_differ_by_less_than_the_tolerance(published, name):
    """A run that repeats another machine's figure is no regression."""
    for row in ("fp16", "fp8"):
        of_row = [values for (_, each), values in published.items() if each == row]
        values = [each[f"decode/prose/bf16/{name}"] for each in of_row]

        assert max(values) - min(values) <= tolerances.PUBLISHED_FRAC[name] * min(values)


# Ship limits


@pytest.mark.parametrize("name", limits.SHIP_LIMITS)
def test_ship_limits_can_be_met(name):
    """Each is a figure that is judged, and fp16 next to itself meets it."""
    of_fp16 = {"floor_ratio_x": 1.0, "top1_drop_frac": 0.0, "perplexity_ratio": 1.0}

    assert limits.SHIP_LIMITS[name].direction == AT_MOST
    assert of_fp16[name] < limits.SHIP_LIMITS[name].value < math.inf


def has_losses(folder, row):
    """Return whether a stored row was run in both phases."""
    values = baselines.read(folder, row).values
    return all(f"{phase}/prose/bf16/kl_mean_nats" in values for phase in PHASES)


STORED_ROWS = [(folder, row) for folder in MEASURED for row in sorted(baselines.names(folder))]


def test_stored_rows_without_a_loss_are_known_not_to_run():
    """On the H200 TensorRT-RTX has no kernel for one; every other row has its losses."""
    found = {(path.parts[-3], row) for path, row in STORED_ROWS if not has_losses(path, row)}
    known = known_failure(
        "tensorrt_rtx", "1.6.1.120", "9.0", VARIANTS["int8-weights"], "prefill", "run"
    )

    assert found == {("h200", "int8-weights")}
    assert known


@pytest.mark.parametrize(
    ("folder", "row"),
    [
        pytest.param(folder, row, id=f"{'/'.join(folder.parts[-3:])}-{row}")
        for folder, row in STORED_ROWS
        if has_losses(folder, row)
    ],
)
def test_decisions_hold_for_the_stored_runs_with_evidence(folder, row):
    """KL over fp16's with its error decides every row, far from 2: no decision is inconclusive."""
    own, floor = (baselines.read(folder, name).values for name in (row, FLOOR))
    limit = limits.SHIP_LIMITS["floor_ratio_x"].value

    told = set()
    for phase in PHASES:
        (kl, error), (floor_kl, floor_error) = (
            [values[f"{phase}/prose/bf16/{name}"] for name in ("kl_mean_nats", KL_ERROR)]
            for values in (own, floor)
        )
        ratio = kl / floor_kl
        # Without the pairs, which are not stored to bf16: an error of both, and no smaller one.
        half = ratio * T_95 * math.hypot(error / kl, floor_error / floor_kl)
        told.add((ratio + half <= limit) - (ratio - half > limit))

    assert told == {1 if limits.DECISIONS["bundled"][row] == limits.SHIPPED else -1}


@pytest.mark.parametrize("row", limits.BUNDLED)
def test_stored_perplexity_and_top1_keep_no_shipped_row_from_shipping(stored, row):
    """A shipped row's stored values are within the other two limits as well."""
    if limits.DECISIONS["bundled"][row] == limits.SHIPPED:
        for phase in PHASES:
            own, floor = (
                {
                    name: value_of(stored[each], phase, name)
                    for name in ("top1_frac", "perplexity_ratio")
                }
                for each in (row, FLOOR)
            )
            drop = floor["top1_frac"] - own["top1_frac"]
            assert limits.SHIP_LIMITS["top1_drop_frac"].allows(drop)
            assert limits.SHIP_LIMITS["perplexity_ratio"].allows(own["perplexity_ratio"])


def test_the_study_s_own_figures_are_judged_as_the_study_did():
    """FP8 on a B300 (KL 0.0844, 15 points of top-1, perplexity 64.44 of 58.55): not shipped."""
    figures = {
        "floor_ratio_x": 0.0844 / 0.0023,
        "top1_drop_frac": 0.15,
        "perplexity_ratio": 64.44 / 58.55,
    }

    assert figures.keys() == limits.SHIP_LIMITS.keys()
    assert not any(bound.allows(figures[name]) for name, bound in limits.SHIP_LIMITS.items())


# Plan sizes


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", limits.BUNDLED)
def test_stored_plan_size_is_within_its_bounds(bundled, stored, row, phase):
    """The formula explains every plan that was built."""
    smallest, largest = limits.plan_mib(bundled, VARIANTS[row], phase)

    assert smallest <= stored[row][f"{phase}/plan_mib"] <= largest


@pytest.mark.parametrize(
    ("row", "stored_bytes"),
    [
        # T0: wte 2048, wpe 2048, 12608 a block, ln_f 64; the head is a second wte.
        ("fp16", 2 * (2048 + 2048 + 2 * 12608 + 64 + 2048)),
        ("fp32", 4 * (2048 + 2048 + 2 * 12608 + 64 + 2048)),
        # q, k, v, c_fc and c_proj: 3 x 1024 + 2 x 4096 a block, one byte less each.
        ("fp8", 2 * (2048 + 2048 + 2 * 12608 + 64 + 2048) - 2 * 11264),
        ("fp8-q_proj", 2 * (2048 + 2048 + 2 * 12608 + 64 + 2048) - 2 * 1024),
        ("fp8-dequantize-fp32", 2 * (2048 + 2048 + 2 * 12608 + 64 + 2048) - 2 * 11264),
    ],
)
def test_plan_size_is_weights_and_kernels(t0, row, stored_bytes):
    """2 bytes in fp16, 4 in fp32, 1 in FP8, a tied table twice; kernels beyond that."""
    smallest, largest = limits.plan_mib(t0, VARIANTS[row], "decode")

    assert smallest * limits.MIB == stored_bytes
    assert largest - smallest == pytest.approx(limits.PLAN_KERNELS_MIB + 2 * limits.PLAN_LAYER_MIB)


@pytest.mark.parametrize(
    ("row", "sources"), [("fp16", 0), ("fp8", 2), ("fp8-c_proj", 2), ("fp8-no-c_proj", 0)]
)
def test_prefill_plan_has_room_for_a_kernel_source_a_quantized_c_proj(t0, row, sources):
    """One for each layer that multiplies c_proj in FP8, in prefill alone."""
    decode, prefill = (limits.plan_mib(t0, VARIANTS[row], each) for each in ("decode", "prefill"))

    assert prefill[0] == decode[0]
    assert prefill[1] - decode[1] == pytest.approx(sources * limits.PLAN_KERNEL_SOURCE_MIB)


def test_plan_of_an_untied_head_holds_it_once(t0):
    """An own head is among the weights already, so the sizes are equal."""
    untied = tiny_checkpoint(replace(T0, tied_head=False))

    sizes = [limits.plan_mib(each, VARIANTS["fp16"], "decode") for each in (t0, untied)]

    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", QUANTIZED)
def test_plan_of_fp16_does_not_pass_as_one_of_the_recipe(row, phase):
    """At the real size the bounds of fp16 and of the recipe's rows do not meet."""
    checkpoint = of_shape(GPT_NEO_125M, "EleutherAI/gpt-neo-125m")

    _, largest = limits.plan_mib(checkpoint, VARIANTS[row], phase)
    smallest, _ = limits.plan_mib(checkpoint, VARIANTS[FLOOR], phase)

    assert largest < smallest


@pytest.mark.parametrize("key", sorted(limits.PLAN_MIB), ids="/".join)
def test_random_rows_are_real_and_near_the_formula(key):
    """A fixed pair is of a row that exists, is what plan_mib returns, and meets the formula."""
    name, row, phase = key
    smallest, largest = limits.PLAN_MIB[key]
    formula = limits.plan_mib(of_shape(GPT_NEO_125M, "as a formula"), VARIANTS[row], phase)

    assert name.startswith("random:")
    assert phase in PHASES
    assert limits.plan_mib(of_shape(GPT_NEO_125M, name), VARIANTS[row], phase) == (
        smallest,
        largest,
    )
    assert formula[0] - 1 <= smallest < largest
    assert smallest <= {"fp16": 313.6, "fp8": 239.5}[row] <= largest  # the study's plans
    assert formula[0] <= {"fp16": 313.6, "fp8": 239.5}[row] <= formula[1]


def test_rows_of_random_weights_differ_in_their_plans():
    """A row of the matrix with the recipe's network and other ranges is not among them."""
    rows = limits.all_rows_of("random:gpt-neo-125m")
    plain = {"name": "", "summary": "", "activation_scale_factor": 1.0, "calibration": "max"}
    networks = [replace(VARIANTS[row], **plain) for row in rows]

    assert set(limits.OTHER_RANGES) < set(limits.MATRIX)
    assert set(rows) == {*limits.STUDY_ROWS, *limits.MATRIX} - {*limits.OTHER_RANGES}
    # The study built scales x 1.5 too.
    assert len(set(networks)) == len(networks) - 1
    assert all(replace(VARIANTS[row], **plain) in networks for row in limits.OTHER_RANGES)


def test_a_random_row_without_fixed_sizes_has_the_formula_s():
    """The table is for what was measured; every other row of random weights has bounds too."""
    random, named = (of_shape(GPT_NEO_125M, name) for name in ("random:gpt-neo-125m", "other"))

    found = limits.plan_mib(random, VARIANTS["fp32"], "decode")

    assert found == limits.plan_mib(named, VARIANTS["fp32"], "decode")


# Plans that TensorRT-RTX 1.6.1.120 built on a CPU, with no baseline of them.
BUILT_MIB = {
    ("fp16", "prefill"): 5308.944, ("fp16", "decode"): 5307.023,
    ("fp8", "prefill"): 3118.674, ("fp8", "decode"): 3107.194,
}  # fmt: skip


@pytest.mark.parametrize(("row", "phase"), BUILT_MIB, ids="-".join)
def test_plans_of_the_largest_model_are_within_the_formula(row, phase):
    """What lies beside the weights grows with the layers, 32 here."""
    name = "random:gpt-neo-2.7B"
    smallest, largest = limits.plan_mib(
        of_shape(random_architecture(name), name), VARIANTS[row], phase
    )
    assert smallest < BUILT_MIB[row, phase] < largest


RANDOM = [path for path in ALL_FOLDERS if MODELS.get(path.name, "").startswith("random:")]


@pytest.mark.parametrize("folder", RANDOM, ids=lambda path: "/".join(path.parts[-3:]))
def test_stored_plans_of_random_rows_are_within_their_bounds(folder):
    """Rows are those of the table, fixed pairs are of stored rows, and all plans are in bounds.

    At the study's shapes every row that the study built is there.
    """
    name = MODELS[folder.name]
    checkpoint, stored = of_shape(random_architecture(name), name), baselines.names(folder)

    assert {FLOOR} < stored <= set(limits.all_rows_of(name))
    assert name != "random:gpt-neo-125m" or stored >= set(limits.STUDY_ROWS)
    assert {row for model, row, _ in limits.PLAN_MIB if model == name} <= stored
    for row, phase in product(stored, PHASES):
        smallest, largest = limits.plan_mib(checkpoint, VARIANTS[row], phase)
        stored_mib = baselines.read(folder, row).values[f"{phase}/plan_mib"]
        assert smallest <= stored_mib <= largest, (row, phase)
