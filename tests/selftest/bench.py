"""Run the part of the gate that a fault is in, with the fault and without; judge with its tests.

losses           a phase of the row is measured, and its losses on the prose are judged
sampled losses   the same on the text that was sampled from the checkpoint
new losses       as losses; the references' distributions are made with the fault too
new references   as losses; the references themselves run with the fault too
networks         what the row quantizes, and with which ranges, is read back from TensorRT
plans            the row's plan is built in a child process, in a folder of its own
stored           the control's losses are judged with the fault
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import pytest

from gptneo_trt import network, plans, scales, texts
from gptneo_trt.backend import backend_named
from gptneo_trt.data import Measurement, Scales, TextSet
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.targets import TARGETS, Gpu, Target
from gptneo_trt.text_sources import SOURCES
from gptneo_trt.variant import Variant
from gptneo_trt.variants import FLOOR, VARIANTS, every_module
from tests.gate import test_build, test_quality
from tests.gate.cells import folder_of
from tests.gate.measure import Pipeline
from tests.gate.measurer import CONTEXT, Setup
from tests.gate.run import GateRun, baseline_key, stored_baseline
from tests.selftest.fault import Fault
from tests.selftest.judging import Cells, gate_tests, judged, tests_of

FLAVOUR = "tensorrt_rtx"
NEXT_TOKEN_STEP = 8  # one question or prompt in eight: they take most of a prefill's time
SAMPLED = tests_of([test_quality], "regression/sampled/kl_mean_nats")
PROSE = [test for test in gate_tests(test_quality) if test not in SAMPLED]
NETWORK = [
    *tests_of([test_build], "quantized_projections"),
    *tests_of([test_build], "regression/activation_amax"),
]
BUILD = [test for test in gate_tests(test_build) if test not in NETWORK]

Outcomes = dict[str, Measurement | GptNeoTrtError]


@dataclass(frozen=True)
class Measured:
    """Hold both phases of a row, and the prefill logits that decode was held against."""

    phases: Outcomes
    logits: np.ndarray


def few_texts(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with fewer questions and prompts, and without the sampled text."""
    pipeline.next_token_texts = pipeline.next_token_texts[::NEXT_TOKEN_STEP]
    pipeline.sampled_texts = []
    return pipeline


