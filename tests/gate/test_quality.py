"""Logits, K and V are finite; the loss is within limits, as stored, and as decided."""

import pytest

from gptneo_trt import ratios
from gptneo_trt.data import Cell
from gptneo_trt.network import PHASES
from gptneo_trt.paired import paired_difference
from gptneo_trt.variants import FLOOR, VARIANTS
from gptneo_trt.verdicts import (
    AT_MOST,
    WITHIN,
    Bound,
    judge_decision,
    judge_limit,
    judge_regression,
    judge_stored,
    not_measured,
)
from tests.gate import limits, tolerances
from tests.gate.cells import PUBLISHED_VALUES, OutsideShipLimitsError
from tests.gate.run import BASELINE_PREFIX, regression_values

LIMITED = ("kl_mean_nats", "float32/kl_mean_nats", "top1_frac", "perplexity_ratio")
NEXT_TOKEN = ("next_token/kl_mean_nats", "next_token/top1_frac")
STANDARD_ERRORS = {
    "kl_mean_nats": "kl_mean_stderr_nats",
    "top1_frac": "top1_stderr_frac",
    "perplexity_ratio": "perplexity_ratio_log_stderr",
}
REGRESSIONS = ("kl_mean_nats", "nll_mean_nats", "top1_disagreement_frac")


def value_of(measurement, metric):
    """Return a metric: "kl_mean_nats" is prose's to bf16, prefixes name what differs."""
    values, name = _values_of(measurement, metric)
    return values[name]


def error_of(measurement, metric):
    """Return the standard error of a metric over texts, in its unit; None where it has none."""
    values, name = _values_of(measurement, metric)
    error = values.get(STANDARD_ERRORS[name])
    # d exp(x) = exp(x) dx: the error of a ratio is that of its logarithm times the ratio.
    return error * values[name] if error and name == "perplexity_ratio" else error


def _values_of(measurement, metric):
    """Return the values of a text set and reference, and the name of a metric among them."""
    *prefix, name = metric.split("/")
    text, reference = "prose", "bf16"
    if prefix == ["float32"]:
        reference = "float32"
    if prefix == ["next_token"]:
        text = "next_token"
    return measurement.metrics[f"{text}/{reference}"].values, name


@pytest.mark.cells(phases=PHASES, metrics=("non_finite",), quality=True)
def test_everything_is_finite(variant, phase, metric, measured, judge):
    """No NaN or infinity in logits, K or V; checked before any other metric."""
    found = measured(variant, phase).non_finite
    verdict, reason = ("failed", found) if found else ("passed", "logits, K and V are finite")
    judge(Cell(variant.name, phase, metric, found or 0, 0, None, verdict, reason))


def _judge_limit(variant, phase, metric, measured, judge, checkpoint, target):
    measurement = measured(variant, phase)
    if measurement.non_finite:
        judge(not_measured(variant.name, phase, metric, measurement.non_finite))
    bound = limits.limits_of(checkpoint, variant, target).bounds()[metric]
    value, error = value_of(measurement, metric), error_of(measurement, metric)
    judge(judge_limit(variant.name, phase, metric, value, bound, error))


@pytest.mark.cells(phases=PHASES, metrics=LIMITED, quality=True, limited=True)
def test_loss_is_within_the_limits(variant, phase, metric, measured, judge, checkpoint, target):
    """What a row loses against Hugging Face's model is at most what limits.py allows."""
    _judge_limit(variant, phase, metric, measured, judge, checkpoint, target)


@pytest.mark.cells(phases=("prefill",), metrics=NEXT_TOKEN, quality=True, limited=True)
def test_next_token_is_within_the_limits(
    variant, phase, metric, measured, judge, checkpoint, target
):
    """The same for the token that follows a question or a prompt."""
    _judge_limit(variant, phase, metric, measured, judge, checkpoint, target)


@pytest.mark.cells(
    phases=PHASES, metrics=tuple(BASELINE_PREFIX + name for name in REGRESSIONS), quality=True
)
def test_loss_is_the_stored_one(variant, phase, metric, measured, judge, stored, comparing):
    """Token by token, a row loses no more than the stored run did."""
    _judge_regression(variant, phase, metric, measured, judge, stored, comparing)


@pytest.mark.cells(
    phases=("prefill",),
    metrics=(f"{BASELINE_PREFIX}sampled/kl_mean_nats",),
    quality=True,
    text="sampled",
)
def test_loss_on_sampled_text_is_the_stored_one(
    variant, phase, metric, measured, judge, stored, comparing
):
    """The same on text that was sampled from the checkpoint: twice the texts of the prose."""
    _judge_regression(variant, phase, metric, measured, judge, stored, comparing)


