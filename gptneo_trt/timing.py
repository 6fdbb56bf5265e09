"""Paired, interleaved timing of two executors -> ratio with an interval, in device time.

A round times four stretches of replays, floor, own, own, floor: a clock that drifts evenly
within a round moves both alike. Stretches lie between two CUDA events on the stream of the
replays, so what is measured is when the device was done, not when the host had launched.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from scipy import stats

from gptneo_trt.data import Speedup
from gptneo_trt.errors import RunError

RESAMPLES = 2000
# The 95 % interval of a median of 5 is the whole sample and covers 94 %; of fewer, it covers less.
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Timed:
    """Hold what is timed, as three calls.

    Attributes:
        name: variant name, for messages.
        replay: launches the work of one step on the current CUDA stream, without waiting for it.
        prepare: puts state back, such as the position in the cache, on the same stream; called
            before every stretch, outside the timed region.
        outputs: waits for the last replay and returns what it gave, float32 of any shape.
        spread: how far two replays from one state may differ, of the largest value; 0 for bits.
    """

    name: str
    replay: Callable[[], object]
    prepare: Callable[[], object]
    outputs: Callable[[], np.ndarray]
    spread: float = 0.0


class Event(Protocol):
    """Mark a point of the current stream; ``torch.cuda.Event(enable_timing=True)`` is one."""

    def record(self) -> object:
        """Put the mark behind everything launched so far."""
        ...

    def synchronize(self) -> object:
        """Wait until the device has passed the mark."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds between this mark and a later one."""
        ...


class DeviceClock:
    """Count seconds of device time: a timer for ``@pytest.mark.benchmark(timer=...)``.

    It stands still but for ``advance``, so a benchmark that calls it before and after a call sees
    the device time added in that call. Use it with ``benchmark.pedantic`` alone:
    ``benchmark(...)`` calibrates its timer, and would wait for this one to move by itself.
    """

    def __init__(self) -> None:
        self.__name__ = type(self).__name__  # pytest-benchmark stores a timer by its name.
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds added so far."""
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Add seconds of device time."""
        self._seconds += seconds

    def advance_by(self, rounds_us: Sequence[float]) -> Callable[[], None]:
        """Return a function that adds the microseconds of the next round at each call.

        A benchmark can run once a test, and which rounds count is known only after they ran: its
        rounds are these calls, so that it shows the rounds that are judged and no others.
        """
        left = iter(rounds_us)
        return lambda: self.advance(next(left) * 1e-6)


