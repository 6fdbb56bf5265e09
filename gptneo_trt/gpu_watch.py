"""Watch a GPU between timed rounds: clocks, temperature, throttling, and who else uses it.

Every figure is NVML's. What a GPU or a driver does not tell is None, not an error. A process
belongs to this run when it is this one, one of its ancestors or one of its descendants.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gptneo_trt.errors import RunError

MIB = 1 << 20
PROC = Path("/proc")
# Reasons for which a GPU runs slower than it was asked to, by the name of their bit. Not among
# them: idle, clocks that a user set, and sync boost, which are how a machine is set up.
SLOWDOWNS = {
    "nvmlClocksEventReasonSwPowerCap": "software power cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "hardware power brake",
}
UNKNOWN, NOT_VISIBLE, ALONE = "unknown", "not visible", "of this run alone"
ANOTHER_NAMESPACE = "of another namespace, one of these is this process"


@dataclass(frozen=True)
class GpuProcess:
    """Hold one process that has a compute context on the GPU.

    Attributes:
        pid: NVML's.
        title: name of its program, "" where /proc has none.
        memory_mib: of the GPU; None where NVML does not tell.
        is_foreign: whether it may be of another run.
    """

    pid: int
    title: str
    memory_mib: float | None
    is_foreign: bool

    def __str__(self) -> str:
        title = f" ({self.title})" if self.title else ""
        memory = "memory unknown" if self.memory_mib is None else f"{self.memory_mib:.0f} MiB"
        return f"pid {self.pid}{title}, {memory}"


@dataclass(frozen=True)
class GpuSample:
    """Hold what NVML said at one moment; None of what it does not tell.

    Attributes:
        sm_mhz: clock of the multiprocessors.
        memory_mhz: clock of the memory.
        temperature_c: of the die.
        slowdowns: values of SLOWDOWNS, sorted.
        processes: with a compute context, this one among them where ids are visible.
    """

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    slowdowns: tuple[str, ...] | None
    processes: tuple[GpuProcess, ...] | None


class GpuWatch:
    """Sample one GPU while it is entered; NVML is open as long.

    Attributes:
        samples: in order.
    """

    def __init__(self, uuid: str) -> None:
        """Remember which GPU, by NVML's UUID: CUDA_VISIBLE_DEVICES does not count for NVML."""
        self._uuid = uuid
        self.samples: list[GpuSample] = []

    def __enter__(self) -> Self:
        """Open NVML and the GPU.

        Raises:
            RunError: there is no such GPU.
        """
        # Here and not above: a run without a GPU needs no NVML.
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise nvml_error(self._uuid, error) from error
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise nvml_error(self._uuid, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close NVML."""
        self._nvml.nvmlShutdown()

    def sample(self) -> None:
        """Add a sample, outside any timed stretch: NVML takes up to milliseconds.

        The first one belongs after the rounds to warm up, when this process has a context and
        the clocks are no longer those of an idle GPU.

        Raises:
            RunError: the GPU is lost, or NVML fails otherwise.
        """
        nvml = self._nvml
        self.samples.append(
            GpuSample(
                sm_mhz=self._told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                memory_mhz=self._told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
                temperature_c=self._told("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
                slowdowns=self._slowdowns(),
                processes=self._processes(),
            )
        )

    def _told(self, function: str, *arguments: object) -> Any:
        return told(self._nvml, self._uuid, function, self._handle, *arguments)

    def _slowdowns(self) -> tuple[str, ...] | None:
        bits = self._told("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            return None
        names = (name for bit, name in SLOWDOWNS.items() if bits & getattr(self._nvml, bit))
        return tuple(sorted(names))

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        running = self._told("nvmlDeviceGetComputeRunningProcesses")
        if running is None:
            return None
        memory = {each.pid: each.usedGpuMemory for each in running}
        # This process has a context: where it is not shown, ids are of another namespace.
        is_known = os.getpid() in memory or not memory
        return tuple(
            GpuProcess(
                pid=pid,
                title=_program(pid) if is_known else ANOTHER_NAMESPACE,
                memory_mib=None if used is None else used / MIB,
                is_foreign=not _is_of_this_run(pid) if is_known else len(memory) > 1,
            )
            for pid, used in sorted(memory.items())
        )


def disturbances(
    samples: Sequence[GpuSample], clock_drift_frac: float, temperature_drift_c: float
) -> tuple[str, ...]:
    """Return what happened to a GPU that lets its times not be compared, a line each.

    Args:
        samples: of one measurement, in order.
        clock_drift_frac: a clock may differ by so much, as a fraction of its largest value.
        temperature_drift_c: and the temperature by so many degrees.
    """
    lines = []
    for name, attribute in (("SM clock", "sm_mhz"), ("memory clock", "memory_mhz")):
        earlier, later = _ends(samples, attribute)
        largest = max(earlier, later)
        if largest - min(earlier, later) > clock_drift_frac * largest:
            change = 100 * (later - earlier) / largest
            lines.append(f"{name} from {earlier} to {later} MHz ({change:+.0f} %)")
    earlier, later = _ends(samples, "temperature_c")
    if abs(later - earlier) > temperature_drift_c:
        direction = "rose" if later > earlier else "fell"
        lines.append(f"temperature {direction} by {abs(later - earlier)} C, to {later} C")
    lines += [f"throttled: {name}" for name in _all_slowdowns(samples)]
    return (*lines, *(f"another process uses the GPU: {each}" for each in _foreign(samples)))


def seen(samples: Sequence[GpuSample]) -> dict[str, object]:
    """Return what samples span, for reports: least and most, and names; JSON types.

    ``processes`` says "not visible" where NVML shows none although this process has a context, as
    in a container: then it cannot be known whether another one used the GPU.
    """
    ranges = {
        "sm_clock_mhz": "sm_mhz",
        "memory_clock_mhz": "memory_mhz",
        "temperature_c": "temperature_c",
    }
    found: dict[str, object] = {
        name: sorted(_ends(samples, attribute)) if _told_values(samples, attribute) else UNKNOWN
        for name, attribute in ranges.items()
    }
    found["slowdowns"] = _all_slowdowns(samples) if _told_values(samples, "slowdowns") else UNKNOWN
    return found | {"processes": _visibility(samples)}


def settings(nvml: Any, uuid: str, handle: Any) -> dict[str, float | None]:
    """Return how a GPU is set up: clocks in MHz and power in W; None of what it does not tell.

    Args:
        nvml: the module ``pynvml``, open.
        uuid: of the GPU, for messages.
        handle: NVML's, of the GPU.

    Raises:
        RunError: NVML fails otherwise.
    """
    milliwatts = told(nvml, uuid, "nvmlDeviceGetEnforcedPowerLimit", handle)
    found: dict[str, float | None] = {
        f"{name}_{kind}_clock_mhz": told(nvml, uuid, function, handle, clock)
        for name, clock in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM))
        for kind, function in (
            ("largest", "nvmlDeviceGetMaxClockInfo"),
            ("application", "nvmlDeviceGetApplicationsClock"),
        )
    }
    return found | {"power_limit_w": None if milliwatts is None else milliwatts / 1000}


def told(nvml: Any, uuid: str, function: str, *arguments: object) -> Any:
    """Return what a function of NVML says; None where this GPU or this driver does not tell.

    Raises:
        RunError: NVML fails otherwise, for example because the GPU is lost.
    """
    try:
        return getattr(nvml, function)(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
    ):
        return None
    except nvml.NVMLError as error:
        raise nvml_error(uuid, error) from error


def nvml_error(uuid: str, error: Exception) -> RunError:
    """Return the error of a GPU that NVML cannot watch."""
    return RunError(
        f"{uuid}: NVML: {error}; expected a GPU that can be watched while it is timed; do: look "
        "for it with nvidia-smi, and for Xid errors with dmesg"
    )


def _told_values(samples: Sequence[GpuSample], attribute: str) -> list[Any]:
    """Return the values of an attribute that NVML told, in order."""
    values = (getattr(each, attribute) for each in samples)
    return [value for value in values if value is not None]


def _ends(samples: Sequence[GpuSample], attribute: str) -> tuple[int, int]:
    """Return the least and the most of a figure, the earlier one first; 0, 0 without any."""
    values = _told_values(samples, attribute) or [0]
    least, most = min(values), max(values)
    return (least, most) if values.index(least) <= values.index(most) else (most, least)


def _all_slowdowns(samples: Sequence[GpuSample]) -> list[str]:
    """Return every slowdown that was seen, sorted."""
    return sorted({name for names in _told_values(samples, "slowdowns") for name in names})


def _foreign(samples: Sequence[GpuSample]) -> list[str]:
    """Return every process of another run that was seen, as it was last, by its id."""
    processes = (each for found in _told_values(samples, "processes") for each in found)
    last = {each.pid: str(each) for each in processes if each.is_foreign}
    return [last[pid] for pid in sorted(last)]


def _visibility(samples: Sequence[GpuSample]) -> str | list[str]:
    """Return which foreign processes were seen, or why none was."""
    told_of = _told_values(samples, "processes")
    if not told_of:
        return UNKNOWN
    return _foreign(samples) or (ALONE if any(told_of) else NOT_VISIBLE)


def _is_of_this_run(pid: int) -> bool:
    """Return whether a process is this one, an ancestor or a descendant of it."""
    own = os.getpid()
    return own in _with_ancestors(pid) or pid in _with_ancestors(own)


def _with_ancestors(pid: int) -> list[int]:
    """Return a process and its ancestors, as far as /proc knows them."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        pid = _parent(pid)
    return found


def _parent(pid: int) -> int:
    """Return the id of a process's parent; 0 where it has none, or ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The second field, the name in parentheses, may hold spaces and parentheses (proc_pid_stat(5)).
    return int(text.rpartition(")")[2].split()[1])


def _program(pid: int) -> str:
    """Return the name of a process's program; "" where /proc has none."""
    try:
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
