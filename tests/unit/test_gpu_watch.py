"""The watch over a GPU: what disturbs it is named, what it does not tell is no disturbance."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt import gpu_watch
from gptneo_trt.errors import RunError
from gptneo_trt.gpu_watch import (
    ALONE,
    NOT_VISIBLE,
    SLOWDOWNS,
    UNKNOWN,
    GpuProcess,
    GpuSample,
    GpuWatch,
    disturbances,
    seen,
)

pynvml = pytest.importorskip("pynvml")

UUID = "GPU-made-up"
MIB = 1 << 20
FOREIGN = GpuProcess(4242, "python3", 512.0, True)
OWN = GpuProcess(os.getpid(), "pytest", 900.0, False)
NOTHING = GpuSample(None, None, None, None, None)
DRIFT = {"clock_drift_frac": 0.03, "temperature_drift_c": 15}


def sample(sm_mhz=1980, memory_mhz=3201, temperature_c=40, slowdowns=(), processes=(OWN,)):
    """Return a sample of a GPU that nothing disturbs, but for what is given."""
    return GpuSample(sm_mhz, memory_mhz, temperature_c, slowdowns, processes)


@pytest.fixture
def nvml(monkeypatch):
    """Return a stub of pynvml with one quiet H200 that this process uses; its ``open`` counts."""
    stub = SimpleNamespace(open=0, pids=[os.getpid()], reasons=0x1)
    real = ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU", "NVMLError")
    errors = [name for name in dir(pynvml) if name.startswith("NVMLError_")]
    for name in (*real, *errors, *SLOWDOWNS):
        setattr(stub, name, getattr(pynvml, name))

    def change(sessions):
        stub.open += sessions

    clocks = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
    stub.nvmlInit, stub.nvmlShutdown = lambda: change(1), lambda: change(-1)
    stub.nvmlDeviceGetHandleByUUID = {UUID: "handle"}.__getitem__
    stub.nvmlDeviceGetClockInfo = lambda handle, clock: clocks[clock]
    stub.nvmlDeviceGetTemperature = lambda handle, sensor: 40
    stub.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: stub.reasons
    stub.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=512 * MIB) for pid in stub.pids
    ]
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    return stub


def one_sample():
    """Return what a watch sees at one moment."""
    with GpuWatch(UUID) as watch:
        watch.sample()
    return watch.samples[0]


def failing(code):
    """Return a function that fails as NVML does."""

    def fail(*_):
        raise pynvml.NVMLError(code)

    return fail


def test_the_stub_has_what_pynvml_has(nvml):
    """Every name that the watch asks for exists in the package."""
    own = {"open", "pids", "reasons"}

    assert not [name for name in vars(nvml) if name not in own and not hasattr(pynvml, name)]


# Samples


def test_a_sample_holds_what_nvml_says(nvml):
    """Clocks, temperature and this process; idle is no slowdown. NVML is closed afterwards."""
    found = one_sample()

    assert (found.sm_mhz, found.memory_mhz, found.temperature_c) == (1980, 3201, 40)
    assert found.slowdowns == ()
    assert [(each.pid, each.memory_mib, each.is_foreign) for each in found.processes] == [
        (os.getpid(), 512.0, False)
    ]
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x1 | 0x2 | 0x10 | 0x100, ()),
        (0x4, ("software power cap",)),
        (0x8 | 0x40, ("hardware slowdown", "hardware thermal slowdown")),
        (0x20, ("software thermal slowdown",)),
        (0x80 | 0x1, ("hardware power brake",)),
    ],
)
def test_slowdowns_are_told_from_settings(nvml, bits, names):
    """Power and heat disturb; idle, set clocks, sync boost and display clocks do not."""
    nvml.reasons = bits

    assert one_sample().slowdowns == names


FUNCTIONS = {
    "nvmlDeviceGetClockInfo": "sm_mhz",
    "nvmlDeviceGetTemperature": "temperature_c",
    "nvmlDeviceGetCurrentClocksEventReasons": "slowdowns",
    "nvmlDeviceGetComputeRunningProcesses": "processes",
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
    ],
)
def test_what_a_gpu_does_not_tell_is_unknown(nvml, function, code):
    """Such a function gives None, the others their figures; nothing of it is a disturbance."""
    setattr(nvml, function, failing(code))

    found = one_sample()

    assert getattr(found, FUNCTIONS[function]) is None
    assert disturbances([found], **DRIFT) == ()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_lost_gpu_is_an_error(nvml, function):
    """NVML's text and the GPU are named, and NVML is closed."""
    setattr(nvml, function, failing(pynvml.NVML_ERROR_GPU_IS_LOST))

    with pytest.raises(RunError, match=r"^GPU-made-up: NVML: GPU is lost; .*; do: look for it"):
        one_sample()
    assert nvml.open == 0


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_gpu_that_cannot_be_opened_is_an_error(nvml, function):
    """Nothing is left open behind it."""
    setattr(nvml, function, failing(pynvml.NVML_ERROR_NOT_FOUND))

    with pytest.raises(RunError, match=r"^GPU-made-up: NVML: .*; expected a GPU that can be watc"):
        one_sample()
    assert nvml.open == 0


