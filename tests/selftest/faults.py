"""Every fault that is seeded on the CPU, and the plugin that seeds one into a whole run.

A seed changes what the gate builds, runs, measures or reads, never a limit or a verdict.
test_faults.py seeds the rows in its own process. As a plugin (``-p tests.selftest.faults``) this
module seeds the row that the environment variable GATE_FAULT names.
"""

import os

import pytest

from tests.selftest.fault import Fault
from tests.selftest.gate_faults import GATE_FAULTS, UNSEEN
from tests.selftest.model_faults import MODEL_FAULTS

VARIABLE = "GATE_FAULT"
FAULTS: tuple[Fault, ...] = (*MODEL_FAULTS, *GATE_FAULTS)


def fault_named(name: str) -> Fault:
    """Return the row of this name."""
    return {fault.name: fault for fault in (*FAULTS, *UNSEEN)}[name]


def pytest_configure(config: pytest.Config) -> None:
    """Seed the fault that GATE_FAULT names, for the whole run."""
    patch = pytest.MonkeyPatch()
    fault_named(os.environ[VARIABLE]).seed(patch)
    config.add_cleanup(patch.undo)
