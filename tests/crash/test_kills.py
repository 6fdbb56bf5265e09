"""Killed at random moments, work on files leaves what was there, or what is new, and nothing else.

Every trial begins in the folder that the one before was killed in, as a run of the gate does.
"""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.crash.warm import WarmProcess, ends
from tests.crash.works import MADE, WORKS

# Work -> kills in the short form; the long one has ten times as many.
KILLS = {"plan": 16, "scales": 16, "baselines": 48, "references": 24}
INTERRUPTED = 4  # one kill in so many is a Ctrl-C


def run_whole(warm: WarmProcess, name: str, folder: Path) -> float:
    """Let a work run to its end; return its seconds."""
    warm.start(name, folder)
    statuses, seconds = warm.ended()
    assert statuses == [MADE]
    return seconds


def kill(warm: WarmProcess, name: str, folder: Path, after_s: float, number: int) -> None:
    """Kill the process group of a work after so many seconds, and wait until all of it is gone."""
    (pid,) = warm.start(name, folder)
    time.sleep(after_s)
    with suppress(ProcessLookupError):  # it was faster than the one that was measured
        os.killpg(pid, number)
    warm.ended()
    assert ends(warm.others)


def temporaries(folder: Path) -> list[str]:
    """Return what is in a folder under a name that only a running process needs."""
    return [str(path) for path in folder.rglob(".*")]


def kill_often(warm: WarmProcess, name: str, folder: Path, kills: int) -> list[bool]:
    """Kill a work at random moments; return whether each time it had done all before."""
    work = WORKS[name]
    work.prepare(folder)
    work.start(folder)
    duration_s = run_whole(warm, name, folder)
    moments, done = random.Random(f"{name} {kills}"), []
    for trial in range(kills):
        work.start(folder)
        number = signal.SIGINT if trial % INTERRUPTED == 0 else signal.SIGKILL
        kill(warm, name, folder, moments.uniform(0, duration_s), number)
        done.append(work.check(folder))
        assert len(temporaries(folder)) <= 2  # of this trial: what earlier ones left is gone
    return done


def check_kills(warm: WarmProcess, name: str, folder: Path, kills: int) -> None:
    """Kill a work often; what is left is right each time, and the next run needs no help."""
    done = kill_often(warm, name, folder, kills)
    assert not all(done), "no kill came before the end"
    WORKS[name].start(folder)
    run_whole(warm, name, folder)
    assert WORKS[name].check(folder)
    assert temporaries(folder) == []


@pytest.mark.parametrize(("name", "kills"), KILLS.items(), ids=KILLS)
def test_killed_work_leaves_the_old_or_the_new(warm, tmp_path, name, kills):
    """After each kill all that a reader accepts is whole and right; the next run is, too."""
    check_kills(warm, name, tmp_path, kills)


@pytest.mark.long
@pytest.mark.parametrize(("name", "kills"), KILLS.items(), ids=KILLS)
def test_work_killed_a_thousand_times_leaves_the_old_or_the_new(warm, tmp_path, name, kills):
    """The same with ten times as many kills, at other moments."""
    check_kills(warm, name, tmp_path, 10 * kills)


def test_a_file_written_in_place_is_caught(warm, tmp_path):
    """The trials above can fail: a writer without a temporary file leaves half of one."""
    with pytest.raises(AssertionError, match=r"obtained \d+ lines"):
        kill_often(warm, "in place", tmp_path, 10)


def test_there_are_a_hundred_kills():
    """The short form has at least 100, the long one at least 1,000."""
    assert sum(KILLS.values()) >= 100
