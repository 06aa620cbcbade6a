"""Events that extensions are notified of. A separate module, imported at the first event: dataclasses take memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core import Extent, MeshFailure, Point


@dataclass(frozen=True)
class Spawning:
    """The processes that are about to be spawned."""

    mesh_name: str
    extent: Extent
    hosts: tuple[str, ...]
    """The names of their hosts."""
    is_local: bool
    """Whether all of them run on the spawning process's host."""
    is_host: bool = False
    """Whether they are the processes that run the hosts' extensions, one on each host."""


@dataclass(frozen=True)
class ActorEnd:
    """An actor of this process ended."""

    name: str
    class_name: str
    point: Point
    """Its place in its mesh."""
    error: BaseException | None
    """Why it failed; ``None`` if it was stopped."""


@dataclass(frozen=True)
class ProcEnd:
    """Another process ended."""

    address: tuple[int, int, int]
    """As :attr:`Proc.address`."""
    point: Point | None
    """Its place in the mesh that was watched; ``None`` in :meth:`Extension.proc_ended`."""
    mesh: Any
    """The mesh that was watched; ``None`` in :meth:`Extension.proc_ended`."""
    failure: MeshFailure | None
    """How it died; ``None`` if it was stopped in order."""
    incarnation: int = 0
    """As :attr:`Proc.incarnation`, when the watch began."""


@dataclass(frozen=True, eq=False)
class EndpointCall:
    """One run of an endpoint of an actor of this process. The same object is told when it begins and when it ends."""

    name: str
    """The actor's name."""
    class_name: str
    point: Point
    """The actor's place in its mesh."""
    endpoint: str


@dataclass(frozen=True)
class Raised:
    """Code of an actor of this process raised an exception."""

    name: str
    """The actor's name."""
    class_name: str
    point: Point
    """The actor's place in its mesh."""
    endpoint: str
    """What was called: an endpoint, ``__init__``, or ``__cleanup__``."""
    error: BaseException
