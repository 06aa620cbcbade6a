"""The launcher ``local``: hosts that are agents on this machine, for development and for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mesh_core.plugins import hookimpl
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin, Phase, Place
from mesh_launchers._host import LAST_LINES, command, tail, told
from mesh_launchers._together import Group, GroupLauncher

_START_S = 60.0


@dataclass(frozen=True)
class LocalOptions:
    """Options of the launcher ``local``."""

    python: str = sys.executable
    """The interpreter of the hosts; by default that of the script. It must have mesh-core."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Changes to the environment of the hosts' processes."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """The resources that each host states, such as ``{"gpus": 2}``, for ``hosts.select``; nobody checks or reserves them."""


class LocalLauncher(GroupLauncher["_LocalGroup"]):
    """Starts agents on this machine, each listening on loopback. One process starts those that are started together, and imports once for all."""

    async def start(self, options: LocalOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        self.begin(_LocalGroup(self.place, options, hosts, len(self.groups)))


class _LocalGroup(Group):
    """Hosts that are started together."""

    def __init__(self, place: Place, options: LocalOptions, hosts: Sequence[HostSpec], number: int) -> None:
        super().__init__(place, hosts, f"agents{number}.log")
        self._options = options
        self._logs = {each: place.folder / f"{each}.log" for each in self.hosts}

    def log(self, number: int, lines: int = LAST_LINES) -> str:
        """Return the last lines of a host's agent, after those of the process that has started it."""
        first = super().log(number, lines)
        with suppress(FileNotFoundError), self._logs[number].open("rb") as file:
            return "\n".join(filter(None, [first, tail(file, lines)]))
        return first

    async def live(self) -> None:
        """Start them, and follow them."""
        self.report(self.hosts, Phase.STARTING)
        options = self._options
        line = told(
            self.place,
            list(self.hosts.values()),
            logs=self._logs,
            address="127.0.0.1:0",
            resources=dict(options.resources),
        )
        words = command(options.python, self.place.job)
        try:
            await self.start_process(words, line, {**os.environ, **options.env})
        except OSError as error:
            self.fail(self.hosts, f"{type(error).__name__}: {error}")
            return
        late = asyncio.get_running_loop().time() + _START_S
        while silent := self.left() - self.listening:
            left = late - asyncio.get_running_loop().time()
            if left <= 0:
                self.fail(silent, f"it has not listened after {_START_S:g} s")
                await self.end(silent)
                return
            self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), left)

    def process_ended(self, status: int) -> None:
        """Its hosts have ended with it."""
        how = f"it was ended by signal {-status}" if status < 0 else f"it has ended with status {status}"
        for each in self.left() - self.ending:
            self.fail([each], self.failed.get(each, how))


LOCAL = LauncherPlugin(
    name="local",
    api_version=API_VERSION,
    create=LocalLauncher,
    options=LocalOptions,
    summary="agents on this machine, for development and tests",
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The plugin of this module."""
    yield LOCAL
