"""What is known about a failure: :class:`MeshFailure`."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import FailureKind
from mesh_core._common.errors import (
    REMEDY,
    AuthenticationError,
    MeshError,
    SpawnError,
    SupervisionError,
    describe_point,
    type_name,
)

if TYPE_CHECKING:
    from mesh_core._native import Lost, Point

_LINE = 200
"""Maximum characters of an exception's text in a one-line description."""


OF_HOSTS = frozenset(
    {
        FailureKind.HOST_DEAD,
        FailureKind.HOST_UNREACHABLE,
        FailureKind.HOST_NOT_ATTACHED,
        FailureKind.HOST_NOT_AUTHENTICATED,
        FailureKind.HOST_ABSENT,
    }
)
"""Failures of whole hosts."""

_HOST_KINDS = frozenset({FailureKind.HOST_DEAD, FailureKind.HOST_UNREACHABLE})
"""Failures whose headline says only that the host is dead."""


@dataclass(frozen=True)
class MeshFailure:
    """What failed, where, why and when; the argument of ``__supervise__``.

    >>> failure = MeshFailure(mesh_name="trainers", rank=3, point={"gpus": 3}, host="b7", pid=4242, signal=9)
    >>> print(failure.report())
    rank 3 (gpus=3) of mesh 'trainers' died on host b7, pid 4242: killed by signal 9 (SIGKILL)
    """

    mesh: Any = None
    """A reference to the mesh in which it happened."""
    mesh_name: str = ""
    rank: int | None = None
    """The rank that failed; ``None`` if the whole mesh did."""
    point: Mapping[str, int] | None = None
    host: str = ""
    pid: int | None = None
    exitcode: int | None = None
    """The process's exit status, if it exited."""
    signal: int | None = None
    """The signal that killed the process, if one did."""
    out_of_memory: bool = False
    """Whether the kernel killed it for lack of memory, as far as the kernel's counters tell."""
    exception: BaseException | None = None
    """The exception that was raised, if any."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines that the process wrote to stderr."""
    chain: tuple[str, ...] = ()
    """The owners that passed the failure on, the one nearest to the failure first."""
    since: float | None = None
    """When it was noticed, in seconds since the epoch."""
    host_fate: str = ""
    """Why its whole host is dead, in one word such as ``"silent"``; empty if the host is alive."""
    reason: str = ""
    """What is known beyond the status, signal or exception."""
    kind: FailureKind = FailureKind.UNKNOWN
    """The kind of failure. If it is not given, it follows from the other fields."""
    unmade: bool = False
    """Whether the actor was never there, because its constructor raised ``exception``."""
    _key: tuple[int, int, int] = field(default=(0, 0, 0), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind is FailureKind.UNKNOWN:
            object.__setattr__(self, "kind", self._kind())

    def _kind(self) -> FailureKind:
        if self.signal is not None:
            return FailureKind.OUT_OF_MEMORY if self.out_of_memory else FailureKind.KILLED
        if self.exitcode is not None:
            return FailureKind.EXITED
        return FailureKind.ACTOR_FAILED if self.exception is not None else FailureKind.UNKNOWN

    @property
    def id(self) -> str:
        """An identifier that is unique in the job and the same in every process, so that reports can be matched.

        It consists of the ids of the process and the actor, each of which fails only once. Empty if created by hand.
        """
        mesh, rank, actor = self._key
        if self._key == (0, 0, 0):
            return ""
        return f"{mesh:x}.{rank}.{actor:x}" if actor else f"{mesh:x}.{rank}"

    def headline(self) -> str:
        """Describe the failure in one line."""
        what = "failed" if self._lives() else "died"
        return f"{self._who()} {what}{self._where()}: {self._why()}"

    def report(self) -> str:
        """Describe the failure in full, in several lines for people."""
        lines = [self.headline()]
        if self.reason and self._why() != self.reason:
            lines.append(f"  {self.reason}")
        if self.since is not None:
            lines.append(f"  since: {time.strftime('%Y-%m-%d %H:%M:%S%z', time.localtime(self.since))}")
        if self.id:
            lines.append(f"  failure: {self.id} ({self.kind.value})")
        if self.chain:
            lines.append(f"  arrived by: {' -> '.join(self.chain)}")
        told = _traceback(self.exception)
        if told:
            lines.append("  exception:")
            lines += _indented(told.rstrip().splitlines())
        if self.stderr_tail:
            lines.append("  last lines of its stderr:")
            lines += _indented(self.stderr_tail)
        return "\n".join(lines)

    def _lives(self) -> bool:
        """Return whether an actor failed in a process that is still running."""
        return self.kind is FailureKind.ACTOR_FAILED

    def __repr__(self) -> str:
        return f"<MeshFailure{f' {self.id}' if self.id else ''} {self.kind.value}: {self.headline()}>"

    def _repr_html_(self) -> str:
        from mesh_core._common.display import block

        title, _, rest = self.report().partition("\n")
        return block(title, rest)

    def _who(self) -> str:
        mesh = f"mesh {self.mesh_name!r}" if self.mesh_name else "a mesh"
        return mesh if self.rank is None else f"rank {self.rank}{describe_point(self.point)} of {mesh}"

    def _where(self) -> str:
        # A host that has not joined yet is known by its number: "host 3".
        where = f" on {'' if self.host.startswith('host ') else 'host '}{self.host}" if self.host else ""
        return where + (f"{',' if where else ' in'} pid {self.pid}" if self.pid is not None else "")

    def _why(self) -> str:
        if self.signal is not None:
            why = ", probably by the kernel as memory ran out" if self.out_of_memory else ""
            return f"killed by signal {self.signal} ({signal_name(self.signal)}){why}"
        if self.exception is not None:
            return f"{'its constructor ' if self.unmade else ''}{raised_in_words(self.exception)}"
        if self.kind is FailureKind.BOOTSTRAP_FAILED:
            return self.reason or "its bootstrap raised"
        if self.exitcode is not None:
            return f"exited with status {self.exitcode}"
        if self.kind in _HOST_KINDS:
            return "its host is dead"
        return self.reason or "no reason is known"


def of_loss(
    lost: Lost,
    mesh: Any,
    *,
    name: str,
    host: str,
    point: Point | None,
    rank: int,
) -> MeshFailure:
    """Return what a process's end means for one rank of a mesh; it is the same failure from whichever mesh it is seen."""
    return MeshFailure(
        mesh=mesh,
        mesh_name=name,
        rank=rank,
        point=point,
        host=host,
        pid=lost.pid,
        exitcode=lost.exitcode,
        signal=lost.signal,
        out_of_memory=lost.out_of_memory,
        stderr_tail=tuple(lost.stderr_tail),
        host_fate=lost.fate,
        reason=_reason(lost)
        if mesh is None
        else mesh._process.supervision.explained.added_to(_reason(lost), lost),
        since=time.time(),
        kind=lost.kind,
        _key=(*lost.process, 0),
    )


class NotAttached(SupervisionError, SpawnError):
    """The host never joined the job, for example because nobody listens there."""


class NotAuthenticated(SupervisionError, AuthenticationError):
    """The host never joined the job, because one side does not accept the other's credentials."""


def error_of(failure: MeshFailure) -> SupervisionError:
    """Return the exception to raise for a failure; it says what went wrong if the host could not be attached."""
    told = f"{failure._who()} was never started: {failure.reason}"
    if failure.kind is FailureKind.HOST_NOT_ATTACHED:
        error: SupervisionError = NotAttached(told, failure=failure)
    elif failure.kind is FailureKind.HOST_NOT_AUTHENTICATED:
        refused = NotAuthenticated(told, failure=failure)
        refused.remedy = REMEDY
        error = refused
    else:
        error = SupervisionError(failure=failure)
    return error


def _reason(lost: Lost) -> str:
    # Beside an exit status or a signal it would only say how the end was noticed.
    return "" if lost.kind in _BY_STATUS else lost.reason


_BY_STATUS = frozenset({FailureKind.EXITED, FailureKind.KILLED, FailureKind.OUT_OF_MEMORY})


def signal_name(number: int) -> str:
    """Return a signal's name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return "unnamed"


def raised_in_words(exception: BaseException) -> str:
    """Describe an exception in one line."""
    from mesh_core._serialize.exceptions import actor_error, text_of

    told = actor_error(exception)
    kind = type(exception) if told is None else told.cause_type
    text = text_of(exception) if told is None else told.message
    first, _, more = text.strip().partition("\n")
    first = f"{first[:_LINE]}{' ...' if more or len(first) > _LINE else ''}"
    if kind is MeshError:
        # Raised by Mesh itself, for example for a kill: the text is enough.
        return first
    name = type_name(type(exception)) if told is None else told.cause_name
    return f"raised {name}{f': {first}' if first else ''}"


def _traceback(exception: BaseException | None) -> str:
    """Return the traceback of an exception, as far as it is known."""
    if exception is None:
        return ""
    from mesh_core._serialize.exceptions import actor_error, format_traceback

    told = actor_error(exception)
    if told is not None:
        return told.remote_traceback
    return format_traceback(exception) if exception.__traceback__ is not None else ""


def _indented(lines: Any) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]
