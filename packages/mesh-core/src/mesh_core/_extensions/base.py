"""The base class of extensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mesh_core._common.current import current
from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core import ActorMesh, Future, HostMesh, ProcMesh, ValueMesh
    from mesh_core._common.proc import Proc
    from mesh_core._extensions.events import ActorEnd, EndpointCall, ProcEnd, Raised, Spawning
    from mesh_core._futures.sending import Sending
    from mesh_core._hosting.local_actor import LocalActor
    from mesh_core._process.process import Process


class _NotCarried:
    def __repr__(self) -> str:
        return "NOT_CARRIED"

    def __reduce__(self) -> str:
        return "NOT_CARRIED"


NOT_CARRIED: Final = _NotCarried()
"""Returned by :meth:`Extension.for_spawn` if the spawned processes are not to have the extension."""


class Extension:
    """Code that runs in processes beside the actors; derive a class from it and :func:`install` that.

    Each process has one instance: ``__init__`` is called first, then ``start``. Processes spawned by this one later get the
    extension too, and so do those that they spawn. ``proc`` and ``payload`` are set before ``start`` is called. The page
    "Extend Mesh" says which thread runs each method.
    """

    name: ClassVar[str]
    """Its name in messages and errors, unique in a process."""
    after: ClassVar[Sequence[str]] = ()
    """The names of extensions that start before this one and stop after it, if they are installed."""
    on_hosts: ClassVar[bool] = False
    """Whether each host gets its own instance when processes that may carry the extension are spawned there."""

    _at_once: ClassVar[bool] = False
    """Whether ``receive`` runs where messages arrive, ahead of later ones: only for what takes no time."""

    _everywhere: ClassVar[bool] = False
    """Whether each process creates an instance by itself, so that none is carried there."""
    _mesh_process: Process
    payload: Any
    """What :meth:`for_spawn` returned where this process was spawned, or what was passed to :func:`install`."""

    def for_spawn(self, spawning: Spawning) -> Any:
        """Return the payload for processes about to be spawned, or ``NOT_CARRIED``. It is pickled."""
        return self.payload

    def start(self) -> None:
        """Start, before any actor of the process is created. Messages can be sent already; they are received only afterwards."""

    def stop(self) -> None:
        """Stop, after the last actor of the process ended. Messages are no longer received but can still be sent."""

    def closed(self) -> None:
        """Remove what the runtime itself needs, such as credentials. Called only in a script, after its runtime was closed."""

    def receive(self, message: Any, sender: Proc) -> Any:
        """Handle a message from another process's instance, and return the answer. May be a coroutine function."""
        raise MeshError(f"extension {self.name!r} takes no messages: it does not define receive()")

    def actor_ended(self, end: ActorEnd) -> None:
        """Called after an actor of this process ended."""

    def proc_ended(self, end: ProcEnd) -> None:
        """Called after a process of this host ended; only in the host's own instance."""

    def endpoint_raised(self, raised: Raised) -> None:
        """Called when an actor's code raised, on the same thread, before the caller is notified."""

    def endpoint_began(self, call: EndpointCall) -> None:
        """Called when an endpoint of an actor of this process begins, where it runs."""

    def endpoint_ended(self, call: EndpointCall, error: BaseException | None) -> None:
        """Called when it has returned or raised, in the same place, before the caller is notified. ``error`` is what it raised."""

    def make_actor(self, actor: LocalActor) -> Any:
        """Create an actor of this process: return ``actor.construct()``, or an object of its class created in another way."""
        return actor.construct()

    def actor_class(self, cls: type) -> type:
        """Return the class to spawn instead of ``cls``; its endpoints must accept the same calls."""
        return cls

    # For use by the extension.

    @cached_property
    def proc(self) -> Proc:
        """The process that this instance runs in."""
        from mesh_core._common.proc import proc_of

        return proc_of(self._mesh_process)

    def call(
        self,
        to: ProcMesh | ActorMesh[Any] | HostMesh | Proc,
        message: Any,
        *,
        timeout: float | None = None,
    ) -> Future[ValueMesh[Any]]:
        """Send a message to the instances in the processes of a mesh, or to those of hosts; the future returns their answers.

        ``this_host()`` is the host that this process is on.
        """
        return current().extensions.call(self, to, message, timeout)

    def install_on(self, to: ProcMesh | ActorMesh[Any] | HostMesh) -> Future[ValueMesh[None]]:
        """Install the extension in the running processes of a mesh; those that have it keep their instance.

        A host's instance runs in a separate process, which is started for the host's first extension in this
        job. It belongs to no mesh, ends with the job, and is respawned if it dies.

        Messages sent after this call reach the instances: there is no need to wait.
        """
        return current().extensions.install_on(self, to)

    def tell(self, to: ProcMesh | ActorMesh[Any] | HostMesh | Proc, message: Any) -> Sending:
        """Send a message that is not answered. If ``receive`` raises, that is logged in the receiving process.

        A thread waits while more than ``mailbox_budget`` bytes are in flight to a process; a coroutine continues, and may await
        the result.
        """
        return current().extensions.tell(self, to, message)
