"""Faults that are seeded into engines: their rows, and how they reach the process that builds."""

import subprocess
import sys

import pytest

from gptneo_trt import network, plan_worker, plans
from tests.selftest import faulty_worker
from tests.selftest.engine_bench import seed_workers
from tests.selftest.engine_faults import ENGINE_FAULTS
from tests.selftest.fault import KINDS, THROUGH_ENGINES
from tests.selftest.seeds import everywhere

STALE = next(fault for fault in ENGINE_FAULTS if fault.name == "plan-stale")


def test_rows_are_named_once_and_of_known_kinds():
    """Names are test ids and names of folders."""
    assert len({fault.name for fault in ENGINE_FAULTS}) == len(ENGINE_FAULTS) >= 30
    assert {fault.kind for fault in ENGINE_FAULTS} <= set(KINDS)
    assert {fault.through for fault in ENGINE_FAULTS} == set(THROUGH_ENGINES)


@pytest.mark.parametrize(("folder", "is_seeded"), [(STALE.name, True), ("gate", False)])
def test_a_plan_in_a_fault_s_folder_is_built_with_it(folder, is_seeded, tmp_path, monkeypatch):
    """The worker's command names the fault; in any other folder it is the gate's own."""
    commands = []
    monkeypatch.setattr(plans, "_run_worker", lambda request, command, *_: commands.append(command))
    seed_workers(monkeypatch, ENGINE_FAULTS)
    own = [sys.executable, "-m", "gptneo_trt.plan_worker"]
    plans._run_worker(None, own, {"plan": tmp_path / folder / "plans" / "x.plan"}, 1.0)
    assert commands == [faulty_worker.command(STALE.name, own) if is_seeded else own]


def test_a_fault_that_no_row_names_builds_nothing():
    """The child of an unknown fault ends with an error, not with a clean plan."""
    command = faulty_worker.command("no-such-fault", [sys.executable, "-m", "x"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no-such-fault" in done.stderr


def test_a_function_is_replaced_wherever_it_was_imported(monkeypatch):
    """Its own module and the one that builds plans get the other; undone, both have it again."""
    real = network.build_network
    with monkeypatch.context() as patch:
        everywhere(patch, real, len)
        assert network.build_network is plan_worker.build_network is len
    assert network.build_network is plan_worker.build_network is real
