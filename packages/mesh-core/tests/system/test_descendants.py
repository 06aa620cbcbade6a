"""What ended workers leave behind: which processes are signalled, and when a worker's number is free again."""

from __future__ import annotations

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
