"""Say where a figure comes from: commit, versions, machine, GPU and its clocks."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from gptneo_trt.data import Provenance
from gptneo_trt.targets import Gpu

PACKAGES = (
    "datasets",
    "numpy",
    "nvidia-modelopt",
    "safetensors",
    "tensorrt",
    "tensorrt-rtx",
    "tokenizers",
    "torch",
    "transformers",
)
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("conftest.py", "fixtures", "gptneo_trt", "tests")


def provenance(target: str, command: Sequence[str], gpu: Gpu | None = None) -> Provenance:
    """Return the provenance of figures measured now, by this process.

    Args:
        target: for example "cpu/tensorrt_rtx-1.6.1.120".
        command: as typed, without the folder of the program.
        gpu: that ran the engines; None where none did.
    """
    processor = f"{_processor()}, {os.cpu_count()} cores, {sys.platform}"
    return Provenance(
        target=target,
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=" ".join(command),
        versions={"python": platform.python_version()} | _versions(),
        machine=f"{gpu.title}, driver {gpu.driver}; {processor}" if gpu else processor,
        gpu=_gpu(gpu) if gpu else {},
    )


def _gpu(gpu: Gpu) -> dict[str, str | float | None]:
    """Return what a time depends on of a GPU; not its UUID, which is of one card."""
    return {
        "name": gpu.name,
        "compute_capability": gpu.compute_capability,
        "driver": gpu.driver,
        **gpu.settings,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def _commit() -> str:
    """Return the commit, with "-dirty" when files differ from it, or "unknown".

    A new file counts where there is source: one that was forgotten in a commit is missing in
    whatever is checked out from it. Baselines do not: they are what a run writes, not what it
    measures.
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    everything = (".", ":(exclude)baselines")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *everything)
    changed = changed or _git("status", "--porcelain", "--", *SOURCES)
    return f"{commit}-dirty" if changed else commit


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
