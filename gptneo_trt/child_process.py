"""Child processes: what one inherits, that it ends with its parent, and how it ended, in words."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def environment() -> dict[str, str]:
    """Return this environment, in which ``python -m gptneo_trt...`` finds this very package."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def die_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent``, the process that started it, is gone.

    A parent that was killed cannot end its children, and theirs is memory, a GPU or a file that
    the next run needs. Linux counts from the end of the thread that started the child.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def ending(status: int | None, seconds: float) -> str:
    """Return how a child ended after so many seconds.

    Args:
        status: as ``Popen.returncode``: minus the number of a signal; None: it did not end.
        seconds: since it began.
    """
    if status is None:
        return f"hung and was killed after {seconds:.1f} s"
    if status >= 0:
        return f"ended with status {status} after {seconds:.1f} s"
    name = signal.Signals(-status).name
    why = " (so does the kernel end it when memory runs out)" if name == "SIGKILL" else ""
    return f"died of {name}{why} after {seconds:.1f} s"
