"""Measure rows through engines on the GPU, in this process, and keep the engines that are timed."""

from collections.abc import Callable

import numpy as np

from gptneo_trt import decoder
from gptneo_trt.data import Measurement, Scales
from gptneo_trt.decoder import Executor
from gptneo_trt.engine import Engine
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.variants import FLOOR, Variant
from tests.gate.measure import Pipeline
from tests.gate.measurer import CONTEXT, Setup

REPEATS = 100  # calls after which an engine still has to give the same bits


class EnginePipeline(Pipeline):
    """Hold what Pipeline holds, and the engines of the floor and of the row in hand."""

    # TensorRT-RTX compiles kernels for every length that an engine runs, about a second each.
    widths = (CONTEXT // 2, CONTEXT)

    def __init__(self, setup: Setup, load: Callable[[Variant, str], Engine]) -> None:
        """Remember how an engine is loaded; none is yet."""
        super().__init__(setup)
        self._load = load
        self._engines: dict[tuple[str, str], Engine | GptNeoTrtError] = {}
        self._in_hand = FLOOR
        self._measured: dict[str, dict[str, Measurement | GptNeoTrtError]] = {}

    def engine(self, variant: Variant, phase: str) -> Engine:
        """Return the engine of a row and phase, loaded once while the row is in hand.

        Raises:
            GptNeoTrtError: it cannot be built or loaded; the same error each time.
        """
        if variant.name not in (FLOOR, self._in_hand):
            self._in_hand = variant.name
            self._engines = {key: each for key, each in self._engines.items() if key[0] == FLOOR}
        key = variant.name, phase
        if key not in self._engines:
            try:
                self._engines[key] = self._load(variant, phase)
            except GptNeoTrtError as error:
                self._engines[key] = error
        found = self._engines[key]
        if isinstance(found, GptNeoTrtError):
            raise found
        return found

    def executor(self, variant: Variant, scales: Scales | None, phase: str) -> Executor:
        """Return what runs the network of a row: here the engine."""
        return self.engine(variant, phase)

    def measurement(self, variant: Variant, phase: str) -> Measurement:
        """Return what the engines of a row gave in a phase; raise what they failed with."""
        if variant.name not in self._measured:
            self._measured[variant.name] = self.measure(variant, None)
            self._keep_kernels(variant)
        found = self._measured[variant.name][phase]
        if isinstance(found, GptNeoTrtError):
            raise found
        return found

    def _keep_kernels(self, variant: Variant) -> None:
        """Let the next run find what this one compiled for the lengths that a row ran."""
        for (name, _), engine in self._engines.items():
            if name == variant.name and not isinstance(engine, GptNeoTrtError):
                engine.keep_kernels()

    def texts(self) -> np.ndarray:
        """Return int32 [2, CONTEXT]: two texts of random tokens, the same in every run."""
        generator = np.random.default_rng(0)
        vocabulary = self.checkpoint.architecture.vocab_size
        return generator.integers(0, vocabulary, (2, CONTEXT), dtype=np.int32)

    def first_and_last_logits(self, variant: Variant, phase: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of one text as the engine gives them first, and after REPEATS calls."""
        engine, architecture = self.engine(variant, phase), self.checkpoint.architecture
        run = {"prefill": decoder.prefill, "decode": decoder.decode}[phase]
        text, other = self.texts()[:, None]
        first = run(engine, architecture, text).logits
        if phase == "prefill":
            tokens = decoder.checked_tokens(other, architecture, engine).to(engine.device)
            for _ in range(REPEATS):
                engine.run(decoder.prefill_feeds(tokens))
        else:  # CONTEXT calls, which are more
            run(engine, architecture, other)
        self._keep_kernels(variant)
        return first, run(engine, architecture, text).logits

    def logits_after_another_text(
        self, variant: Variant, left_behind: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a short text's logits from a new loop, and after a long text in the same one.

        Args:
            variant: the row.
            left_behind: what stands in every cache row before the short text starts.
        """
        engine, architecture = self.engine(variant, "decode"), self.checkpoint.architecture
        long, short = self.texts()
        tokens = {
            name: decoder.checked_tokens(text[None, :length], architecture, engine)
            for name, text, length in (("long", long, 200), ("short", short, 8))
        }

        def decoded(loop: decoder.DecodeLoop, name: str) -> np.ndarray:
            loop.start(tokens[name])
            for _ in range(tokens[name].shape[-1]):
                loop.step()
            return loop.decoded().logits

        alone = decoded(decoder.DecodeLoop(engine, architecture, 1, CONTEXT), "short")
        loop = decoder.DecodeLoop(engine, architecture, 1, CONTEXT)
        decoded(loop, "long")
        loop.cache.fill_(left_behind)
        return alone, decoded(loop, "short")
