"""A seeded fault turns the gate's cell red for its reason; the same rows are green without it."""

import re
from functools import cache

import pytest

from gptneo_trt.errors import MetricError
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.selftest.faults import FAULTS, UNSEEN, WTE, network_from
from tests.selftest.judging import QUALITY, wanted_cells


@pytest.fixture(scope="session")
def cells_with(pipeline, scales, control, quality):
    """Return a function fault -> every quality cell of its row, measured once with the fault."""

    @cache
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
    assert set(cells) == wanted_cells(QUALITY)
    assert {key: cell for key, cell in cells.items() if cell.verdict != "passed"} == {}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_turns_its_cell_red(fault, cells_with):
    """The cell that is there to catch a fault does, in every phase that has the fault."""
    cells = cells_with(fault)
    for phase in fault.phases:
        cell = cells[phase, fault.cell]
        assert cell.verdict == fault.verdict, cell
        assert re.match(fault.reason, cell.reason), cell


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nothing_is_judged_where_something_is_not_finite(phase, cells_with):
    """One value that is not finite leaves no figure of its phase measured, and nothing decided."""
    fault = next(row for row in FAULTS if row.cell == "non_finite" and phase in row.phases)
    cells = cells_with(fault)
    phases = (phase, "both")  # the ship decision is about both
    verdicts = {metric: cell.verdict for (of, metric), cell in cells.items() if of in phases}
    assert verdicts.pop("non_finite") == "failed"
    assert set(verdicts.values()) == {"not measured"}


def test_truncated_vocabulary_is_refused(pipeline, monkeypatch):
    """Logits without the last token of the vocabulary are not compared at all."""
    last = pipeline.checkpoint.architecture.vocab_size - 1
    seed = network_from({"vocab_size": last}, {WTE: lambda weights: weights[WTE][:last]})
    seed(monkeypatch)
    outcomes = pipeline.measure(VARIANTS[FLOOR], None)
    for error in outcomes.values():
        assert isinstance(error, MetricError)
        assert re.search(rf"obtained logits of shape \(\d+, {last}\), expected", str(error))


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="no KL of the row shows it")
@pytest.mark.parametrize("fault", UNSEEN, ids=lambda fault: fault.name)
def test_fault_is_not_seen_yet(fault, cells_with):
    """What the losses of a row do not show is written down, and reported once they do."""
    cells = cells_with(fault)
    losses = [cell for (_, metric), cell in cells.items() if metric.endswith("kl_mean_nats")]
    assert any(cell.verdict != "passed" for cell in losses)
