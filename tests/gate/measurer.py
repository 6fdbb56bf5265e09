"""Run rows in worker processes: this one must not wait for torch, and a row uses one core.

Each worker holds the checkpoint, the texts and the references, and runs one row at a time on one
thread: a row's products are small, results do not depend on the number of threads, and two
processes share two cores without waiting for each other. ``--workers 0`` runs here.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gptneo_trt.data import Measurement, Scales, TextSet
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.variants import Variant

if TYPE_CHECKING:
    from tests.gate.measure import Pipeline

CONTEXT = 256  # the study's cache rows and prefill length
PROSE_TEXTS = 12  # windows of the context
# The study's 1536 teacher-forced tokens, as 12 texts of 128 rather than 6 of 256: half the steps,
# twice the texts to resample, and still beyond the window of a local layer.
DECODE_TOKENS = 128

Outcome = Measurement | GptNeoTrtError


@dataclass(frozen=True)
class Setup:
    """Say what a worker loads.

    Attributes:
        model: as given to ``--model``.
        flavour: TensorRT flavour.
        text_source: "bundled" or "study".
        cache: folder where references are kept.
        keep_logits: whether measurements of rows without FP8 keep their logits.
        summation_order: of the interpreter; see ``Interpreter``.
    """

    model: str
    flavour: str
    text_source: str
    cache: Path
    keep_logits: bool = False
    summation_order: int = 0


_pipeline: "Pipeline"  # of this process, set by _prepare


def _prepare(setup: Setup) -> None:
    global _pipeline
    # Only a worker needs torch and transformers; importing them takes seconds.
    from tests.gate.measure import Pipeline

    _pipeline = Pipeline(setup)


def _load() -> None:
    _pipeline.load()


def _measure(variant: Variant, scales: Scales | None) -> dict[str, Outcome]:
    return _pipeline.measure(variant, scales)


def _measure_again(variant: Variant, scales: Scales | None) -> dict[str, Outcome]:
    return _pipeline.second_roll.measure(variant, scales)


def _calibrate(text: TextSet, modules: Sequence[str]) -> Scales:
    return _pipeline.calibrate(text, modules)


class Measurer:
    """Measure rows, each once, in the order of ``submit``."""

    def __init__(self, setup: Setup, workers: int) -> None:
        """Start the workers, which begin to load; with 0 workers, load nothing yet."""
        self._rows: dict[str, Future[dict[str, Outcome]]] = {}
        self._second_rolls: dict[str, Future[dict[str, Outcome]]] = {}
        self._pool: ProcessPoolExecutor | None = None
        if workers > 0:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, context, _prepare, (setup,))
            for _ in range(workers):
                self._pool.submit(_load)
        else:
            _prepare(setup)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers without waiting for rows that nobody asked for."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _run(self, function, *arguments) -> Future:
        if self._pool:
            return self._pool.submit(function, *arguments)
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def calibrate(self, text: TextSet, modules: Sequence[str]) -> Scales:
        """Return the calibrated scales of these modules."""
        return self._run(_calibrate, text, modules).result()

    def submit(self, variant: Variant, scales: Scales | None) -> None:
        """Queue a row unless it is queued."""
        if variant.name not in self._rows:
            self._rows[variant.name] = self._run(_measure, variant, scales)

    def result(self, variant: Variant, phase: str) -> Measurement:
        """Return what a submitted row gave in a phase; raise what it failed with."""
        return _given(self._rows[variant.name], phase)

    def submit_second_roll(self, variant: Variant, scales: Scales | None) -> None:
        """Queue a row in another order of summation, compared as the regressions need it."""
        self._second_rolls[variant.name] = self._run(_measure_again, variant, scales)

    def second_roll(self, variant: Variant, phase: str) -> Measurement:
        """Return what the second roll of a row gave in a phase; raise what it failed with."""
        return _given(self._second_rolls[variant.name], phase)


def _given(row: Future[dict[str, Outcome]], phase: str) -> Measurement:
    """Return what a row gave in a phase; raise what it failed with."""
    outcome = row.result()[phase]
    if isinstance(outcome, GptNeoTrtError):
        raise outcome
    return outcome
