"""Measure what the CPU gate costs: ``python -m tests.measure_gate [pytest options]``.

Runs ``pytest -m cpu tests/gate`` twice on a new cache folder: cold (calibration and every
plan), then warm. Prints wall seconds, processor seconds and peak memory: the largest sum, over the
process and its children, of the proportional set size, sampled twice a second.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass

import psutil

SAMPLE_S = 0.5


@dataclass(frozen=True)
class Cost:
    """Hold what one run took.

    Attributes:
        wall_s: from start to exit.
        cpu_s: user and system time of the run and of all its children.
        peak_gib: largest sampled memory of the process tree.
        status: exit status.
    """

    wall_s: float
    cpu_s: float
    peak_gib: float
    status: int


def _tree_bytes(root: psutil.Process) -> int:
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def measure(command: list[str]) -> Cost:
    """Run a command to its end and return what it took."""
    before = os.times()
    started = time.perf_counter()
    process = psutil.Popen(command)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, _tree_bytes(process))
        except psutil.NoSuchProcess:
            break
        time.sleep(SAMPLE_S)
    status = process.wait()
    after = os.times()
    cpu_s = after.children_user - before.children_user
    cpu_s += after.children_system - before.children_system
    return Cost(time.perf_counter() - started, cpu_s, peak / 2**30, status)


def gate_command(target: str, *options: str) -> list[str]:
    """Return the command of one run of the gate, in this Python."""
    return [sys.executable, "-m", "pytest", "-m", target, "tests/gate", "-q", *options]


def main(options: list[str]) -> int:
    """Measure both runs, print a line each, and fail if one of them failed."""
    costs = {}
    with tempfile.TemporaryDirectory(prefix="gate-cache-") as cache:
        command = gate_command("cpu", f"--gate-cache={cache}", *options)
        for name in ("cold", "warm"):
            costs[name] = measure(command)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end")
    for name, cost in costs.items():
        print(
            f"{name}: {cost.wall_s:.0f} s wall, {cost.cpu_s:.0f} s processor, "
            f"{cost.peak_gib:.2f} GiB peak, exit status {cost.status}"
        )
    return max(cost.status for cost in costs.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
