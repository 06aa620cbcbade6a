"""Ways to connect to a job: through a local socket, or through a host of the job with credentials."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mesh_core._features.debug import places
from mesh_core._features.debug.wire import Wire
from mesh_core._native import VisitEnd, jobs_of_host, visit_job

_REACH_S = 10.0
"""How many seconds connecting to a host may take."""


class Ended(Exception):
    """The job does not exist or has ended."""


class Link:
    """A connection to a job."""

    def __init__(self, peer: socket.socket, end: VisitEnd | None = None) -> None:
        self.wire = Wire(peer)
        self._end = end

    @property
    def broken(self) -> str:
        """Why the connection ended, if not because the job did; empty while it is up."""
        return (self._end and self._end.why) or ""


class Door(Protocol):
    """A way to a job."""

    def open(self) -> Link:
        """Connect; raise :class:`Ended` or a ``MeshError`` if that fails."""


@dataclass(frozen=True)
class LocalDoor:
    """The inspection socket of a job on this machine."""

    path: str

    def open(self) -> Link:
        """Connect."""
        try:
            return Link(places.connect(self.path))
        except OSError as error:
            raise Ended(str(error)) from None


@dataclass(frozen=True)
class HostDoor:
    """A host that takes part in a job."""

    address: str
    credentials: Path
    job: int

    def open(self) -> Link:
        """Connect."""
        descriptor, end = visit_job(self.address, self.credentials, self.job, _REACH_S)
        return Link(socket.socket(fileno=descriptor), end)


def doors_of_host(address: str, credentials: str | os.PathLike[str]) -> list[HostDoor]:
    """Return a door for each job that the host at this address takes part in."""
    folder = Path(credentials)
    return [HostDoor(address, folder, job) for job in jobs_of_host(address, folder, _REACH_S)]
