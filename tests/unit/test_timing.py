"""Timing: device time of interleaved rounds, of work whose outputs did not change."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from gptneo_trt import timing
from gptneo_trt.errors import RunError
from gptneo_trt.network import PHASES
from gptneo_trt.timed_regions import TIMED_REGIONS
from gptneo_trt.timing import DeviceClock, PairedTimer, Timed
from tests.child import child_environment

ROOT = Path(__file__).parents[2]
LOGITS = np.array([[0.5, 0.0, -1.5]], dtype=np.float32)
SPEED_TESTS = """
import pytest
from test_timing import Device, timed_rounds, timer_of
from gptneo_trt.timing import DeviceClock

CLOCK = DeviceClock()

@pytest.mark.benchmark(timer=CLOCK)
def test_enabled(benchmark):
    timer = timer_of(Device(), 0.5, 0.4)
    assert timed_rounds(timer, rounds=8).rounds == 8
    benchmark.pedantic(CLOCK.advance_by(timer.own_us), rounds=8, iterations=1)

@pytest.mark.benchmark(timer=CLOCK)
def test_disabled(benchmark):
    benchmark.disabled = True  # as --benchmark-disable does
    benchmark.pedantic(CLOCK.advance_by([400.0] * 8), rounds=8, iterations=1)
    assert benchmark.stats is None
