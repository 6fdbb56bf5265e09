"""The Stopwatch: what is disturbed or cannot be judged is measured once more, and no oftener."""

from functools import partial
from types import SimpleNamespace

import pytest

from gptneo_trt.baselines import Baseline
from gptneo_trt.gpu_watch import GpuProcess, GpuSample
from gptneo_trt.timing import PairedTimer
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate import speed, test_speed
from tests.gate.run import GateRun
from tests.gate.shape import Shape
from tests.gate.speed import ROUNDS, ROUNDS_A_SAMPLE, WARM_UP_ROUNDS, Stopwatch
from tests.unit.test_timing import Device

QUIET = GpuSample(1980, 3201, 40, (), (GpuProcess(1, "pytest", 512.0, False),))
THROTTLED = GpuSample(1980, 3201, 40, ("software power cap",), QUIET.processes)
CAP = "throttled: software power cap"


def is_iterator(times_ms):
    """Return whether there is a time for each executor that is made."""
    return hasattr(times_ms, "__next__")


class Watched(Stopwatch):
    """A Stopwatch of made-up engines: each of its executors takes so many milliseconds."""

    def __init__(self, device, times_ms):
        super().__init__(SimpleNamespace(), "GPU-made-up")
        self.device, self.times_ms = device, times_ms

    def timed(self, variant, phase):
        """Return an executor of the row."""
        step_ms = self.times_ms[variant.name]
        return self.device.timed(variant.name, next(step_ms) if is_iterator(step_ms) else step_ms)

    def step(self, variant):
        """Return the same, with and without its step."""
        return self.timed(variant, "decode")

    bare_step = step


@pytest.fixture
def watched(monkeypatch):
    """Return a function that makes a Stopwatch whose GPU is throttled in some measurements."""

    def make(throttled=(), fp16_ms=1.0, fp8_ms=0.5):
        device, entered = Device(), []

        class Watch:
            def __init__(self, uuid):
                assert uuid == "GPU-made-up"
                self.samples = []
                entered.append(self)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

            def sample(self):
                device.log.append("sample")
                self.samples.append(THROTTLED if len(entered) in throttled else QUIET)

        monkeypatch.setattr(speed, "GpuWatch", Watch)
        monkeypatch.setattr(speed, "PairedTimer", partial(PairedTimer, event=device.event))
        return Watched(device, {FLOOR: fp16_ms, "fp8": fp8_ms})

    return make


def undisturbed(obtained, noise):
    """Return whether nothing was seen."""
    return not obtained.disturbances and not noise.disturbances


def compared(stopwatch, is_settled=undisturbed):
    """Return fp8 against fp16, and fp16 against itself."""
    own = stopwatch.timed(VARIANTS["fp8"], "decode")
    return stopwatch.against_floor(own, "decode", is_settled)


# Samples


def test_samples_are_taken_after_the_warm_up_and_between_rounds(watched):
    """Never between the events of a stretch; a round that does not count follows each but one."""
    stopwatch = watched()
    stopwatch.overhead(VARIANTS[FLOOR])
    log = stopwatch.device.log

    first = log.index("sample")
    assert log[:first].count("synchronize") == 4 * WARM_UP_ROUNDS
    assert log.count("sample") == ROUNDS // ROUNDS_A_SAMPLE + 1
    uncounted = WARM_UP_ROUNDS + ROUNDS // ROUNDS_A_SAMPLE
    assert log.count("synchronize") == 4 * (ROUNDS + uncounted)
    stretches = " ".join(log).split("record")[1::2]
    assert not any("sample" in stretch for stretch in stretches)


def test_a_comparison_holds_the_rounds_that_count(watched):
    """Ratio, interval and own times are of ROUNDS rounds."""
    obtained, noise = compared(watched())

    assert (obtained.speedup.ratio, noise.speedup.ratio) == pytest.approx((2.0, 1.0))
    assert obtained.speedup.confidence == pytest.approx(0.95)
    assert obtained.own_us == pytest.approx([500.0] * ROUNDS)
    assert obtained.disturbances == ()


# Once more


def test_a_settled_comparison_is_measured_once(watched):
    """fp16 against itself is measured once a phase, whatever the number of rows."""
    stopwatch = watched()

    compared(stopwatch)
    compared(stopwatch)

    assert (stopwatch.record["measurements"], stopwatch.record["measured_again"]) == (3, 0)


def test_a_disturbed_row_is_measured_again(watched):
    """The second measurement is judged; that of fp16 against itself stays where it was quiet."""
    stopwatch = watched(throttled={2})  # 1: fp16 against itself

    obtained, noise = compared(stopwatch)

    assert obtained.disturbances == noise.disturbances == ()
    assert (stopwatch.record["measurements"], stopwatch.record["measured_again"]) == (3, 1)
    assert stopwatch.record["disturbances"] == [f"fp8, decode: {CAP}"]
    assert stopwatch.record["slowdowns"] == ["software power cap"]


def test_a_row_that_is_disturbed_twice_says_so(watched):
    """There is no third measurement."""
    stopwatch = watched(throttled={2, 3})

    obtained, _ = compared(stopwatch)

    assert obtained.disturbances == (CAP,)
    assert stopwatch.record["measurements"] == 3


