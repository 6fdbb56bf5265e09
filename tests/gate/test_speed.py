"""Speed on the GPU: against fp16 in the same run, the stored ratio, and what else there is."""

from dataclasses import replace
from functools import partial

import pytest

from gptneo_trt.engine_verdicts import (
    judge_disturbed,
    judge_resolved,
    judge_speedup,
    minimum_detectable_x,
)
from gptneo_trt.network import PHASES
from gptneo_trt.verdicts import AT_LEAST, AT_MOST, Bound, judge_limit, not_measured
from tests.gate import limits, tolerances
from tests.gate.cells import FP16_TO_ITSELF, SlowerThanPyTorchError
from tests.gate.speed import CLOCK

NO_BENCHMARK = "benchmarks are disabled (--benchmark-disable, or pytest -n)"


def _stored_ratio(variant, phase, metric, stored):
    """Return the stored ratio, and by what fraction of it a row may be slower."""
    found, name = stored(variant), f"{phase}/speedup_x"
    expected = found.values.get(name)
    if expected is None and (variant.name, metric) == FP16_TO_ITSELF:
        expected = 1.0
    rounding = found.rounding.get(name, 0.0)
    return expected, tolerances.SPEEDUP_FRAC + (rounding / expected if expected else 0.0)


def _cell(variant, phase, metric, expected, obtained, noise):
    """Return the cell of a ratio, measured beside fp16 against itself.

    ``expected`` is the stored ratio and its tolerance; None where nothing is to be compared.
    """
    detectable = minimum_detectable_x(
        obtained.speedup, tolerances.SPEEDUP_CONFIDENCE, tolerances.POWER
    )
    of_machine = {"noise_frac": tolerances.NOISE_FRAC, "minimum_detectable": detectable}
    key = variant.name, phase, metric
    if expected is None:
        cell = judge_resolved(
            *key, obtained.speedup, tolerances.SPEEDUP_FRAC, noise.speedup, **of_machine
        )
    else:
        cell = judge_speedup(*key, obtained.speedup, *expected, noise.speedup, **of_machine)
    of_noise = (f"A/A: {line}" for line in noise.disturbances)
    return judge_disturbed(cell, (*obtained.disturbances, *of_noise))


def _timed(variant, phase, benchmark, stopwatch, judged):
    """Return a row next to fp16, fp16 next to itself, and the cell that ``judged`` makes of it."""
    benchmark.group = f"{phase}, device time a replay"
    own = stopwatch.timed(variant, phase)
    obtained, noise = stopwatch.against_floor(
        own, phase, lambda *measured: judged(*measured).verdict != "inconclusive"
    )
    benchmark.pedantic(CLOCK.advance_by(obtained.own_us), rounds=len(obtained.own_us), iterations=1)
    return obtained, noise, judged(obtained, noise)


def _keep(variant, phase, benchmark, gate_run, comparisons):
    """Keep the figures of a row, for reports, baselines and pytest-benchmark's own files."""
    gate_run.add_speedup(variant.name, phase, *(each.speedup for each in comparisons))
    benchmark.extra_info |= gate_run.speedup_values(variant.name, phase)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.cells(phases=PHASES, metrics=("regression/speedup_x",), hardware=True)
def test_speed_against_fp16_is_the_stored_one(
    variant, phase, metric, benchmark, stopwatch, gate_run, stored, comparing, judge
):
    """A row is as fast, next to the fp16 engine of this run, as it was when it was stored."""
    if benchmark.disabled:
        judge(not_measured(variant.name, phase, metric, NO_BENCHMARK))
    # What is to be stored is held against itself: rounds that could not tell it from itself within
    # the tolerance, or of a disturbed GPU, are refused now and not when they are compared with.
    expected = _stored_ratio(variant, phase, metric, stored) if comparing else None
    judged = partial(_cell, variant, phase, metric, expected)
    *comparisons, cell = _timed(variant, phase, benchmark, stopwatch, judged)
    if not comparing and cell.verdict != "passed":
        judge(cell)
    _keep(variant, phase, benchmark, gate_run, comparisons)
    if not comparing:
        pytest.skip("baselines are being written")
    judge(cell)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.cells(phases=PHASES, metrics=("speedup_x",), hardware=True, stored=False)
