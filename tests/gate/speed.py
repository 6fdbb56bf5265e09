"""Time engines on the GPU: each row against fp16, fp16 against itself and what else is there."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from gptneo_trt import decoder, gpu_watch
from gptneo_trt.alternatives import alternative
from gptneo_trt.data import Speedup
from gptneo_trt.engine import Engine
from gptneo_trt.engine_verdicts import noise_fault
from gptneo_trt.gpu_watch import GpuSample, GpuWatch
from gptneo_trt.timed_regions import TIMED_REGIONS
from gptneo_trt.timing import DeviceClock, PairedTimer, Timed
from gptneo_trt.variant import Variant
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate import tolerances
from tests.gate.engines import EnginePipeline
from tests.gate.shape import Shape

ROUNDS, WARM_UP_ROUNDS = 30, 3
ALTERNATIVE_ROUNDS = 10  # they differ by tens of per cent, and some take milliseconds a replay
REPLAYS = {"decode": 10, "prefill": 4}
# Rounds between two looks at the GPU. The host is busy with each for up to milliseconds, in which
# the GPU idles; a round that does not count follows, else the first stretch, fp16's, paid for it.
ROUNDS_A_SAMPLE = 5
CLOCK = DeviceClock()  # what pytest-benchmark reads: seconds of the GPU, not of this process


@dataclass(frozen=True)
class Comparison:
    """Hold one measurement of two executors, and what happened to the GPU meanwhile.

    Attributes:
        speedup: floor time over own time.
        own_us: own time a replay, a round each.
        disturbances: a line each; see ``gpu_watch.disturbances``.
    """

    speedup: Speedup
    own_us: tuple[float, ...]
    disturbances: tuple[str, ...]

    @property
    def is_quiet(self) -> bool:
        """Return whether an A/A run shows that ratios can be judged."""
        return not (self.disturbances or noise_fault(self.speedup, tolerances.NOISE_FRAC))


# Whether a row's measurement, beside the A/A run, can be judged.
IsSettled = Callable[[Comparison, Comparison], bool]


def timing(shape: Shape) -> dict[str, object]:
    """Return what every latency of a run is the time of, for reports and baselines."""
    regions = {
        phase: asdict(region) | {"replays": REPLAYS[phase], "rounds": ROUNDS}
        for phase, region in TIMED_REGIONS.items()
    }
    return {"regions": regions, "warm_up_rounds": WARM_UP_ROUNDS} | shape._asdict()


class Stopwatch:
    """Time engines that a pipeline holds, under watch, and once more what cannot be judged.

    Attributes:
        record: of all measurements so far, for reports: how many, how many of them again, what
            disturbed them, and what ``gpu_watch.seen`` says of the GPU.
    """

    def __init__(self, engines: EnginePipeline, uuid: str) -> None:
        """Remember where the engines are, and NVML's name of the GPU that runs them."""
        self._engines, self._uuid = engines, uuid
        self._floors: dict[str, Timed] = {}
        self._noise: dict[str, Comparison] = {}
        self._samples: list[GpuSample] = []
        self._disturbances: list[str] = []
        self._measurements, self._again = 0, 0
        self.record: dict[str, object] = {}

    @cached_property
    def _architecture(self):
        return self._engines.checkpoint.architecture

    def _tokens(self, engine: Engine) -> torch.Tensor:
        """Return a batch of texts that fill the context, int32 [1, B, context] on the host."""
        texts = self._engines.texts(engine)[0]
        return decoder.checked_tokens(texts, self._architecture, engine)

    def _loop(self, engine: Engine) -> decoder.DecodeLoop:
        """Return a loop with room for a batch of texts that fill the cache."""
        return decoder.DecodeLoop(engine, self._architecture, engine.batch, engine.context)

    def step(self, variant: Variant) -> Timed:
        """Return a decode step just below the end of a full cache."""
        engine = self._engines.engine(variant, "decode")
        loop = self._loop(engine)
        loop.start(self._tokens(engine))
        for _ in range(engine.context):
            loop.step()
        first = engine.context - REPLAYS["decode"]
        return Timed(
            variant.name,
            loop.step,
            lambda: loop.seek(first),
            lambda: loop.logits[:, first].cpu().numpy(),
        )

    def bare_step(self, variant: Variant) -> Timed:
        """Return the replay of a decode engine and nothing else."""
        engine = self._engines.engine(variant, "decode")
        loop = self._loop(engine)
        outputs = engine.run(loop.feeds)
        return Timed(
            f"{variant.name} without its step",
            engine.repeat(lambda: engine.run(loop.feeds)),
            lambda: None,
            lambda: outputs["logits"].cpu().numpy(),
        )

    def whole_text(self, variant: Variant) -> Timed:
        """Return a prefill of texts that fill the context."""
        engine = self._engines.engine(variant, "prefill")
        feeds = decoder.prefill_feeds(self._tokens(engine).to(engine.device))
        outputs = engine.run(feeds)
        return Timed(
            variant.name,
            engine.repeat(lambda: engine.run(feeds)),
            lambda: None,
            lambda: outputs["logits"].cpu().numpy(),
        )

    def timed(self, variant: Variant, phase: str) -> Timed:
        """Return what one replay of a row is in a phase."""
        return {"decode": self.step, "prefill": self.whole_text}[phase](variant)

    def floor(self, phase: str) -> Timed:
        """Return fp16, made once a phase."""
        if phase not in self._floors:
            self._floors[phase] = self.timed(VARIANTS[FLOOR], phase)
        return self._floors[phase]

    def against_floor(
        self, own: Timed, phase: str, is_settled: IsSettled
    ) -> tuple[Comparison, Comparison]:
        """Return fp16's time over a row's, and over its own in the same run.

        What is not settled is measured once more, fp16 against itself too where that was not
        quiet, and the second measurement is returned whatever it is: choosing would favour one.
        """
        noise = self.noise(phase)
        obtained = self._measured(self.floor(phase), own, phase)
        if is_settled(obtained, noise):
            return obtained, noise
        self._again += 1
        if not noise.is_quiet:
            del self._noise[phase]
        return self._measured(self.floor(phase), own, phase), self.noise(phase)

    def noise(self, phase: str) -> Comparison:
        """Return fp16 against itself, measured once a phase."""
        if phase not in self._noise:
            twin = self.timed(VARIANTS[FLOOR], phase)
            self._noise[phase] = self._measured(self.floor(phase), twin, phase)
        return self._noise[phase]

    def overhead(self, variant: Variant) -> Comparison:
        """Return the time of a decode step over that of its engine alone."""
        return self._undisturbed(self.step(variant), self.bare_step(variant), "decode", ROUNDS)

    def clock_frac(self, phase: str) -> float:
        """Return how much of fp16's rounds, by the host's clock, the device's clock has counted.

        From the first stretch until the device has nothing left to do: a clock that stops when
        the work is launched, or that watches another stream, has counted next to nothing of it.
        """
        timer = PairedTimer(self.floor(phase), self.floor(phase), REPLAYS[phase])
        timer.warm_up(WARM_UP_ROUNDS)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(ALTERNATIVE_ROUNDS):
            timer.round()
        torch.cuda.synchronize()
        # A round is four stretches of replays.
        counted_us = 4 * REPLAYS[phase] * sum(timer.own_us)
        return 1e-6 * counted_us / (time.perf_counter() - started)

    def alternative(self, name: str, phase: str) -> Comparison:
        """Return fp16's time over that of what a user would otherwise run."""
        checkpoint, engine = self._engines.checkpoint, self._engines.engine(VARIANTS[FLOOR], phase)
        shape = engine.batch, engine.context
        own = alternative(name, phase, checkpoint, shape, torch.device("cuda"))
        return self._undisturbed(self.floor(phase), own, phase, ALTERNATIVE_ROUNDS)

    def _undisturbed(self, floor: Timed, own: Timed, phase: str, rounds: int) -> Comparison:
        """Return a measurement, the second one where the first was disturbed."""
        found = self._measured(floor, own, phase, rounds)
        if not found.disturbances:
            return found
        self._again += 1
        return self._measured(floor, own, phase, rounds)

    def _measured(self, floor: Timed, own: Timed, phase: str, rounds: int = ROUNDS) -> Comparison:
        """Time two executors once, with looks at the GPU between rounds, and keep the record."""
        timer = PairedTimer(floor, own, REPLAYS[phase])
        with GpuWatch(self._uuid) as watch:
            timer.check_outputs()
            timer.warm_up(WARM_UP_ROUNDS)
            for done in range(rounds):
                if done % ROUNDS_A_SAMPLE == 0:
                    watch.sample()
                    timer.warm_up(1)
                timer.round()
            watch.sample()
            timer.check_outputs()
        seen = gpu_watch.disturbances(
            watch.samples, tolerances.CLOCK_DRIFT_FRAC, tolerances.TEMPERATURE_DRIFT_C
        )
        self._keep(f"{own.name}, {phase}", watch.samples, seen)
        speedup = timer.speedup(confidence=2 * tolerances.SPEEDUP_CONFIDENCE - 1)
        return Comparison(speedup, timer.own_us, seen)

    def _keep(self, what: str, samples: list[GpuSample], seen: tuple[str, ...]) -> None:
        """Bring the record up to date with one measurement."""
        self._measurements += 1
        self._samples += samples
        self._disturbances += [f"{what}: {line}" for line in seen]
        self.record |= {
            "measurements": self._measurements,
            "measured_again": self._again,
            "disturbances": self._disturbances,
        } | gpu_watch.seen(self._samples)
