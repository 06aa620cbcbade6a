"""Scripts that join the job of a controller which outlives them, one after the other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import MeshError, set_fault_handler, shutdown, this_host
from mesh_core.extensions import Guests, check_free, has_joined, join_job

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2, of="file", full=True)]

BEGIN = """
import os, socket, sys
from mesh_core import Actor, SupervisionError, context, endpoint, shutdown, this_host, this_proc
from mesh_core.extensions import check_free, has_joined, join_job

class Counter(Actor):
    def __init__(self):
        self.count = 0
        self.procs = []
    @endpoint
    def add(self, n):
        self.count += n
        return self.count
    @endpoint
    def fail(self):
        context().actor_instance.kill("a test")
    @endpoint
    def spawn(self):
        self.procs.append(this_host().spawn_procs({"gpus": 1}))
        return self.procs[-1].pids

if __name__ == "__main__":
    link = socket.socket(fileno=int(sys.argv[1]))
    joined = join_job(link, bytes.fromhex(sys.stdin.readline()))
"""
SPAWN = """
procs = this_host().spawn_procs({"gpus": 2}, name="procs")
counters = procs.spawn("counters", Counter)
print(*counters.add.call(5).get(timeout=60).values(), *procs.pids, flush=True)
"""


class Guest:
    """A script, run as a process."""

    def __init__(self, guests: Guests, text: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    BEGIN + textwrap.indent(textwrap.dedent(text), "    "),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                text=True,
            )
        told = guests.let_in(ours, self.process.pid, {})
        self.say(told.hex())

    def say(self, what: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def guest() -> Iterator[Callable[[str], Guest]]:
    """Admit scripts, and end the job afterwards."""
    shutdown()
    before = set_fault_handler(None)
    guests = Guests("a test")
    made: list[Guest] = []

    def let_in(text: str) -> Guest:
        made.append(Guest(guests, text))
        return made[-1]

    yield let_in
    guests.dismiss()
    for each in made:
        if each.process.poll() is None:
            each.kill()
    shutdown()
    set_fault_handler(before)


def test_meshes_of_a_script_belong_to_the_next_one(guest: Callable[[str], Guest]) -> None:
    """GST-2, GST-3."""
    first = guest(SPAWN + "input()\n")
    said = first.heard().split()
    first.kill()
    second = guest(
        """
        counters = joined.actors["counters"]
        print(*counters.add.call(1).get(timeout=60).values(), *joined.procs["procs"].pids, flush=True)
        more = joined.procs["procs"].spawn("more", Counter)
        more.add.call(1).get(timeout=60)
        """
    )
    assert second.heard().split() == ["6", "6", *said[2:]]
    assert second.end() == 0
    third = guest(
        """
        print(sorted(joined.actors), flush=True)
        joined.actors["more"].stop().get(timeout=60)
        joined.procs["procs"].stop().get(timeout=60)
        print(joined.procs, joined.actors, flush=True)
        """
    )
    assert third.heard() == "['counters', 'more']"
    assert third.heard() == "{} {}" and third.end() == 0
    last = guest("print(joined.procs, joined.actors, flush=True)")
    assert last.heard() == "{} {}" and last.end() == 0


def test_a_script_that_another_one_has_replaced_gets_an_error(
    guest: Callable[[str], Guest],
) -> None:
    """GST-1."""
    first = guest(
        SPAWN
        + """
input()
for what in (lambda: counters.add.call(1000).get(timeout=60), lambda: this_host().spawn_procs()):
    try:
        print("done", what(), flush=True)
    except Exception as error:
        print(*str(error).split(), joined.is_lost, flush=True)
shutdown()
check_free()
print(has_joined(), len(this_host().spawn_procs({"gpus": 1}).pids), flush=True)
"""
    )
    first.heard()
    os.kill(first.process.pid, signal.SIGSTOP)
    second = guest(
        """
        counters = joined.actors["counters"]
        print(*counters.add.call(1).get(timeout=60).values(), flush=True)
        input()
        print(*counters.add.call(0).get(timeout=60).values(), flush=True)
        """
    )
    assert second.heard() == "6 6"
    first.say()
    os.kill(first.process.pid, signal.SIGCONT)
    for _ in range(2):
        said = first.heard()
        assert "no longer part of its job" in said and said.endswith("True")
    assert first.heard() == "False 1" and first.end() == 0
    second.say()
    assert second.heard() == "6 6" and second.end() == 0


def test_deaths_and_failures_are_reported_to_the_present_or_next_script(
    guest: Callable[[str], Guest],
) -> None:
    """GST-3."""
    first = guest(SPAWN + "input()\n")
    pids = [int(each) for each in first.heard().split()[2:]]
    first.kill()
    os.kill(pids[0], signal.SIGKILL)
    listen = """
        counters = joined.actors["counters"]
        try:
            while True:
                counters.slice(gpus=1).add.call_one(0).get(timeout=60)
        except SupervisionError as error:
            print(error.failure.pid, error.failure.kind, flush=True)
        """
    second = guest(listen)
    assert second.heard().split()[0] == str(pids[0])
    assert second.end() == 0
    third = guest(
        """
        counters = joined.actors["counters"]
        print(*(counters.slice(gpus=1).add.call_one(0).get(timeout=60) for _ in range(3)), flush=True)
        counters.slice(gpus=1).fail.broadcast()
        """
        + listen
    )
    # Another script was told of that death.
    assert third.heard() == "5 5 5"
    assert "ACTOR_FAILED" in third.heard() and third.end() == 0


def test_meshes_of_the_scripts_actors_end_with_it(guest: Callable[[str], Guest]) -> None:
    """GST-4."""
    first = guest(
        SPAWN
        + 'print(*this_proc().spawn("here", Counter).spawn.call_one().get(timeout=60), flush=True)\ninput()\n'
    )
    first.heard()
    pid = int(first.heard())
    end = os.pidfd_open(pid)
    try:
        first.kill()
        import select

        assert select.select([end], [], [], 60)[0]
    finally:
        os.close(end)


def test_a_member_of_a_job_joins_no_other(guest: Callable[[str], Guest], tmp_path: Path) -> None:
    one = guest(
        """
        print(has_joined(), flush=True)
        try:
            check_free()
        except Exception as error:
            print(error, flush=True)
        """
    )
    assert one.heard() == "True" and "takes part in one job at a time" in one.heard()
    assert one.end() == 0
    assert not has_joined()
    this_host().spawn_procs({"gpus": 1}).initialized.get(timeout=60)
    with pytest.raises(MeshError, match="uses Mesh already"):
        check_free()
    ours, theirs = socket.socketpair()
    from mesh_core.extensions import dumps

    with ours, theirs, pytest.raises(MeshError, match="uses Mesh already"):
        join_job(theirs, dumps({"host": "here"})[0])


def test_a_silent_script_is_given_up(guest: Callable[[str], Guest]) -> None:
    with pytest.raises(AssertionError):
        # It left before it was admitted.
        assert _gone(guest)
    after = guest("print(joined.procs, flush=True)")
    assert after.heard() == "{}" and after.end() == 0


def _gone(guest: Callable[[str], Guest]) -> Any:
    one = guest("")
    one.kill()
    return one.process.returncode == 0
