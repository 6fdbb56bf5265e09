"""Targets: which GPU is here, what ``-m`` asks for, and what is said when they do not fit."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gptneo_trt.backend import FLAVOURS
from gptneo_trt.checkpoint import STUDY_CHECKPOINT
from gptneo_trt.errors import RunError
from gptneo_trt.targets import (
    TARGETS,
    Gpu,
    format_mismatch,
    gpu_at_hand,
    gpu_mismatch,
    target_of_expression,
)

UUID = "01234567-89ab-cdef-0123-456789abcdef"
H200 = Gpu("NVIDIA H200", "9.0", "580.95.05", f"GPU-{UUID}", 140.5)
NVML_ERRORS = (
    "LibraryNotFound", "DriverNotLoaded", "NotFound", "Unknown",
    "NotSupported", "FunctionNotFound", "NoPermission",
)  # fmt: skip
# Device name -> the targets that it is.
DEVICES = {
    "NVIDIA H200": {"h200"},
    "NVIDIA H200 NVL": {"h200"},
    "NVIDIA B200": {"b200"},
    "NVIDIA B300 SXM6 AC": {"b300"},
    "NVIDIA H20": set(),
    "NVIDIA H20-3e": set(),
    "NVIDIA H200-141C": set(),
    "NVIDIA H100 80GB HBM3": set(),
    "NVIDIA GH200 480GB": set(),
    "NVIDIA GB200": set(),
    "": set(),
}
# Expression -> target.
ASKED = {
    "": "cpu",
    "cpu": "cpu",
    "slow": "cpu",
    "not slow": "cpu",
    "not cpu": "cpu",
    "not b200": "cpu",
    "h200": "h200",
    "(h200)": "h200",
    "h200 and not slow": "h200",
    "not slow and h200": "h200",
    "h200 or h200": "h200",
    "not cpu and b200": "b200",
    "not (cpu or h200) and b200": "b200",
    "b300 and not(cpu or (slow and h200))": "b300",
    "not not b300": "b300",
    "not (slow or not b300)": "b300",
    "h200x": "cpu",
    "h200-nvl": "cpu",
    "H200": "cpu",
    "cells(phases='b200') and h200": "h200",
    'cells(phases="b200")': "cpu",
    "h200 and (not slow": "h200",
    ") b200": "b200",
}
MORE_THAN_ONE = {
    "h200 or b200": "b200, h200",
    "cpu and h200": "cpu, h200",
    "b300 or (b200 and not slow) or h200": "b200, b300, h200",
    "not (not h200 or not b200)": "b200, h200",
}


class NvmlError(Exception):
    """Stand in for ``pynvml.NVMLError``."""


@pytest.fixture
def torch_sees(monkeypatch):
    """Return a function that makes ``import torch`` see so many GPUs of compute capability 9.0."""

    class Uuid:
        def __str__(self):
            return UUID

    def install(count, opens=True):
        def properties(index):
            if not opens:
                raise RuntimeError("the driver is too old")
            return {0: SimpleNamespace(uuid=Uuid(), major=9, minor=0)}[index]

        cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: count,
            get_device_properties=properties,
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2", cuda=cuda))

    return install


@pytest.fixture
def nvml(monkeypatch):
    """Return a stub of pynvml that knows one H200, and counts its open sessions."""
    errors = {f"NVMLError_{name}": type(name, (NvmlError,), {}) for name in NVML_ERRORS}
    stub = SimpleNamespace(NVMLError=NvmlError, sessions=0, **errors)

    def change(sessions):
        stub.sessions += sessions

    def handle(uuid):
        if uuid != H200.uuid:
            raise stub.NVMLError_NotFound("Not Found")
        return "handle"

    stub.nvmlInit = lambda: change(1)
    stub.nvmlShutdown = lambda: change(-1)
    stub.nvmlDeviceGetHandleByUUID = handle
    stub.nvmlDeviceGetName = {"handle": H200.name}.__getitem__
    stub.nvmlSystemGetDriverVersion = lambda: H200.driver
    memory = SimpleNamespace(total=int(H200.memory_gib * 2**30))
    stub.nvmlDeviceGetMemoryInfo = {"handle": memory}.__getitem__
    stub.NVML_CLOCK_SM, stub.NVML_CLOCK_MEM = 1, 2
    stub.nvmlDeviceGetMaxClockInfo = lambda handle, clock: {1: 1980, 2: 3201}[clock]
    stub.nvmlDeviceGetApplicationsClock = failing(stub.NVMLError_NotSupported("Not Supported"))
    stub.nvmlDeviceGetEnforcedPowerLimit = {"handle": 700_000}.__getitem__
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    return stub


def printed(code, **environment):
    """Return what a new Python prints."""
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def failing(error):
    """Return a function that raises ``error``, whatever it is called with."""

    def fail(*_):
        raise error

    return fail


def test_gpu_is_the_one_that_torch_uses(torch_sees, nvml):
    """NVML is asked for torch's device by UUID, in NVML's form; its session is closed."""
    torch_sees(1)
    assert gpu_at_hand() == H200
    assert nvml.sessions == 0


def test_gpu_has_its_clocks_and_power_limit(torch_sees, nvml):
    """What NVML does not tell of them is None, and no error."""
    torch_sees(1)
    assert gpu_at_hand().settings == {
        "sm_largest_clock_mhz": 1980,
        "sm_application_clock_mhz": None,
        "memory_largest_clock_mhz": 3201,
        "memory_application_clock_mhz": None,
        "power_limit_w": 700.0,
    }


def test_P02_no_device_is_no_gpu(monkeypatch, torch_sees):
    """A torch whose is_available() is true but that counts no device has no GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    torch_sees(0)
    assert gpu_at_hand() is None


