"""The error classes, all under :class:`MeshError`.

Each takes its message first and everything else by keyword, keeps its arguments as attributes, and can be
pickled and sent to another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import NativeError

if TYPE_CHECKING:
    from mesh_core._failures.failure import MeshFailure


BOOTSTRAP_FAILED = 78
"""Exit status of a process whose bootstrap raised, for outside observers; Mesh itself is told by the process's last message."""
REMEDY = "compare what `mesh credentials show` prints for the script's folder and for the host's"
"""What to try when one side does not accept the other's credentials."""


class MeshError(RuntimeError):
    """Base class of all errors that Mesh raises itself.

    >>> try:
    ...     raise ActorTimeout("actor 'trainer' on rank 3 did not answer within 30.0 s", rank=3)
    ... except MeshError as error:
    ...     print(type(error).__name__, error.rank)
    ActorTimeout 3
    """

    results: Any = None
    """When a call to many actors failed: the ``ValueMesh`` with the result or the exception of every rank."""
    _deaths: tuple[tuple[int, int, int], ...] = ()
    """The keys of the processes whose deaths this error reports."""
    _loaded_from: tuple[Any, Any] | None = None
    """The pickle and buffers of the message it was loaded from, if that has to be loaded again."""

    def __reduce__(self) -> Any:
        # The results of all ranks stay with the caller: they may be large, and need not be picklable.
        state = {name: value for name, value in self.__dict__.items() if name not in _HERE_ONLY}
        return _rebuild, (type(self), self.args), state


_HERE_ONLY = frozenset({"results", "_loaded_from"})


def _rebuild(kind: type[MeshError], args: tuple[Any, ...]) -> MeshError:
    return kind(*args)


class _OfActor(MeshError):
    """An error about one actor."""

    def __init__(
        self, message: str = "", *, actor: str = "", rank: int | None = None, host: str = ""
    ) -> None:
        super().__init__(message)
        self.actor = actor
        self.rank = rank
        self.host = host


class ActorTimeout(_OfActor, TimeoutError):
    """An actor did not answer in time; the call was cancelled."""

    def __init__(
        self,
        message: str = "",
        *,
        actor: str = "",
        rank: int | None = None,
        host: str = "",
        timeout: float | None = None,
    ) -> None:
        super().__init__(message, actor=actor, rank=rank, host=host)
        self.timeout = timeout
        """The deadline that passed, in seconds."""


class SupervisionError(MeshError):
    """A failure that nobody handled, raised by a waiting call; :attr:`failure` has the details."""

    def __init__(self, message: str = "", *, failure: MeshFailure | None = None) -> None:
        super().__init__(message or (failure.report() if failure is not None else ""))
        self.failure = failure

    def __repr__(self) -> str:
        return f"SupervisionError({first_line(self)!r})"

    def _repr_html_(self) -> str:
        from mesh_core._common.display import block

        title, _, rest = str(self).partition("\n")
        return block(f"SupervisionError: {title}", rest)


class PoolLost(SupervisionError):
    """The process that created a pool died, and the pool with it: nobody assigns its replicas any longer.

    Raised in processes that the pool was sent to, by tasks waiting for a replica and by tasks submitted later. A running
    task continues unless its replica died too.

    >>> issubclass(PoolLost, SupervisionError)
    True
    """


class DeviceMeshError(SupervisionError):
    """A mesh lost ranks that were needed; :attr:`coordinates` says which.

    Code that computes on a whole mesh creates this error with :meth:`of`.

    >>> error = DeviceMeshError("mesh 'workers' has lost a rank", coordinates=({"hosts": 1, "gpus": 3},))
    >>> error.coordinates
    ({'hosts': 1, 'gpus': 3},)
    """

    def __init__(
        self,
        message: str = "",
        *,
        mesh_name: str = "",
        coordinates: tuple[Mapping[str, int], ...] = (),
        failure: MeshFailure | None = None,
    ) -> None:
        super().__init__(message, failure=failure)
        self.mesh_name = mesh_name
        self.coordinates = coordinates
        """The points that were lost, in rank order."""

    @classmethod
    def of(cls, mesh: Any) -> DeviceMeshError:
        """Return the error for the ranks that a mesh of processes or actors has lost so far.

        >>> from mesh_core import DeviceMeshError, this_host
        >>> with this_host().spawn_procs({"gpus": 2}, name="workers") as procs:
        ...     procs.slice(gpus=1).stop().get()
        ...     print(DeviceMeshError.of(procs))
        mesh 'workers' has lost 1 of its 2 ranks: gpus=1; respawn them with respawn(), or continue with those in alive()
        """
        itself = getattr(mesh, "_itself", mesh)
        name, lost = itself.name, itself.failed()
        shown = [describe_point(point).strip(" ()") or "its only one" for point in lost[:_POINTS_SHOWN]]
        more = f" and {len(lost) - len(shown)} more" if len(lost) > len(shown) else ""
        message = (
            f"mesh {name!r} has lost {len(lost)} of its {len(mesh)} ranks: {'; '.join(shown)}{more}; respawn them "
            "with respawn(), or continue with those in alive()"
        )
        return cls(message, mesh_name=name, coordinates=tuple(dict(point) for point in lost))


_POINTS_SHOWN = 8


