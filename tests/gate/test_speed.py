"""Speed on the GPU: against fp16 in the same run, the stored ratio, and what else there is."""

import pytest

from gptneo_trt.engine_verdicts import judge_speedup
from gptneo_trt.network import PHASES
from gptneo_trt.verdicts import AT_MOST, Bound, judge_limit, not_measured
from tests.gate import limits
from tests.gate.cells import FP16_TO_ITSELF
from tests.gate.speed import CLOCK, ROUNDS

NO_BENCHMARK = "benchmarks are disabled (--benchmark-disable, or pytest -n)"


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.cells(phases=PHASES, metrics=("regression/speedup_x",), hardware=True)
def test_speed_against_fp16_is_the_stored_one(
    variant, phase, metric, benchmark, stopwatch, gate_run, stored, comparing, judge
):
    """A row is as fast, next to the fp16 engine of this run, as it was when it was stored."""
    if benchmark.disabled:
        judge(not_measured(variant.name, phase, metric, NO_BENCHMARK))
    benchmark.group = f"{phase}, device time a replay"
    noise = stopwatch.noise(phase)
    own = stopwatch.timed(variant, phase)
    obtained = stopwatch.against_floor(
        own, phase, lambda timer: benchmark.pedantic(timer.round, rounds=ROUNDS, iterations=1)
    )
    gate_run.add_speedup(variant.name, phase, obtained, noise)
    benchmark.extra_info |= gate_run.speedup_values(variant.name, phase)
    if not comparing:
        pytest.skip("baselines are being written")
    found = stored(variant)
    expected = found.values.get(f"{phase}/speedup_x")
    if expected is None and (variant.name, metric) == FP16_TO_ITSELF:
        expected = 1.0
    rounding = found.rounding.get(f"{phase}/speedup_x", 0.0)
    tolerance = limits.SPEEDUP_FRAC + (rounding / expected if expected else 0.0)
    judge(judge_speedup(variant.name, phase, metric, obtained, expected, tolerance, noise))


@pytest.mark.cells(phases=("decode",), metrics=("step_overhead_x",), hardware=True, rows="floor")
def test_step_is_little_more_than_its_engine(
    variant, phase, metric, stopwatch, gate_run, checkpoint, judge
):
    """All that a decode step does beside the engine costs next to nothing."""
    obtained = stopwatch.overhead(variant)
    gate_run.add_value(variant.name, f"{phase}/{metric}", obtained.ratio)
    bound = Bound(AT_MOST, limits.step_overhead(checkpoint))
    judge(judge_limit(variant.name, phase, metric, obtained.ratio, bound))


def _judge_alternative(variant, phase, metric, stopwatch, gate_run, checkpoint, judge):
    obtained = stopwatch.alternative(metric.removeprefix("alternative/").removesuffix("_x"), phase)
    # fp16's time over the other's; the limits and the report speak of the other's over fp16's.
    times = 1 / obtained.ratio
    gate_run.add_value(variant.name, f"{phase}/{metric}", times)
    gate_run.add_value(variant.name, f"{phase}/{metric.removesuffix('_x')}_us", obtained.latency_us)
    judge(judge_limit(variant.name, phase, metric, times, limits.alternative(checkpoint, metric)))


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