def test_P02_hidden_devices_are_no_gpu():
    """With CUDA_VISIBLE_DEVICES empty there is no GPU, whatever the host has."""
    code = "from gptneo_trt.targets import gpu_at_hand; print(gpu_at_hand())"
    assert printed(code, CUDA_VISIBLE_DEVICES="") == "None"


def test_import_loads_neither_torch_nor_nvml():
    """The module is read on every run; what only a GPU needs is loaded when it is asked for."""
    code = "import sys, gptneo_trt.targets; print({'torch', 'pynvml'} & set(sys.modules))"
    assert printed(code) == "set()"


def test_a_gpu_that_cannot_be_opened_is_an_error(torch_sees):
    """A GPU that is counted and fails is not reported as no GPU."""
    torch_sees(1, opens=False)
    with pytest.raises(RunError, match="GPU 0: torch counts it but cannot open it: the driver is"):
        gpu_at_hand()


@pytest.mark.parametrize("name", ["LibraryNotFound", "DriverNotLoaded"])
def test_no_nvml_is_no_gpu(torch_sees, nvml, name):
    """Where NVML's library or the driver is absent there is no GPU."""
    torch_sees(1)
    nvml.nvmlInit = failing(getattr(nvml, f"NVMLError_{name}")(name))
    assert gpu_at_hand() is None


@pytest.mark.parametrize(
    "call", ["Init", "DeviceGetHandleByUUID", "DeviceGetName", "DeviceGetMemoryInfo"]
)
def test_other_nvml_errors_are_named(torch_sees, nvml, call):
    """Any other NVML error carries NVML's text and the GPU; no session is left open."""
    torch_sees(1)
    setattr(nvml, f"nvml{call}", failing(nvml.NVMLError_Unknown("Unknown Error")))
    with pytest.raises(RunError, match=rf"GPU-{UUID}: NVML: Unknown Error; .* nvidia-smi -L"):
        gpu_at_hand()
    assert nvml.sessions == 0


def test_absent_package_says_how_to_install_it(monkeypatch, torch_sees):
    """A GPU without NVML's Python package is an error with the command that installs it."""
    torch_sees(1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RunError, match=r"NVML: .*pynvml.*; do: pip install nvidia-ml-py"):
        gpu_at_hand()


def test_the_stub_has_what_pynvml_has(nvml, monkeypatch):
    """Every name that is used of pynvml exists in the package."""
    monkeypatch.delitem(sys.modules, "pynvml")
    pynvml = pytest.importorskip("pynvml")
    assert not [name for name in vars(nvml) if name != "sessions" and not hasattr(pynvml, name)]
    assert issubclass(pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError)


