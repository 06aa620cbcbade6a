"""A launcher for Mesh whose hosts are sandboxes on this machine, made by bubblewrap.

Each has processes, a name and temporary files of its own, and reads the machine's files; what it may write to is said by an option. To the
script they are hosts like any others.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_launchers import HostSpec, LauncherPlugin, LaunchError
from mesh_launchers.agents import AgentLauncher, Start, command

__all__ = ["BOXES", "BoxLauncher", "BoxOptions"]


@dataclass(frozen=True)
class BoxOptions:
    """Options of the launcher ``boxes``."""

    writable: Sequence[str] = ()
    """Folders that hosts may write to; they can read all others."""
    python: str = sys.executable
    """The interpreter of the hosts."""

    def __post_init__(self) -> None:
        """Look at once whether they are there."""
        missing = [each for each in self.writable if not Path(each).is_dir()]
        if missing:
            raise LaunchError(f"writable={missing[0]!r} is no folder here")


class BoxLauncher(AgentLauncher):
    """Starts an agent in each sandbox: one command for each, and all else is ``AgentLauncher``."""

    async def start(self, options: BoxOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        for host in hosts:
            box = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
            for each in options.writable:
                box += ["--bind", each, each]
            box += [
                "--unshare-pid",
                "--unshare-ipc",
                "--unshare-uts",
                "--hostname",
                host.name,
                "--die-with-parent",
            ]
            start = Start(arguments=[*box, *command(options.python, host.name)], listen="127.0.0.1:0")
            self.agents.begin(host, start)


def _probe() -> ProbeResult[None]:
    if shutil.which("bwrap") is None:
        return ProbeResult.no("there is no bwrap here", remedy="install bubblewrap: apt install bubblewrap")
    return ProbeResult.yes()


BOXES = LauncherPlugin(
    name="boxes",
    api_version=1,
    create=BoxLauncher,
    options=BoxOptions,
    probe=_probe,
    summary="sandboxes on this machine, made by bubblewrap",
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The one of this package."""
    yield BOXES
