"""For launchers whose hosts are started by a command: on this machine, or a command that reaches another.

:func:`command` and :func:`shell` are what runs on a host: a program that needs nothing there but mesh-core. It reads the host's credentials from its
standard input, and ends when that ends. :class:`AgentLauncher` starts such commands, and reports the states of hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh_launchers._contract import HostSpec, Phase, Place, Report
from mesh_launchers._errors import LaunchError
from mesh_launchers._host import HostProcess, command, resumed, shell, told

__all__ = ["AgentLauncher", "Agents", "Start", "command", "shell"]

_START_S = 60.0
_VISIT_S = 30.0
_REACH_S = 10.0
_AGAIN_S = 0.5
_MOST_AGAIN_S = 10.0
"""The pauses between attempts to take up a host again double up to this."""
_LAST_S = 15.0
"""How long to try to reach a host that is to end, and whose connection is lost."""


@dataclass(frozen=True)
class Start:
    """How a host is started."""

    arguments: Sequence[str]
    """The command. It must pass standard input and output through to :func:`command` on the host."""
    listen: str | None = None
    """Where the agent listens; port 0 stands for any."""
    dial: str | None = None
    """Where the script waits, as HOST:PORT by which the host reaches it, for an agent that nobody can connect to; instead of `listen`."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """The resources that the host states."""
    preemption_grace: float = 0.0
    """Seconds that the agent continues after SIGTERM, if something sends that to :func:`command` before it kills it; without it, SIGTERM ends the agent."""
    env: Mapping[str, str] | None = None
    """The environment of the command; by default that of this process."""
    reached: Callable[[str], str] = lambda address: address
    """Returns the address by which others reach a port."""
    lingers: bool = False
    """Whether hosts of a job that is kept outlive the end of the command, which is then only a lost connection: the same command is run again, and takes the
    host up where it left it, until the job is no longer kept."""
    is_remote: bool = False
    """Whether to make sure that this machine can connect to the agent."""
    explain: Callable[[int, str], str] | None = None
    """Explains an exit status and the last lines, if their meaning is known; else returns an empty text."""
    again: Callable[[int, str], bool] | None = None
    """Whether to try once more after such an end, if the host has not reported anything."""
    limit: asyncio.Semaphore | None = None
    """Limits how many start at once."""
    tries: int = 1
    pause: Callable[[int], float] = lambda _: 0.0
    """Seconds before a further try."""
    timeout: float = _START_S
    """Seconds after which a host that does not listen has failed."""


class Agents:
    """The hosts of one job."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._hosts: dict[int, _Agent] = {}
        self._order = ""
        """What hosts were told last; those that start meanwhile are told it too."""

    def begin(self, spec: HostSpec, start: Start) -> None:
        """Begin to start a host."""
        agent = self._hosts[spec.number] = _Agent(self._place, spec, start, lambda: self._order)
        agent.begin()

    def log(self, number: int, lines: int) -> str:
        """Return the last lines of a host."""
        agent = self._hosts.get(number)
        return "" if agent is None else agent.process.last_lines(lines)

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts."""
        await asyncio.gather(*[self._hosts[each].stop() for each in numbers if each in self._hosts])

    async def dial(self, number: int, visit: str, address: str) -> None:
        """Let a host connect to a visitor."""
        await self._hosts[number].dial(visit, address)

    async def leave(self, number: int, visit: str) -> None:
        """End everything that a host does for a visitor."""
        await self._hosts[number].leave(visit)

    async def renew(self, order: str) -> None:
        """Give all hosts new certificates."""
        self._order = order
        await asyncio.gather(*[each.process.say(order) for each in self._hosts.values()])

    async def close(self) -> None:
        """End all."""
        await self.stop(list(self._hosts))


class AgentLauncher:
    """A launcher except for ``start``, which has to call ``self.agents.begin()`` for each host.

    >>> class LocalLauncher(AgentLauncher):
    ...     async def start(self, options, hosts):
    ...         for host in hosts:
    ...             self.agents.begin(host, Start(arguments=command("python3", host.name), listen="127.0.0.1:0"))
    """

    def __init__(self, place: Place) -> None:
        self.agents = Agents(place)

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts."""
        await self.agents.stop(numbers)

    async def log(self, number: int, lines: int) -> str:
        """Return the last lines that a host's agent has written."""
        return self.agents.log(number, lines)

    async def dial(self, number: int, visit: str, address: str) -> None:
        """Let a host connect to a visitor too, if it connects to the script (:class:`~mesh_launchers.DialingLauncher`)."""
        await self.agents.dial(number, visit, address)

    async def leave(self, number: int, visit: str) -> None:
        """End everything that a host does for a visitor."""
        await self.agents.leave(number, visit)

    async def renew(self, order: str) -> None:
        """Give all hosts new certificates (:class:`~mesh_launchers.RenewingLauncher`)."""
        await self.agents.renew(order)

    async def close(self) -> None:
        """End all hosts."""
        await self.agents.close()