def sampled_text(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline without questions and prompts, on the references of all texts."""
    pipeline.load()
    pipeline.next_token_texts = []
    return pipeline


class Bench:
    """Hold the bundled checkpoint, what it is judged with on the CPU, and rows without a fault.

    Attributes:
        gate_cache: nothing faulty is written there.
        folder: an empty one, for what faulty runs write: ``folder / fault.name``.
        target, gpu: of the stored runs.
    """

    def __init__(
        self,
        gate_cache: Path,
        folder: Path,
        target: Target = TARGETS["cpu"],
        gpu: Gpu | None = None,
    ) -> None:
        """Remember where things are; nothing is loaded before it is needed."""
        self.gate_cache, self.folder = gate_cache, folder
        self.target, self.gpu = target, gpu
        self.backend = backend_named(FLAVOUR)
        self.pipeline = self._new_pipeline(gate_cache)
        self.checkpoint = self.pipeline.checkpoint
        self.control = cache(self._control)
        self.cells_with = cache(self._cells_with)
        self._clean = cache(self._cells_through)

    def _new_pipeline(self, folder: Path) -> Pipeline:
        return few_texts(Pipeline(Setup("bundled", FLAVOUR, "bundled", folder)))

    @cached_property
    def _on_sampled_text(self) -> Pipeline:
        return sampled_text(Pipeline(Setup("bundled", FLAVOUR, "bundled", self.gate_cache)))

    @cached_property
    def scales(self) -> Scales:
        """Return the calibrated ranges; those of the gate where its cache has them."""
        return self.read_scales() or self._calibrated()

    @property
    def _modules(self) -> tuple[str, ...]:
        return every_module(self.checkpoint.architecture.num_layers)

    @cached_property
    def _scales_file(self) -> tuple[Path, TextSet]:
        text = self._texts()["calibration"]
        return scales.scales_path(self.gate_cache, self.checkpoint, text), text

    def read_scales(self) -> Scales | None:
        """Return the ranges in the gate's cache, read anew; None where it has none."""
        path, text = self._scales_file
        return scales.read_scales(path, self.checkpoint, text, self._modules)

    def _calibrated(self) -> Scales:
        path, text = self._scales_file
        found = self.pipeline.calibrate(text, self._modules)
        scales.write_scales(path, found)
        return found

    def _texts(self) -> dict[str, TextSet]:
        file, vocabulary = self.checkpoint.tokenizer_file, self.checkpoint.architecture.vocab_size
        return {
            name: texts.text_set(name, "bundled", file, CONTEXT, vocabulary)
            for name in SOURCES["bundled"]
        }

    def _stored(self) -> Callable[[Variant], object]:
        """Return a function variant -> Baseline, with the key of this very moment."""
        key = baseline_key(self.target, self.backend, self.gpu, self.checkpoint, self._texts())
        folder = folder_of(self.target, self.backend.target, self.checkpoint)
        return partial(stored_baseline, GateRun(key=key, folder=folder))

    @cached_property
    def stored(self) -> Callable[[Variant], object]:
        """Return a function variant -> Baseline, of the target."""
        return self._stored()

    def _control(self, variant: Variant) -> Measured:
        """Return what a row gives without a fault."""
        prefill, logits = self.pipeline.measure_prefill(variant, self.scales)
        decode = self.pipeline.measure_decode(variant, self.scales, logits)
        return Measured({"prefill": prefill, "decode": decode}, logits)

    def judge_losses(self, variant: Variant, phases: Outcomes, stored=None) -> Cells:
        """Return every quality cell of a row that gave this."""

        def measured(row: Variant, phase: str) -> Measurement:
            found = (phases if row == variant else self.control(row).phases)[phase]
            if isinstance(found, GptNeoTrtError):
                raise found
            return found

        given = {"measured": measured, "checkpoint": self.checkpoint}
        return judged(PROSE, variant, stored=stored or self.stored, **given)

    def _cells_with(self, fault: Fault) -> Cells:
        """Return what the gate judges with the fault, run once a fault."""
        variant = VARIANTS[fault.variant]
        # Without the fault; the floor too, which the ship decision of every row is held against.
        _ = self.scales, self.stored, self.control(variant), self.control(VARIANTS[FLOOR])
        if fault.through == "sampled losses":
            _ = self._on_sampled_text
        with pytest.MonkeyPatch.context() as patch:
            fault.seed(patch)
            if fault.through in ("networks", "plans", "stored", "sampled losses"):
                return self._cells_through(fault.through, variant, fault.cells, fault.name)
            return self.judge_losses(variant, self._measured_with(fault, variant))

    def cells_without(self, fault: Fault) -> Cells:
        """Return what the gate judges of the same cells without the fault."""
        variant = VARIANTS[fault.variant]
        if fault.through in ("networks", "plans", "sampled losses"):
            return self._clean(fault.through, variant, fault.cells, "control")
        return self._clean("stored", variant, (), "control")

    def _measured_with(self, fault: Fault, variant: Variant) -> Outcomes:
        """Return the phases of a row, those of the fault measured now."""
        pipeline = self.pipeline
        if fault.through == "new losses":
            pipeline = self._new_pipeline(self.gate_cache)
        elif fault.through == "new references":
            pipeline = self._new_pipeline(self.folder / fault.name)
        clean = self.control(variant)
        phases, logits = dict(clean.phases), clean.logits
        for phase in fault.phases:
            try:
                if phase == "prefill":
                    phases[phase], logits = pipeline.measure_prefill(variant, self.scales)
                else:
                    phases[phase] = pipeline.measure_decode(variant, self.scales, logits)
            except GptNeoTrtError as error:
                phases[phase] = error
        return phases

    def _cells_through(
        self, through: str, variant: Variant, cells: tuple[tuple[str, str], ...], name: str
    ) -> Cells:
        """Return cells of a row that need no new measurement."""
        if through == "stored":
            return self.judge_losses(variant, self.control(variant).phases, self._stored())
        given = {"checkpoint": self.checkpoint, "stored": self._stored()}
        if through == "sampled losses":
            found, _ = self._on_sampled_text.measure_prefill(variant, self.scales)
            return judged(SAMPLED, variant, measured=lambda *_: found, **given)
        if through == "networks":
            _ = self.scales  # in the cache from here on
            return judged(NETWORK, variant, **given | self._networks(self.read_scales()))
        return judged(BUILD, variant, cells, planned=self._planner(name), **given)

    def _networks(self, ranges: Scales) -> dict[str, object]:
        """Return what tests of networks ask for: networks and ranges of this very moment."""

        def built(variant: Variant, phase: str) -> network.Network:
            backend, checkpoint = self.backend, self.checkpoint
            return network.build_network(backend, checkpoint, variant, ranges, phase, CONTEXT)

        def calibrated(variant: Variant) -> dict[str, float]:
            modules = variant.quantized_modules(self.checkpoint.architecture.num_layers)
            return {module: ranges.activation_amax[module] for module in modules}

        return {"built_network": built, "calibrated": calibrated, "scales": ranges}

    def _planner(self, name: str) -> Callable[[Variant, str], object]:
        def planned(variant: Variant, phase: str) -> object:
            used = self.scales if variant.quantized else None
            request = plans.PlanRequest(
                self.backend, self.checkpoint, variant, used, phase, CONTEXT
            )
            return plans.build_plan(request, self.folder / name)

        return planned
