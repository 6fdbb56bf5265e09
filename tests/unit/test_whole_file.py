"""Files that appear whole or not at all, and what dead processes leave."""

import fcntl
import os
import resource
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from gptneo_trt.errors import StorageError
from gptneo_trt.whole_file import (
    LOCK,
    remove_abandoned,
    update_lock,
    whole_file,
    write_tensors,
    writer_lock,
)


def write(path, content):
    """Write a text whole."""
    with whole_file(path) as temporary:
        temporary.write_text(content)


def test_a_file_appears_when_the_block_ends(tmp_path):
    """Until then the old one is there, and afterwards nothing else."""
    path = tmp_path / "new folder" / "file"
    write(path, "old")
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file"]


def test_a_block_that_raises_leaves_the_old_file(tmp_path):
    """Its own error comes out, and no other file stays."""

    def half_write():
        with whole_file(tmp_path / "file") as temporary:
            temporary.write_text("new")
            raise KeyError

    write(tmp_path / "file", "old")
    with pytest.raises(KeyError):
        half_write()
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def abandoned(folder, name="file"):
    """Return what a process that was killed while it wrote a file leaves."""
    left = folder / f".{name}.{'0' * 16}.tmp"
    left.mkdir()
    (left / name).write_text("half")
    (left / ".tmpAbCdEf").write_text("what safetensors writes before it renames")
    return left


def test_what_a_dead_process_left_is_removed_by_the_next_writer(tmp_path):
    """Whatever it wrote; files of other names are left alone."""
    left, empty = abandoned(tmp_path, "other"), tmp_path / f".file.{'1' * 16}.tmp"
    empty.mkdir()
    (tmp_path / ".file.tmp").write_text("the user's")
    write(tmp_path / "file", "new")
    assert (left.exists(), empty.exists()) == (False, False)
    assert sorted(os.listdir(tmp_path)) == [".file.tmp", "file"]


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    """A temporary folder that is locked is somebody's."""
    left = abandoned(tmp_path)
    held = os.open(left / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    remove_abandoned(tmp_path)
    assert left.exists()
    os.close(held)
    remove_abandoned(tmp_path)
    assert not left.exists()


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    """The last to end wins, whole; the other's content is not mixed in."""
    with whole_file(tmp_path / "file") as first:
        first.write_text("first")
        write(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "first"


def test_an_update_waits_for_the_one_before(tmp_path):
    """The second process gets the lock when the first gives it back, and none is left."""
    order = []

    def second():
        with update_lock(tmp_path / "row"):
            order.append("second")

    waiting = threading.Thread(target=second)
    with update_lock(tmp_path / "row"):
        waiting.start()
        waiting.join(0.2)
        write(tmp_path / "file", "another writer leaves the lock alone")
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    assert os.listdir(tmp_path) == ["file"]


def test_the_lock_of_an_update_that_was_killed_does_not_block(tmp_path):
    """What a dead process left of it is taken over."""
    left = tmp_path / f".row.{'0' * 16}.tmp"
    left.mkdir()
    (left / LOCK).touch()
    with update_lock(tmp_path / "row"):
        assert os.listdir(tmp_path) == [left.name]
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_disk():
    """Let no file of this process grow beyond 4 KiB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


# What is written -> how.
TOO_LARGE = {
    "text": lambda path: write(path, "x" * 5000),
    "tensors": lambda path: write_tensors(path, {"x": np.zeros(5000, np.float32)}),
}


@pytest.mark.parametrize("too_large", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_full_disk_is_an_error_of_ours(tmp_path, small_disk, too_large):
    """File, reason and remedy are named; the old file stays and nothing else."""
    path = tmp_path / "file"
    write(path, "old")
    with pytest.raises(StorageError, match=r"file cannot be written: .*too large.*; free space"):
        too_large(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_tensors_are_read_back(tmp_path):
    """Name, type and values are those that were written."""
    write_tensors(tmp_path / "x.safetensors", {"x": np.arange(3, dtype=np.float32)}, {"a": "b"})
    assert load_file(tmp_path / "x.safetensors")["x"].tolist() == [0, 1, 2]


def test_a_lock_is_made_beside_the_file_and_given_back(tmp_path):
    """Its folder is made; when the block ends, also badly, the next one gets it at once."""
    path = tmp_path / "new" / "x.plan"
    with pytest.raises(KeyError), writer_lock(path):
        raise KeyError
    with writer_lock(path, timeout_s=0):
        assert os.listdir(path.parent) == ["x.lock"]


@pytest.mark.parametrize("writer", [writer_lock, whole_file])
def test_a_folder_that_cannot_be_is_named(tmp_path, writer):
    """A file where a folder should be is an error with the path."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match=r"file/x\.plan cannot be written"),
        writer(tmp_path / "file" / "x.plan"),
    ):
        pytest.fail("nothing can be written here")
