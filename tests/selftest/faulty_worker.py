"""The child process that builds a plan, with a fault: ``python -m ... FAULT < JOB``."""

import sys
from collections.abc import Sequence

import pytest

from gptneo_trt import plan_worker
from tests.selftest.engine_faults import ENGINE_FAULTS


def command(fault: str, worker: Sequence[str]) -> list[str]:
    """Return the worker's command, "python -m module", with the fault."""
    return [worker[0], "-m", __name__, fault]


def main(arguments: list[str]) -> int:
    """Seed the fault, and build."""
    (name,) = arguments
    with pytest.MonkeyPatch.context() as patch:
        {fault.name: fault for fault in ENGINE_FAULTS}[name].seed(patch)
        return plan_worker.main(sys.stdin.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