def test_a_disturbed_a_a_run_is_measured_again_with_the_row(watched):
    """Both are; the next row finds the new one."""
    stopwatch = watched(throttled={1})

    _, noise = compared(stopwatch)
    compared(stopwatch)

    assert noise.disturbances == ()
    assert (stopwatch.record["measurements"], stopwatch.record["measured_again"]) == (5, 1)


def test_a_noisy_a_a_run_is_measured_again(watched):
    """A machine on which fp16 differs from itself by 2 % is given one more chance."""
    times_ms = iter([1.02, 1.0, 1.0])  # of the twin, of fp16, of the twin once more
    stopwatch = watched(fp16_ms=times_ms)

    _, noise = compared(stopwatch, is_settled=lambda obtained, noise: noise.is_quiet)

    assert noise.speedup.ratio == pytest.approx(1.0)
    assert (stopwatch.record["measurements"], stopwatch.record["measured_again"]) == (4, 1)
    assert not list(times_ms)


def test_an_unsettled_comparison_is_measured_again_once(watched):
    """As where the rounds are too few to decide: the second is returned, settled or not."""
    stopwatch = watched()

    compared(stopwatch, is_settled=lambda obtained, noise: False)

    assert (stopwatch.record["measurements"], stopwatch.record["measured_again"]) == (3, 1)


@pytest.mark.parametrize(("throttled", "seen"), [({1}, ()), ({1, 2}, (CAP,))])
def test_a_disturbed_overhead_is_measured_again(watched, throttled, seen):
    """Cells without a baseline are watched as well."""
    stopwatch = watched(throttled)

    assert stopwatch.overhead(VARIANTS[FLOOR]).disturbances == seen
    assert stopwatch.record["measured_again"] == 1


# Baselines


class Benchmark:
    """Stand in for pytest-benchmark's fixture, and keep what it is shown."""

    disabled, group = False, ""

    def __init__(self):
        self.extra_info, self.shown_us = {}, []

    def pedantic(self, target, rounds, iterations):
        """Time each call by the clock of the speed tests."""
        for _ in range(rounds):
            before = speed.CLOCK()
            target()
            self.shown_us.append(1e6 * (speed.CLOCK() - before))


def test_what_is_timed_is_said_with_batch_and_context():
    """A latency means nothing without them."""
    said = speed.timing(Shape(4, 1024))

    assert (said["batch"], said["context"]) == (4, 1024)
    assert "`batch` tokens a replay" in said["regions"]["decode"]["tokens"]
    assert "`batch` x `context` tokens a replay" in said["regions"]["prefill"]["tokens"]


def run_cell(stopwatch, comparing, stored_ratio=2.0):
    """Run the speed test of fp8 in decode; return its run, what it shows, and how it ended."""
    run, benchmark = GateRun(), Benchmark()
    stored = Baseline({}, {}, {"decode/speedup_x": stored_ratio}, {})

    def judge(cell):
        run.cells.append(cell)
        if cell.verdict != "passed":
            pytest.fail(cell.reason, pytrace=False)

    ended = "passed"
    try:
        test_speed.test_speed_against_fp16_is_the_stored_one(
            VARIANTS["fp8"], "decode", "regression/speedup_x", benchmark, stopwatch, run,
            lambda variant: stored, comparing, judge,
        )  # fmt: skip
    except (pytest.skip.Exception, pytest.fail.Exception) as outcome:
        ended = type(outcome).__name__
    return run, benchmark, ended


def test_the_benchmark_shows_the_rounds_that_are_judged(watched):
    """Of two measurements the second one, a round each."""
    _, benchmark, ended = run_cell(watched(throttled={2}), comparing=True)

    assert ended == "passed"
    assert benchmark.shown_us == pytest.approx([500.0] * ROUNDS)
    assert benchmark.extra_info["speedup_x"] == pytest.approx(2.0)


def test_a_figure_is_stored_without_a_comparison(watched):
    """While baselines are written the cell is skipped, and its figures are kept."""
    run, _, ended = run_cell(watched(), comparing=False)

    assert (ended, run.cells) == ("Skipped", [])
    assert run.values["fp8"]["decode/speedup_x"] == pytest.approx(2.0)


def test_a_disturbed_figure_is_not_stored(watched):
    """A baseline of a throttled GPU would judge all later runs: it is refused now."""
    run, _, ended = run_cell(watched(throttled={2, 3}), comparing=False)

    assert ended == "Failed"
    assert [cell.verdict for cell in run.cells] == ["inconclusive"]
    assert run.values == {}


def test_a_figure_that_its_rounds_cannot_tell_from_itself_is_not_stored(watched):
    """An interval wider than the tolerance would make every later comparison inconclusive."""
    stopwatch = watched()
    rounds = lambda: stopwatch.device.log.count("synchronize") // 4  # noqa: E731
    stopwatch.times_ms["fp8"] = lambda: 0.4 + 0.1 * (rounds() % 3)

    run, _, ended = run_cell(stopwatch, comparing=False)

    assert ended == "Failed"
    assert "too few rounds to decide" in run.cells[0].reason
    assert run.values == {}
