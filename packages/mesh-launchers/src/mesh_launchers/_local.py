"""The launcher ``local``: hosts that are agents on this machine, for development and for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mesh_core.plugins import hookimpl
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin, Phase, Place, Report
from mesh_launchers._host import HostProcess, command, tail, told

_START_S = 60.0
_LAST_LINES = 12


@dataclass(frozen=True)
class LocalOptions:
    """Options of the launcher ``local``."""

    python: str = sys.executable
    """The interpreter of the hosts; that of the script if nothing is given. It must have mesh-core."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Changes to the environment of the hosts' processes."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each host says it has, such as ``{"gpus": 2}``, for ``hosts.select``; nobody checks or reserves it."""


class LocalLauncher:
    """Starts agents on this machine, each listening on loopback: those that are started together by one process, which imports once for all."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._groups: list[_Group] = []

    async def start(self, options: LocalOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        group = _Group(self._place, options, hosts, len(self._groups))
        self._groups.append(group)
        group.begin()

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts."""
        await asyncio.gather(*[each.stop(numbers) for each in self._groups])

    async def log(self, number: int, lines: int) -> str:
        """Return the last lines that a host's agent has written."""
        return next((each.log(number, lines) for each in self._groups if number in each.hosts), "")

    async def close(self) -> None:
        """End all hosts."""
        await asyncio.gather(*[each.stop(list(each.hosts)) for each in self._groups])


class _Group:
    """Hosts that are started together."""

    def __init__(self, place: Place, options: LocalOptions, hosts: Sequence[HostSpec], number: int) -> None:
        self._place = place
        self._options = options
        self.hosts = {each.number: each for each in hosts}
        self._logs = {each: place.folder / f"{each}.log" for each in self.hosts}
        self._over: set[int] = set()
        """Hosts that have ended."""
        self._ending: set[int] = set()
        self._listening: set[int] = set()
        self._environments: dict[int, Mapping[str, Any]] = {}
        self._failed: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._has_ended = False
        self._begun = asyncio.Event()
        """Whether it can be told something."""
        self._process = HostProcess(self._heard, place.folder / f"agents{number}.log", place.silence)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._live())

    def log(self, number: int, lines: int = _LAST_LINES) -> str:
        """Return the last lines of a host's agent, behind those of the process that has started it."""
        first = self._process.last_lines(lines)
        with suppress(FileNotFoundError), self._logs[number].open("rb") as file:
            return "\n".join(filter(None, [first, tail(file, lines)]))
        return first

    def _report(
        self, numbers: Iterable[int], phase: Phase, why: str = "", address: str | None = None
    ) -> None:
        for each in numbers:
            self._place.report(Report(each, phase, why, address, self._environments.get(each)))

    async def _live(self) -> None:
        """Start them, and see that they come."""
        self._report(self.hosts, Phase.STARTING)
        options = self._options
        line = told(
            self._place,
            list(self.hosts.values()),
            logs=self._logs,
            address="127.0.0.1:0",
            resources=dict(options.resources),
        )
        words = command(options.python, self._place.job)
        starting = asyncio.ensure_future(self._process.start(words, line, {**os.environ, **options.env}))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Not in the middle: what it begins would be nobody's.
            await asyncio.wait([starting])
            raise
        except OSError as error:
            self._fail(self.hosts, f"{type(error).__name__}: {error}")
            return
        finally:
            self._begun.set()
        late = asyncio.get_running_loop().time() + _START_S
        while silent := self.hosts.keys() - self._listening - self._over:
            left = late - asyncio.get_running_loop().time()
            if left <= 0:
                self._fail(silent, f"it has not listened after {_START_S:g} s")
                await self._end(silent)
                return
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def _fail(self, numbers: Iterable[int], why: str) -> None:
        for each in set(numbers) - self._over:
            self._over.add(each)
            lines = self.log(each)
            self._report([each], Phase.FAILED, f"{why}\n{lines}" if lines else why)
        self._changed.set()

    def _heard(self, what: Mapping[str, Any]) -> None:
        number = what.get("host")
        if number is None:
            self._has_ended = True
            status = int(what["ended"])
            how = f"it was ended by signal {-status}" if status < 0 else f"it has ended with status {status}"
            for each in self.hosts.keys() - self._over - self._ending:
                self._fail([each], self._failed.get(each, how))
        elif "environment" in what:
            self._environments[number] = what["environment"]
        elif "address" in what and number not in self._ending:
            self._listening.add(number)
            self._report([number], Phase.RUNNING, address=str(what["address"]))
        elif "failed" in what:
            self._failed[number] = str(what["failed"])
        elif "over" in what:
            if number in self._ending:
                self._over.add(number)
            else:
                self._fail([number], self._failed.get(number, f"it has ended with status {what['over']}"))
        self._changed.set()

    async def _end(self, numbers: Iterable[int]) -> None:
        await self._process.say(f"end {' '.join(map(str, numbers))}")

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts; the last of them end the process that has started them."""
        mine = {each for each in numbers if each in self.hosts}
        if not mine:
            return
        self._ending |= mine
        if self.hosts.keys() - self._over - self._ending:
            await self._begun.wait()
            await self._end(mine)
            while mine - self._over and not self._has_ended:
                self._changed.clear()
                await self._changed.wait()
        else:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            await self._process.stop()
        self._over |= mine
        self._report(mine, Phase.ENDED)


LOCAL = LauncherPlugin(
    name="local",
    api_version=API_VERSION,
    create=LocalLauncher,
    options=LocalOptions,
    summary="agents on this machine, for development and tests",
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The one of this module."""
    yield LOCAL
