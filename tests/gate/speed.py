"""Time engines on the GPU: each row against fp16, fp16 against itself and what else is there."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial

import numpy as np
import torch

from gptneo_trt import decoder
from gptneo_trt.alternatives import alternative
from gptneo_trt.data import Speedup
from gptneo_trt.timing import TIMED_REGIONS, DeviceClock, PairedTimer, Timed
from gptneo_trt.variants import FLOOR, VARIANTS, Variant
from tests.gate.engines import EnginePipeline
from tests.gate.measurer import CONTEXT

ROUNDS, WARM_UP_ROUNDS = 30, 3
ALTERNATIVE_ROUNDS = 10  # they differ by tens of per cent, and some take milliseconds a replay
REPLAYS = {"decode": 10, "prefill": 4}
CLOCK = DeviceClock()  # what pytest-benchmark reads: seconds of the GPU, not of this process

Benchmark = Callable[[PairedTimer], None]


def timing() -> dict[str, object]:
    """Return what every latency of a run is the time of, for reports and baselines."""
    regions = {
        phase: asdict(region) | {"replays": REPLAYS[phase], "rounds": ROUNDS}
        for phase, region in TIMED_REGIONS.items()
    }
    return {"regions": regions, "warm_up_rounds": WARM_UP_ROUNDS, "context": CONTEXT}


def run_rounds(timer: PairedTimer, rounds: int = ROUNDS) -> None:
    """Run the timed rounds."""
    for _ in range(rounds):
        timer.round()


class Stopwatch:
    """Time engines that a pipeline holds."""

    def __init__(self, engines: EnginePipeline) -> None:
        """Remember where the engines are."""
        self._engines = engines
        self._floors: dict[str, Timed] = {}
        self._noise: dict[str, Speedup] = {}

    @cached_property
    def _architecture(self):
        return self._engines.checkpoint.architecture

    def _text(self) -> np.ndarray:
        return self._engines.texts()[:1]

    def step(self, variant: Variant) -> Timed:
        """Return a decode step just below the end of a full cache."""
        engine = self._engines.engine(variant, "decode")
        loop = decoder.DecodeLoop(engine, self._architecture, 1, CONTEXT)
        loop.start(decoder.checked_tokens(self._text(), self._architecture, engine))
        for _ in range(CONTEXT):
            loop.step()
        first = CONTEXT - REPLAYS["decode"]
        return Timed(
            variant.name,
            loop.step,
            lambda: loop.seek(first),
            lambda: loop.logits[:, first].cpu().numpy(),
        )

    def bare_step(self, variant: Variant) -> Timed:
        """Return the replay of a decode engine and nothing else."""
        engine = self._engines.engine(variant, "decode")
        loop = decoder.DecodeLoop(engine, self._architecture, 1, CONTEXT)
        outputs = engine.run(loop.feeds)
        return Timed(
            f"{variant.name} without its step",
            engine.repeat(lambda: engine.run(loop.feeds)),
            lambda: None,
            lambda: outputs["logits"].cpu().numpy(),
        )

    def whole_text(self, variant: Variant) -> Timed:
        """Return a prefill of CONTEXT tokens."""
        engine = self._engines.engine(variant, "prefill")
        tokens = decoder.checked_tokens(self._text(), self._architecture, engine)
        feeds = decoder.prefill_feeds(tokens.to(engine.device))
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

    def against_floor(self, own: Timed, phase: str, rounds: Benchmark = run_rounds) -> Speedup:
        """Return fp16's time over another's, from interleaved rounds."""
        return self._compared(self.floor(phase), own, phase, rounds)

    def noise(self, phase: str) -> Speedup:
        """Return the ratio of fp16 to itself, measured once a phase."""
        if phase not in self._noise:
            twin = self.timed(VARIANTS[FLOOR], phase)
            self._noise[phase] = self.against_floor(twin, phase)
        return self._noise[phase]

    def overhead(self, variant: Variant) -> Speedup:
        """Return the time of a decode step over that of its engine alone."""
        return self._compared(self.step(variant), self.bare_step(variant), "decode", run_rounds)

    def alternative(self, name: str, phase: str) -> Speedup:
        """Return fp16's time over that of what a user would otherwise run."""
        checkpoint = self._engines.checkpoint
        own = alternative(name, phase, checkpoint, CONTEXT, torch.device("cuda"))
        return self.against_floor(own, phase, partial(run_rounds, rounds=ALTERNATIVE_ROUNDS))

    def _compared(self, floor: Timed, own: Timed, phase: str, rounds: Benchmark) -> Speedup:
        timer = PairedTimer(floor, own, REPLAYS[phase], CLOCK)
        timer.check_outputs()
        timer.warm_up(WARM_UP_ROUNDS)
        rounds(timer)
        timer.check_outputs()
        return timer.speedup()
