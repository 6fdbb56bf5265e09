"""A seeded fault turns the gate's cell red for its reason; the same rows are green without it."""

import re
from dataclasses import replace

import pytest

from gptneo_trt.baselines import read, write
from gptneo_trt.data import Plan
from gptneo_trt.errors import BaselineError, BuildError, MetricError
from gptneo_trt.network import PHASES
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate import test_build, test_quality
from tests.selftest.faults import C_FC, FAULTS, UNSEEN, WTE, linear, network_from
from tests.selftest.judging import gate_tests, judged

FP8 = VARIANTS["fp8"]
QUALITY = gate_tests(test_quality)
QUANTIZED = [test_build.test_exactly_the_intended_projections_are_quantized]


@pytest.fixture
def quality(control, checkpoint, stored):
    """Return a function (variant, its measurements) -> every quality cell of the row."""

    def cells(variant, phases):
        def measured(row, phase):
            return phases[phase] if row == variant else control(row).phases[phase]

        return judged(QUALITY, variant, measured=measured, checkpoint=checkpoint, stored=stored)

    return cells


@pytest.fixture
def cells_with(pipeline, scales, control, quality):
    """Return a function fault -> every quality cell of its row, measured with the fault."""

    def cells(fault):
        variant = VARIANTS[fault.variant]
        clean = control(variant)
        phases, logits = dict(clean.phases), clean.logits
        with pytest.MonkeyPatch.context() as patch:
            fault.seed(patch)
            if "prefill" in fault.phases:
                phases["prefill"], logits = pipeline.measure_prefill(variant, scales)
            if "decode" in fault.phases:
                phases["decode"] = pipeline.measure_decode(variant, scales, logits)
        return quality(variant, phases)

    return cells


@pytest.mark.parametrize("name", [FLOOR, "fp8", "fp32"])
def test_control_is_green(name, control, quality):
    """Without a fault every quality cell of the rows that faults are seeded into passes."""
    variant = VARIANTS[name]
    cells = quality(variant, control(variant).phases)
    wanted = [mark.kwargs for test in QUALITY for mark in test.pytestmark if mark.name == "cells"]
    assert len(cells) == sum(len(each["phases"]) * len(each["metrics"]) for each in wanted)
    assert {key: cell for key, cell in cells.items() if cell.verdict != "passed"} == {}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_turns_its_cell_red(fault, cells_with):
    """The cell that is there to catch a fault does, in every phase that has the fault."""
    cells = cells_with(fault)
    for phase in fault.phases:
        cell = cells[phase, fault.cell]
        assert (cell.verdict, bool(re.match(fault.reason, cell.reason))) == (
            fault.verdict,
            True,
        ), cell


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="no cell of the row shows it")
@pytest.mark.parametrize("fault", UNSEEN, ids=lambda fault: fault.name)
def test_fault_is_not_seen_yet(fault, cells_with):
    """What the gate does not see is written down, and reported once it does."""
    assert any(cell.verdict != "passed" for cell in cells_with(fault).values())


def test_a_nan_hides_every_figure(pipeline, scales, control, quality):
    """Where something is not finite no figure of that phase passes, and the row is not shipped."""
    fault = next(fault for fault in FAULTS if fault.cell == "non_finite")
    clean = control(VARIANTS[FLOOR])
    broken = replace(clean.phases["decode"], non_finite="keys[0] = inf", metrics={}, agreement=None)
    cells = quality(VARIANTS[FLOOR], clean.phases | {"decode": broken})
    found = {metric: cell.verdict for (phase, metric), cell in cells.items() if phase == "decode"}
    assert found.pop("non_finite") == "failed"
    assert set(found.values()) == {"not measured"}, fault
    assert cells["both", "ship"].verdict == "failed"
