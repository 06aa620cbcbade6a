"""Where code runs: in which actor, at which place of its mesh, for which message."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mesh_core._common.current import current, holder
from mesh_core._common.errors import MeshError
from mesh_core._native import Extent, Point

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._native import Message

_current: ContextVar[tuple[Instance, Message | None] | None] = ContextVar("mesh_context", default=None)

enter = _current.set
"""Make an actor and the message that it handles the context of this thread or task. Called for every message: no function, and no
:class:`Context` before somebody wants one."""


class Instance:
    """An actor as it sees itself: :attr:`Context.actor_instance`."""

    __slots__ = ("actor_id", "class_name", "creator", "name", "proc_id", "rank")

    def __init__(
        self,
        *,
        actor_id: int,
        proc_id: str,
        rank: Point,
        name: str,
        class_name: str,
        creator: str = "the script",
    ) -> None:
        self.actor_id = actor_id
        """The actor's id, the same on every rank of its mesh."""
        self.proc_id = proc_id
        """The process it lives in."""
        self.rank = rank
        """Its place in the mesh that it was spawned in."""
        self.name = name
        """The name that it was spawned under."""
        self.class_name = class_name
        self.creator = creator
        """What spawned and owns it: another actor and its process, or the script."""

    def describe(self) -> str:
        """Describe the actor for people: its name, its place in its mesh, and its process."""
        where = f" on rank {self.rank.rank}" if len(self.rank.extent.labels) else ""
        return f"actor {self.name!r}{where} in {self.proc_id}"

    def stop(self, reason: str = "") -> None:
        """Stop this actor in order, after the messages sent before; this is no failure. What it owns is stopped first."""
        self._cell("stop").inbox.finish()

    def kill(self, reason: str = "") -> None:
        """Make this actor fail now: waiting messages are refused, and its owner is notified with ``reason``."""
        # At once, on whichever thread this is: the next message is already refused.
        self._cell("kill").fail(MeshError(f"{self.describe()} was killed{f': {reason}' if reason else ''}"))

    def abort(self, reason: str = "") -> None:
        """End this actor's whole process at once, with exit status 1; every actor in it dies."""
        import os
        import sys

        sys.stderr.write(f"mesh: {self.describe()} ends its process{f': {reason}' if reason else ''}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def _cell(self, what: str) -> ActorCell:
        process = holder().process
        cell = None if process is None else process.actor_host().actors.get(self.actor_id)
        if cell is None:
            raise MeshError(f"cannot {what}(): {self!r} does not run in this process, or no longer does")
        return cell

    @property
    def ref(self) -> ActorMesh[Any]:
        """A reference to this actor that can be given to others; ``self`` becomes this when an actor sends it."""
        return current().reference_to(self._cell("ref"))

    @property
    def proc(self) -> ProcMesh:
        """The process it lives in, as a mesh of one."""
        return current().own_proc()

    @property
    def proc_mesh(self) -> ProcMesh:
        """The whole mesh of processes that its process belongs to."""
        return current().own_mesh()

    def __repr__(self) -> str:
        return f"<actor {self.name!r} ({self.class_name}) at {self.rank} in {self.proc_id}>"


class Context:
    """What :func:`context` returns: the running actor, and the message that it handles."""

    __slots__ = ("_message", "actor_instance")

    def __init__(self, instance: Instance, message: Message | None) -> None:
        self.actor_instance = instance
        self._message = message

    @property
    def message_rank(self) -> Point:
        """This actor's place in the slice that was messaged; for its place in the mesh see ``actor_instance.rank``."""
        message = self._message
        if message is None:
            return self.actor_instance.rank
        return Point(message.index, parse_shape(message.shape))

    def __repr__(self) -> str:
        return f"Context(actor_instance={self.actor_instance!r}, message_rank={self.message_rank})"


@lru_cache(maxsize=256)  # a process gets messages of few shapes, and every spawn has one
def parse_shape(text: str) -> Extent:
    """Parse the shape of a cast as messages carry it: ``hosts=2,gpus=8``."""
    if not text:
        return Extent([], [])
    labels, sizes = zip(*(dim.rsplit("=", 1) for dim in text.split(",")), strict=True)
    return Extent(list(labels), [int(size) for size in sizes])


def current_instance() -> Instance | None:
    """Return the running actor, if there is one."""
    now = _current.get()
    return None if now is None else now[0]


def current_place() -> tuple[int, str] | None:
    """Return the running actor's place in the messaged slice, as messages carry it: its rank and the shape."""
    now = _current.get()
    if now is None:
        return None
    instance, message = now
    if message is not None:
        return message.index, message.shape
    rank = instance.rank
    return rank.rank, ",".join(f"{label}={size}" for label, size in rank.extent.items())


def current_message() -> Message | None:
    """Return the message being handled, if there is one."""
    now = _current.get()
    return None if now is None else now[1]


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop running in this thread, which must not be blocked; does not import asyncio."""
    asyncio = sys.modules.get("asyncio")
    return None if asyncio is None else asyncio._get_running_loop()


def context() -> Context:
    """Return which actor is running, and for which message. Works only inside actors.

    >>> from mesh_core import context
    >>> context()
    Traceback (most recent call last):
    ...
    mesh_core._common.errors.MeshError: context() is for code that an actor runs; no actor runs here...
    """
    now = _current.get()
    if now is None:
        raise MeshError(
            "context() is for code that an actor runs; no actor runs here. "
            "Call it in an endpoint, or pass what you need as an argument"
        )
    return Context(*now)


def current_rank() -> Point:
    """Return this actor's place in the slice that was messaged."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Return the dimensions of the slice that was messaged."""
    return dict(context().message_rank.extent.items())


def current_actor_name() -> str:
    """Return the name that this actor was spawned under."""
    return context().actor_instance.name
