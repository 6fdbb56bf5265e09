"""A plugin: the process that builds a decode plan aborts, as TensorRT's builder can."""

import sys

import pytest

from gptneo_trt import plans


def pytest_configure(config: pytest.Config) -> None:
    """Replace the worker's command for the whole run."""
    run_worker = plans._run_worker
    crash = [sys.executable, "-c", "import os; os.write(2, b'last words\\n'); os.abort()"]

    def run(request, command, job, timeout_s):
        command = crash if request.phase == "decode" else command
        run_worker(request, command, job, timeout_s)

    patch = pytest.MonkeyPatch()
    patch.setattr(plans, "_run_worker", run)
    config.add_cleanup(patch.undo)
