"""The gate's limits: a reason for every number, and the key sets of the tables that must agree."""

import math
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import T0, tiny_checkpoint

from gptneo_trt import baselines
from gptneo_trt.data import Architecture, Checkpoint
from gptneo_trt.errors import BaselineError
from gptneo_trt.network import PHASES
from gptneo_trt.variants import FLOOR, VARIANTS
from gptneo_trt.verdicts import AT_LEAST, AT_MOST, Bound, judge_limit
from gptneo_trt.weights import parameter_shapes
from tests.gate import limits

BASELINES = Path(__file__).parents[2] / "baselines"
STORED = BASELINES / "cpu/tensorrt_rtx-1.6.1.120/bundled"
FOLDERS = [path for path in sorted(BASELINES.glob("*/*/*")) if path.name in limits.LIMITS]
QUANTIZED = sorted(name for name in VARIANTS if len(VARIANTS[name].quantized) >= 5)
CHECKPOINTS = sorted(limits.LIMITS)
ROWS = [(name, row) for name in CHECKPOINTS for row in limits.LIMITS[name]]
GPT_NEO_125M = Architecture(
    vocab_size=50257,
    hidden_size=768,
    num_heads=12,
    intermediate_size=3072,
    max_positions=2048,
    window_size=256,
    attention_layers=("global", "local") * 6,
)


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
    rows = set(VARIANTS)

    assert set(limits.BUNDLED) == rows
    assert set(limits.DECISIONS["bundled"]) == rows
    assert baselines.names(STORED) == rows


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "/".join(path.parts[-3:]))
def test_every_folder_of_stored_runs_is_complete(folder):
    """Wherever runs are stored, each row with limits has its JSON and its token values."""
    rows = limits.LIMITS[folder.name]
    expected = {f"{row}{suffix}" for row in rows for suffix in (".json", ".tokens.npz")}

    assert {path.name for path in folder.iterdir()} == expected


def test_stored_runs_measured_the_same_things(stored):
    """No stored row lacks a value that another one has."""
    assert len({frozenset(values) for values in stored.values()}) == 1


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


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_limits_are_positive_finite_and_have_a_reason(name, row):
    """Each number of a row bounds something, and a sentence says why it is what it is."""
    found = limits.LIMITS[name][row]
    numbers = [getattr(found, field.name) for field in fields(found) if field.name != "reason"]

    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert len(found.reason.split()) >= 5


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_limits_can_judge_their_metric(name, row):
    """No limit is one that verdicts calls nonsensical, and each end is itself acceptable."""
    for metric, bound in limits.LIMITS[name][row].bounds().items():
        cell = judge_limit(row, "prefill", metric, bound.value, bound)
        assert cell.verdict == "passed", cell.reason


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


@pytest.mark.parametrize("row", VARIANTS)
def test_stored_run_is_within_its_limits(stored, row):
    """What was accepted as a baseline would pass the limits of today."""
    for phase, (metric, bound) in product(PHASES, limits.BUNDLED[row].bounds().items()):
        value = value_of(stored[row], phase, metric)
        if phase == "decode" and metric.startswith("next_token/"):
            assert value is None
        else:
            assert judge_limit(row, phase, metric, value, bound).verdict == "passed"


@pytest.mark.parametrize("row", VARIANTS)
def test_stored_decode_agrees_with_prefill(stored, row):
    """The stored agreement is within the tolerance that the row's own loss gives."""
    own_loss = stored[row]["decode/prose/float32/kl_mean_nats"]

    assert stored[row]["decode/agreement/kl_mean_nats"] <= limits.agreement_nats(own_loss)


# Looking up


def test_limits_of_a_row():
    """A row's limits and decision are those of its checkpoint."""
    bundled, study = (SimpleNamespace(name=name) for name in CHECKPOINTS[::-1])

    assert limits.limits_of(bundled, VARIANTS["fp8"]) is limits.BUNDLED["fp8"]
    assert limits.limits_of(study, VARIANTS["fp8"]) is limits.STUDY["fp8"]
    assert limits.decision_of(study, VARIANTS["fp16"]) == limits.SHIPPED
    assert limits.decision_of(study, VARIANTS["fp8"]) == limits.STUDIED


@pytest.mark.parametrize("look_up", [limits.limits_of, limits.decision_of])
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


# Ship limits


def test_ship_bounds_are_relative_to_the_floor():
    """Half of the KL may be the recipe's, two in a hundred tokens may change."""
    found = limits.ship_bounds({"kl_mean_nats": 3e-4, "top1_frac": 0.98, "perplexity_ratio": 1.0})

    assert found == {
        "kl_mean_nats": Bound(AT_MOST, 6e-4),
        "top1_frac": Bound(AT_LEAST, pytest.approx(0.96)),
        "perplexity_ratio": Bound(AT_MOST, 1.01),
    }


