"""Where features meet the kernel: what a process asks of them, and what it tells them.

The kernel calls what stands here and knows nothing of who put it here; ``_bundle`` and extensions do. Each hook is empty,
or does the least, in a process in which no feature wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._common.context import Instance
    from mesh_core._common.tracing import Tracer
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._failures.policies import Policy
    from mesh_core._futures.future import Future
    from mesh_core._hosting.local_actor import LocalActor
    from mesh_core._native import Message

Addr = tuple[int, int, int]


class Hooks:
    """The hooks of one process."""

    __slots__ = (
        "actor_class",
        "closed",
        "closing",
        "downs",
        "failures",
        "find_bypass",
        "find_pids",
        "find_policy",
        "find_tracer",
        "flush",
        "knocked",
        "making",
        "noticing",
        "packed_class",
        "preparing",
        "raised",
        "recorded",
        "recording",
        "spawning",
        "staging",
        "sync",
    )

    def __init__(self) -> None:
        self.actor_class: list[Callable[[type], type]] = []
        """Which class is spawned where a class is asked for."""
        self.making: list[Callable[[LocalActor], Any]] = []
        """What makes the actors of this process, instead of their constructors alone."""
        self.packed_class: Callable[[type], object] = _as_it_is
        """What is pickled for an actor class; it is unpickled as that class."""
        self.raised: list[Callable[[Instance, str, BaseException], None]] = []
        """Called where an actor's code has raised, on its thread, before anybody else hears of it."""
        self.spawning: list[Callable[[], object]] = []
        """Called when processes are about to be spawned."""
        self.downs: list[Callable[[Message], object]] = []
        """Told the end of each process that this one hears of."""
        self.recording: list[Callable[[int, Any, int], object]] = []
        """Told what is about to be spawned here: its owner, the mesh, and the actors' id (0 for processes)."""
        self.recorded: Callable[[Message], object] = _nothing_to_record
        """At a controller that outlives scripts: told what one of them is about to spawn, or has stopped."""
        self.preparing: list[Callable[[], Preparation | None]] = []
        """What a fork server does before it imports what is to be preloaded."""
        self.staging: list[Callable[[], object]] = []
        """Called when this process is about to have actors, by several threads perhaps."""
        self.flush: list[Callable[[], object]] = []
        """Called when processes have stopped, to show what they have printed."""
        self.noticing: list[Callable[[], object]] = []
        """Called on the thread that takes the controller's notices, as that begins: there they are in nobody's way."""
        self.knocked: Callable[[], object] = _nothing
        """Called when somebody has connected to the descriptor that the runtime watches for the job."""
        self.closing: list[Callable[[], object]] = []
        """Called when the runtime of this process is about to be closed."""
        self.closed: list[Callable[[], object]] = []
        """Called when the runtime of this process is closed."""
        self.failures: list[Callable[[MeshFailure, bool, str], object]] = []
        """Told what became of a failure; see :meth:`failed`."""
        self.find_tracer: Callable[[], Tracer | None] = _nothing
        """Looks whether calls are to be traced by now."""
        self.find_policy: Callable[[str], Policy] = _no_policy
        """The policy that a name means."""
        self.find_bypass: Callable[[], object | None] = _nothing
        """What moves large parts of messages between hosts past their agents: a capsule, if something installed does."""
        self.find_pids: Callable[[Iterable[Addr], float], dict[Addr, int]] = _no_pids
        """The pids of processes on other hosts, as far as they can be had within so many seconds."""
        self.sync: Callable[..., Future[Any]] = _no_sync
        """Copies a directory of the script's to hosts; see :meth:`HostMesh.sync_workspace`."""

    def failed(self, failure: MeshFailure, *, handled: bool, by: str = "") -> None:
        """Say what became of a failure: ``by`` is whoever handled it, or was the last to pass it on."""
        for tell in list(self.failures):
            tell(failure, handled, by)

    def have_raised(self, instance: Instance, endpoint: str, error: BaseException) -> None:
        """Say that an actor's code has raised; ``endpoint`` is what was called."""
        for hear in list(self.raised):
            try:
                hear(instance, endpoint, error)
            except Exception:
                import logging

                logging.getLogger("mesh").exception(
                    "what was to hear of the exception of %s raised itself", instance.describe()
                )


Preparation = tuple[str, str, Any]
"""A module, a function in it, and its first argument, which travels as JSON; the second is the host's own directory."""


def prepare(steps: Iterable[Preparation], scratch: str) -> None:
    """Do in a fork server what the spawning process has asked for."""
    import importlib

    for module, function, argument in steps:
        getattr(importlib.import_module(module), function)(argument, scratch)


def _as_it_is(cls: type) -> object:
    return cls


def _nothing_to_record(_message: Message) -> None:
    return None


def _nothing() -> None:
    return None


def _no_policy(name: str) -> Policy:
    raise MeshError(f"cannot find the policy {name!r}: this process looks for no plugins")


def _no_sync(*_args: Any, **_kwargs: Any) -> Future[Any]:
    raise MeshError("this process cannot copy directories to hosts: no feature does that here")


def _no_pids(_addrs: Iterable[Addr], _timeout: float) -> dict[Addr, int]:
    return {}