def test_speed_against_fp16_is_resolved(
    variant, phase, metric, benchmark, stopwatch, gate_run, judge
):
    """Where no ratio is stored, one is told only if its rounds would show a slower row."""
    if benchmark.disabled:
        judge(not_measured(variant.name, phase, metric, NO_BENCHMARK))
    judged = partial(_cell, variant, phase, metric, None)
    *comparisons, cell = _timed(variant, phase, benchmark, stopwatch, judged)
    if cell.verdict == "passed":
        _keep(variant, phase, benchmark, gate_run, comparisons)
    judge(cell)


@pytest.mark.cells(phases=PHASES, metrics=("clock_frac",), hardware=True, rows="floor")
def test_clock_counts_what_the_device_does(variant, phase, metric, stopwatch, gate_run, judge):
    """Times are of the work, not of its launch: the device is not busy long after they end."""
    obtained = stopwatch.clock_frac(phase)
    gate_run.add_value(variant.name, f"{phase}/{metric}", obtained)
    bound = Bound(AT_LEAST, limits.CLOCK_FRAC)
    judge(judge_limit(variant.name, phase, metric, obtained, bound))


@pytest.mark.cells(phases=("decode",), metrics=("step_overhead_x",), hardware=True, rows="floor")
def test_step_is_little_more_than_its_engine(
    variant, phase, metric, stopwatch, gate_run, checkpoint, shape, judge
):
    """All that a decode step does beside the engine costs next to nothing."""
    obtained = stopwatch.overhead(variant)
    times = obtained.speedup.ratio
    gate_run.add_value(variant.name, f"{phase}/{metric}", times)
    limit = limits.step_overhead(checkpoint, is_stored_shape=shape.is_stored)
    bound = Bound(AT_MOST, limit)
    cell = judge_limit(variant.name, phase, metric, times, bound)
    judge(judge_disturbed(cell, obtained.disturbances))


def _judge_alternative(
    variant, phase, metric, stopwatch, gate_run, checkpoint, judge, target, shape
):
    obtained = stopwatch.alternative(metric.removeprefix("alternative/").removesuffix("_x"), phase)
    # fp16's time over the other's; the limits and the report speak of the other's over fp16's.
    times, latency_us = 1 / obtained.speedup.ratio, obtained.speedup.latency_us
    gate_run.add_value(variant.name, f"{phase}/{metric}", times)
    gate_run.add_value(variant.name, f"{phase}/{metric.removesuffix('_x')}_us", latency_us)
    bound = limits.alternative(checkpoint, metric)
    cell = judge_limit(variant.name, phase, metric, times, bound)
    cell = judge_disturbed(cell, obtained.disturbances)
    least = limits.slower(target, checkpoint.name, shape, metric)
    if least is not None and cell.verdict == "failed" and times >= least:
        reason = f"slower than PyTorch, as known: {cell.reason}, never less than {least:g}"
        gate_run.cells.append(replace(cell, verdict="passed", reason=reason))
        raise SlowerThanPyTorchError(reason)
    judge(cell)


@pytest.mark.filterwarnings("ignore")  # a user's PyTorch may warn of what it likes
@pytest.mark.cells(
    phases=("decode",),
    metrics=(
        "alternative/hugging_face_eager_x",
        "alternative/static_graph_x",
        "alternative/static_compiled_graph_x",
        "alternative/weights_read_x",
    ),
    hardware=True,
    rows="floor",
)
def test_decode_against_what_a_user_would_run(
    variant, phase, metric, stopwatch, gate_run, checkpoint, judge, target, shape
):
    """A decode step of fp16 is faster than PyTorch's, and no faster than reading the weights."""
    _judge_alternative(
        variant, phase, metric, stopwatch, gate_run, checkpoint, judge, target, shape
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cells(
    phases=("prefill",),
    metrics=("alternative/hugging_face_eager_x", "alternative/hugging_face_compiled_x"),
    hardware=True,
    rows="floor",
)
def test_prefill_against_what_a_user_would_run(
    variant, phase, metric, stopwatch, gate_run, checkpoint, judge, target, shape
):
    """A prefill of fp16 is faster than Hugging Face's own model."""
    _judge_alternative(
        variant, phase, metric, stopwatch, gate_run, checkpoint, judge, target, shape
    )
