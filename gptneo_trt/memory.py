"""How much memory the kernel and the container's limit leave, and how many builds that holds."""

import sys
from pathlib import Path

from gptneo_trt.data import Checkpoint

KERNEL = Path("/proc/meminfo")  # proc_meminfo(5)
CONTAINER = Path("/sys/fs/cgroup")  # the kernel's "Control Group v2", "Memory"
KIB = 1 << 10
# Bytes that one build takes for each parameter, measured at gpt-neo-1.3B: weights in float32, and
# what the network and TensorRT make of them.
BUILD_BYTES = 8
MOST_BUILDS = 5  # at once, where cores and memory are for more
CORES_A_BUILD = 3


def builds_at_once(checkpoint: Checkpoint, cores: int, memory: int) -> int:
    """Return how many plans of a checkpoint can be built side by side: at least one.

    Args:
        checkpoint: whose weights every build holds.
        cores: of the processor.
        memory: bytes that are left, see ``memory_left``; room for one build stays free for
            whoever waits for the plans, and may build networks meanwhile.
    """
    fitting = memory // (BUILD_BYTES * checkpoint.parameters) - 1
    return max(1, min(MOST_BUILDS, cores // CORES_A_BUILD, fitting))


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
