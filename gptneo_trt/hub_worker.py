"""The child process that downloads one commit: ``python -m gptneo_trt.hub_worker JOB``.

It is a process of its own because huggingface_hub retries for minutes, and a name lookup or a hub
that answers a byte at a time has no timeout at all: the parent ends it when nothing arrives.
"""

import json
import sys
from types import TracebackType

from huggingface_hub import HfApi, constants, snapshot_download

from gptneo_trt.child_process import die_with

ANSWER_TIMEOUT_S = 5.0
CHUNK_BYTES = 1 << 20


def download(job: dict[str, str], patterns: list[str]) -> None:
    """Download the files of one commit that match ``patterns`` into the cache folder of a job.

    The hub is asked for the commit first: that has a timeout, which the listing has not.
    """
    # What arrives is written by the chunk, and what is written is how the parent sees progress.
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    repo, revision, repo_type = job["repo"], job["revision"], job["repo_type"]
    HfApi().repo_info(repo, revision=revision, repo_type=repo_type, timeout=ANSWER_TIMEOUT_S)
    snapshot_download(
        repo,
        revision=revision,
        repo_type=repo_type,
        cache_dir=job["cache"],
        allow_patterns=patterns,
        etag_timeout=ANSWER_TIMEOUT_S,
    )


def say_first_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error in one line: whatever a hub answers ends here, as the parent's."""
    lines = str(error).strip().splitlines() or [""]
    print(f"{kind.__name__}: {lines[0]}", file=sys.stderr)


if __name__ == "__main__":
    sys.excepthook = say_first_line
    arguments = json.loads(sys.argv[1])
    die_with(arguments["parent"])
    download(arguments["job"], arguments["patterns"])
