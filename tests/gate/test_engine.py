"""Engines load, multiply in FP8 what their row says, give the same bits again, and lose no more
than the recipe that they were built from."""

from functools import cache

import numpy as np
import pytest

from gptneo_trt import metrics
from gptneo_trt.data import Cell
from gptneo_trt.engine_verdicts import judge_excess
from gptneo_trt.network import PHASES
from gptneo_trt.paired import paired_difference
from gptneo_trt.verdicts import AT_LEAST, AT_MOST, Bound, judge_limit, not_measured
from tests.gate import tolerances
from tests.gate.measure import distribution

LEFT_BEHIND = (float("nan"), 6e4)


def directly_compared(prose, expected, obtained):
    """Return the Metrics of an engine's logits to the interpreter's, float32 [N, T, V] both."""
    reference = distribution(prose[:, : expected.shape[1]], expected)
    return metrics.summarize(metrics.compare(reference, obtained.reshape(-1, obtained.shape[-1])))


@pytest.fixture(scope="session")
def direct(engines, measured, interpreted):
    """Return a function (variant, phase) -> Metrics of the engine's logits to the interpreter's."""

    @cache
    def compared(variant, phase):
        expected, obtained = interpreted(variant, phase).logits, measured(variant, phase).logits
        return directly_compared(engines.prose, expected, obtained)

    return compared


def _finite_pair(variant, phase, metric, measured, interpreted, judge):
    """Return what engine and interpreter gave, unless there is something not finite in it."""
    engine, recipe = measured(variant, phase), interpreted(variant, phase)
    broken = engine.non_finite or recipe.non_finite
    if broken:
        judge(not_measured(variant.name, phase, metric, broken))
    return engine, recipe


@pytest.mark.cells(phases=PHASES, metrics=("engine/loads",), hardware=True, stage="deserialize")
def test_engine_loads(variant, phase, metric, engines, gate_run, judge):
    """The plan becomes an engine with a context on this GPU."""
    loaded = engines.engine(variant, phase).loaded
    gate_run.add_value(variant.name, f"{phase}/load_s", loaded.load_s)
    reason = "; ".join(("loaded", *loaded.log.lines))
    judge(Cell(variant.name, phase, metric, "loaded", None, None, "passed", reason))


@pytest.mark.cells(phases=PHASES, metrics=("engine/quantized_projections",), hardware=True)
def test_exactly_the_intended_projections_run_quantized(
    variant, phase, metric, engines, checkpoint, judge
):
    """The engine's inspector shows quantized inputs for the row's projections, and no others."""
    found, expected = set(engines.engine(variant, phase).quantized_modules()), set()
    if variant.is_calibrated:  # weights alone are multiplied in the compute type
        expected = set(variant.quantized_modules(checkpoint.architecture.num_layers))
    reason = f"{len(found)} projections multiply in {variant.quantized_format.upper()}"
    if found != expected:
        reason += f"; missing: {sorted(expected - found)}; not intended: {sorted(found - expected)}"
    verdict = "passed" if found == expected else "failed"
    judge(Cell(variant.name, phase, metric, len(found), len(expected), None, verdict, reason))


def _judge_same_bits(variant, phase, metric, judge, pairs):
    """Judge whether the logits of each pair (what, expected, obtained) are bitwise equal."""
    different = [
        f"{what}: {int(np.sum(expected.view('i4') != obtained.view('i4')))} of {expected.size}"
        for what, expected, obtained in pairs
        if expected.tobytes() != obtained.tobytes()
    ]
    verdict = "failed" if different else "passed"
    reason = f"logits differ {'; '.join(different)}" if different else "logits are bitwise equal"
    judge(Cell(variant.name, phase, metric, len(different), 0, None, verdict, reason))


@pytest.mark.cells(phases=PHASES, metrics=("engine/repeats",), hardware=True, stage="run")
def test_first_and_hundredth_call_give_the_same_bits(variant, phase, metric, engines, judge):
    """No kernel is exchanged while an engine runs, and nothing of another text stays."""
    first, last = engines.first_and_last_logits(variant, phase)
    _judge_same_bits(variant, phase, metric, judge, [("after 100 calls", first, last)])


