"""Find one pinned revision of a Hugging Face repository: in the cache, else download it."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from gptneo_trt.errors import CheckpointError

COMMIT = re.compile(r"[0-9a-f]{40}")
ANSWER_TIMEOUT_S = 5.0
TRUE_WORDS = {"1", "ON", "YES", "TRUE"}


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
        CheckpointError: not a pinned id, not cached and offline, or the hub refused or did
            not answer; the message names the repository, the revision and what is cached.
    """
    if "/" not in repo:
        raise _error(repo, revision, repo_type, patterns, "the id lacks its owner (owner/name)")
    if not COMMIT.fullmatch(revision):
        raise _error(repo, revision, repo_type, patterns, "the revision is no commit of 40 digits")
    try:
        return Path(_download(repo, revision, patterns, repo_type, local_files_only=True))
    except LocalEntryNotFoundError as error:
        if is_offline():
            why = "HF_HUB_OFFLINE is set, and the cache lacks it or a part of it"
            raise _error(repo, revision, repo_type, patterns, why) from error
    except HFValidationError as error:
        raise _error(repo, revision, repo_type, patterns, _first_line(error)) from error
    try:
        # Asked first since it has a timeout, which snapshot_download's listing has not.
        HfApi().repo_info(repo, revision=revision, repo_type=repo_type, timeout=ANSWER_TIMEOUT_S)
        return Path(_download(repo, revision, patterns, repo_type, local_files_only=False))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise _error(repo, revision, repo_type, patterns, _first_line(error)) from error


def _download(
    repo: str, revision: str, patterns: Sequence[str], repo_type: str, local_files_only: bool
) -> str:
    return snapshot_download(
        repo,
        repo_type=repo_type,
        revision=revision,
        allow_patterns=list(patterns),
        local_files_only=local_files_only,
        etag_timeout=ANSWER_TIMEOUT_S,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _cached_revisions(repo: str, repo_type: str) -> list[str]:
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type=repo_type)
    return sorted(path.name for path in folder.glob("snapshots/*"))


def _error(
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
