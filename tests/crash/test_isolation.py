"""A builder that really crashes, fills the disk or runs out of memory costs its own plan."""

import sys
import time
from dataclasses import replace

import pytest

from gptneo_trt import plans
from gptneo_trt.errors import CrashError, StorageError
from gptneo_trt.plans import build_plan
from tests.crash.warm import ends, is_running
from tests.crash.works import tiny_request

PYTHON = (sys.executable, "-c")
# The worker itself, with this little memory left when TensorRT starts to build: by address space
# taken so far, because a limit on the whole would depend on the machine's libraries and threads.
LITTLE_MEMORY = """
import resource, sys
from gptneo_trt import plan_worker
create_config = plan_worker.create_config
def limited(*args):
    config = create_config(*args)
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + {mib} * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return config
plan_worker.create_config = limited
sys.exit(plan_worker.main(sys.stdin.read()))
"""
SAY = "import os, sys; os.write(2, b'[ERROR] element types differ: FP8 and Half\\n'); "
# What the builder does -> its command in place of the worker's own, or around it; what is said.
BUILDERS = {
    "reads address 0": (
        [*PYTHON, SAY + "import ctypes; ctypes.string_at(0)"], r"died of SIGSEGV after \d+\.\d s",
    ),
    "aborts": ([*PYTHON, SAY + "os.abort()"], r"died of SIGABRT after \d+\.\d s"),
    "is killed as the kernel does": (
        [*PYTHON, SAY + "os.kill(os.getpid(), 9)"], r"died of SIGKILL \(.*memory.*\) after \d",
    ),
    "hangs": ([*PYTHON, SAY + "import time; time.sleep(60)"], r"hung and was killed after 2\.\d s"),
    "crashes, and its own child hangs": (
        [*PYTHON, SAY + "os.fork() or __import__('time').sleep(60); os.abort()"],
        r"died of SIGABRT after",
    ),
    "writes on a full disk": (
        ["/bin/sh", "-c", 'ulimit -f 100; exec "$@"', "sh"],
        r"gave up after \d+\.\d s: StorageError: .*\.plan cannot be written: .*too large; free",
    ),
    # TensorRT then refuses in one of many ways, throws where nobody catches, or reads at address 0.
    "builds without memory": (
        [*PYTHON, LITTLE_MEMORY.format(mib=2)],
        r"(gave up after \d+\.\d s: MemoryError: |died of SIG(ABRT|SEGV) after \d)",
    ),
    "builds without memory for a thread": (
        [*PYTHON, LITTLE_MEMORY.format(mib=8)],
        r"(gave up after \d+\.\d s: MemoryError: |died of SIG(ABRT|SEGV) after \d)",
    ),
}  # fmt: skip


def files(folder):
    """Return the files of a cache that are neither locks nor the stored weights."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in found if path.suffix != ".lock" and "weights" not in path.parts]


@pytest.mark.parametrize(("command", "message"), BUILDERS.values(), ids=BUILDERS)
def test_a_builder_that_ends_badly_costs_its_plan(monkeypatch, tmp_path, command, message):
    """The error has how it ended, after how long and its last lines, and no file is left.

    It is no BuildError, so no known failure is, whatever its last lines say.
    """
    run_worker = plans._run_worker

    wraps = command[0] == "/bin/sh"
    builds = wraps or "plan_worker" in command[-1]

    def run(request, own, job, timeout_s):
        instead = [*command, *own] if wraps else command
        run_worker(request, instead, job, timeout_s if builds else 2.0)

    with monkeypatch.context() as patch:
        patch.setattr(plans, "_run_worker", run)
        with pytest.raises(
            CrashError, match=rf"variant fp8, decode, .*: the builder {message}"
        ) as e:
            build_plan(tiny_request(), tmp_path)
    if not builds:
        assert e.value.log == ("[ERROR] element types differ: FP8 and Half",)
    assert files(tmp_path) == []


def test_another_plan_is_built_beside_one_that_crashed(monkeypatch, tmp_path):
    """The plan of the next row is built in the same folder; then the first one, too."""
    run_worker = plans._run_worker
    crash = [*PYTHON, "import os; os.abort()"]
    with monkeypatch.context() as patch:
        patch.setattr(plans, "_run_worker", lambda r, command, *rest: run_worker(r, crash, *rest))
        with pytest.raises(CrashError):
            build_plan(tiny_request(), tmp_path)
    prefill = replace(tiny_request(), phase="prefill")
    assert not build_plan(prefill, tmp_path).cached
    assert not build_plan(tiny_request(), tmp_path).cached


def test_nothing_that_a_builder_started_outlives_it(monkeypatch, tmp_path):
    """A process that the builder left in its group is killed with it."""
    pid_file = tmp_path / "pid"
    program = (
        "import os, pathlib, sys, time\n"
        "pid = os.fork()\n"
        f"pid and pathlib.Path({str(pid_file)!r}).write_text(str(pid))\n"
        "pid or time.sleep(60)\n"
    )
    run_worker = plans._run_worker
    started = time.monotonic()

    def run(request, own, job, _):
        run_worker(request, [*PYTHON, program], job, 2.0)

    monkeypatch.setattr(plans, "_run_worker", run)
    with pytest.raises(CrashError, match="the worker ended well but"):
        build_plan(tiny_request(), tmp_path / "cache")
    assert time.monotonic() - started < 30
    assert ends(lambda: is_running(int(pid_file.read_text())))


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """A cache in the place of a file is an error of ours with the remedy."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot be written: .*; free space there, or use"):
        build_plan(tiny_request(), tmp_path / "cache")
