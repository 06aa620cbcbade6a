"""The launcher ``local``: hosts that are agents on this machine, for development and for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh_core.plugins import hookimpl
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin
from mesh_launchers.agents import AgentLauncher, Start, command


@dataclass(frozen=True)
class LocalOptions:
    """Options of the launcher ``local``."""

    python: str = sys.executable
    """The interpreter of the hosts; that of the script if nothing is given. It must have mesh-core."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Changes to the environment of the hosts' processes."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each host says it has, such as ``{"gpus": 2}``, for ``hosts.select``; nobody checks or reserves it."""


class LocalLauncher(AgentLauncher):
    """Starts agents on this machine, each listening on loopback."""

    async def start(self, options: LocalOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        for host in hosts:
            start = Start(
                arguments=command(options.python, host.name),
                listen="127.0.0.1:0",
                resources=options.resources,
                env={**os.environ, **options.env},
            )
            self.agents.begin(host, start)


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
