"""What ended workers leave behind: which processes are signalled, and when a worker's number is free again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mesh_core._system import process_marks


def test_a_reused_pid_is_not_signalled() -> None:
    """MRK-2: the process that was looked at had another start time."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        seen = process_marks.look(child.pid)
        assert seen is not None
        process_marks.send(child.pid, seen._replace(start=b"1"), signal.SIGKILL)
        process_marks.send(child.pid, seen, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM


LEAVES_ONE_BEHIND = """
import os, signal, time
from mesh_core._system import process_marks
from mesh_core._system.descendants import Brood

brood = Brood()
brood.listen()
number = brood.take_number()
read, write = os.pipe()
if (worker := os.fork()) == 0:
    brood.fledge(number)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(write, b".")
        while True:
            signal.pause()
    os.read(read, 1)
    os._exit(0)
brood.add(worker, number)
while not list(brood.ended()):
    time.sleep(0.001)
rounds = 0
while (pause := brood.hunt(())) is not None:
    rounds += 1
    assert not brood.is_free(number)
    assert brood.take_number() != number
    time.sleep(pause)
assert process_marks.find(lambda mark: mark.owner == brood.owner) == {}
print(brood.is_free(number), rounds > 0)
"""


@pytest.mark.slow
def test_a_number_is_free_when_nothing_of_its_worker_is_left() -> None:
    """BRD-1, if a worker leaves a process behind that ignores SIGTERM."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_ONE_BEHIND], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")


MAKES_OWNERS = """
import os, sys
from mesh_core._system import process_marks

print(process_marks.new_owner(), flush=True)
sys.stdin.read()
"""


def has_ended(mark: process_marks.Mark) -> bool:
    """Whether the owner of a process of this mark has ended, if that runs where this one does."""
    return process_marks.EndedOwners()(os.getpid(), mark)


def test_only_the_marks_of_owners_that_have_ended_are_taken_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """MRK-3."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_OWNERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        owner = int(child.stdout.readline())
        mark = process_marks.Mark(owner, 1 << 22)
        elsewhere = mark._replace(owner=owner ^ 1 << 20)
        later = mark._replace(owner=owner ^ 1)
        equal = process_marks.detached_from(owner)
        detached = process_marks.Mark(equal, equal)
        assert mark.pid == child.pid
        assert not mark.detached and detached.detached
        assert not process_marks.Mark(owner, owner).detached, "nobody of ours does this"
        assert not has_ended(mark)
        assert not has_ended(elsewhere)
        assert has_ended(later), "a process of this pid that has started at another time"
        child.kill()
        # Whether or not somebody has waited for it.
        while (seen := process_marks.look(child.pid)) is not None and not seen.ended:
            pass
        assert has_ended(mark)
    assert has_ended(mark)
    assert not has_ended(elsewhere), "of other namespaces: it may live there"
    assert not has_ended(detached)
    monkeypatch.setattr(process_marks.os, "getuid", lambda: 54321)
    assert not has_ended(mark), "another user's, also for root"
    monkeypatch.undo()
    namespaces = process_marks._namespaces
    monkeypatch.setattr(
        process_marks, "_namespaces", lambda pid: namespaces(pid) if pid == "self" else (1, 1)
    )
    assert not has_ended(mark), "a process of another namespace"


def test_owners_may_be_below_owners_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    hard, depth = -1, 0
    monkeypatch.setattr(process_marks.resource, "getrlimit", lambda _: (hard, hard))
    while depth < 20:
        owner = process_marks.new_owner()
        equal = process_marks.detached_from(owner)
        assert hard < 0 or owner < hard
        assert process_marks.soft_of(1 << 20) < equal < owner
        hard, depth = (equal if depth % 2 else owner), depth + 1
    hard = 1 << 51
    with pytest.raises(OSError, match="too low for marks"):
        process_marks.new_owner()
