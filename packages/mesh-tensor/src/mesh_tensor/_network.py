"""The addresses at which processes on several hosts meet for collectives.

NET-1: nothing of a collective leaves a machine unless the script has allowed it: gloo neither encrypts what it sends nor asks who connects.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from mesh_core import MeshError
from mesh_core.extensions import current_proc, membership

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh_core import ProcMesh

LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class Where(NamedTuple):
    """Where a process is."""

    host: str
    addresses: tuple[str, ...]
    """Its host's addresses for other hosts, the likeliest first; empty if all are on one machine."""


def here() -> Where:
    """Return where this process is."""
    member = membership()
    found = () if member is None else tuple(each for each in member.addresses if not _is_loopback(each))
    return Where(current_proc().host, found)


def meeting_places(
    procs: ProcMesh, wheres: Sequence[Where], allowed: Mapping[str, str] | None
) -> tuple[str, list[str]]:
    """Return the address at which this process has its store, and those at which each of the others listens."""
    mine = here()
    hosts = dict.fromkeys(each.host for each in wheres)
    outside = [each for each in wheres if each.addresses and each.host != mine.host]
    if not outside and not (allowed and any(host in allowed for host in hosts)):
        # On one machine, whatever the names of its hosts.
        return LOOPBACK, [LOOPBACK] * len(wheres)
    if allowed is None:
        raise MeshError(
            f"{procs} is on several machines, {', '.join(hosts)}: gloo, which does its collectives, neither encrypts what it sends nor asks "
            "who connects. Where everybody on that network may see the data, call mesh_tensor.allow_clear_text() before the first collective. "
            "to_mesh(), share(), fetch() and calls of actors are encrypted, and work without it"
        )
    return _address(mine, allowed), [_address(each, allowed) for each in wheres]


def _address(where: Where, allowed: Mapping[str, str]) -> str:
    found = allowed.get(where.host) or next(iter(where.addresses), None)
    if found is None:
        raise MeshError(
            f"it is not known at which address other hosts reach {where.host!r}: give it to allow_clear_text({{{where.host!r}: ...}})"
        )
    return found


def interface() -> str | None:
    """Return the interface that this process's environment names."""
    return os.environ.get(_INTERFACE)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
