"""Run rows in worker processes: this one must not wait for torch, and a row uses one core.

Each worker holds the checkpoint, the texts and the references, and runs one row at a time on one
thread: a row's products are small, results do not depend on the number of threads, and two
processes share two cores without waiting for each other. ``--workers 0`` runs here.

A worker that dies costs the row that it ran, and another one takes its place. (The processes of
``concurrent.futures`` share their queues: one that dies costs all rows, and those of a parent that
was killed wait for ever.) Each has a thread here that hands it rows.
"""

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gptneo_trt.child_process import die_with, ending
from gptneo_trt.data import Measurement, Scales, TextSet
from gptneo_trt.errors import CrashError, GptNeoTrtError
from gptneo_trt.variant import Variant

if TYPE_CHECKING:
    from tests.gate.measure import Pipeline

CONTEXT = 256  # the study's cache rows and prefill length
PROSE_TEXTS = 12  # windows of the context
# The study's 1536 teacher-forced tokens, as 12 texts of 128 rather than 6 of 256: half the steps,
# twice the texts to resample, and still beyond the window of a local layer.
DECODE_TOKENS = 128

# For one row: minutes at 125m size on one core. A process that has not answered by then hangs.
LIMIT_S = 3600.0
DYING_S = 5.0  # for a process whose pipe is closed to end

Outcome = Measurement | GptNeoTrtError
# What it is for, function and arguments; what it gives goes into the future.
_Call = tuple[Future, str, Callable, tuple]


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
        checkpoint_sha256: what the model must be, whenever a worker loads it; "" for anything.
    """

    model: str
    flavour: str
    text_source: str
    cache: Path
    keep_logits: bool = False
    summation_order: int = 0
    checkpoint_sha256: str = ""


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


def _calibrate(text: TextSet, modules: Sequence[str], others: Sequence[str]) -> Scales:
    return _pipeline.calibrate(text, modules, others)


def _serve(connection: Connection, parent: int) -> None:
    """Answer calls, in a worker: ``(function, arguments)`` -> (what it gave, what it raised)."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    while True:
        function, arguments = connection.recv()
        connection.send(_outcome(function, arguments))


def _outcome(function: Callable, arguments: tuple) -> tuple[Any, Exception | None]:
    """Return what a call gave, or what it raised: that is for whoever asked for the row."""
    try:
        return function(*arguments), None
    except GptNeoTrtError as error:
        return None, error
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        return None, error


class _Worker:
    """Hold a process that runs one call at a time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, others = context.Pipe()
        self._process = context.Process(target=_serve, args=(others, os.getpid()), daemon=True)
        self._process.start()
        others.close()  # so that the end of the process is the end of the pipe

    @property
    def is_alive(self) -> bool:
        """Return whether it can run another call."""
        return self._process.is_alive()

    def run(self, what: str, function: Callable, arguments: tuple) -> Any:
        """Return what a call gives; raise what it raises.

        Raises:
            CrashError: the process died, or has not answered after LIMIT_S.
        """
        started = time.monotonic()
        try:
            self._connection.send((function, arguments))
            has_answered = self._connection.poll(LIMIT_S)
            found, error = self._connection.recv() if has_answered else (None, None)
        except (EOFError, OSError) as lost:
            self._process.join(DYING_S)
            raise self._crash(what, time.monotonic() - started) from lost
        if not has_answered:
            raise self._crash(what, time.monotonic() - started)
        if error:
            raise error
        return found

    def _crash(self, what: str, seconds: float) -> CrashError:
        """End the process; return the error of the call that it never answered."""
        how = ending(self._process.exitcode, seconds)
        self.end()
        return CrashError(f"{what}: the process that interprets networks {how}")

    def end(self) -> None:
        """Kill the process, which holds nothing that is not in a file."""
        self._process.kill()
        self._process.join()


class Measurer:
    """Measure rows, each once, in the order of ``submit``."""

    def __init__(self, setup: Setup, workers: int) -> None:
        """Start the workers, which begin to load; with 0 workers, load nothing yet."""
        self._rows: dict[str, Future[dict[str, Outcome]]] = {}
        self._second_rolls: dict[str, Future[dict[str, Outcome]]] = {}
        self._setup = setup
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers: dict[int, _Worker] = {}
        self._threads = [
            Thread(target=self._hand_out, args=(index,), daemon=True) for index in range(workers)
        ]
        for thread in self._threads:
            self._run("loading", _load)  # what fails here, a row meets again
            thread.start()
        if not workers:
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
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        for _ in self._threads:
            self._calls.put(None)
        for worker in list(self._workers.values()):
            worker.end()
        for thread in self._threads:
            thread.join()

    def _hand_out(self, index: int) -> None:
        """Hand calls to a worker, and to another one when that has died."""
        while call := self._calls.get():
            future, *asked = call
            _fulfil(future, partial(self._run_in_worker, index, *asked))
        if index in self._workers:
            self._workers[index].end()

    def _run_in_worker(self, index: int, what: str, function: Callable, arguments: tuple) -> Any:
        if index not in self._workers or not self._workers[index].is_alive:
            worker = self._workers[index] = _Worker()
            with ExitStack() as unprepared:
                unprepared.callback(worker.end)
                worker.run(what, _prepare, (self._setup,))
                unprepared.pop_all()
        return self._workers[index].run(what, function, arguments)

    def _run(self, what: str, function: Callable, *arguments: Any) -> Future:
        future: Future = Future()
        if self._threads:
            self._calls.put((future, what, function, arguments))
        else:
            _fulfil(future, partial(function, *arguments))
        return future

    def calibrate(
        self, text: TextSet, modules: Sequence[str], other_methods: Sequence[str] = ()
    ) -> Scales:
        """Return the calibrated scales of these modules, by other methods too."""
        return self._run("calibration", _calibrate, text, modules, other_methods).result()

    def submit(self, variant: Variant, scales: Scales | None) -> None:
        """Queue a row unless it is queued."""
        if variant.name not in self._rows:
            self._rows[variant.name] = self._run(
                f"variant {variant.name}", _measure, variant, scales
            )

    def result(self, variant: Variant, phase: str) -> Measurement:
        """Return what a submitted row gave in a phase; raise what it failed with."""
        return _given(self._rows[variant.name], phase)

    def submit_second_roll(self, variant: Variant, scales: Scales | None) -> None:
        """Queue a row in another order of summation, compared as the regressions need it."""
        self._second_rolls[variant.name] = self._run(
            f"variant {variant.name}, second roll", _measure_again, variant, scales
        )

    def second_roll(self, variant: Variant, phase: str) -> Measurement:
        """Return what the second roll of a row gave in a phase; raise what it failed with."""
        return _given(self._second_rolls[variant.name], phase)


def _fulfil(future: Future, call: Callable[[], Any]) -> None:
    """Put what a call gives, or what it raises, into a future: that is for whoever asks."""
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)


def _given(row: Future[dict[str, Outcome]], phase: str) -> Measurement:
    """Return what a row gave in a phase; raise what it failed with."""
    outcome = row.result()[phase]
    if isinstance(outcome, GptNeoTrtError):
        raise outcome
    return outcome
