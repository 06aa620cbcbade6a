"""The launcher ``ssh``: hosts by their names, reached by OpenSSH's own client with its whole configuration."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin, Place
from mesh_launchers._dialing import check_dial
from mesh_launchers._errors import LaunchError
from mesh_launchers.agents import AgentLauncher, Start, shell

_AT_ONCE = 8
"""Logins at once: from the eleventh on sshd drops some."""
_TRIES = 5
_PAUSE_S = 0.5
_OWN_STATUS = 255
"""The exit status of ssh's own errors."""
_NOT_FOUND = 127
_OF_AGENT = re.compile(r"\d\d:\d\d:\d\d mesh host: ")
_PASSING = re.compile(r"kex_exchange_identification|Connection reset by|Connection closed by|banner exchange")
"""What ssh reports when a server has too many logins at once."""


@dataclass(frozen=True)
class SshOptions:
    """Options of the launcher ``ssh``."""

    python: str | Mapping[str, str] | None = None
    """The interpreter on the hosts, or a mapping of interpreters by host. It must have mesh-core of the script's version. By default that of the
    script, by its path, on hosts that have it there, as on a shared file system; and ``python3`` on others."""
    config: str | None = None
    """A configuration file for ssh, in place of ``~/.ssh/config``."""
    arguments: Sequence[str] = ()
    """More arguments for ssh, such as ``("-J", "gate")``."""
    address: Mapping[str, str] = field(default_factory=dict)
    """The address by which the script reaches a host, if it differs from the one that ssh connects to."""
    listen: str = "0.0.0.0:0"
    """Where agents listen on their hosts."""
    dial: str | None = None
    """HOST:PORT at which the script waits for hosts that nobody can connect to: an address of its machine, as the hosts reach it."""
    login_timeout: float = 15.0
    """Seconds for a connection."""
    start_timeout: float = 120.0
    """Seconds until an agent listens, with the login."""

    def __post_init__(self) -> None:
        """Check what would otherwise only be noticed on the hosts."""
        if self.dial is not None:
            check_dial(self.dial)

    def python_of(self, host: str) -> str | None:
        """Return the interpreter of a host, if it is named."""
        return self.python.get(host) if isinstance(self.python, Mapping) else self.python


class SshLauncher(AgentLauncher):
    """Starts agents by ssh; a host ends with its connection, except in a job that is kept."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._chance = random.Random()

    async def start(self, options: SshOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        if shutil.which("ssh") is None:
            raise LaunchError("there is no ssh here: install OpenSSH's client (apt install openssh-client)")
        ssh = _ssh(options)
        names = await asyncio.gather(*[self._name(ssh, options, host) for host in hosts])
        for host, name in zip(hosts, names, strict=True):
            assert host.target is not None
            start = Start(
                arguments=[*ssh, "--", host.target, shell(options.python_of(host.target), host.name)],
                listen=options.listen,
                dial=options.dial,
                is_remote=True,
                lingers=True,
                reached=lambda address, name=name: _at(name, address),  # type: ignore[misc]
                explain=_explain,
                again=lambda status, lines: status == _OWN_STATUS and _PASSING.search(lines) is not None,
                limit=self._limit,
                tries=_TRIES,
                pause=lambda turn: _PAUSE_S * 2**turn * self._chance.uniform(0.5, 1.5),
                timeout=options.start_timeout,
            )
            self.agents.begin(host, start)

    async def _name(self, ssh: Sequence[str], options: SshOptions, host: HostSpec) -> str:
        """Return the name or address by which others reach a host."""
        assert host.target is not None
        given = options.address.get(host.target)
        if given is None:
            async with self._limit:
                given = await _host_name(ssh, host.target)
        return given


def _ssh(options: SshOptions) -> list[str]:
    """Return the client with the options of all hosts. No terminal: it would echo its input, which is secret."""
    config = [] if options.config is None else ["-F", options.config]
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": f"{max(1, round(options.login_timeout))}",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
        # A separate connection: a shared one has few sessions, and may be stale.
        "ControlPath": "none",
        "ControlMaster": "no",
    }
    said = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", *config, *options.arguments, *said, "-T"]


async def _host_name(ssh: Sequence[str], target: str) -> str:
    """Return the name or address that ssh would connect to."""
    asked = await asyncio.create_subprocess_exec(
        *ssh,
        "-G",
        "--",
        target,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await asked.communicate()
    if asked.returncode:
        raise LaunchError(f"ssh does not take {target!r}: {error.decode(errors='replace').strip()}")
    found = re.search(r"^hostname (\S+)$", out.decode(), re.MULTILINE)
    return target if found is None else found[1]


def _at(name: str, address: str) -> str:
    """Return the address of a port on a host."""
    host = f"[{name}]" if ":" in name else name
    return f"tcp://{host}:{address.rpartition(':')[2]}"


def _explain(status: int, lines: str) -> str:
    # What the agent has written is not the reason.
    last = next((each for each in reversed(lines.splitlines()) if not _OF_AGENT.match(each)), "")
    if status == _NOT_FOUND:
        return f"there is no such interpreter on the host: {last}. Name one with python="
    if status == _OWN_STATUS:
        return f"ssh: {last.removeprefix('ssh: ') or 'the connection was lost'}"
    return ""


def _probe() -> ProbeResult[None]:
    if shutil.which("ssh") is None:
        return ProbeResult.no(
            "there is no ssh here", remedy="install OpenSSH's client: apt install openssh-client"
        )
    return ProbeResult.yes()


SSH = LauncherPlugin(
    name="ssh",
    api_version=API_VERSION,
    create=SshLauncher,
    options=SshOptions,
    is_named=True,
    probe=_probe,
    summary="machines that OpenSSH's client reaches, by their names",
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The plugin of this module."""
    yield SSH
