"""A host that is told by SIGTERM that it will be taken away (HST-5)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh_core import Credentials
from mesh_launchers import HostSpec, Place, _host
from mesh_launchers._host import HostProcess, command, told

pytestmark = pytest.mark.slow
LIMIT = 30.0
GRACE = "\nGRACE_S = 8.0\n", "\nGRACE_S = 1.0\n"
"""An agent that does not end is killed sooner here."""


class Program:
    """The program of a host, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.said: list[Mapping[str, Any]] = []
        self._changed = asyncio.Event()
        self.process = HostProcess(self._heard, folder / "log", 600.0)

    def _heard(self, what: Mapping[str, Any]) -> None:
        self.said.append(what)
        self._changed.set()

    async def until(self, word: str) -> Any:
        async with asyncio.timeout(LIMIT):
            while not (found := [each[word] for each in self.said if word in each]):
                self._changed.clear()
                await self._changed.wait()
        return found[-1]

    async def wrote(self, words: str) -> None:
        async with asyncio.timeout(LIMIT):
            while words not in self.process.last_lines(100):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)


@asynccontextmanager
async def program(folder: Path, grace: float) -> AsyncIterator[Program]:
    credentials = Credentials.new(folder / "credentials")
    place = Place("lab", folder, credentials.host_path, 600.0, lambda _: None)
    running = Program(folder)
    line = told(place, [HostSpec(0, "lab-0")], grace=grace, address="127.0.0.1:0")
    words = [part.replace(*GRACE) for part in command(sys.executable, "lab")]
    await running.process.start(words, line)
    try:
        await running.until("address")
        await running.wrote("listens at")
        yield running
    finally:
        await running.process.stop()


def agent_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_a_notice_goes_on_to_the_agent(tmp_path: Path) -> None:
    """A scheduler that signals the first process of a host alone, such as Kubernetes."""

    async def main() -> None:
        async with program(tmp_path, grace=20.0) as running:
            pid = running.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            await running.wrote("SIGTERM")
            assert await running.until("over") == 0
            assert "it was taken away: SIGTERM came" in await running.until("failed")

    asyncio.run(main())


def test_one_that_comes_to_all_processes_is_one(tmp_path: Path) -> None:
    """Also to the agent itself, as from Slurm where it tracks processes without control groups."""

    async def main() -> None:
        async with program(tmp_path, grace=20.0) as running:
            pid = running.process.pid
            assert pid is not None
            agent = agent_of(pid)
            os.kill(agent, signal.SIGTERM)
            os.kill(pid, signal.SIGTERM)
            assert await running.until("over") == 0
            lines = running.process.last_lines(100)
            assert "another SIGTERM" not in lines or "ends by SIGTERM" not in lines, lines

    asyncio.run(main())


def test_without_a_grace_it_ends_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with program(tmp_path, grace=0.0) as running:
            pid = running.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            assert await running.until("ended") == 128 + signal.SIGTERM

    asyncio.run(main())


@pytest.mark.full
def test_an_agent_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """When the grace is over: by SIGINT, and SIGKILL."""
    assert GRACE[0] in _host.program()

    async def main() -> None:
        async with program(tmp_path, grace=0.1) as running:
            pid = running.process.pid
            assert pid is not None
            os.kill(agent_of(pid), signal.SIGSTOP)
            os.kill(pid, signal.SIGTERM)
            assert await running.until("over") == -signal.SIGKILL

    asyncio.run(main())


def test_ending_a_host_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    async def main() -> None:
        async with program(tmp_path, grace=600.0) as running:
            await running.process.say("end 0")
            assert await running.until("over") == 0
            assert "ends by SIGINT" in running.process.last_lines(100)

    asyncio.run(main())


def test_other_lines_of_a_command_are_no_messages(tmp_path: Path) -> None:
    """HST-4: a shell may write the time of day before it runs the host."""

    async def main() -> None:
        running = Program(tmp_path)
        said = ("3:0 up 4 days", "3:14:15 up", "3:=5", "x:={}", ":={}", "3:={", '3:+{"good"', "3:=: 1}")
        await running.process.start(["printf", r"%s\n", *said], b"")
        assert await running.until("good") == 1
        assert await running.until("ended") == 0
        assert len(running.said) == 2
        await running.process.stop()

    asyncio.run(main())