def _cuda_event() -> Event:
    """Return an event that takes times.

    Raises:
        RunError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RunError(
            f"timing: obtained no CUDA device with torch {torch.__version__}, expected one; run "
            "on a GPU host with a CUDA build of torch"
        )
    return torch.cuda.Event(enable_timing=True)


class PairedTimer:
    """Time two executors that are both resident, in interleaved rounds.

    In this order: ``check_outputs``, ``warm_up``, ``round`` as often as wanted, ``check_outputs``,
    ``speedup``. Floor and own may be the same executor: an A/A run, whose ratio should be 1.
    """

    def __init__(
        self,
        floor: Timed,
        own: Timed,
        replays: int,
        event: Callable[[], Event] = _cuda_event,
    ) -> None:
        """Take two executors, the number of replays in a stretch, and what to measure with.

        Args:
            floor: what own is compared with.
            own: what is judged.
            replays: in one stretch; the more, the less the launch of the first one counts.
            event: makes an event on the current stream.

        Raises:
            RunError: no replays, or no CUDA device.
        """
        self._name = f"timing of {own.name} against {floor.name}"
        if replays < 1:
            raise RunError(f"{self._name}: obtained {replays} replays, expected at least 1")
        self._floor, self._own, self._replays = floor, own, replays
        self._start, self._end = event(), event()
        self._rounds: list[tuple[float, float]] = []
        self._expected: tuple[np.ndarray, ...] = ()
        self._checked: list[int] = []  # number of rounds at each check of the outputs
        self._warm = False

    def check_outputs(self) -> None:
        """Replay each once from its prepared state, and hold the outputs against the first check.

        Raises:
            RunError: outputs that are not finite, or not those of the first check, bitwise or to
                the executor's own spread; of either executor, all in one message.
        """
        both = (self._floor, self._own)
        outputs = tuple(_outputs_once(timed) for timed in both)
        expected = self._expected or outputs
        wrong = sorted(
            f"{name}: {fault}"
            for name, timed, before, now in zip(self._names(), both, expected, outputs, strict=True)
            if (fault := _output_fault(before, now, timed.spread))
        )
        if wrong:
            raise RunError(
                f"{self._name}: outputs after {len(self._rounds)} rounds: {'; '.join(wrong)}; "
                "these times are not of the work that was checked"
            )
        self._expected = expected
        self._checked.append(len(self._rounds))

    def warm_up(self, rounds: int) -> None:
        """Run rounds that do not count: before the first round, and after a pause between two."""
        for _ in range(rounds):
            self._measure()
            self._warm = True

    def round(self) -> None:
        """Time floor, own, own, floor; keep the means a replay.

        Raises:
            RunError: a time that is not finite and positive.
        """
        self._rounds.append(self._measure())

    @property
    def own_us(self) -> tuple[float, ...]:
        """Return own's microseconds a replay, one of each round so far."""
        return tuple(own_us for _, own_us in self._rounds)

    def speedup(self, confidence: float = 0.95, seed: int = 0) -> Speedup:
        """Return the median over rounds of floor time / own time, with its interval.

        The interval is the percentile one of RESAMPLES bootstrap medians, rounds being the units.

        Args:
            confidence: of the two-sided interval.
            seed: of the resampling.

        Raises:
            RunError: too few rounds, none to warm up, outputs not checked before and after, or a
                confidence that is none.
        """
        self._require_rounds(confidence)
        floor_us, own_us = np.array(self._rounds, dtype=np.float64).T
        ratios = floor_us / own_us
        interval = stats.bootstrap(
            (ratios,),
            np.median,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        return Speedup(
            ratio=float(np.median(ratios)),
            lower=float(interval.low),
            upper=float(interval.high),
            confidence=confidence,
            latency_us=float(np.median(own_us)),
            floor_latency_us=float(np.median(floor_us)),
            rounds=len(ratios),
            replays=self._replays,
        )

    def _names(self) -> tuple[str, str]:
        """Return what the two are called in messages; an A/A run has one name twice."""
        return f"floor {self._floor.name}", f"own {self._own.name}"

    def _measure(self) -> tuple[float, float]:
        """Return microseconds a replay of floor and own, each the mean of two stretches."""
        order = (self._floor, self._own, self._own, self._floor)
        first_floor, first_own, last_own, last_floor = (self._stretch_us(each) for each in order)
        return (first_floor + last_floor) / 2, (first_own + last_own) / 2

    def _stretch_us(self, timed: Timed) -> float:
        """Return microseconds a replay over one stretch; only replays lie between the events."""
        timed.prepare()
        self._start.record()
        for _ in range(self._replays):
            timed.replay()
        self._end.record()
        self._end.synchronize()
        replay_us = 1e3 * self._start.elapsed_time(self._end) / self._replays
        if not (math.isfinite(replay_us) and replay_us > 0):
            raise RunError(
                f"{self._name}: {timed.name}: obtained {replay_us} us a replay, expected a finite "
                "time above 0; launch the replays on the current stream"
            )
        return replay_us

    def _require_rounds(self, confidence: float) -> None:
        """Raise RunError unless the rounds are what TIMED_REGIONS says of them."""
        rounds, wrong = len(self._rounds), []
        if rounds < FEWEST_ROUNDS:
            wrong.append(f"obtained {rounds} rounds, expected at least {FEWEST_ROUNDS}; time more")
        if not self._warm:
            wrong.append("obtained no round to warm up, expected at least 1; call warm_up first")
        if 0 not in self._checked or self._checked[-1] != rounds:
            wrong.append(
                f"obtained checks of the outputs after {self._checked} rounds, expected one after "
                f"0 and one after {rounds}; call check_outputs before and after the rounds"
            )
        if not 0 < confidence < 1:
            wrong.append(f"obtained confidence {confidence}, expected above 0 and below 1")
        if wrong:
            raise RunError(f"{self._name}: {'; '.join(wrong)}")


def _outputs_once(timed: Timed) -> np.ndarray:
    """Return a copy of what one replay from the prepared state gives."""
    timed.prepare()
    timed.replay()
    return np.array(timed.outputs())


def _output_fault(expected: np.ndarray, obtained: np.ndarray, spread: float) -> str:
    """Return why outputs are not those expected, or ""; what is not finite never is.

    ``spread``: how far they may differ, of the largest value expected.
    """
    bad = np.argwhere(~np.isfinite(obtained))
    if obtained.size == 0:
        return "obtained no values"
    if len(bad):
        index = tuple(map(int, bad[0]))
        return f"obtained {obtained[index]} at {list(index)}, expected finite values"
    if (expected.dtype, expected.shape) != (obtained.dtype, obtained.shape):
        return (
            f"obtained {obtained.dtype} {obtained.shape}, expected {expected.dtype} "
            f"{expected.shape} as before"
        )
    largest = np.abs(obtained.astype(np.float64) - expected.astype(np.float64)).max()
    allowed = spread * float(np.abs(expected).max())
    if expected.tobytes() == obtained.tobytes() or (spread and largest <= allowed):
        return ""
    within = f", within {allowed:.3g}" if spread else ""
    return f"obtained values that differ by up to {largest:.3g}, expected those of before{within}"
