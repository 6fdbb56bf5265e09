"""A seeded fault turns the gate's cell red for its reason; the same cells are green without it."""

import pytest

from gptneo_trt.variants import FLOOR, VARIANTS
from tests.selftest.bench import PROSE
from tests.selftest.fault import KINDS, THROUGH, Fault
from tests.selftest.faults import FAULTS, UNSEEN, fault_named
from tests.selftest.gate_seeds import stored_run
from tests.selftest.judging import wanted_cells


@pytest.mark.parametrize("name", [FLOOR, "fp8", "fp32"])
def test_control_is_green(name, bench):
    """Without a fault every quality cell of the rows that faults are seeded into passes."""
    variant = VARIANTS[name]
    cells = bench.judge_losses(variant, bench.control(variant).phases)
    assert set(cells) == wanted_cells(PROSE)
    assert {key: cell for key, cell in cells.items() if cell.verdict != "passed"} == {}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_turns_its_cell_red(fault, bench, expect_caught):
    """The cell that is there to catch a fault does, in every phase that has the fault."""
    expect_caught(fault, bench.cells_with(fault), bench.cells_without(fault))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nothing_is_judged_where_something_is_not_finite(phase, bench):
    """One value that is not finite leaves no figure of its phase measured, and nothing decided."""
    fault = next(row for row in FAULTS if row.cell == "non_finite" and phase in row.phases)
    cells = bench.cells_with(fault)
    phases = (phase, "both")  # the ship decision is about both
    verdicts = {metric: cell.verdict for (of, metric), cell in cells.items() if of in phases}
    assert verdicts.pop("non_finite") == "failed"
    assert set(verdicts.values()) == {"not measured"}


def test_a_refused_reference_leaves_no_logits(bench):
    """What a quantized reference gave is not kept for a later run."""
    fault = fault_named("reference-quantized")
    bench.cells_with(fault)
    assert not list((bench.folder / fault.name).rglob("*.safetensors"))


def test_a_copied_stored_run_is_green(bench):
    """The copies that faults of stored runs are made in are as good as the stored runs."""
    fault = Fault("none", "baseline", "", stored_run(lambda path: None), "", "", through="stored")
    assert {cell.verdict for cell in bench.cells_with(fault).values()} == {"passed"}


def test_rows_are_named_once_and_of_every_kind():
    """Names are test ids; all kinds but those that need a GPU have a row here."""
    rows = (*FAULTS, *UNSEEN)
    assert len({fault.name for fault in rows}) == len(rows) >= 30
    assert {fault.kind for fault in rows} == set(KINDS) - {"timing"}
    assert {fault.through for fault in rows} <= set(THROUGH)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="no cell of the row shows it")
@pytest.mark.parametrize("fault", UNSEEN, ids=lambda fault: fault.name)
def test_fault_is_not_seen_yet(fault, bench, expect_caught):
    """What the gate does not show is written down, and reported once it does."""
    expect_caught(fault, bench.cells_with(fault), bench.cells_without(fault))
