"""Where features meet the kernel: what a process asks of them, and what it tells them.

The kernel calls these hooks without knowing who set them; ``_bundle`` and extensions do. A hook that no feature
uses is empty or does the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._common.context import Instance
    from mesh_core._common.tracing import Around, Tracer
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
        "around",
        "closed",
        "closing",
        "downs",
        "failures",
        "find_bypass",
        "find_pids",
        "find_policy",
        "find_tracer",
        "flush",
        "hosting",
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
        """Replace the class that is about to be spawned."""
        self.hosting: list[Callable[[type], object]] = []
        """Told the class of actors that this process is about to have, once for each class."""
        self.making: list[Callable[[LocalActor], Any]] = []
        """Create the actors of this process, instead of calling their constructors directly."""
        self.around: list[Around] = []
        """Put something around endpoints; see :meth:`Process.wrap_endpoints`."""
        self.packed_class: Callable[[type], object] = _as_it_is
        """Returns what to pickle for an actor class; it unpickles as that class."""
        self.raised: list[Callable[[Instance, str, BaseException], None]] = []
        """Called when an actor's code raised, on its thread, before anybody else is notified."""
        self.spawning: list[Callable[[], object]] = []
        """Called when processes are about to be spawned."""
        self.downs: list[Callable[[Message], object]] = []
        """Told of the end of each process that this one is notified of."""
        self.recording: list[Callable[[int, Any, int], object]] = []
        """Told what is about to be spawned here: its owner, the mesh, and the actors' id (0 for processes)."""
        self.recorded: Callable[[Message], object] = _nothing_to_record
        """In a controller that outlives scripts: told what a script is about to spawn, or has stopped."""
        self.preparing: list[Callable[[], Preparation | None]] = []
        """Return what a fork server does before it preloads modules."""
        self.staging: list[Callable[[], object]] = []
        """Called when this process is about to have actors, possibly by several threads at once."""
        self.flush: list[Callable[[], object]] = []
        """Called after processes stopped, to show their output."""
        self.noticing: list[Callable[[], object]] = []
        """Called on the thread that handles the controller's notices when it starts, where it delays nobody."""
        self.knocked: Callable[[], object] = _nothing
        """Called when somebody connected to the descriptor that the runtime watches for the job."""
        self.closing: list[Callable[[], object]] = []
        """Called before this process's runtime is closed."""
        self.closed: list[Callable[[], object]] = []
        """Called after this process's runtime was closed."""
        self.failures: list[Callable[[MeshFailure, bool, str], object]] = []
        """Told what became of a failure; see :meth:`failed`."""
        self.find_tracer: Callable[[], Tracer | None] = _nothing
        """Checks whether calls are to be traced from now on."""
        self.find_policy: Callable[[str], Policy] = _no_policy
        """Returns the policy with this name."""
        self.find_bypass: Callable[[], object | None] = _nothing
        """Returns a capsule with functions that move large message parts between hosts past the agents, if any are installed."""
        self.find_pids: Callable[[Iterable[Addr], float], dict[Addr, int]] = _no_pids
        """Returns the pids of processes on other hosts, as far as they are known within the given seconds."""
        self.sync: Callable[..., Future[Any]] = _no_sync
        """Copies a directory of the script to hosts; see :meth:`HostMesh.sync_workspace`."""

    def failed(self, failure: MeshFailure, *, handled: bool, by: str = "") -> None:
        """Report what became of a failure: ``by`` handled it, or was the last to pass it on."""
        for tell in list(self.failures):
            tell(failure, handled, by)

    def have_raised(self, instance: Instance, endpoint: str, error: BaseException) -> None:
        """Report that an actor's code raised; ``endpoint`` is what was called."""
        for hear in list(self.raised):
            try:
                hear(instance, endpoint, error)
            except Exception:
                import logging

                logging.getLogger("mesh").exception(
                    "a hook raised when notified of the exception of %s", instance.describe()
                )


Preparation = tuple[str, str, Any]
"""A module, a function in it, and its first argument, which travels as JSON; its second is the host's scratch directory."""


def prepare(steps: Iterable[Preparation], scratch: str) -> None:
    """Run in a fork server the steps that the spawning process asked for."""
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
    raise MeshError(f"cannot find policy {name!r}: this process does not load plugins")


def _no_sync(*_args: Any, **_kwargs: Any) -> Future[Any]:
    raise MeshError("cannot copy directories to hosts: this process does not have the workspace feature")


def _no_pids(_addrs: Iterable[Addr], _timeout: float) -> dict[Addr, int]:
    return {}