@pytest.mark.parametrize("metric", ["kl_mean_nats", "top1_frac"])
def test_ship_bound_of_a_nan_floor_allows_nothing(metric):
    """A floor that is not a number makes no row shippable."""
    floor = {"kl_mean_nats": 3e-4, "top1_frac": 0.98} | {metric: float("nan")}

    bound = limits.ship_bounds(floor)[metric]

    assert not bound.allows(0.0)
    assert not bound.allows(1.0)


@pytest.mark.parametrize("row", VARIANTS)
def test_decisions_hold_for_the_stored_run(stored, row):
    """A shipped row's stored values are within the ship limits, a studied row's miss one."""
    within = all(
        bound.allows(value_of(stored[row], phase, metric))
        for phase in PHASES
        for metric, bound in limits.ship_bounds(
            {name: value_of(stored[FLOOR], phase, name) for name in ("kl_mean_nats", "top1_frac")}
        ).items()
    )

    assert within == (limits.DECISIONS["bundled"][row] == limits.SHIPPED)


def test_the_study_s_own_figures_are_judged_as_the_study_did():
    """FP8 on a B300 (KL 0.0844, 15 points of top-1, perplexity 64.44 of 58.55): not shipped."""
    bounds = limits.ship_bounds({"kl_mean_nats": 0.0023, "top1_frac": 0.95})

    assert not bounds["kl_mean_nats"].allows(0.0844)
    assert not bounds["top1_frac"].allows(0.95 - 0.15)
    assert not bounds["perplexity_ratio"].allows(64.44 / 58.55)


# Tolerances


def test_agreement_grows_with_the_row_s_own_loss():
    """Half of what a row loses, and never less than what a row without FP8 shows."""
    assert limits.agreement_nats(0.0) == limits.AGREEMENT_NATS
    assert limits.agreement_nats(1e-6) == limits.AGREEMENT_NATS
    assert limits.agreement_nats(0.008) == pytest.approx(0.004)


@given(st.floats(0, 100), st.floats(0, 100))
def test_agreement_is_monotonic(one, other):
    """A row that loses more is allowed no less."""
    smaller, larger = sorted((one, other))

    assert limits.agreement_nats(smaller) <= limits.agreement_nats(larger)


def test_agreement_of_a_nan_loss_is_no_looser_than_that_of_none():
    """A loss that is not a number earns no tolerance."""
    assert limits.agreement_nats(float("nan")) == limits.AGREEMENT_NATS


def test_regression_tolerance_of_kl_is_a_fraction_with_a_floor():
    """A tenth of the stored mean, and never less than the noise of fp32's own rounding."""
    assert limits.regression_tolerance("kl_mean_nats", 0.008) == pytest.approx(0.0008)
    assert limits.regression_tolerance("kl_mean_nats", 0.0) == limits.REGRESSION_NATS
    assert limits.regression_tolerance("kl_mean_nats", -1e-9) == limits.REGRESSION_NATS


@pytest.mark.parametrize("stored_mean", [0.0, 0.1, 50.0])
def test_regression_tolerances_of_other_metrics_are_absolute(stored_mean):
    """NLL and disagreement may move by so much, wherever they started."""
    tolerance = limits.regression_tolerance

    assert tolerance("nll_mean_nats", stored_mean) == limits.REGRESSION_NLL_NATS
    assert tolerance("top1_disagreement_frac", stored_mean) == limits.REGRESSION_TOP1_FRAC


def test_a_metric_without_a_tolerance_is_an_error():
    """A regression metric that nobody gave a tolerance is not compared with 0 or infinity."""
    with pytest.raises(KeyError, match="true_prob_rms_frac"):
        limits.regression_tolerance("true_prob_rms_frac", 0.1)


# Plan sizes


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", VARIANTS)
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
    smallest, largest = limits.plan_mib(t0, VARIANTS[row], "prefill")

    assert smallest * limits.MIB == stored_bytes
    assert largest - smallest == pytest.approx(limits.PLAN_KERNELS_MIB)


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


def test_a_random_row_without_fixed_sizes_has_the_formula_s():
    """The table is for what was measured; every other row of random weights has bounds too."""
    random, named = (of_shape(GPT_NEO_125M, name) for name in ("random:gpt-neo-125m", "other"))

    found = limits.plan_mib(random, VARIANTS["fp32"], "decode")

    assert found == limits.plan_mib(named, VARIANTS["fp32"], "decode")


@pytest.mark.parametrize("key", sorted(limits.PLAN_MIB), ids="/".join)
def test_stored_plan_of_a_random_row_is_within_its_bounds(key):
    """Fixed pairs and stored runs name the same rows, and agree."""
    name, row, phase = key
    folder = STORED.parent / name.replace(":", "-")
    smallest, largest = limits.PLAN_MIB[key]

    assert baselines.names(folder) == {each for _, each, _ in limits.PLAN_MIB}
    assert smallest <= baselines.read(folder, row).values[f"{phase}/plan_mib"] <= largest