# Processes


def test_children_and_ancestors_are_of_this_run(nvml):
    """Workers of this process, its parent and the first process use the GPU in its name."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    nvml.pids = [os.getpid(), child.pid, os.getppid()]

    found = one_sample()
    child.communicate(b"\n")

    assert [each.is_foreign for each in found.processes] == [False] * 3
    assert disturbances([found], **DRIFT) == ()


def test_another_process_is_foreign(nvml, monkeypatch, tmp_path):
    """Neither ancestor nor descendant: named with its program, even with odd characters."""
    for pid, name, parent in ((os.getpid(), "pytest", 1), (4242, "a) (b", 1), (4243, "c", 4242)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0\n")
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
    monkeypatch.setattr(gpu_watch, "PROC", tmp_path)
    nvml.pids = [4243, os.getpid(), 4242]

    found = one_sample()

    assert disturbances([found], **DRIFT) == (
        "another process uses the GPU: pid 4242 (a) (b), 512 MiB",
        "another process uses the GPU: pid 4243 (c), 512 MiB",
    )


def test_a_process_that_proc_does_not_know_is_foreign(nvml):
    """It has no name there; NVML may not tell its memory either."""
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=MIB),
        SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None),
    ]

    assert disturbances([one_sample()], **DRIFT) == (
        "another process uses the GPU: pid 4194305, memory unknown",
    )


@pytest.mark.parametrize(("pids", "foreign"), [([2**22 + 1], 0), ([2**22 + 1, 2**22 + 2], 2)])
def test_ids_of_another_namespace_are_counted(nvml, pids, foreign):
    """One is this process under another id; of two, one is foreign, and which cannot be said."""
    nvml.pids = pids

    lines = disturbances([one_sample()], **DRIFT)

    assert len(lines) == foreign
    assert all("of another namespace, one of these is this process" in line for line in lines)


def test_no_visible_process_is_recorded_and_no_disturbance(nvml):
    """As in a container, whose NVML shows none although this process has a context."""
    nvml.pids = []

    found = one_sample()

    assert disturbances([found], **DRIFT) == ()
    assert seen([found])["processes"] == NOT_VISIBLE


# Disturbances


@pytest.mark.parametrize(
    ("later", "line"),
    [
        ({"sm_mhz": 1755}, "SM clock from 1980 to 1755 MHz (-11 %)"),
        ({"memory_mhz": 2619}, "memory clock from 3201 to 2619 MHz (-18 %)"),
        ({"temperature_c": 56}, "temperature rose by 16 C, to 56 C"),
        ({"temperature_c": 24}, "temperature fell by 16 C, to 24 C"),
        ({"slowdowns": ("hardware slowdown",)}, "throttled: hardware slowdown"),
        (
            {"processes": (OWN, FOREIGN)},
            "another process uses the GPU: pid 4242 (python3), 512 MiB",
        ),
    ],
)
def test_a_disturbance_is_named_once(later, line):
    """Wherever in the measurement it was, and whatever came after it."""
    found = disturbances([sample(), sample(**later), sample(**later), sample()], **DRIFT)

    assert found == (line,)


def test_drift_within_its_tolerance_is_none():
    """A clock 3 % lower and 15 degrees more are what interleaved rounds cancel."""
    samples = [sample(sm_mhz=2000, temperature_c=40), sample(sm_mhz=1940, temperature_c=55)]

    assert disturbances(samples, **DRIFT) == ()


def test_a_clock_that_rises_is_a_disturbance_too():
    """A GPU that left its idle clock during the rounds."""
    assert disturbances([sample(sm_mhz=345), sample()], **DRIFT) == (
        "SM clock from 345 to 1980 MHz (+83 %)",
    )


def test_nothing_told_is_no_disturbance():
    """Neither a sample without figures nor no sample at all."""
    assert disturbances([NOTHING, sample(), NOTHING], **DRIFT) == ()
    assert disturbances([], **DRIFT) == ()


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
def test_clock_drift_is_the_span_over_the_largest(clocks):
    """In whatever order the clocks were seen, one line is there exactly when the span is."""
    lines = disturbances([sample(sm_mhz=clock) for clock in clocks], **DRIFT)

    drifts = max(clocks) - min(clocks) > 0.03 * max(clocks)
    assert [line.startswith("SM clock from") for line in lines] == [True] * drifts


# The record


def test_the_record_spans_what_was_seen():
    """Least and most, every slowdown, and who else used the GPU."""
    samples = [
        sample(),
        sample(sm_mhz=1755, temperature_c=51, slowdowns=("software power cap",)),
        sample(processes=(OWN, FOREIGN)),
    ]

    assert seen(samples) == {
        "sm_clock_mhz": [1755, 1980],
        "memory_clock_mhz": [3201, 3201],
        "temperature_c": [40, 51],
        "slowdowns": ["software power cap"],
        "processes": ["pid 4242 (python3), 512 MiB"],
    }


def test_the_record_says_what_is_unknown():
    """What NVML did not tell is not a zero; alone on the GPU is said too."""
    assert set(seen([NOTHING]).values()) == {UNKNOWN}
    assert seen([sample(), NOTHING])["processes"] == ALONE