def test_rows_are_keyed_by_their_name():
    """A target is found under its own name, and every default exists."""
    assert (
        [row.name for row in TARGETS.values()] == list(TARGETS) == ["cpu", "h200", "b200", "b300"]
    )
    assert {row.flavour for row in TARGETS.values()} == set(FLAVOURS)


def test_defaults_follow_the_machine():
    """The study's GPUs take its TensorRT and checkpoint; the others what runs without a hub."""
    for name in ("cpu", "h200"):
        assert (TARGETS[name].flavour, TARGETS[name].model) == ("tensorrt_rtx", "bundled")
    for name in ("b200", "b300"):
        assert (TARGETS[name].flavour, TARGETS[name].model) == ("tensorrt", STUDY_CHECKPOINT)


def test_every_target_but_cpu_needs_a_gpu():
    """Only the interpreter runs anywhere."""
    assert [row.name for row in TARGETS.values() if not row.needs_gpu] == ["cpu"]


@pytest.mark.parametrize(("expression", "name"), ASKED.items(), ids=ASKED)
def test_expression_asks_for_its_target(expression, name):
    """A name counts as a whole and unless it is negated; without any the target is cpu."""
    assert target_of_expression(expression) is TARGETS[name]


@pytest.mark.parametrize(("expression", "names"), MORE_THAN_ONE.items(), ids=MORE_THAN_ONE)
def test_one_target_a_run(expression, names):
    """An expression that asks for two targets is refused, with both of them."""
    with pytest.raises(RunError, match=f"obtained targets {names}, expected one a run; do: run"):
        target_of_expression(expression)


@pytest.mark.parametrize(("name", "targets"), DEVICES.items(), ids=DEVICES)
def test_device_names_are_looked_up_whole(name, targets):
    """H200 is neither H20 nor GH200, B200 is not GB200, and a virtual H200 is none."""
    gpu = replace(H200, name=name)
    fits = {row.name for row in TARGETS.values() if gpu_mismatch(row, gpu) is None}
    assert fits == {"cpu", *targets}


CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
OLDEST = {"fp32": "7.5", "fp16": "7.5", "fp8": "8.9", "int4": "8.0", "nvfp4": "10.0"}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("number_format", OLDEST)
def test_N08_formats_need_a_compute_capability(number_format, capability):
    """FP8 runs from 8.9 on, INT4 from 8.0, NVFP4 from 10.0; 10.0 is a newer version than 8.9."""
    fits = CAPABILITIES.index(capability) >= CAPABILITIES.index(OLDEST[number_format])
    needed = f"needs compute capability {OLDEST[number_format]} or newer"

    why = format_mismatch(number_format, capability)

    assert why == (None if fits else f"{number_format}: {needed}, device has {capability}")


@pytest.mark.parametrize("name", ["h200", "b200", "b300"])
def test_no_gpu_says_what_is_needed(name):
    """Without a GPU the text has what was needed, what was found and what runs anywhere."""
    word = name.upper()
    assert gpu_mismatch(TARGETS[name], None) == (
        f"target {name}: needed an NVIDIA {word}, found no GPU; do: run it on a host with an "
        f"NVIDIA {word}, or `pytest -m cpu` anywhere"
    )


def test_cpu_fits_everywhere():
    """The CPU gate runs beside any GPU and without one."""
    assert gpu_mismatch(TARGETS["cpu"], None) is None
    assert gpu_mismatch(TARGETS["cpu"], H200) is None


def test_another_gpu_is_named():
    """A GPU without a target of its own is named with its compute capability."""
    text = gpu_mismatch(TARGETS["h200"], replace(H200, name="NVIDIA H20"))
    assert text == (
        "target h200: needed an NVIDIA H200, found NVIDIA H20 (compute capability 9.0); do: run "
        "it on a host with an NVIDIA H200, or `pytest -m cpu` anywhere"
    )


def test_the_marker_of_the_gpu_found_is_offered():
    """On a GPU that has a target of its own, that one can be run here."""
    text = gpu_mismatch(TARGETS["b200"], H200)
    assert "found NVIDIA H200 (compute capability 9.0)" in text
    assert "an NVIDIA B200, or `pytest -m h200` here, or `pytest -m cpu` anywhere" in text
