"""How a process proves to other hosts that it belongs to the job, and where they can reach it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_core._common.current import holder
from mesh_core._native import interfaces, roll

if TYPE_CHECKING:
    from mesh_core._process.process import Process

# What the host's agent leaves in the job's folder: see `gateway/host.rs` and `hand_on_revocations`.
_MEMBERSHIP = "membership"
_REVOKED = "revoked.crl"
_LOOPBACK = ("127.", "::1", "localhost")


@dataclass(frozen=True)
class Membership:
    """What a process needs to open its own connections to processes of its job on other hosts.

    Code that connects must verify the other end as Mesh does: see the page "Security".
    """

    credentials: Path
    """A folder with ``ca.pem``, ``crl.pem``, and the certificate and key of a host or of the controller. The files change when
    certificates are renewed or revoked; read them again."""
    revocations: Path | None
    """Where the host's agent puts newer revocation lists from the controller, in DER; it may not exist."""
    addresses: tuple[str, ...]
    """This host's addresses as other hosts reach them, the likeliest first; only loopback addresses if all hosts of the
    job are on this machine."""
    silence: float
    """How many seconds of silence make a host of the job count as dead."""


def membership() -> Membership | None:
    """Return how this process belongs to a job of several hosts, or ``None`` if it does not (yet).

    The same object is returned while nothing changes. In a script it exists after :func:`attach_to_workers`.

    >>> from mesh_core.extensions import membership
    >>> membership() is None  # a script without other hosts
    True
    """
    process = holder().process
    if process is None or process.closed or process.pid != os.getpid():
        return None
    return process.slots.of(_Known).membership(process)


class _Known:
    """A process's membership, once known; kept in its slots."""

    def __init__(self) -> None:
        self._from: tuple[str, str] | None = None
        self._made: Membership | None = None
        self._asked_host = False

    def membership(self, process: Process) -> Membership | None:
        if process.credentials is None and not self._asked_host:
            # There from before the job's first process on this host, or never.
            self._asked_host = True
            process.credentials = _left_by_agent(process.identity.scratch)
        found = process.credentials
        if found is not None and found is not self._from:
            self._made, self._from = _made(process, *found), found
        return self._made


def told(process: Process) -> list[object] | None:
    """What processes are told that this one spawns on its own host."""
    if process.credentials is None:
        return None
    folder, listens = process.credentials
    if process.identity.mesh_id == 0 and _all_here(process):
        listens = "127.0.0.1:0"
    return [process.identity.host_no, folder, listens]


def _left_by_agent(scratch: str) -> tuple[str, str] | None:
    if not scratch:
        return None
    try:
        word = Path(scratch, _MEMBERSHIP).read_bytes()
    except OSError:
        return None
    listens, _, folder = word.partition(b"\n")
    return os.fsdecode(folder), listens.decode()


def _made(process: Process, folder: str, listens: str) -> Membership:
    host = listens.rpartition("//")[2].rpartition(":")[0].strip("[]")
    addresses = _interfaces() if host in ("", "0.0.0.0", "::") else _numbers(host)
    if process.identity.mesh_id == 0 and _all_here(process):
        addresses = ("127.0.0.1",)
    scratch = process.identity.scratch
    revocations = Path(scratch, _REVOKED) if scratch else None
    return Membership(Path(folder), revocations, addresses, process.settings.heartbeat_timeout)


def _interfaces() -> tuple[str, ...]:
    try:
        return tuple(interfaces())
    except OSError:
        return ()


def _numbers(host: str) -> tuple[str, ...]:
    """A host's addresses, which its script may have given by name."""
    import socket

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return _interfaces()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _all_here(process: Process) -> bool:
    """Whether the hosts that were attached are all this machine, under its own address for itself."""
    known = [address.rpartition("//")[2].strip("[") for _, _, address, *_ in roll(process.runtime)]
    return bool(known) and all(address.startswith(_LOOPBACK) for address in known)
