"""What a user wants, checked before anything is started, and the process that then keeps it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mesh_core import Credentials, configure, python_command
from mesh_core.plugins import PluginManager
from mesh_launchers import _authority
from mesh_launchers._authority import Use, authority
from mesh_launchers._code import own_code
from mesh_launchers._contract import LAUNCHERS, LauncherPlugin, options_of
from mesh_launchers._durations import seconds
from mesh_launchers._errors import LaunchError
from mesh_launchers._folder import LOG, JobFolder
from mesh_launchers._host_facts import environment
from mesh_launchers._job import SPARES

_ONLY = "hosts"
_KEEPER = "from mesh_launchers._keeper import start; start()  # mesh_launchers._keeper"
"""The comment is for people who look at a list of processes."""
_SETTINGS = ("heartbeat_timeout", "fan_out", "stop_timeout")


@dataclass(frozen=True)
class Plan:
    """A job that is to be started."""

    launcher: str
    name: str
    meshes: Mapping[str, Mapping[str, Any]]
    """By name: the hosts to start, and the launcher's options."""
    keep: float | None
    credentials: str | os.PathLike[str] | None
    dial: str | None
    """Where the script waits for hosts that connect to it."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """The script's, where another process attaches the hosts."""
    _uses: list[Use] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        launcher: str,
        hosts: int | Sequence[str] | None = None,
        *,
        name: str | None = None,
        meshes: Mapping[str, int | Sequence[str] | Mapping[str, Any]] | None = None,
        spares: int | Sequence[str] = 0,
        keep: str | float | None = None,
        credentials: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """Check what :func:`launch` is given."""
        plugin = PluginManager().get(LAUNCHERS, launcher)
        assert isinstance(plugin, LauncherPlugin)
        described: dict[str, dict[str, Any]] = {}
        dials: set[str | None] = set()
        for mesh, (targets, given) in _wanted(plugin, hosts, meshes, spares).items():
            together = {**options, **given}
            dials.add(getattr(options_of(plugin, together), "dial", None))
            described[mesh] = {"targets": targets, "options": together}
        if len(dials) > 1:
            raise ValueError(
                "dial= must be the same for all meshes: the script waits for all its hosts at one address"
            )
        kept = None if keep is None else seconds(keep, "keep")
        probe = plugin.probe()
        if not probe.available:
            raise LaunchError(f"the launcher {launcher!r} cannot work here: {probe.reason}. {probe.remedy}")
        now = configure()
        settings = {name: getattr(now, name) for name in _SETTINGS}
        name = name or f"{launcher}-{secrets.token_hex(3)}"
        return cls(launcher, name, described, kept, credentials, dials.pop(), settings)

    def show(self) -> list[str]:
        """Return what will be submitted, if the launcher submits something that can be read."""
        plugin = PluginManager().get(LAUNCHERS, self.launcher)
        assert isinstance(plugin, LauncherPlugin)
        if plugin.show is None:
            return []
        return [
            plugin.show(options_of(plugin, mesh["options"]), self.name, len(mesh["targets"]), number)
            for number, mesh in enumerate(self.meshes.values())
        ]

    def begin(self) -> tuple[JobFolder, socket.socket]:
        """Start the process that keeps the job; returns the job's folder, and this script's connection to that process."""
        folder, lock = JobFolder.make(self.name)
        try:
            credentials = self._credentials()
            folder.write(
                {
                    "name": self.name,
                    "credentials": str(credentials),
                    "lifetime": _authority.LIFETIME.total_seconds(),
                    "launcher": self.launcher,
                    "meshes": self.meshes,
                    "keep": self.keep,
                    "dial": self.dial,
                    "settings": self.settings,
                    "environment": {**environment(), "code": own_code()},
                    "path": [each or os.getcwd() for each in sys.path],  # noqa: PTH109 - as at a spawn
                }
            )
            return folder, _start_keeper(folder, lock)
        except BaseException:
            folder.remove()
            raise
        finally:
            os.close(lock)

    def _credentials(self) -> Path:
        """The folder of those that the hosts get: the script's own, or, where the hosts outlive it, the job's."""
        given = None if self.credentials is None else Credentials.load(self.credentials).path
        if self.keep is not None:
            self._uses.append(Use.of_new() if given is None else Use(given))
            return self._uses[0].path
        ours = authority()
        if given is not None:
            ours.take(given, self.name)
        return ours.credentials()

    def let_go(self) -> None:
        """Use the credentials of a job that outlives the script no longer: the job does."""
        while self._uses:
            self._uses.pop().end()

    def has_ended(self, folder: JobFolder) -> LaunchError:
        """Say why the process that was to keep the job has not."""
        said = ""
        with suppress(FileNotFoundError), folder.open(LOG, "r") as log:
            said = log.read().strip()
        folder.runs()
        return LaunchError(f"the process that was to keep job {self.name!r} has ended at once: {said}")


def _start_keeper(folder: JobFolder, lock: int) -> socket.socket:
    """Start the process that keeps the job; returns this script's connection to it."""
    ours, theirs = socket.socketpair()
    # By a shell that ends at once: it is no child of the script, which need not wait for it.
    command = ["/bin/sh", "-c", '"$@" &', "sh", *python_command(_KEEPER)]
    with theirs, folder.open(LOG, "ab") as log:
        subprocess.run(
            [*command, str(folder.path), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock, theirs.fileno()],
            start_new_session=True,
            check=True,
        )
    return ours


def _wanted(
    plugin: LauncherPlugin,
    hosts: int | Sequence[str] | None,
    meshes: Mapping[str, int | Sequence[str] | Mapping[str, Any]] | None,
    spares: int | Sequence[str],
) -> dict[str, tuple[list[str | None], dict[str, Any]]]:
    """Return the hosts of each mesh, and the options that are its own."""
    if (hosts is None) == (meshes is None):
        raise ValueError("give either hosts= or meshes=")
    wanted: dict[str, tuple[list[str | None], dict[str, Any]]] = {}
    for name, told in {_ONLY: hosts}.items() if meshes is None else meshes.items():
        given = dict(told) if isinstance(told, Mapping) else {"hosts": told}
        wanted[name] = _targets(plugin, given.pop("hosts", None), f"hosts of mesh {name!r}"), given
    if not wanted or SPARES in wanted:
        raise ValueError(
            f"meshes must name one or more meshes, and none of them {SPARES!r}, got {list(wanted)}"
        )
    if spares:
        wanted[SPARES] = _targets(plugin, spares, "spares"), {}
    named = [each for targets, _ in wanted.values() for each in targets if each is not None]
    twice = sorted({each for each in named if named.count(each) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is named more than once: a host is started once")
    return wanted


def _targets(plugin: LauncherPlugin, hosts: object, what: str) -> list[str | None]:
    if plugin.is_named:
        if (
            not isinstance(hosts, Sequence)
            or isinstance(hosts, str)
            or not all(isinstance(each, str) for each in hosts)
            or not hosts
        ):
            raise ValueError(
                f"{what}: the launcher {plugin.name!r} wants their names, such as ['b1', 'b2'], got {hosts!r}"
            )
        return list(hosts)
    if not isinstance(hosts, int) or isinstance(hosts, bool) or hosts < 1:
        raise ValueError(f"{what}: the launcher {plugin.name!r} wants how many, such as 2, got {hosts!r}")
    return [None] * hosts
