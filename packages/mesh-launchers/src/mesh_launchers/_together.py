"""Hosts that one process starts together, and reports about: the common part of the launchers ``local`` and ``slurm``."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from mesh_launchers._contract import HostSpec, Phase, Place, Report
from mesh_launchers._host import LAST_LINES, HostProcess


class Group(ABC):
    """The hosts of one process. Its messages become reports."""

    def __init__(self, place: Place, hosts: Sequence[HostSpec], log: str) -> None:
        self.place = place
        self.hosts = {each.number: each for each in hosts}
        self.process = HostProcess(self._heard, place.folder / log, place.silence)
        self.over: set[int] = set()
        """Hosts that have ended."""
        self.ending: set[int] = set()
        """Hosts that were asked to end."""
        self.listening: set[int] = set()
        self.environments: dict[int, Mapping[str, Any]] = {}
        self.failed: dict[int, str] = {}
        """Why hosts have failed, in their own words."""
        self.taken: set[int] = set()
        """Hosts that a scheduler has sent SIGTERM to."""
        self.changed = asyncio.Event()
        self.has_ended = False
        """Whether the process has."""
        self.begun = asyncio.Event()
        """Whether the process can be sent messages."""
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Begin to start the hosts."""
        self.tasks.append(asyncio.create_task(self.live()))

    # Overridden by each launcher; may do nothing.

    @abstractmethod
    async def live(self) -> None:
        """Start the hosts, and follow them."""

    def log(self, number: int, lines: int = LAST_LINES) -> str:
        """Return the last lines of a host."""
        return self.process.last_lines(lines)

    def process_ended(self, status: int) -> None:  # noqa: B027
        """The process has ended."""

    def came(self, number: int, node: str) -> None:  # noqa: B027
        """A host has reported its address and its environment."""

    def address_of(self, number: int, address: str) -> str:
        """Return where others reach a host that listens at an address."""
        return address

    def is_being_taken(self, number: int) -> None:  # noqa: B027
        """A scheduler has sent SIGTERM to a host, which goes on for a while."""

    def host_ended(self, number: int, status: int) -> None:
        """A host has ended that was not asked to."""
        self.fail([number], self.failed.get(number) or f"it has ended with status {status}")

    async def ended(self) -> None:  # noqa: B027
        """All hosts have ended, and the process with them."""

    # Common to all launchers.

    def left(self) -> set[int]:
        """Return the hosts that have not ended."""
        return self.hosts.keys() - self.over

    def report(self, numbers: Iterable[int], phase: Phase, why: str = "", address: str | None = None) -> None:
        """Report the state of hosts."""
        for each in numbers:
            self.place.report(Report(each, phase, why, address, self.environments.get(each)))

    def fail(self, numbers: Iterable[int], why: str) -> None:
        """Report that hosts have failed, with the last lines of each."""
        for each in set(numbers) - self.over:
            self.over.add(each)
            lines = self.log(each)
            self.report([each], Phase.FAILED, f"{why}\n{lines}" if lines else why)
        self.changed.set()

    async def start_process(self, arguments: Sequence[str], line: bytes, env: Mapping[str, str]) -> None:
        """Start the process. A cancellation waits for that: otherwise nobody would own what it starts."""
        starting = asyncio.ensure_future(self.process.start(arguments, line, env))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            raise
        finally:
            self.begun.set()

    def _heard(self, what: Mapping[str, Any]) -> None:
        number = what.get("host")
        if number is None:
            self.has_ended = True
            self.process_ended(int(what["ended"]))
        elif "environment" in what:
            self.environments[number] = what["environment"]
            self.came(number, str(what["node"]))
        elif "address" in what and number not in self.ending:
            self.listening.add(number)
            self.report([number], Phase.RUNNING, address=self.address_of(number, str(what["address"])))
        elif "failed" in what:
            self.failed[number] = str(what["failed"])
            if what.get("taken"):
                self.taken.add(number)
        elif "leaving" in what:
            self.is_being_taken(number)
        elif "over" in what:
            if number in self.ending:
                self.over.add(number)
            else:
                self.host_ended(number, int(what["over"]))
        self.changed.set()

    async def end(self, numbers: Iterable[int]) -> None:
        """Ask hosts to end."""
        await self.process.say(f"end {' '.join(map(str, numbers))}")

    async def renew(self, order: str) -> None:
        """Give the hosts new certificates."""
        if self.left():
            await self.begun.wait()
            await self.process.say(order)

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts; with the last of them, the process that has started them ends."""
        mine = {each for each in numbers if each in self.hosts}
        if not mine:
            return
        self.ending |= mine
        if self.left() - self.ending:
            await self.begun.wait()
            await self.end(mine)
            while mine & self.left() and not self.has_ended:
                self.changed.clear()
                await self.changed.wait()
        else:
            for each in self.tasks:
                each.cancel()
            if self.tasks:
                await asyncio.wait(self.tasks)
            await self.process.stop()
            await self.ended()
        self.over |= mine
        self.report(mine, Phase.ENDED)


G = TypeVar("G", bound=Group)


class GroupLauncher(Generic[G]):
    """A launcher except for ``start``, which has to add to ``groups``."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.groups: list[G] = []

    def begin(self, group: G) -> None:
        """Begin to start the hosts of a group."""
        self.groups.append(group)
        group.begin()

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts."""
        await asyncio.gather(*[each.stop(numbers) for each in self.groups])

    async def log(self, number: int, lines: int) -> str:
        """Return the last lines of a host's output, or of the process that has started it."""
        return next((each.log(number, lines) for each in self.groups if number in each.hosts), "")

    async def renew(self, order: str) -> None:
        """Give all hosts new certificates."""
        await asyncio.gather(*[each.renew(order) for each in self.groups])

    async def close(self) -> None:
        """End all hosts."""
        await asyncio.gather(*[each.stop(list(each.hosts)) for each in self.groups])
