"""Run engines with a fault and without, on a GPU, and judge them with the gate's tests.

engine plans   the fault is in the network that the plan is built from, in a child process
engine runs    the plan is the row's own; the fault is in what loads, runs or times it
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptneo_trt import plans
from gptneo_trt.data import Measurement, Plan
from gptneo_trt.engine import Engine
from gptneo_trt.network import PHASES
from gptneo_trt.plans import PlanRequest
from gptneo_trt.targets import Gpu, Target
from gptneo_trt.variant import Variant
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate import test_build, test_engine, test_quality, test_speed
from tests.gate.engines import EnginePipeline
from tests.gate.measurer import CONTEXT, Setup
from tests.gate.speed import Stopwatch
from tests.selftest import faulty_worker
from tests.selftest.bench import FLAVOUR, Bench, few_texts
from tests.selftest.fault import Fault
from tests.selftest.judging import Cells, judged, tests_of

MODULES = (test_build, test_quality, test_engine, test_speed)
ROWS = (VARIANTS[FLOOR], VARIANTS["fp8"])  # that faults are seeded into
BUILDERS = max(1, min(8, (os.cpu_count() or 1) // 2))

Measure = Callable[[Variant, str], Measurement]


def rounds_alone() -> SimpleNamespace:
    """Return what a speed test needs of pytest-benchmark, which runs once a test: the rounds."""

    def pedantic(function, rounds, iterations):
        for _ in range(rounds):
            function()

    return SimpleNamespace(disabled=False, group="", extra_info={}, pedantic=pedantic)


class EngineBench(Bench):
    """Hold what Bench holds, engines without a fault, and plans that are built ahead."""

    def __init__(
        self, gate_cache: Path, folder: Path, target: Target, gpu: Gpu | None, interpreted: Measure
    ) -> None:
        """Remember where things are; nothing is loaded before it is needed.

        Args:
            gate_cache: the gate's; nothing faulty is written there.
            folder: an empty one: a plan with a fault is built in ``folder / fault.name``.
            target: of the stored runs.
            gpu: that runs the engines.
            interpreted: (variant, phase) -> what the network gives without a fault.
        """
        self._ahead: dict[tuple[str, str, str], Future[Plan]] = {}
        super().__init__(gate_cache, folder, target, gpu)
        self._interpreted = interpreted
        self._judged_without = cache(self._judged_without_fault)

    def _new_pipeline(self, folder: Path, fault: Fault | None = None) -> EnginePipeline:
        setup = Setup("bundled", FLAVOUR, "bundled", folder, keep_logits=True)
        made = few_texts(
            EnginePipeline(setup, lambda variant, phase: self._load(fault, variant, phase))
        )
        made.widths = (CONTEXT,)  # a length more is a second more an engine
        return made

    def _pipeline_with(self, fault: Fault) -> EnginePipeline:
        """Return a pipeline that loads anew, on the references of the one without a fault."""
        made = self._new_pipeline(self.gate_cache, fault)
        for name in ("checkpoint", "prose", "references", "provenances"):
            setattr(made, name, getattr(self.pipeline, name))
        return made

    def build_ahead(self, pool: ThreadPoolExecutor, faults: Sequence[Fault]) -> None:
        """Queue the plans of the rows without a fault, and of faults that are in a plan."""
        for row in ROWS:
            for phase in PHASES:
                self._submit(pool, "", row, phase)
        for fault in faults:
            if fault.through == "engine plans":
                for phase in fault.phases:
                    self._submit(pool, fault.name, VARIANTS[fault.variant], phase)

    def _submit(self, pool: ThreadPoolExecutor, name: str, row: Variant, phase: str) -> None:
        folder = self.folder / name if name else self.gate_cache
        build = pool.submit(plans.build_plan, self._request(row, phase), folder)
        self._ahead[name, row.name, phase] = build

    def _request(self, variant: Variant, phase: str) -> PlanRequest:
        used = self.scales if variant.quantized else None
        runs_on = self.gpu.identity if self.gpu else ""
        return PlanRequest(
            self.backend, self.checkpoint, variant, used, phase, CONTEXT, gpu=runs_on
        )

    def _load(self, fault: Fault | None, variant: Variant, phase: str) -> Engine:
        name = fault.name if fault else ""
        key = name, variant.name, phase
        plan = self._ahead.get(key) or self._ahead["", variant.name, phase]
        return Engine(self._request(variant, phase), plan.result())

    def _cells_with(self, fault: Fault) -> Cells:
        """Return the fault's cells as the gate judges them with the fault."""
        _ = self.scales, self.stored  # without the fault
        variant, clean = VARIANTS[fault.variant], self._measured(self.pipeline)
        engines = self._pipeline_with(fault)
        faulty = self._measured(engines)

        def measured(row: Variant, phase: str) -> Measurement:
            seen = row == variant and phase in fault.phases
            return faulty(row, phase) if seen else clean(row, phase)

        with pytest.MonkeyPatch.context() as patch:
            if fault.through == "engine runs":
                for row in (variant, VARIANTS[FLOOR]):
                    self.control(row)
                fault.seed(patch)
            return self._judge(variant, fault.cells, engines, measured)

    def cells_without(self, fault: Fault) -> Cells:
        """Return the same cells as the gate judges them without the fault."""
        return self._judged_without(VARIANTS[fault.variant], fault.cells)

    def _judged_without_fault(self, variant: Variant, cells: tuple[tuple[str, str], ...]) -> Cells:
        return self._judge(variant, cells, self.pipeline, self._measured(self.pipeline))

    def _measured(self, engines: EnginePipeline) -> Measure:
        """Return a function (variant, phase) -> Measurement of these engines, one phase each."""
        if engines is self.pipeline:
            return lambda row, phase: self.control(row).phases[phase]

        @cache
        def measured(row: Variant, phase: str) -> Measurement:
            if phase == "prefill":
                return engines.measure_prefill(row, None)[0]
            return engines.measure_decode(row, None, self.control(row).logits)

        return measured

    def _judge(
        self,
        variant: Variant,
        cells: tuple[tuple[str, str], ...],
        engines: EnginePipeline,
        measured: Measure,
    ) -> Cells:
        """Return cells of a row, judged by the gate's tests of engines, losses and speed."""

        def direct(row: Variant, phase: str) -> object:
            expected, obtained = self._interpreted(row, phase), measured(row, phase)
            return test_engine.directly_compared(engines.prose, expected.logits, obtained.logits)

        tests = [test for metric in {key[1] for key in cells} for test in tests_of(MODULES, metric)]
        return judged(
            tests, variant, cells,
            target=self.target, checkpoint=self.checkpoint, stored=self.stored, engines=engines,
            measured=measured, interpreted=self._interpreted, direct=direct,
            stopwatch=Stopwatch(engines, self.gpu.uuid if self.gpu else ""),
            benchmark=rounds_alone(),
        )  # fmt: skip


def seed_workers(patch: pytest.MonkeyPatch, faults: Sequence[Fault]) -> None:
    """Let the child that builds a plan in a folder named after a fault seed that fault first."""
    run_worker, names = plans._run_worker, {fault.name for fault in faults}

    def run(request, command, job, timeout_s):
        name = Path(job["plan"]).parents[1].name
        command = faulty_worker.command(name, command) if name in names else command
        run_worker(request, command, job, timeout_s)

    patch.setattr(plans, "_run_worker", run)