class SpawnError(MeshError):
    """A process or actor could not be started."""

    def __init__(
        self,
        message: str = "",
        *,
        host: str = "",
        pid: int | None = None,
        exitcode: int | None = None,
        signal: int | None = None,
        stderr_tail: str = "",
    ) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid
        self.exitcode = exitcode
        self.signal = signal
        self.stderr_tail = stderr_tail
        """The last lines that the process wrote to stderr."""


class MailboxFull(_OfActor):
    """A message was not sent because the receiver's budget is used up, and the sender asked not to wait or must not wait."""

    def __init__(
        self,
        message: str = "",
        *,
        actor: str = "",
        rank: int | None = None,
        host: str = "",
        budget: int | None = None,
    ) -> None:
        super().__init__(message, actor=actor, rank=rank, host=host)
        self.budget = budget
        """How many bytes may be in flight."""


class ReplyDropped(_OfActor):
    """A reply was dropped on arrival because the calling process already held as many unread replies as it may.

    The endpoint ran and its effects stand; only its result is lost.
    """

    def __init__(
        self,
        message: str = "",
        *,
        actor: str = "",
        rank: int | None = None,
        host: str = "",
        size: int | None = None,
    ) -> None:
        super().__init__(message, actor=actor, rank=rank, host=host)
        self.size = size
        """The size of the reply in bytes."""


class Undeliverable(_OfActor, ConnectionError):
    """A message was returned: its receiver stopped, died or never existed."""

    def __init__(
        self,
        message: str = "",
        *,
        actor: str = "",
        rank: int | None = None,
        host: str = "",
        reason: str = "",
    ) -> None:
        super().__init__(message, actor=actor, rank=rank, host=host)
        self.reason = reason
        """Why, as text."""


class Stopped(Undeliverable, SupervisionError):
    """A message was returned, because its actor or the actor's process had been stopped in order. There is no ``failure``."""


class NotBegun(Undeliverable):
    """A task was returned: it did not begin, and never will."""


class ChannelClosed(MeshError, EOFError):
    """Nothing more can be received from a channel: it was closed, or it was for one value, which was received."""


class BrokenPromise(MeshError):
    """A promise lost everything that could have given it a result.

    >>> from mesh_core import Promise
    >>> future = Promise[int]("weights").future
    >>> future.get()
    Traceback (most recent call last):
    mesh_core._common.errors.BrokenPromise: promise 'weights' was dropped before it had a result; ...
    """


class AuthenticationError(MeshError, PermissionError):
    """A peer could not prove that it belongs to the job."""

    def __init__(self, message: str = "", *, host: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.host = host
        self.remedy = remedy
        """What to do next."""


class SerializationError(MeshError, TypeError):
    """A value cannot be sent, or what was received cannot be unpickled."""

    def __init__(self, message: str = "", *, path: str = "", type_name: str = "") -> None:
        super().__init__(message)
        self.path = path
        """The path to the offending object, such as ``args[0]['lock']``."""
        self.type_name = type_name
        """The offending object's type."""


class Unsendable(TypeError):
    """Raised by an object that refuses to be pickled, with advice; converted to a :class:`SerializationError`."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


class PluginError(MeshError):
    """A plugin is missing, broken, duplicated or not usable with this version."""

    def __init__(self, message: str, *, kind: str = "", name: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """The kind of plugin that was asked for, such as ``"policy"`` or ``"command"``."""
        self.name = name
        """The name by which users select it."""
        self.remedy = remedy
        """What to do next."""


class PluginLoadError(PluginError):
    """A named plugin exists but could not be loaded; ``__cause__`` is the exception it raised, if it did."""

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        name: str = "",
        distribution: str = "",
        version: str = "",
        cause: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(message, kind=kind, name=name, remedy=remedy)
        self.distribution = distribution
        """The installed distribution that offers the plugin; ``pip uninstall`` takes this name."""
        self.version = version
        """The distribution's version."""
        self.cause = cause
        """What went wrong, as text, so that this error can always be pickled."""


_OF_NATIVE: dict[NativeError, type[MeshError]] = {
    NativeError.CLOSED: MeshError,
    NativeError.FORKED: MeshError,
    NativeError.NO_SUCH_PROC: Undeliverable,
    NativeError.PORT_CLOSED: Undeliverable,
    NativeError.FULL: MailboxFull,
    NativeError.FRAME: MeshError,
    NativeError.OS: MeshError,
    NativeError.SPAWN: SpawnError,
    NativeError.NOT_CONTROLLER: MeshError,
    NativeError.CREDENTIALS: AuthenticationError,
    NativeError.ADDRESS: MeshError,
}
"""The exception class for each kind of error of the native layer."""


def of_native(kind: NativeError, message: str, fields: dict[str, Any]) -> MeshError:
    """Create the exception for an error of the native layer."""
    return _OF_NATIVE[kind](message, **fields)


def type_name(kind: type) -> str:
    """Return a type's name as in tracebacks: with its module, unless that is ``builtins`` or ``__main__``."""
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text; a failure's report has many."""
    return str(error).partition("\n")[0]


def in_a_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"


def describe_point(point: Mapping[str, int] | None) -> str:
    """Return coordinates for a message, as in `` (hosts=1, gpus=3)``, or nothing if there are none."""
    return f" ({', '.join(f'{label}={place}' for label, place in point.items())})" if point else ""