class _Agent:
    """One host."""

    def __init__(self, place: Place, spec: HostSpec, start: Start, order: Callable[[], str]) -> None:
        self._place = place
        self._spec = spec
        self._order = order
        self._start = start
        self._environment: Mapping[str, Any] | None = None
        self._failed: str | None = None
        self._unreached = ""
        """Why the host cannot connect to the script, if it should."""
        self._reaching: asyncio.Task[None] | None = None
        self._listens = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._door = ""
        """Where the program of the host can be taken up again."""
        self._address: str | None = None
        self._is_over = False
        """Whether the host has said that it ends."""
        self._visits: dict[str, asyncio.Future[None]] = {}
        """Visitors, and whether the host can connect to each."""
        self.process = self._new_process()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._live())

    def _new_process(self) -> HostProcess:
        return HostProcess(self._heard, self._place.folder / f"{self._spec.number}.log", self._place.silence)

    def _report(self, phase: Phase, why: str = "", address: str | None = None) -> None:
        report = Report(self._spec.number, phase, why=why, address=address, environment=self._environment)
        self._place.report(report)

    def _heard(self, what: Mapping[str, Any]) -> None:
        if "visit" in what:
            self._heard_of_visit(what)
            return
        if "log" in what:
            with self.process.log.open("a") as log:
                log.write(str(what["log"]))
            return
        if "environment" in what:
            self._environment = what["environment"]
        self._door = str(what.get("door", self._door))
        self._is_over = self._is_over or "over" in what
        if "failed" in what:
            self._failed = str(what["failed"])
        if "unreached" in what and not self._stopping:
            self._unreached = (
                f"{self._spec.name} cannot connect to the script at {self._start.dial}: {what['unreached']}"
            )
            self._report(Phase.STARTING, why=self._unreached)
        if "dials" in what or "address" in what:
            self._heard_where(what.get("address"))
        if "ended" in what:
            for each in list(self._visits):
                self._heard_of_visit({"visit": each, "failed": "it has ended"})
            if not self._ended.done():
                self._ended.set_result(int(what["ended"]))

    def _heard_where(self, address: str | None) -> None:
        """The host can be reached, or connects by itself."""
        self._listens.set()
        if self._stopping:
            return
        if address is None:
            self._came(None)
        elif self._start.is_remote and self._address is None:
            self._reaching = asyncio.create_task(self._reach(self._start.reached(address)))
        else:
            self._came(self._start.reached(address))

    def _heard_of_visit(self, what: Mapping[str, Any]) -> None:
        visit = self._visits.get(what["visit"])
        if visit is None or visit.done():
            return
        if "dials" in what:
            visit.set_result(None)
        elif "failed" in what or "over" in what:
            visit.set_exception(LaunchError(str(what.get("failed", "its agent has ended"))))

    async def dial(self, visit: str, address: str) -> None:
        coming = self._visits[visit] = asyncio.get_running_loop().create_future()
        try:
            await self.process.say(f"dial {self._spec.number} {visit} {address}")
            await asyncio.wait_for(coming, _VISIT_S)
        except (LaunchError, TimeoutError) as error:
            why = str(error) or f"no answer within {_VISIT_S:g} s"
            raise LaunchError(f"{self._spec.name} cannot connect to {address}: {why}") from None

    async def leave(self, visit: str) -> None:
        if self._visits.pop(visit, None) is not None:
            await self.process.say(f"leave {visit}")

    async def _reach(self, address: str) -> None:
        """Report that it runs, if this machine can connect to it; the script is here too."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            connecting = asyncio.open_connection(host.strip("[]"), int(port))
            _, writer = await asyncio.wait_for(connecting, _REACH_S)
            writer.close()
        except (OSError, TimeoutError) as error:
            why = "timed out" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0)
            self._failed = (
                f"the script's machine cannot connect to {self._spec.name} at {address}: {why}. Give the address or the port "
                "that is open (address=, listen=), or have the host connect to the script (dial=)"
            )
            await self.process.stop("over")
        else:
            self._came(address)

    def _came(self, address: str | None) -> None:
        self._address = address
        self._report(Phase.RUNNING, address=address)

    async def _live(self) -> None:
        try:
            turn = 1
            while True:
                status = await self._try()
                lines = self.process.last_lines()
                if turn >= self._start.tries or not self._may_try_again(status, lines):
                    break
                await asyncio.sleep(self._start.pause(turn))
                turn += 1
            if self._can_be_resumed:
                status, lines = await self._follow(status, lines)
            self._report(Phase.FAILED, why=self._why(status, lines))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the reason of this host's failure
            self._report(Phase.FAILED, why=f"{type(error).__name__}: {error}")

    @property
    def _can_be_resumed(self) -> bool:
        """Whether the host goes on, as far as is known, though the connection to it has ended."""
        return bool(self._door) and not self._is_over and self._failed is None

    async def _follow(self, status: int, lines: str) -> tuple[int, str]:
        """Take the host up again whenever the connection to it has been lost; return how it ended."""
        loop = asyncio.get_running_loop()
        lost, pause = loop.time(), _AGAIN_S
        while self._can_be_resumed and loop.time() < lost + self._place.silence:
            why = self._why(status, lines).splitlines()[0]
            self._report(
                Phase.RUNNING, f"the connection to it is lost, and tried again: {why}", self._address
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MOST_AGAIN_S)
            if await self._resume(self._start.timeout):
                self._came(self._address)
                status = await asyncio.shield(self._ended)
                lost, pause = loop.time(), _AGAIN_S
            elif self._ended.done():
                status = self._ended.result()
            lines = self.process.last_lines()
        return status, lines

    async def _resume(self, limit: float) -> bool:
        """Take the host up again; return whether it answers."""
        self._listens.clear()
        async with self._start.limit or contextlib.nullcontext():
            await self._begin(resumed(self._door, self._spec.number))
            await self._heard_of(limit)
        if not self._listens.is_set() or self._ended.done():
            await self.process.drop()
            return False
        if self._order():
            await self.process.say(self._order())
        return True

    async def _begin(self, line: bytes) -> None:
        """Run the command."""
        self._ended = asyncio.get_running_loop().create_future()
        self.process = self._new_process()
        starting = asyncio.ensure_future(self.process.start(self._start.arguments, line, self._start.env))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Not in the middle of it: nobody would own what it starts.
            await asyncio.wait([starting])
            raise

    async def _heard_of(self, limit: float) -> bool:
        """Wait until the host can be used, or the command has ended; return whether either has come."""
        listens: asyncio.Future[Any] = asyncio.ensure_future(self._listens.wait())
        waits: list[asyncio.Future[Any]] = [listens, self._ended]
        try:
            done, _ = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listens.cancel()
        return bool(done)

    def _may_try_again(self, status: int, lines: str) -> bool:
        """Return whether it has ended for a reason that may pass, before the host was reached."""
        again = self._start.again
        return self._environment is None and again is not None and again(status, lines)

    async def _try(self) -> int:
        """Start it, and return its exit status when it has ended."""
        spec, start = self._spec, self._start
        self._report(Phase.STARTING)
        async with start.limit or contextlib.nullcontext():
            where = {"address": start.listen} if start.dial is None else {"dial": start.dial}
            line = told(
                self._place,
                [spec],
                grace=start.preemption_grace,
                lingers=start.lingers and self._place.is_kept,
                resources=dict(start.resources),
                **where,
            )
            await self._begin(line)
            if self._order():
                await self.process.say(self._order())
            done = await self._heard_of(start.timeout)
        if not done:
            after = f"after {start.timeout:g} s"
            self._failed = (
                f"{self._unreached}, {after}: dial= must be an address of the script's machine that is open to its hosts"
                if self._unreached
                else f"it has not listened {after}"
            )
            await self.process.stop()
        return await asyncio.shield(self._ended)

    def _why(self, status: int, lines: str) -> str:
        """Explain why it has ended."""
        explain = self._start.explain
        why = self._failed or ("" if explain is None else explain(status, lines))
        if not why:
            why = f"it was ended by signal {-status}" if status < 0 else f"it has ended with status {status}"
        return why if lines.removeprefix("ssh: ") in why else f"{why}\n{lines}"

    async def stop(self) -> None:
        self._stopping = True
        if self._reaching is not None:
            self._reaching.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._can_be_resumed and (self._ended.done() or not self._listens.is_set()):
            # It would go on for as long as the job was to be kept.
            await self._resume(_LAST_S)
        await self.process.stop("over")
        self._report(Phase.ENDED)
