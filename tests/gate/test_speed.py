"""Speed on the GPU: against fp16 in the same run, the stored ratio, and what else there is."""

import pytest

from gptneo_trt.engine_verdicts import judge_disturbed, judge_speedup, minimum_detectable_x
from gptneo_trt.network import PHASES
from gptneo_trt.verdicts import AT_LEAST, AT_MOST, Bound, judge_limit, not_measured
from tests.gate import limits, tolerances
from tests.gate.cells import FP16_TO_ITSELF
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


def _cell(variant, phase, metric, obtained, noise, expected, tolerance_frac):
    """Return the cell of a ratio, measured beside fp16 against itself."""
    detectable = minimum_detectable_x(
        obtained.speedup, tolerances.SPEEDUP_CONFIDENCE, tolerances.POWER
    )
    cell = judge_speedup(
        variant.name, phase, metric, obtained.speedup, expected, tolerance_frac, noise.speedup,
        noise_frac=tolerances.NOISE_FRAC, minimum_detectable=detectable,
    )  # fmt: skip
    of_noise = (f"A/A: {line}" for line in noise.disturbances)
    return judge_disturbed(cell, (*obtained.disturbances, *of_noise))


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.cells(phases=PHASES, metrics=("regression/speedup_x",), hardware=True)
def test_speed_against_fp16_is_the_stored_one(
    variant, phase, metric, benchmark, stopwatch, gate_run, stored, comparing, judge
):
    """A row is as fast, next to the fp16 engine of this run, as it was when it was stored."""
    if benchmark.disabled:
        judge(not_measured(variant.name, phase, metric, NO_BENCHMARK))
    benchmark.group = f"{phase}, device time a replay"
    # What is to be stored is held against itself: rounds that could not tell it from itself within
    # the tolerance, or of a disturbed GPU, are refused now and not when they are compared with.
    expected, tolerance_frac = None, tolerances.SPEEDUP_FRAC
    if comparing:
        expected, tolerance_frac = _stored_ratio(variant, phase, metric, stored)

    def judged(obtained, noise):
        ratio = expected if comparing else obtained.speedup.ratio
        return _cell(variant, phase, metric, obtained, noise, ratio, tolerance_frac)

    own = stopwatch.timed(variant, phase)
    obtained, noise = stopwatch.against_floor(
        own, phase, lambda *measured: judged(*measured).verdict != "inconclusive"
    )
    benchmark.pedantic(CLOCK.advance_by(obtained.own_us), rounds=len(obtained.own_us), iterations=1)
    cell = judged(obtained, noise)
    if not comparing and cell.verdict != "passed":
        judge(cell)
    gate_run.add_speedup(variant.name, phase, obtained.speedup, noise.speedup)
    benchmark.extra_info |= gate_run.speedup_values(variant.name, phase)
    if not comparing:
        pytest.skip("baselines are being written")
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
    variant, phase, metric, stopwatch, gate_run, checkpoint, judge
):
    """All that a decode step does beside the engine costs next to nothing."""
    obtained = stopwatch.overhead(variant)
    times = obtained.speedup.ratio
    gate_run.add_value(variant.name, f"{phase}/{metric}", times)
    bound = Bound(AT_MOST, limits.step_overhead(checkpoint))
    cell = judge_limit(variant.name, phase, metric, times, bound)
    judge(judge_disturbed(cell, obtained.disturbances))


def _judge_alternative(variant, phase, metric, stopwatch, gate_run, checkpoint, judge):
    obtained = stopwatch.alternative(metric.removeprefix("alternative/").removesuffix("_x"), phase)
    # fp16's time over the other's; the limits and the report speak of the other's over fp16's.
    times, latency_us = 1 / obtained.speedup.ratio, obtained.speedup.latency_us
    gate_run.add_value(variant.name, f"{phase}/{metric}", times)
    gate_run.add_value(variant.name, f"{phase}/{metric.removesuffix('_x')}_us", latency_us)
    bound = limits.alternative(checkpoint, metric)
    cell = judge_limit(variant.name, phase, metric, times, bound)
    judge(judge_disturbed(cell, obtained.disturbances))


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
    variant, phase, metric, stopwatch, gate_run, checkpoint, judge
):
    """A decode step of fp16 is faster than PyTorch's, and no faster than reading the weights."""
    _judge_alternative(variant, phase, metric, stopwatch, gate_run, checkpoint, judge)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cells(
    phases=("prefill",),
    metrics=("alternative/hugging_face_eager_x", "alternative/hugging_face_compiled_x"),
    hardware=True,
    rows="floor",
)
def test_prefill_against_what_a_user_would_run(
    variant, phase, metric, stopwatch, gate_run, checkpoint, judge
):
    """A prefill of fp16 is faster than Hugging Face's own model."""
    _judge_alternative(variant, phase, metric, stopwatch, gate_run, checkpoint, judge)