"""


class Device:
    """A device with one stream: what is launched takes device time, and the host none of it."""

    def __init__(self):
        self.now_ms, self.log = 0.0, []

    def event(self):
        """Return an event on the stream."""
        return DeviceEvent(self)

    def launch(self, name, step_ms):
        """Put work on the stream."""
        self.now_ms += step_ms
        self.log.append(name)

    def timed(self, name, step_ms, outputs=lambda: LOGITS):
        """Return work of ``step_ms``, a number or a function that returns it."""
        duration = step_ms if callable(step_ms) else lambda: step_ms
        return Timed(
            name,
            replay=lambda: self.launch(name, duration()),
            prepare=lambda: self.launch(f"prepare {name}", 7.0),
            outputs=outputs,
        )


class DeviceEvent:
    """A mark on the stream; its time may be read only once the host has waited for it."""

    def __init__(self, device):
        self.device, self.at_ms, self.waited = device, np.nan, False

    def record(self):
        """Mark the time at which the stream gets here."""
        self.at_ms, self.waited = self.device.now_ms, False
        self.device.log.append("record")

    def synchronize(self):
        """Wait."""
        self.waited = True
        self.device.log.append("synchronize")

    def elapsed_time(self, end_event):
        """Return milliseconds to a later mark."""
        assert end_event.waited, "the device is not ready"
        return end_event.at_ms - self.at_ms


def noisy(mean_ms, seed, frac=0.02):
    """Return a function that returns a duration with normal noise."""
    random = np.random.default_rng(seed)
    return lambda: random.normal(mean_ms, frac * mean_ms)


def timer_of(device, floor_ms, own_ms, replays=4):
    """Return a timer of fp16 against fp8, checked and warm."""
    floor, own = device.timed("fp16", floor_ms), device.timed("fp8", own_ms)
    timer = PairedTimer(floor, own, replays, device.event)
    timer.check_outputs()
    timer.warm_up(1)
    return timer


def timed_rounds(timer, rounds=5, **options):
    """Run rounds, check the outputs once more, and return the speedup."""
    for _ in range(rounds):
        timer.round()
    timer.check_outputs()
    return timer.speedup(**options)


# Times


@pytest.mark.parametrize(("floor_ms", "own_ms", "ratio"), [(1.0, 0.5, 2.0), (0.5, 1.0, 0.5)])
def test_ratio_is_floor_time_over_own_time(floor_ms, own_ms, ratio):
    """Half the time is 2, twice the time 0.5; latencies are microseconds a replay."""
    speedup = timed_rounds(timer_of(Device(), floor_ms, own_ms))

    assert speedup.ratio == pytest.approx(ratio)
    assert (speedup.lower, speedup.upper) == pytest.approx((ratio, ratio))
    assert speedup.floor_latency_us == pytest.approx(1e3 * floor_ms)
    assert speedup.latency_us == pytest.approx(1e3 * own_ms)
    assert (speedup.confidence, speedup.rounds, speedup.replays) == (0.95, 5, 4)


def test_R05_work_that_holds_its_stream_is_waited_for():
    """A step of 10 ms that is launched in no time takes 10 ms; preparing it counts nowhere."""
    speedup = timed_rounds(timer_of(Device(), 10.0, 10.0, replays=1))

    assert speedup.latency_us == speedup.floor_latency_us == pytest.approx(10_000)


def test_round_interleaves_stretches_and_prepares_outside():
    """A round is floor, own, own, floor; between two events there are replays and nothing else."""
    device = Device()
    timer = timer_of(device, 1.0, 1.0, replays=2)
    device.log.clear()

    timer.round()

    stretches = [
        [f"prepare {name}", "record", name, name, "record", "synchronize"]
        for name in ("fp16", "fp8", "fp8", "fp16")
    ]
    assert device.log == list(chain.from_iterable(stretches))


def test_drift_within_a_round_cancels():
    """Where every stretch is slower than the one before by the same time, A/A is exactly 1."""
    device = Device()
    slowing = lambda: 1.0 + 0.25 * device.log.count("synchronize")  # noqa: E731

    speedup = timed_rounds(timer_of(device, slowing, slowing))

    assert (speedup.lower, speedup.ratio, speedup.upper) == (1, 1, 1)


def test_one_executor_may_be_timed_against_itself():
    """An A/A run takes the same executor twice, and its interval contains 1."""
    device = Device()
    only = device.timed("fp16", noisy(1.0, seed=0))
    timer = PairedTimer(only, only, 4, event=device.event)
    timer.check_outputs()
    timer.warm_up(1)

    speedup = timed_rounds(timer, rounds=30)

    assert speedup.lower < 1 < speedup.upper
    assert speedup.ratio == pytest.approx(1, abs=0.02)


def test_an_outlying_round_does_not_move_the_median():
    """One round in nine that was held up leaves ratio and latencies as they are."""
    device = Device()
    held_up = lambda: 50.0 if 40 < device.log.count("synchronize") <= 43 else 1.0  # noqa: E731

    speedup = timed_rounds(timer_of(device, 2.0, held_up), rounds=9)

    assert (speedup.ratio, speedup.latency_us) == pytest.approx((2.0, 1e3))


def test_interval_is_deterministic_and_follows_its_confidence():
    """The same rounds and seed give the same ends; more confidence or noise gives wider ones."""
    timer = timer_of(Device(), noisy(1.1, seed=1), noisy(1.0, seed=2))

    speedup = timed_rounds(timer, rounds=20)

    assert speedup == timer.speedup(confidence=0.95, seed=0)
    assert speedup.lower < speedup.ratio < speedup.upper
    assert speedup.ratio == pytest.approx(1.1, abs=0.02)
    narrow = timer.speedup(confidence=0.5)
    assert speedup.lower < narrow.lower < narrow.upper < speedup.upper
    quiet = timer_of(Device(), noisy(1.1, seed=1, frac=2e-4), noisy(1.0, seed=2, frac=2e-4))
    quiet = timed_rounds(quiet, rounds=20)
    assert quiet.upper - quiet.lower < 0.1 * (speedup.upper - speedup.lower)


@pytest.mark.parametrize("rounds", [timing.FEWEST_ROUNDS, 20])
def test_interval_misses_about_as_often_as_stated(rounds):
    """Over 150 runs of two equal executors, 95 % intervals miss 1 in at most 12 %."""
    missed = 0
    for seed in range(150):
        step_ms = noisy(1.0, seed)
        speedup = timed_rounds(timer_of(Device(), step_ms, step_ms, replays=1), rounds)
        missed += not speedup.lower <= 1 <= speedup.upper

    assert missed <= 0.12 * 150


# What gives no figure


@pytest.mark.parametrize("step_ms", [0.0, -1.0, np.nan, np.inf])
def test_a_time_that_is_none_is_refused(step_ms):
    """Zero, as of work on another stream, negative and non-finite times name the executor."""
    own_ms = [1.0]
    timer = timer_of(Device(), 1.0, lambda: own_ms[0])
    own_ms[0] = step_ms

    with pytest.raises(
        RunError, match=r"^timing of fp8 against fp16: fp8: obtained .* us a replay, expected a f"
    ):
        timer.round()
    assert timer.own_us == ()


def test_replays_must_be_some():
    """A stretch of no replays has no time a replay."""
    with pytest.raises(RunError, match="obtained 0 replays, expected at least 1"):
        timer_of(Device(), 1.0, 1.0, replays=0)


def test_without_a_gpu_the_error_says_so(monkeypatch):
    """CUDA events need a device: what was found and what to do are named."""
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    device = Device()

    with pytest.raises(RunError, match=r"obtained no CUDA device with torch .*; run on a GPU host"):
        PairedTimer(device.timed("fp16", 1.0), device.timed("fp8", 1.0), 4)


def test_speedup_needs_enough_checked_rounds_after_a_warm_up():
    """Whatever is missing is named at once: rounds, warm-up, a check at each end, confidence."""
    device = Device()
    timer = PairedTimer(device.timed("fp16", 1), device.timed("fp8", 1), 1, event=device.event)
    for _ in range(timing.FEWEST_ROUNDS - 1):
        timer.round()
    timer.check_outputs()

    with pytest.raises(RunError) as caught:
        timer.speedup(confidence=np.nan)

    assert str(caught.value) == (
        "timing of fp8 against fp16: obtained 4 rounds, expected at least 5; time more; "
        "obtained no round to warm up, expected at least 1; call warm_up first; "
        "obtained checks of the outputs after [4] rounds, expected one after 0 and one after 4; "
        "call check_outputs before and after the rounds; "
        "obtained confidence nan, expected above 0 and below 1"
    )


def test_speedup_needs_a_check_after_the_last_round():
    """Rounds that were timed after the last check are of unchecked work."""
    timer = timer_of(Device(), 1.0, 1.0)
    timed_rounds(timer)
    timer.round()

    with pytest.raises(RunError, match=r"after \[0, 5\] rounds, expected one after 0 and one af"):
        timer.speedup()


# Outputs


def checked_twice(device, second, first=LOGITS, name="fp8", spread=0.0):
    """Check outputs that are ``first`` and later ``second``, in the same buffer if it fits."""
    buffer = [np.array(first)]
    work = {row: device.timed(row, 1.0) for row in ("fp16", "fp8")}
    work[name] = replace(work[name], outputs=lambda: buffer[0], spread=spread)
    timer = PairedTimer(work["fp16"], work["fp8"], 1, event=device.event)
    timer.check_outputs()
    for _ in range(5):
        timer.round()
    if np.shape(second) == buffer[0].shape:
        buffer[0][...] = second
    else:
        buffer[0] = second
    timer.check_outputs()


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_outputs_that_changed_are_caught(name):
    """Which of the two changed, after how many rounds and by how much is said."""
    role = {"fp16": "floor", "fp8": "own"}[name]
    with pytest.raises(
        RunError,
        match=rf"^timing of fp8 against fp16: outputs after 5 rounds: {role} {name}: obtained "
        r"values that differ by up to 0\.25, expected those of before; these times",
    ):
        checked_twice(Device(), LOGITS + np.float32([0, 0.25, 0]), name=name)


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (np.float32([[0.5, -0.0, -1.5]]), "values that differ by up to 0, expected those of bef"),
        (np.float32([[0.5, 0.0, np.nan]]), r"nan at \[0, 2\], expected finite values"),
        (np.float32([[-np.inf, 0.0, np.nan]]), r"-inf at \[0, 0\], expected finite values"),
        (LOGITS[:, :2], r"float32 \(1, 2\), expected float32 \(1, 3\) as before"),
        (np.tile(LOGITS, (2, 1)), r"float32 \(2, 3\), expected float32 \(1, 3\) as before"),
        (np.empty((1, 0), dtype=np.float32), "no values"),
    ],
)
def test_outputs_are_compared_bit_by_bit(second, fault):
    """A sign of zero, NaN, infinity and another shape are all seen."""
    with pytest.raises(RunError, match=f"own fp8: obtained {fault}"):
        checked_twice(Device(), second)


@pytest.mark.parametrize("spread", [0.25, 0.125])
def test_outputs_may_differ_by_an_executor_s_own_spread(spread):
    """Of the largest value, 1.5 here, and of that executor alone."""
    second = LOGITS + np.float32([0, 0.25, 0])
    if spread == 0.25:
        checked_twice(Device(), second, spread=spread)
        return
    with pytest.raises(RunError, match=r"differ by up to 0\.25, expected .* before, within 0\.188"):
        checked_twice(Device(), second, spread=spread)


def test_outputs_that_never_were_finite_are_refused_at_once():
    """NaN before timing is not "the same as before": the first check refuses both executors."""
    device = Device()
    bad = np.full((1, 3), np.nan, dtype=np.float32)
    floor, own = (device.timed(name, 1.0, outputs=lambda: bad) for name in ("fp16", "fp8"))
    timer = PairedTimer(floor, own, 1, event=device.event)

    with pytest.raises(RunError, match=r"after 0 rounds: floor fp16: obtained nan .*; own fp8: o"):
        timer.check_outputs()


def test_each_check_replays_once_from_the_prepared_state():
    """What is compared is one replay after ``prepare``, of floor and of own."""
    device = Device()
    timer = PairedTimer(device.timed("fp16", 1), device.timed("fp8", 1), 9, event=device.event)

    timer.check_outputs()

    assert device.log == ["prepare fp16", "fp16", "prepare fp8", "fp8"]


# The clock, and pytest-benchmark


def test_own_times_are_those_of_the_rounds():
    """A microsecond figure a round and replay, in order; rounds to warm up have none."""
    own_ms = [0.5]
    timer = timer_of(Device(), 1.0, lambda: own_ms[0])

    timer.round()
    timer.warm_up(1)
    own_ms[0] = 0.25
    timer.round()

    assert timer.own_us == pytest.approx((500, 250))


def test_clock_advances_by_a_round_at_each_call():
    """Microseconds of rounds move the clock by seconds, each once and in order."""
    clock = DeviceClock()
    step = clock.advance_by((500.0, 250.0))
    assert clock() == 0

    step()
    assert clock() == pytest.approx(0.5e-3)
    step()
    assert clock() == pytest.approx(0.75e-3)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory):
    """Return the status, the output and the JSON of SPEED_TESTS in a pytest of its own."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "test_speed.py").write_text(SPEED_TESTS)
    report = folder / "benchmark.json"
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--color=no", f"--benchmark-json={report}"],
        cwd=folder,
        env=child_environment(PYTHONPATH=paths),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert report.is_file(), done.stdout
    return done.returncode, done.stdout, json.loads(report.read_text("utf-8"))


def test_pytest_benchmark_shows_device_time(benchmarks):
    """With the clock as its timer, pytest-benchmark's JSON holds own's device time a replay."""
    status, output, report = benchmarks

    assert status == 0, output
    (benchmark,) = report["benchmarks"]
    assert benchmark["name"] == "test_enabled"
    assert benchmark["stats"]["median"] == pytest.approx(0.4e-3)
    assert benchmark["stats"]["max"] == pytest.approx(0.4e-3)
    assert (benchmark["stats"]["rounds"], benchmark["stats"]["iterations"]) == (8, 1)
    assert benchmark["options"]["timer"] == "DeviceClock"


def test_P03_disabled_benchmarks_keep_nothing(benchmarks):
    """Where they are disabled there are no statistics, and one call of the target."""
    status, output, _ = benchmarks

    assert status == 0, output
    assert "PASSED test_speed.py::test_disabled" in output


# What is stated


def test_every_phase_states_its_timed_region():
    """Each phase has a sentence for everything that a reader needs to trust a latency."""
    assert set(TIMED_REGIONS) == set(PHASES)
    for region in TIMED_REGIONS.values():
        assert all(len(text.split()) >= 5 for text in asdict(region).values())
