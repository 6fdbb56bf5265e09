"""A process that has imported everything and forks a child a piece of work: ``python -m ...``.

Importing TensorRT, torch and ModelOpt takes seconds, which a hundred trials cannot. A line of
standard input names a work, a folder and how many children do it at the same time; the answers are
a line when the children, each in a session of its own, begin, and one when all have ended, with
statuses as of ``Popen`` and seconds.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import modelopt.torch.quantization  # noqa: F401 - the child finds it imported
import torch
import transformers  # noqa: F401

from tests.crash.works import FAILED, FOUND_MADE, INTERRUPTED, MADE, WORKS


def child(name: str, folder: Path, begun: int) -> int:
    """Run a work in a session of its own; return the exit status."""
    os.setsid()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # which is for answers alone
    os.write(begun, b"x")
    try:
        return MADE if WORKS[name].run(folder) else FOUND_MADE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return FAILED


def answer(**fields: object) -> None:
    """Write a line for the test."""
    print(json.dumps(fields), flush=True)


def main() -> None:
    """Fork a child a line until there is no more."""
    torch.set_num_threads(1)
    answer(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.monotonic()
        begun, own = os.pipe()
        pids = [forked(asked["work"], Path(asked["folder"]), own) for _ in range(asked["count"])]
        for _ in pids:
            os.read(begun, 1)
        os.close(own)
        os.close(begun)
        answer(pids=pids)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answer(statuses=ended, seconds=time.monotonic() - started)
    os._exit(0)  # what torch and TensorRT do at the end takes seconds, too


def forked(name: str, folder: Path, begun: int) -> int:
    """Fork a child that runs a work; return its id."""
    pid = os.fork()
    if not pid:
        os._exit(child(name, folder, begun))
    return pid


if __name__ == "__main__":
    main()
