"""Memory that is left for child processes, and how many builds it holds."""

import sys
from types import SimpleNamespace

import pytest

from gptneo_trt.memory import MOST_BUILDS, builds_at_once, memory_left

GIB = 1 << 30
KERNEL = "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\nHugePages_Total:       0\n"
ANON = f"anon {3 * GIB}\nfile {5 * GIB}\n"
# What is there -> what of the kernel, the container's limit and its statistics; GiB that are left.
READINGS = {
    "no container": (KERNEL, None, None, 16),
    "no limit": (KERNEL, "max\n", ANON, 16),
    "a limit above what is left": (KERNEL, f"{32 * GIB}\n", ANON, 16),
    "a limit below it": (KERNEL, f"{8 * GIB}\n", ANON, 5),
    "a limit that is used up": (KERNEL, f"{2 * GIB}\n", ANON, 0),
    "a limit without statistics": (KERNEL, f"{8 * GIB}\n", None, 8),
    "a limit alone": (None, f"{8 * GIB}\n", ANON, 5),
    "an old kernel": ("MemTotal: 33554432 kB\n", None, None, sys.maxsize / GIB),
    "nothing": (None, None, None, sys.maxsize / GIB),
    "no numbers": ("MemAvailable: many kB\nMemAvailable:\n\n", "few", "anon", sys.maxsize / GIB),
    "no text": (b"MemAvailable: \xff 1 kB", b"\xff", b"\xff", sys.maxsize / GIB),
}


@pytest.mark.parametrize(("kernel", "limit", "held", "expected"), READINGS.values(), ids=READINGS)
def test_memory_left_is_the_smaller_of_kernel_and_container(
    tmp_path, kernel, limit, held, expected
):
    """A container's own limit counts, without what it holds; files that cannot be read do not."""
    files = {"meminfo": kernel, "memory.max": limit, "memory.stat": held}
    for name, content in files.items():
        if content is not None:
            content = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).write_bytes(content)
    assert memory_left(tmp_path / "meminfo", tmp_path) / GIB == expected


def test_memory_left_here_is_a_plausible_amount():
    """The real files of this machine can be read."""
    assert 1 << 26 < memory_left() < 1 << 50


# Parameters, cores, GiB -> builds at once.
BUILDS = {
    "one core": (1_000_000, 1, 100, 1),
    "two cores": (1_000_000, 2, 100, 1),
    "cores": (1_000_000, 9, 100, 3),
    "many cores": (1_000_000, 128, 100, MOST_BUILDS),
    "memory for four": (1 << 30, 128, 40, 4),
    "memory for three": (1 << 30, 128, 39, 3),
    "memory for none": (1 << 30, 128, 7, 1),
    "no memory": (1 << 30, 128, 0, 1),
    "gpt-neo-2.7B on 16 cores, 112 GiB left": (2_651_307_520, 16, 112, 4),
    "gpt-neo-2.7B on 16 cores, 48 GiB left": (2_651_307_520, 16, 48, 1),
}


@pytest.mark.parametrize(("parameters", "cores", "gib", "expected"), BUILDS.values(), ids=BUILDS)
def test_builds_at_once_fit_the_cores_and_the_memory(parameters, cores, gib, expected):
    """Beside one of the process that waits. One always runs: whether it fits, only trying shows."""
    checkpoint = SimpleNamespace(parameters=parameters)
    assert builds_at_once(checkpoint, cores, gib * GIB) == expected