def _judge_regression(variant, phase, metric, measured, judge, stored, comparing):
    measurement = measured(variant, phase)
    if not comparing:
        pytest.skip("baselines are being written")
    if measurement.non_finite:
        judge(not_measured(variant.name, phase, metric, measurement.non_finite))
    found = stored(variant)
    judge_one = _published if found.is_published else _paired
    judge(judge_one(variant, phase, metric, measurement, found))


def _paired(variant, phase, metric, measurement, found):
    """Judge the values a token against stored ones of the same tokens."""
    text_set, _, name = metric.removeprefix(BASELINE_PREFIX).rpartition("/")
    text_set = text_set or "prose"
    current, text = regression_values(measurement)[metric.removeprefix(BASELINE_PREFIX)]
    before = found.tokens[f"{phase}/{metric}"]
    paired = paired_difference(
        before, current, text, tolerances.CONFIDENCE, tolerances.POWER,
        noise_standard_error=found.values.get(f"{phase}/{metric}/noise", 0.0),
    )  # fmt: skip
    mean = float(before.mean(dtype="float64"))
    own_kl = float(found.tokens[f"{phase}/{BASELINE_PREFIX}kl_mean_nats"].mean(dtype="float64"))
    tolerance = tolerances.regression_tolerance(text_set, name, mean, own_kl)
    return judge_regression(variant.name, phase, metric, paired, mean, tolerance)


def _published(variant, phase, metric, measurement, found):
    """Judge an aggregate against one that was published without values a token."""
    name = PUBLISHED_VALUES[metric.removeprefix(BASELINE_PREFIX)]
    value = f"{phase}/{name}"
    text, _, figure = name.rpartition("/")
    values = measurement.metrics[text].values
    # The published text has an error too, of about the same size.
    error = values["kl_mean_stderr_nats"] if figure == "kl_mean_nats" else 0.0
    allowed = found.rounding[value] + tolerances.PUBLISHED_ERRORS * error
    return judge_stored(
        variant.name, phase, metric, values[figure], found.values[value],
        tolerances.PUBLISHED_FRAC[figure], tolerance_abs=allowed,
    )  # fmt: skip


@pytest.mark.cells(phases=("decode",), metrics=("agreement/kl_mean_nats",), quality=True)
def test_decode_agrees_with_prefill(variant, phase, metric, measured, judge, target):
    """Teacher-forced decode gives what prefill gives on the same tokens."""
    measurement, prefill = measured(variant, phase), measured(variant, "prefill")
    if measurement.agreement is None or prefill.non_finite:
        broken = str(measurement.non_finite or prefill.non_finite)
        judge(not_measured(variant.name, phase, metric, broken))
    # Prefill's loss: a broken decode must not raise its own limit.
    own_loss = prefill.metrics["prose/float32"].values["kl_mean_nats"]
    bound = Bound(AT_MOST, tolerances.agreement_nats(own_loss, target))
    values = measurement.agreement.values
    obtained, error = values["kl_mean_nats"], values.get("kl_mean_stderr_nats")
    judge(judge_limit(variant.name, phase, metric, obtained, bound, error))


@pytest.mark.cells(phases=("both",), metrics=("ship",), quality=True)
def test_ship_decision_holds(variant, phase, metric, measured, judge, gate_run, checkpoint):
    """A shipped row is within the ship limits; a studied row misses one; both with evidence."""
    decision, judged = limits.decision_of(checkpoint, variant), {}
    for each in PHASES:
        own, floor = measured(variant, each), measured(VARIANTS[FLOOR], each)
        broken = own.non_finite or floor.non_finite
        if broken:  # not what a studied row is expected to miss
            judge(not_measured(variant.name, phase, metric, f"{each}: {broken}"))
        figures = _ship_figures(own.metrics["prose/bf16"], floor.metrics["prose/bf16"])
        gate_run.add_floor_ratio(variant.name, each, figures["floor_ratio_x"])
        for name, bound in limits.SHIP_LIMITS.items():
            judged[f"{each}: {name}"] = (figures[name], bound)
    cell = judge_decision(variant.name, phase, metric, decision, judged)
    if cell.verdict == "inconclusive":
        judge(cell)
    gate_run.cells.append(cell)
    if cell.obtained != WITHIN:
        raise OutsideShipLimitsError(cell.reason)


def _ship_figures(own, floor):
    """Return name -> Interval of what the ship limits bound, of a row next to fp16's."""
    return {
        "floor_ratio_x": ratios.floor_ratio(own.tokens, floor.tokens, tolerances.CONFIDENCE),
        "top1_drop_frac": ratios.top1_drop(own.tokens, floor.tokens, tolerances.CONFIDENCE),
        "perplexity_ratio": ratios.perplexity_ratio(own.tokens, tolerances.CONFIDENCE),
    }
