"""Logits, K and V are finite; the loss is within limits, as stored, and as decided."""

import pytest

from gptneo_trt.data import Cell
from gptneo_trt.network import PHASES
from gptneo_trt.paired import paired_difference
from gptneo_trt.variants import FLOOR, VARIANTS
from gptneo_trt.verdicts import (
    AT_MOST,
    Bound,
    judge_limit,
    judge_regression,
    judge_stored,
    not_measured,
)
from tests.gate import limits
from tests.gate.cells import PUBLISHED_VALUES, OutsideShipLimitsError
from tests.gate.run import BASELINE_PREFIX, STORED_REFERENCE, regression_tokens

LIMITED = ("kl_mean_nats", "float32/kl_mean_nats", "top1_frac", "perplexity_ratio")
NEXT_TOKEN = ("next_token/kl_mean_nats", "next_token/top1_frac")
REGRESSIONS = ("kl_mean_nats", "nll_mean_nats", "top1_disagreement_frac")


def value_of(measurement, metric):
    """Return a metric: "kl_mean_nats" is prose's to bf16, prefixes name what differs."""
    *prefix, name = metric.split("/")
    text, reference = "prose", "bf16"
    if prefix == ["float32"]:
        reference = "float32"
    if prefix == ["next_token"]:
        text = "next_token"
    return measurement.metrics[f"{text}/{reference}"].values[name]


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
    judge(judge_limit(variant.name, phase, metric, value_of(measurement, metric), bound))


@pytest.mark.cells(phases=PHASES, metrics=LIMITED, quality=True)
def test_loss_is_within_the_limits(variant, phase, metric, measured, judge, checkpoint, target):
    """What a row loses against Hugging Face's model is at most what limits.py allows."""
    _judge_limit(variant, phase, metric, measured, judge, checkpoint, target)


@pytest.mark.cells(phases=("prefill",), metrics=NEXT_TOKEN, quality=True)
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
    measurement = measured(variant, phase)
    if not comparing:
        pytest.skip("baselines are being written")
    if measurement.non_finite:
        judge(not_measured(variant.name, phase, metric, measurement.non_finite))
    name, found = metric.removeprefix(BASELINE_PREFIX), stored(variant)
    if found.is_published:
        judge(_published(variant, phase, metric, measurement, found))
        return
    tokens = measurement.metrics[f"prose/{STORED_REFERENCE}"].tokens
    current, text = regression_tokens(tokens)[name]
    before = found.tokens[f"{phase}/{metric}"]
    paired = paired_difference(before, current, text)
    mean = float(before.mean(dtype="float64"))
    tolerance = limits.regression_tolerance(name, mean)
    judge(judge_regression(variant.name, phase, metric, paired, mean, tolerance))


def _published(variant, phase, metric, measurement, found):
    """Judge an aggregate against one that was published without values a token."""
    name = PUBLISHED_VALUES[metric.removeprefix(BASELINE_PREFIX)]
    value = f"{phase}/{name}"
    text, _, figure = name.rpartition("/")
    values = measurement.metrics[text].values
    # The published text has an error too, of about the same size.
    error = values["kl_mean_stderr_nats"] if figure == "kl_mean_nats" else 0.0
    allowed = found.rounding[value] + limits.PUBLISHED_ERRORS * error
    return judge_stored(
        variant.name, phase, metric, values[figure], found.values[value],
        limits.PUBLISHED_FRAC[figure], tolerance_abs=allowed,
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
    bound = Bound(AT_MOST, limits.agreement_nats(own_loss, target))
    obtained = measurement.agreement.values["kl_mean_nats"]
    judge(judge_limit(variant.name, phase, metric, obtained, bound))


@pytest.mark.cells(phases=("both",), metrics=("ship",), quality=True)
def test_ship_decision_holds(variant, phase, metric, measured, judge, gate_run, checkpoint):
    """A shipped row is within the ship limits; a studied row still misses them."""
    decision = limits.decision_of(checkpoint, variant)
    misses = []
    for each in PHASES:
        own, floor = measured(variant, each), measured(VARIANTS[FLOOR], each)
        broken = own.non_finite or floor.non_finite
        if broken:  # not what a studied row is expected to miss
            judge(not_measured(variant.name, phase, metric, f"{each}: {broken}"))
        bounds = limits.ship_bounds(floor.metrics["prose/bf16"].values)
        misses += [
            f"{each}: {name} {value_of(own, name):.4g}, expected {bound}"
            for name, bound in bounds.items()
            if not bound.allows(value_of(own, name))
        ]
    as_decided = bool(misses) == (decision == limits.STUDIED)
    reason = f"{decision}: " + ("; ".join(misses) or "within the ship limits")
    if not as_decided and not misses:
        reason += "; now within the limits: revisit the decision"
    verdict = "passed" if as_decided else "failed"
    obtained = "outside the ship limits" if misses else "within the ship limits"
    cell = Cell(variant.name, phase, metric, obtained, decision, None, verdict, reason)
    gate_run.cells.append(cell)
    if misses:
        raise OutsideShipLimitsError(reason)
