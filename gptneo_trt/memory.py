"""How much memory is left for child processes, by the kernel and by the container's limit."""

import sys
from pathlib import Path

KERNEL = Path("/proc/meminfo")  # proc_meminfo(5)
CONTAINER = Path("/sys/fs/cgroup")  # the kernel's "Control Group v2", "Memory"
KIB = 1 << 10


def memory_left(kernel: Path = KERNEL, container: Path = CONTAINER) -> int:
    """Return how many bytes can still be taken without swapping; sys.maxsize where none says.

    A container's limit counts without what it holds; cached files are not held, the kernel drops
    them.
    """
    available = _amounts(kernel).get("MemAvailable:")
    left = sys.maxsize if available is None else available * KIB
    held = _amounts(container / "memory.stat").get("anon")
    try:
        limit = int((container / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return left
    return max(0, min(left, limit - (held or 0)))


def _amounts(file: Path) -> dict[str, int]:
    """Return the first two words of each line; nothing of a file that cannot be read."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
