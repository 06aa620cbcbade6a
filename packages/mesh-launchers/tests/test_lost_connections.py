"""A host of a kept job outlives the connection that has started it, and is taken up again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from counter import Counter, lives
from greeter import host_pids
from launched import LIMIT, processes, until
from sshd import SSHD, Servers

from mesh_core import Credentials
from mesh_launchers import HostSpec, Phase, Place, Report, attach_job, jobs
from mesh_launchers._host import command, resumed, told
from mesh_launchers.agents import AgentLauncher, Start

pytestmark = pytest.mark.slow


class Lingering(AgentLauncher):
    """Hosts of this machine that go on when their command has ended."""

    async def start(self, options: object, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        for host in hosts:
            self.agents.begin(
                host, Start(arguments=command(sys.executable, host.name), listen="127.0.0.1:0", lingers=True)
            )


class Site:
    """A launcher, and what it has reported."""

    def __init__(self, folder: Path, *, silence: float = 60.0, is_kept: bool = True) -> None:
        credentials = Credentials.new(folder / "credentials").host_path
        (folder / "launcher").mkdir()
        self.reports: list[Report] = []
        self._changed = asyncio.Event()
        self.launcher = Lingering(
            Place("lab", folder / "launcher", credentials, silence, self._report, is_kept=is_kept)
        )

    def _report(self, report: Report) -> None:
        self.reports.append(report)
        self._changed.set()

    async def until(self, met: Callable[[Report], bool]) -> Report:
        """Wait for a report that was not there before."""
        async with asyncio.timeout(LIMIT):
            while True:
                while self.reports:
                    if met(report := self.reports.pop(0)):
                        return report
                self._changed.clear()
                await self._changed.wait()


def run(folder: Path, work: Callable[[Site], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        site = Site(folder, **options)
        try:
            await site.launcher.start(None, [HostSpec(0, "b1")])
            await site.until(lambda each: each.phase is Phase.RUNNING)
            await work(site)
        finally:
            await site.launcher.close()
        assert host_pids("b1") == []

    asyncio.run(main())


def connection() -> int:
    """Return the process that passes on what the host and its launcher say."""
    (found,) = [each for each in host_pids("b1") if parent(each) == os.getpid()]
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def test_a_host_is_taken_up_again(tmp_path: Path) -> None:
    """HST-7: again and again, as the same processes; and ends when it is to."""

    async def work(site: Site) -> None:
        # A copy of the agent has its name for a moment, until it has become a fork server.
        until(lambda: len(host_pids("b1")) == 3, "what passes on, what keeps it and the agent are there")
        agents = set(host_pids("b1")) - {connection()}
        for _ in range(2):
            os.kill(connection(), signal.SIGKILL)
            lost = await site.until(lambda each: "the connection to it is lost" in each.why)
            assert lost.phase is Phase.RUNNING and lost.address is not None
            found = await site.until(lambda each: each.phase is Phase.RUNNING and not each.why)
            assert found.address == lost.address
            assert agents < set(host_pids("b1"))
        assert "listens at" in await site.launcher.log(0, 50)

    run(tmp_path, work)


def test_a_host_that_ends_meanwhile_says_so(tmp_path: Path) -> None:
    """HST-7."""

    async def work(site: Site) -> None:
        passes_on, keeps, agent = host_pids("b1")
        os.kill(passes_on, signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
        until(lambda: not lives(keeps), "its program has cleaned up")
        os.kill(passes_on, signal.SIGKILL)
        failed = await site.until(lambda each: each.phase is Phase.FAILED)
        assert failed.why.startswith("its agent has ended while the connection to it was lost")

    run(tmp_path, work)


def test_a_host_that_is_stopped_while_its_connection_is_lost_ends(tmp_path: Path) -> None:
    """HST-7, KPR-3."""

    async def work(site: Site) -> None:
        os.kill(connection(), signal.SIGKILL)
        await site.until(lambda each: "the connection to it is lost" in each.why)
        await site.launcher.stop([0])
        assert host_pids("b1") == []

    run(tmp_path, work)


def test_a_host_of_a_job_that_is_not_kept_ends_with_its_connection(tmp_path: Path) -> None:
    """HST-2."""

    async def work(site: Site) -> None:
        os.kill(connection(), signal.SIGKILL)
        await site.until(lambda each: each.phase is Phase.FAILED)
        until(lambda: not host_pids("b1"), "the host ends")

    run(tmp_path, work, is_kept=False)


class Program:
    """The program of a host, and both directions of its connection."""

    def __init__(self, line: bytes) -> None:
        self.process = subprocess.Popen(
            command(sys.executable, "b1"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.stdin.write(line)
        self.stdin.flush()

    def heard(self, what: str) -> Any:
        """Return what the host says about something."""
        parts = b""
        for line in self.stdout:
            parts += line.partition(b":")[2][1:].rstrip(b"\n")
            if line.partition(b":")[2][:1] == b"=":
                said, parts = json.loads(parts), b""
                if what in said:
                    return said[what]
        raise AssertionError(f"it has not said {what}")

    def lose(self) -> None:
        """Lose both directions of the connection at once."""
        self.stdout.close()
        self.stdin.close()
        self.process.wait(LIMIT)


def program(folder: Path, silence: float) -> Program:
    credentials = Credentials.new(folder / "train").host_path
    place = Place("train", folder, credentials, silence, lambda _: None)
    return Program(told(place, [HostSpec(0, "b1")], lingers=True, address="127.0.0.1:0"))


def test_the_end_of_whoever_has_started_it_is_not_a_lost_connection(tmp_path: Path) -> None:
    """HST-2, HST-7: its input ends, and what it says would still be heard."""
    host = program(tmp_path, 3600.0)
    host.heard("address")
    host.stdin.close()
    assert host.heard("over") == 0
    assert host.process.wait(LIMIT) == 0
    host.stdout.close()
    until(lambda: not host_pids("b1"), "the host ends")


def test_what_was_said_while_nobody_listened_is_said_again(tmp_path: Path) -> None:
    """HST-7: also by a newer connection while the old one does not know yet that it is lost."""
    first = program(tmp_path, 3600.0)
    door = first.heard("door")
    first.lose()
    second = Program(resumed(door, 0))
    address = second.heard("address")
    third = Program(resumed(door, 0))
    assert third.heard("address") == address
    # The older one is let go, and ends nothing.
    assert second.process.wait(LIMIT) == 0
    second.stdin.close()
    second.stdout.close()
    third.stdin.write(b"over\n")
    third.stdin.flush()
    assert third.heard("over") == 0
    third.process.wait(LIMIT)
    third.stdin.close()
    third.stdout.close()
    until(lambda: not host_pids("b1"), "the host ends")


def test_a_lost_host_ends_after_too_long_a_silence(tmp_path: Path) -> None:
    """HST-2, HST-7."""
    host = program(tmp_path, 2.0)
    host.heard("address")
    host.lose()
    assert host_pids("b1")
    until(lambda: not host_pids("b1"), "the host ends")


@pytest.mark.full
@pytest.mark.usefixtures("failures")
@pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="there is no sshd: apt install openssh-server"
)
def test_kept_hosts_outlive_their_ssh_connections(
    tmp_path: Path, jobs_folder: Path, failures: list[Any]
) -> None:
    """HST-7, KPR-1: each end of a connection is killed; what runs there goes on; nothing is left of the job after its keeper."""
    servers = Servers(tmp_path / "sshd", 2)
    try:
        job = servers.launch(name="kept", keep="1h")
        counters: Any = job.wait(timeout=LIMIT).hosts.spawn_procs().spawn("counters", Counter)
        assert counters.add.call(1).get(timeout=LIMIT).values() == [1, 1]
        pids = counters.pid.call().get(timeout=LIMIT).values()
        (client,) = servers.clients("b2")
        for end in (session(servers.processes[0].pid), client):
            os.kill(end, signal.SIGKILL)
        until(lambda: all(each.why for each in job.state().hosts), "both connections are lost")
        assert all("the connection to it is lost" in each.why for each in job.state().hosts)
        until(lambda: not any(each.why for each in job.state().hosts), "both are there again")
        assert counters.add.call(1).get(timeout=LIMIT).values() == [2, 2]
        job.detach()
        until(lambda: jobs()[0].used_by is None, "the script's end is known")
        with attach_job("kept") as again:
            counters = again.actors["counters"]
            assert counters.pid.call().get(timeout=LIMIT).values() == pids
            (keeper,) = processes(jobs_folder / "kept")
            os.kill(keeper, signal.SIGKILL)
            until(lambda: not any(map(lives, pids)), "the hosts end with their keeper")
        assert jobs() == []
    finally:
        servers.close()


def session(server: int) -> int:
    """Return the server's process for a connection."""
    return int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[0])
