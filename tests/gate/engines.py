"""Measure rows through engines on the GPU, in this process, and keep the engines that are timed."""

from collections.abc import Callable

import numpy as np

from gptneo_trt import decoder, metrics
from gptneo_trt.data import Decoded, Measurement, Scales
from gptneo_trt.decoder import Executor
from gptneo_trt.engine import Engine
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.variant import Variant
from gptneo_trt.variants import FLOOR
from tests.gate.measure import Pipeline
from tests.gate.measurer import CONTEXT, Setup

REPEATS = 100  # calls after which an engine still has to give the same bits
LONG, SHORT = 200, 8  # tokens of a text, and of one that follows it
COMPARED = 32  # last positions of a text, where attention has carried what went wrong before


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

    def texts(self, executor: Executor) -> np.ndarray:
        """Return int32 [2, B, context]: two batches of random tokens, the same in every run."""
        generator, shape = np.random.default_rng(0), (2, executor.batch, executor.context)
        vocabulary = self.checkpoint.architecture.vocab_size
        return generator.integers(0, vocabulary, shape, dtype=np.int32)

    def _decoded(self, executor: Executor, token_ids: np.ndarray) -> Decoded:
        """Return what whole texts give in the executor's phase."""
        run = {"prefill": decoder.prefill, "decode": decoder.decode}[executor.phase]
        return run(executor, self.checkpoint.architecture, token_ids)

    def first_and_last_logits(self, variant: Variant, phase: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of a batch as the engine gives them first, and after REPEATS calls."""
        engine, architecture = self.engine(variant, phase), self.checkpoint.architecture
        texts, others = self.texts(engine)
        first = self._decoded(engine, texts).logits
        if phase == "prefill":
            tokens = decoder.checked_tokens(others, architecture, engine).to(engine.device)
            for _ in range(REPEATS):
                engine.run(decoder.prefill_feeds(tokens))
        else:
            for _ in range(0, REPEATS, engine.context):  # each as many calls as the context
                self._decoded(engine, others)
        self._keep_kernels(variant)
        return first, self._decoded(engine, texts).logits

    def non_finite(self, variant: Variant, phase: str) -> str | None:
        """Return the first value of a batch that fills the context and is not finite, or None."""
        engine = self.engine(variant, phase)
        decoded = self._decoded(engine, self.texts(engine)[0])
        return metrics.first_non_finite(vars(decoded))

    def logits_in_other_places(
        self, variant: Variant, phase: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return texts in a batch, and their last logits in it and one place further up.

        The first text of the batch has gone then, and another one follows: each text has another
        place and other texts beside it. Token ids are int32 [B - 1, COMPARED], logits float32
        [B - 1, COMPARED, V].
        """
        engine = self.engine(variant, phase)
        texts, (another, *_) = self.texts(engine)
        moved = np.concatenate((texts[1:], another[None]))
        before, after = (
            self._decoded(engine, each).logits[:, -COMPARED:] for each in (texts, moved)
        )
        return texts[1:, -COMPARED:], before[1:], after[:-1]

    def logits_after_another_text(
        self, variant: Variant, left_behind: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return short texts' logits from a new loop, and after long texts in the same one.

        Args:
            variant: the row.
            left_behind: what stands in every cache row before the short texts start.
        """
        engine, architecture = self.engine(variant, "decode"), self.checkpoint.architecture
        long, short = self.texts(engine)
        tokens = {
            name: decoder.checked_tokens(texts[:, :length], architecture, engine)
            for name, texts, length in (("long", long, LONG), ("short", short, SHORT))
        }

        def decoded(loop: decoder.DecodeLoop, name: str) -> np.ndarray:
            loop.start(tokens[name])
            for _ in range(tokens[name].shape[-1]):
                loop.step()
            return loop.decoded().logits

        def new_loop() -> decoder.DecodeLoop:
            return decoder.DecodeLoop(engine, architecture, engine.batch, engine.context)

        alone, loop = decoded(new_loop(), "short"), new_loop()
        decoded(loop, "long")
        loop.cache.fill_(left_behind)
        return alone, decoded(loop, "short")
