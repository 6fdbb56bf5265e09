"""Write files that appear whole or not at all, one process at a time."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gptneo_trt.errors import StorageError

ID_BYTES = 8
TEMPORARIES = f".*.{'[0-9a-f]' * 2 * ID_BYTES}.tmp"
LOCK = "lock"  # in a temporary folder, open for writing: a folder's own lock is unknown to NFS


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path, in a folder beside ``path``; it becomes ``path`` when all went well.

    The content reaches the disk before the name does, so that a process killed at any moment
    leaves the old file, the new one, or none. A block that raises leaves nothing behind; what a
    killed process left is removed by whoever writes into the folder next. (A folder, since
    safetensors writes into a temporary file of its own.)

    Raises:
        StorageError: the disk is full, or the folder may not be written; ``path`` is as it was.
    """
    with _temporary_folder(path, secrets.token_hex(ID_BYTES)) as folder:
        yield folder / path.name
        with (folder / path.name).open("rb") as file:
            os.fsync(file.fileno())
        (folder / path.name).replace(path)


@contextmanager
def update_lock(path: Path) -> Iterator[None]:
    """Hold a lock on what several steps replace, until the block ends; no file is left of it.

    A dead process holds none.

    Raises:
        StorageError: the folder may not be written.
    """
    with _temporary_folder(path, "0" * 2 * ID_BYTES):
        yield


@contextmanager
def _temporary_folder(path: Path, name: str) -> Iterator[Path]:
    """Give a folder beside ``path`` that this process alone has, until the block ends."""
    folder = path.with_name(f".{path.name}.{name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent)
        held = _claimed(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
    except OSError as error:
        raise StorageError(f"{path} {_unwritable(error)}") from error


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        StorageError: see ``whole_file``.
    """
    with whole_file(path) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata=dict(metadata) if metadata else None)
        except SafetensorError as error:
            raise OSError(f"{error}") from error


@contextmanager
def writer_lock(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Make the folder of a file, and hold the lock beside the file; a dead process holds none.

    Raises:
        Timeout: another process still has it after so many seconds; -1 waits for ever.
        StorageError: the disk is full, or the folder may not be written.
    """
    lock = FileLock(path.with_suffix(".lock"), timeout=timeout_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        raise StorageError(f"{path} {_unwritable(error)}") from error
    try:
        yield
    finally:
        lock.release()


def _unwritable(reason: OSError) -> str:
    return f"cannot be written: {reason}; free space there, or use another folder"


def _claimed(folder: Path) -> int:
    """Make a folder and lock it; return the descriptor that holds the lock until it is closed."""
    while True:
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another writer took it for abandoned just now
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_of(descriptor, folder):
                return descriptor
            os.close(descriptor)


def _is_of(descriptor: int, folder: Path) -> bool:
    """Return whether a descriptor is of a folder's lock, and not of one that was removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK))
    except FileNotFoundError:
        return False


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders in a folder that no process holds any more."""
    for path in folder.glob(TEMPORARIES):
        with suppress(OSError):  # it is held, or gone
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_of(descriptor, path):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)
