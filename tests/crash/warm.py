"""Talk to ``warm_process`` from a test."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tests.child import child_environment

ROOT = Path(__file__).parents[2]
MARK = "GPTNEO_TRIAL"  # in the environment of every process that a trial starts
END_S = 20.0  # for a process that was interrupted, or whose parent was killed, to end


class WarmProcess:
    """Hold a ``warm_process``.

    Args:
        mark: no other process has it.
        errors: file that its children's errors go to.
    """

    def __init__(self, mark: str, errors: IO[bytes]) -> None:
        self._mark = mark
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.warm_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=child_environment(**{MARK: mark}),
        )

        assert self._answer() == {"ready": True}

    def _answer(self) -> dict:
        return json.loads(self._process.stdout.readline())

    def start(self, name: str, folder: Path, count: int = 1) -> list[int]:
        """Start a work; return the ids of its processes, each of which leads a session."""
        asked = {"work": name, "folder": str(folder), "count": count}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()["pids"]

    def ended(self) -> tuple[list[int], float]:
        """Wait for the work that was started; return statuses and seconds."""
        answer = self._answer()
        return answer["statuses"], answer["seconds"]

    def others(self) -> set[int]:
        """Return the processes of any trial that are still there."""
        own, entry = self._process.pid, f"{MARK}={self._mark}".encode()
        return {pid for pid in processes_with(entry) if pid != own}

    def end(self) -> None:
        """End the process, once the work that it waits for has ended."""
        self._process.stdin.close()
        self._process.wait(END_S)
        self._process.stdout.close()


def ends(goes_on: Callable[[], object]) -> bool:
    """Wait until something does not go on any more; return whether it came to an end."""
    deadline = time.monotonic() + END_S
    while goes_on():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def processes_with(entry: bytes) -> Iterator[int]:
    """Yield the ids of processes that have this entry in their environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                entries = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or of another user
                continue
            if entry in entries:
                yield int(folder.name)
