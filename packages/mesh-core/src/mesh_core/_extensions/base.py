"""What an extension is: the class that its author derives from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mesh_core._common.current import current
from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core import ActorMesh, Future, HostMesh, ProcMesh, ValueMesh
    from mesh_core._common.proc import Proc
    from mesh_core._extensions.events import ActorEnd, ProcEnd, Raised, Spawning
    from mesh_core._futures.sending import Sending
    from mesh_core._hosting.local_actor import LocalActor
    from mesh_core._process.process import Process


class _NotCarried:
    def __repr__(self) -> str:
        return "NOT_CARRIED"

    def __reduce__(self) -> str:
        return "NOT_CARRIED"


NOT_CARRIED: Final = _NotCarried()
"""What :meth:`Extension.for_spawn` returns for processes that do without the extension."""


class Extension:
    """Code that lives in processes beside the actors; derive from it and :func:`install` the class.

    Each process has one instance, made in this order: ``__init__``, then ``start``. The processes that this process
    spawns from then on carry the extension too, and so do those that they spawn. ``proc`` and ``payload`` are set
    before ``start`` is called. See the page "Extend Mesh" for which thread runs each method.
    """

    name: ClassVar[str]
    """What messages and errors call it; unique in a process."""
    after: ClassVar[Sequence[str]] = ()
    """The names of extensions that start before this one, if they are installed, and stop after it."""
    on_hosts: ClassVar[bool] = False
    """Whether each host on which processes are spawned that may carry it has an instance of its own, too."""

    _at_once: ClassVar[bool] = False
    """Whether ``receive`` runs where messages arrive, ahead of all that came later: for what takes no time."""

    _everywhere: ClassVar[bool] = False
    """Whether each process makes an instance by itself, so that none is carried there."""
    _mesh_process: Process
    payload: Any
    """What :meth:`for_spawn` has returned where this process was spawned, or what was given to :func:`install`."""

    def for_spawn(self, spawning: Spawning) -> Any:
        """Return the payload for processes that this one is about to spawn, or ``NOT_CARRIED``. It is pickled."""
        return self.payload

    def start(self) -> None:
        """Begin, before any actor of the process is made. Messages can be sent already, and arrive afterwards."""

    def stop(self) -> None:
        """End, after the last actor of the process has ended. Messages no longer arrive, and can still be sent."""

    def closed(self) -> None:
        """Remove what the runtime itself needs, such as credentials; only in a script, where its runtime is closed and can send nothing more."""

    def receive(self, message: Any, sender: Proc) -> Any:
        """Handle a message from another process's instance, and return the answer. It may be a coroutine function."""
        raise MeshError(f"extension {self.name!r} takes no messages: it does not define receive()")

    def actor_ended(self, end: ActorEnd) -> None:
        """Hear that an actor of this process has ended."""

    def proc_ended(self, end: ProcEnd) -> None:
        """Hear that a process of this host has ended; only in the host's own instance."""

    def endpoint_raised(self, raised: Raised) -> None:
        """Called when an actor's code has raised, on the same thread, before the caller is notified."""

    def make_actor(self, actor: LocalActor) -> Any:
        """Make an actor of this process: return ``actor.construct()``, or an object of its class made in another way."""
        return actor.construct()

    def actor_class(self, cls: type) -> type:
        """Return the class to spawn where this process spawns ``cls``; its endpoints must take the same calls."""
        return cls

    # For its own use.

    @cached_property
    def proc(self) -> Proc:
        """The process that this instance lives in."""
        from mesh_core._common.proc import proc_of

        return proc_of(self._mesh_process)

    def call(
        self,
        to: ProcMesh | ActorMesh[Any] | HostMesh | Proc,
        message: Any,
        *,
        timeout: float | None = None,
    ) -> Future[ValueMesh[Any]]:
        """Send a message to the instances in the processes of a mesh, or to those of hosts; the future holds their answers.

        ``this_host()`` is the host that this process is on.
        """
        return current().extensions.call(self, to, message, timeout)

    def install_on(self, to: ProcMesh | ActorMesh[Any] | HostMesh) -> Future[ValueMesh[None]]:
        """Have an instance in the processes of a mesh, which run already; those that have one keep it.

        A host's instance lives in a process of its own, which is started for the first extension that the host has in this
        job. It is no member of a mesh, ends with the job, and is started again when it dies.

        Messages sent after this find it: there is no need to wait.
        """
        return current().extensions.install_on(self, to)

    def tell(self, to: ProcMesh | ActorMesh[Any] | HostMesh | Proc, message: Any) -> Sending:
        """Send a message that nobody answers. What ``receive`` raises is logged in the process that receives it.

        A thread waits while more than ``mailbox_budget`` bytes are under way to a process; a coroutine goes on, and may await
        what is returned.
        """
        return current().extensions.tell(self, to, message)
