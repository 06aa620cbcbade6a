"""The copy of a host's agent that becomes its first fork server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import Watch, family
from hosts_samples import SOON

from mesh_core import Actor, Credentials, attach_to_workers, endpoint, shutdown

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2, of="file", full=True)]

# Only a copy of this program has the mark and the class.
PROGRAM = """
import os, signal, sys
from mesh_core import preload_host, run_worker_loop_forever
sys.mark_of_the_agent = True
class Secret: pass
signal.signal(signal.SIGUSR1, lambda *_: None)
kept = open(os.devnull)
loop = [kept]
loop.append(loop)
del kept, loop
preload_host()
def ready(address):
    print("tcp://" + address, flush=True)
run_worker_loop_forever("127.0.0.1:0", credentials=sys.argv[1], name="first", ready=ready, standby=sys.argv[2] == "standby")
"""


class Facts(Actor):
    @endpoint
    def is_copy(self) -> bool:
        return hasattr(sys, "mark_of_the_agent")

    @endpoint
    def facts(self) -> dict[str, Any]:
        """Returns what a worker finds."""
        import __main__

        return {
            "main": sorted(name for name in vars(__main__) if name in ("Secret", "ready", "preload_host")),
            "files": sorted(each.partition(":")[0] for each in open_files()),
            "signals": {
                each: str(signal.getsignal(each)) for each in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD)
            },
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "argv": sys.argv,
            "path": sys.path,
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name not in ("MESH_HOST_SCRATCH", "PYTEST_CURRENT_TEST")
            },
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "leads its group": os.getpgrp() == os.getpid(),
            "folder": os.getcwd(),  # noqa: PTH109
        }

    @endpoint
    def random_from(self) -> str:
        import random

        return str(random.__file__)

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def open_files() -> list[str]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that the list was read from
            found.append(str(each.readlink()))
    return found


class Agent:
    """The program of an agent."""

    def __init__(self, credentials: Path, word: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(credentials), word],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def copies(self) -> list[int]:
        """Return the processes below it that are, or will become, fork servers."""
        return [each for each in family(self.process.pid) if name_of(each) == "mesh-forkserver"]

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=SOON)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture
def job(tmp_path: Path) -> Credentials:
    credentials = Credentials.new(tmp_path / "job")
    credentials.issue_host(tmp_path / "host")
    return credentials


@pytest.fixture
def agent(job: Credentials, tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "host", "standby")
    yield agent
    shutdown()
    agent.close()


def spawn(agent: Agent, job: Credentials, **options: Any) -> Any:
    hosts = attach_to_workers([agent.address], credentials=job)
    return hosts.spawn_procs(**options).spawn("facts", Facts)


def is_copy(actors: Any) -> bool:
    return bool(actors.is_copy.call_one().get(timeout=SOON))


def test_the_first_job_is_forked_from_it(agent: Agent, job: Credentials) -> None:
    hosts = attach_to_workers([agent.address], credentials=job)
    assert is_copy(hosts.spawn_procs().spawn("facts", Facts))
    assert is_copy(hosts.spawn_procs().spawn("facts", Facts))
    shutdown()
    # There is only one: a second job gets a fresh interpreter.
    assert not is_copy(spawn(agent, job))


def test_workers_find_what_they_would_find_without(agent: Agent, job: Credentials, tmp_path: Path) -> None:
    """SBY-1."""
    actors = spawn(agent, job)
    assert is_copy(actors)
    copy = actors.facts.call_one().get(timeout=SOON)
    shutdown()
    other = Agent(tmp_path / "host", "none")
    try:
        actors = spawn(other, job)
        assert not is_copy(actors)
        assert copy == actors.facts.call_one().get(timeout=SOON)
        shutdown()
    finally:
        other.close()
    assert copy["main"] == []


def test_modules_of_the_script_come_first(
    agent: Agent, job: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SBY-1, for a module that the agent imported from elsewhere."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "random.py").write_text("from _random import Random\nseed = Random().seed\n")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    actors = spawn(agent, job)
    assert actors.random_from.call_one().get(timeout=SOON) == str(tmp_path / "code" / "random.py")
    assert not is_copy(actors)


def test_variables_that_an_interpreter_reads_when_it_starts(agent: Agent, job: Credentials) -> None:
    """SBY-1."""
    actors = spawn(agent, job, env={"MALLOC_ARENA_MAX": "1"}, preload=["json"])
    assert actors.variable.call_one("MALLOC_ARENA_MAX").get(timeout=SOON) == "1"
    assert not is_copy(actors)


def test_an_agent_does_without_a_killed_standby(agent: Agent, job: Credentials) -> None:
    (copy,) = agent.copies()
    os.kill(copy, signal.SIGKILL)
    assert not is_copy(spawn(agent, job))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_agent(agent: Agent, number: signal.Signals) -> None:
    while not (copies := agent.copies()):  # it sets its name a moment after the fork
        os.sched_yield()
    watch = Watch(copies)
    assert len(watch.pids) == 1
    agent.process.send_signal(number)
    agent.process.wait(SOON)
    assert watch.wait(SOON) == []
