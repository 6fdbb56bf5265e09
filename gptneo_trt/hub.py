"""Find one pinned revision of a Hugging Face repository: in the cache, else download it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from gptneo_trt.child_process import environment
from gptneo_trt.errors import CheckpointError

COMMIT = re.compile(r"[0-9a-f]{40}")
# A hub that is there answers within a second; a download of 70 KiB/s still counts as progress.
STALLED_S = 15.0
POLL_S = 0.1
TRUE_WORDS = {"1", "ON", "YES", "TRUE"}
# Of the child: xet has retries of its own, and bytes that do not show in the cache.
WORKER_SETTINGS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
}


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, now or at import."""
    words = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return constants.HF_HUB_OFFLINE or any(word.upper() in TRUE_WORDS for word in words)


def folder_from_hub(
    repo: str, revision: str, patterns: Sequence[str], repo_type: str = "model"
) -> Path:
    """Return the folder of ``repo`` at a commit; another revision is never taken instead.

    The cache comes first, and is all there is when offline: no network call is made then.

    Args:
        repo: "owner/name".
        revision: 40 hexadecimal digits; a branch or a tag moves, so it is refused.
        patterns: names of the files wanted, with ``*``.
        repo_type: "model" or "dataset".

    Raises:
        CheckpointError: not a pinned id, not cached and offline, or the hub refused or, for
            STALLED_S, sent nothing; the message names the repository, the revision, what is
            cached and the command that fetches it.
    """
    if "/" not in repo:
        raise unusable(repo, revision, repo_type, patterns, "the id lacks its owner (owner/name)")
    if not COMMIT.fullmatch(revision):
        raise unusable(
            repo, revision, repo_type, patterns, "the revision is no commit of 40 digits"
        )
    try:
        return _cached(repo, revision, patterns, repo_type)
    except LocalEntryNotFoundError as error:
        if is_offline():
            why = "HF_HUB_OFFLINE is set, and the cache lacks it or a part of it"
            raise unusable(repo, revision, repo_type, patterns, why) from error
    except HFValidationError as error:
        raise unusable(repo, revision, repo_type, patterns, _first_line(error)) from error
    why = _download(repo, revision, patterns, repo_type)
    if why:
        raise unusable(repo, revision, repo_type, patterns, why)
    try:
        return _cached(repo, revision, patterns, repo_type)
    except LocalEntryNotFoundError as error:
        why = "the commit has none of these files"
        raise unusable(repo, revision, repo_type, patterns, why) from error


def _cached(repo: str, revision: str, patterns: Sequence[str], repo_type: str) -> Path:
    folder = snapshot_download(
        repo,
        repo_type=repo_type,
        revision=revision,
        allow_patterns=list(patterns),
        cache_dir=constants.HF_HUB_CACHE,
        local_files_only=True,
    )
    return Path(folder)


def _download(repo: str, revision: str, patterns: Sequence[str], repo_type: str) -> str:
    """Download in a child process; return why that failed, or ""."""
    cache = constants.HF_HUB_CACHE
    job = {"repo": repo, "revision": revision, "repo_type": repo_type, "cache": str(cache)}
    arguments = json.dumps({"job": job, "patterns": list(patterns), "parent": os.getpid()})
    with tempfile.TemporaryFile() as said:
        worker = subprocess.Popen(
            [sys.executable, "-m", "gptneo_trt.hub_worker", arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment() | WORKER_SETTINGS,
        )
        try:
            ended = _ended_before_a_stall(worker, _storage(repo, repo_type))
        finally:
            worker.kill()
            status = worker.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if ended:
        return lines[-1] if status else ""
    return f"nothing arrived for {STALLED_S:g} s (before that: {lines[-1]})"


def _ended_before_a_stall(worker: subprocess.Popen[bytes], storage: Path) -> bool:
    """Wait while files appear or grow in a folder; return whether the worker ended by itself."""
    seen, since = _sizes(storage), time.monotonic()
    while worker.poll() is None:
        time.sleep(POLL_S)
        sizes = _sizes(storage)
        if sizes != seen:
            seen, since = sizes, time.monotonic()
        if time.monotonic() - since > STALLED_S:
            return False
    return True


def _sizes(folder: Path) -> dict[str, int]:
    """Return file -> bytes of everything in a folder that may change meanwhile."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found[str(path)] = path.lstat().st_size
    return found


def _storage(repo: str, repo_type: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type=repo_type)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _cached_revisions(repo: str, repo_type: str) -> list[str]:
    return sorted(path.name for path in _storage(repo, repo_type).glob("snapshots/*"))


def unusable(
    repo: str, revision: str, repo_type: str, patterns: Sequence[str], why: str
) -> CheckpointError:
    """Return the error that names what was wanted, why it failed, what is cached, what to do."""
    commit = revision if COMMIT.fullmatch(revision) else "COMMIT (40 digits)"
    cached = ", ".join(_cached_revisions(repo, repo_type)) or "none"
    includes = " ".join(f"--include '{pattern}'" for pattern in patterns)
    kind = "" if repo_type == "model" else f"--repo-type {repo_type} "
    instead = "a local folder" if repo_type == "model" else "the bundled text"
    return CheckpointError(
        f"{repo_type} {repo!r} at revision {revision!r} cannot be used: {why}; cached revisions "
        f"in {constants.HF_HUB_CACHE}: {cached}; where there is a network, do: hf download "
        f"{kind}{repo} --revision {commit} {includes}; or pass {instead}"
    )
