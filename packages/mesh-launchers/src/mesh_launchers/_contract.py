"""What launchers are: the contract of the kind of plugin ``mesh.launchers``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from mesh_core.plugins import Plugin, PluginKind

API_VERSION: Final = 1


class Phase(StrEnum):
    """The phase of a host's life."""

    WAITING = "waiting"
    """Not available yet: a scheduler has it in its queue."""
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    """As requested."""
    FAILED = "failed"
    """It did not start, or it ended by itself."""


@dataclass(frozen=True)
class HostSpec:
    """A host to be started."""

    number: int
    """Its number in the job; no other host of the job ever has the same."""
    name: str
    """Its name in errors and listings."""
    target: str | None = None
    """Where to start it, as the user named it, if hosts have names before they are started."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels by which scripts select it."""


@dataclass(frozen=True)
class Report:
    """What a launcher reports about a host."""

    number: int
    phase: Phase
    why: str = ""
    """Why it waits, or why it has failed: in the scheduler's words, with the last lines of the host's output."""
    address: str | None = None
    """Where its agent listens, once it is running."""
    environment: Mapping[str, Any] | None = None
    """Its version of Python, and its packages."""


@dataclass(frozen=True)
class Place:
    """What a launcher gets from the process that keeps the job."""

    job: str
    """The job's name."""
    folder: Path
    """A private folder of the launcher's own, which is removed with the job."""
    credentials: Path
    """The hosts' credentials. Pass them to hosts so that nobody else can read them: never in arguments, never in logs."""
    silence: float
    """The seconds of silence after which a host ends by itself, because it was cut off."""
    report: Callable[[Report], None]
    """Reports the state of a host. To be called on the launcher's event loop."""
    is_kept: bool = False
    """Whether the job outlives its script, and so should its hosts outlive lost connections."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """Which modules of the script the hosts are to look for, and on which path; :func:`mesh_launchers.agents.command` does so."""


@runtime_checkable
class Launcher(Protocol):
    """Starts and stops the hosts of one job. It lives in the process that keeps the job, whose event loop calls it.

    Failures raise :class:`LaunchError`, in the words of the system that refused.
    """

    async def start(self, options: Any, hosts: Sequence[HostSpec]) -> None:
        """Start hosts, and return without waiting; the state of each is reported later."""

    async def stop(self, numbers: Sequence[int]) -> None:
        """Stop hosts, including those that have not started yet or have failed. Nothing of them is left when this returns."""

    async def log(self, number: int, lines: int) -> str:
        """Return the last lines that a host's agent has written."""
        ...

    async def close(self) -> None:
        """Stop all hosts, and remove everything else that was created for the job."""


@runtime_checkable
class DialingLauncher(Launcher, Protocol):
    """A launcher whose hosts connect to the script (``dial=``), and can be told to connect to other processes as well.

    ``mesh exec`` and ``mesh shell`` need it. :class:`~mesh_launchers.agents.AgentLauncher` does it.
    """

    async def dial(self, number: int, visit: str, address: str) -> None:
        """Let a host connect to a visitor that waits at HOST:PORT, and return once the visitor is known to be reachable."""

    async def leave(self, number: int, visit: str) -> None:
        """End everything that a host does for a visitor."""


@runtime_checkable
class RenewingLauncher(Launcher, Protocol):
    """A launcher that can give running hosts new certificates, so that a job may be older than those that it began with.

    :class:`~mesh_launchers.agents.AgentLauncher` does it. A job of another launcher ends when its certificates expire, and warns before.
    """

    async def renew(self, order: str) -> None:
        """Pass a line on to the programs of all hosts, including those that start later; ``place.credentials`` has the new files already."""


RESERVED: Final = (
    "launcher",
    "hosts",
    "name",
    "meshes",
    "spares",
    "keep",
    "progress",
    "credentials",
)
"""Arguments of ``launch`` itself, which no option can be called."""


@dataclass(frozen=True, kw_only=True)
class LauncherPlugin(Plugin[None]):
    """A launcher that ``launch("name")`` selects.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class PigeonOptions:
    ...     dovecote: str = "roof"
    >>> LauncherPlugin(
    ...     name="pigeons", api_version=1, options=PigeonOptions, create=lambda place: Pigeons(place), summary="takes its time"
    ... ).name
    'pigeons'
    """

    create: Callable[[Place], Launcher]
    options: type
    """A frozen dataclass: the options of users, with types and defaults."""
    is_named: bool = False
    """Whether hosts are names that the user gives, and not a number of them."""
    explains: bool = False
    """Whether it often knows why hosts end within half a second, and reports that: failures in the script wait that long for its words."""
    show: Callable[[Any, str, int, int], str] | None = None
    """Returns what will be submitted to a scheduler, so that it can be shown first. Its arguments are the options, the job's name, the number of hosts, and
    the number of their mesh in the job."""

    def __post_init__(self) -> None:
        """Refuse options that users could never give."""
        super().__post_init__()
        taken = [each for each in RESERVED if each in getattr(self.options, "__dataclass_fields__", {})]
        if taken:
            raise ValueError(
                f"the launcher {self.name!r} has an option {taken[0]!r}, which launch() takes for an argument of its own: call it differently"
            )


LAUNCHERS: Final = PluginKind(
    word="launcher",
    group="mesh.launchers",
    hook="mesh_register_launchers",
    descriptor=LauncherPlugin,
    api_version=API_VERSION,
    owner="mesh-launchers",
)


def options_of(plugin: LauncherPlugin, given: Mapping[str, Any]) -> Any:
    """Make a launcher's options from the user's; an unknown one is an error that names the nearest."""
    known = [each.name for each in dataclasses.fields(plugin.options) if each.init]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise TypeError(f"the launcher {plugin.name!r} has no option {name!r}; {hint}")
    return plugin.options(**given)