@pytest.mark.cells(phases=("decode",), metrics=("engine/forgets",), hardware=True)
def test_R02_an_earlier_text_leaves_nothing_behind(variant, phase, metric, engines, judge):
    """A short text gives the same bits alone, and after a long one with any value in the cache."""
    pairs = []
    for left in LEFT_BEHIND:
        alone, after = engines.logits_after_another_text(variant, left)
        pairs.append((f"after a long text and {left} in the cache", alone, after))
    _judge_same_bits(variant, phase, metric, judge, pairs)


@pytest.mark.cells(phases=PHASES, metrics=("engine/non_finite",), hardware=True, stored=False)
def test_engine_gives_finite_values(variant, phase, metric, engines, judge):
    """Texts that fill the context give no NaN or infinity in logits, K or V."""
    found = engines.non_finite(variant, phase)
    verdict, reason = ("failed", found) if found else ("passed", "logits, K and V are finite")
    judge(Cell(variant.name, phase, metric, found or 0, 0, None, verdict, reason))


@pytest.mark.cells(
    phases=PHASES,
    metrics=("engine/places_kl_mean_nats",),
    hardware=True,
    rows="exact",
    batched=True,
)
def test_a_text_gives_the_same_wherever_it_stands_in_a_batch(
    variant, phase, metric, engines, gate_run, judge
):
    """One place further up, with another text beside it, a text of a batch gives what it gave.

    Of rows without FP8 alone, whose sums differ by their order and by no more.
    """
    obtained = directly_compared(*engines.logits_in_other_places(variant, phase))
    nats = obtained.values["kl_mean_nats"]
    gate_run.add_value(variant.name, f"{phase}/{metric}", nats)
    bound = Bound(AT_MOST, tolerances.DIRECT_KL_NATS)
    judge(judge_limit(variant.name, phase, metric, nats, bound))


@pytest.mark.cells(
    phases=PHASES,
    metrics=("excess/bf16/kl_mean_nats", "excess/float32/kl_mean_nats"),
    hardware=True,
    quality=True,
    rows="quantized",
)
def test_engine_loses_what_its_recipe_loses(
    variant, phase, metric, measured, interpreted, gate_run, judge
):
    """KL to the reference, paired a token: the engine's minus that of its interpreted network."""
    engine, recipe = _finite_pair(variant, phase, metric, measured, interpreted, judge)
    reference = metric.split("/")[1]
    own, expected = (each.metrics[f"prose/{reference}"] for each in (engine, recipe))
    paired = paired_difference(
        expected.tokens.kl_nats, own.tokens.kl_nats, own.tokens.text,
        tolerances.EXCESS_CONFIDENCE, tolerances.POWER,
    )  # fmt: skip
    recipe_nats = expected.values["kl_mean_nats"]
    gate_run.add_excess(variant.name, phase, reference, recipe_nats, paired)
    judge(
        judge_excess(
            variant.name, phase, metric, paired, recipe_nats,
            tolerances.EXCESS_OF_RECIPE_LOSS, tolerances.EXCESS_NATS,
        )
    )  # fmt: skip


@pytest.mark.cells(
    phases=PHASES,
    metrics=("direct/kl_mean_nats", "direct/top1_frac"),
    hardware=True,
    quality=True,
    rows="exact",
)
def test_engine_gives_what_its_network_gives(
    variant, phase, metric, direct, measured, interpreted, gate_run, judge
):
    """Without FP8, engine and interpreted network agree token by token."""
    _finite_pair(variant, phase, metric, measured, interpreted, judge)
    name = metric.removeprefix("direct/")
    obtained = direct(variant, phase).values[name]
    gate_run.add_value(variant.name, f"{phase}/{metric}", obtained)
    bound = {
        "kl_mean_nats": Bound(AT_MOST, tolerances.DIRECT_KL_NATS),
        "top1_frac": Bound(AT_LEAST, tolerances.DIRECT_TOP1_FRAC),
    }[name]
    judge(judge_limit(variant.name, phase, metric, obtained, bound))
