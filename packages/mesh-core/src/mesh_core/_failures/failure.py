"""What is known about a death: :class:`MeshFailure`."""

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
"""So much of an exception's text is part of a line."""


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
    """What died, where, why and since when: the value that ``__supervise__`` is asked about.

    >>> failure = MeshFailure(mesh_name="trainers", rank=3, point={"gpus": 3}, host="b7", pid=4242, signal=9)
    >>> print(failure.report())
    rank 3 (gpus=3) of mesh 'trainers' died on host b7, pid 4242: killed by signal 9 (SIGKILL)
    """

    mesh: Any = None
    """A reference to the mesh in which it happened."""
    mesh_name: str = ""
    rank: int | None = None
    """The rank that failed; ``None`` where it was the whole mesh."""
    point: Mapping[str, int] | None = None
    host: str = ""
    pid: int | None = None
    exitcode: int | None = None
    """The process's exit status, if it exited."""
    signal: int | None = None
    """The signal that killed the process, if one did."""
    out_of_memory: bool = False
    """Whether it was the kernel that killed it, for lack of memory, as far as the kernel's counters tell."""
    exception: BaseException | None = None
    """What was raised, if something was."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines that the process wrote to its stderr."""
    chain: tuple[str, ...] = ()
    """By which owners the failure arrived, the nearest to the dead first."""
    since: float | None = None
    """When it was noticed, in seconds since the epoch."""
    host_fate: str = ""
    """Why its whole host is dead, in one word, such as ``"silent"``; empty where the host lives."""
    reason: str = ""
    """What is known beyond the status, signal or exception."""
    kind: FailureKind = FailureKind.UNKNOWN
    """What kind of failure it is. Where it is not given it follows from the other fields."""
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
        """Identify the failure within its job. It is the same in every process, so that reports can be matched.

        A process dies once, and an actor fails once: it is made of their ids. Empty for a failure that was made by hand.
        """
        mesh, rank, actor = self._key
        if self._key == (0, 0, 0):
            return ""
        return f"{mesh:x}.{rank}.{actor:x}" if actor else f"{mesh:x}.{rank}"

    def headline(self) -> str:
        """Tell it in one line."""
        what = "failed" if self._lives() else "died"
        return f"{self._who()} {what}{self._where()}: {self._why()}"

    def report(self) -> str:
        """Tell it all in lines for a human."""
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
        """Say whether it is an actor that has failed in a process that lives on."""
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
        # One that has not come yet goes by its number: "host 3".
        where = f" on {'' if self.host.startswith('host ') else 'host '}{self.host}" if self.host else ""
        return where + (f"{',' if where else ' in'} pid {self.pid}" if self.pid is not None else "")

    def _why(self) -> str:
        if self.signal is not None:
            why = ", probably by the kernel as memory ran out" if self.out_of_memory else ""
            return f"killed by signal {self.signal} ({signal_name(self.signal)}){why}"
        if self.exception is not None:
            return raised_in_words(self.exception)
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
    """What a process's end means for one place of a mesh; it is one failure, whatever mesh it is seen from."""
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
        reason=_reason(lost),
        since=time.time(),
        kind=lost.kind,
        _key=(*lost.process, 0),
    )


class NotAttached(SupervisionError, SpawnError):
    """Its host never was part of the job: nobody listens there, for example."""


class NotAuthenticated(SupervisionError, AuthenticationError):
    """Its host never was part of the job, as one side does not accept the other's credentials."""


def error_of(failure: MeshFailure) -> SupervisionError:
    """What is raised for a failure: of a host that could not be attached, what is wrong with that."""
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
    # Beside another status, or a signal, it says only how the end was noticed.
    return "" if lost.kind in _BY_STATUS else lost.reason


_BY_STATUS = frozenset({FailureKind.EXITED, FailureKind.KILLED, FailureKind.OUT_OF_MEMORY})


def signal_name(number: int) -> str:
    """What a signal is called."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return "unnamed"


def raised_in_words(exception: BaseException) -> str:
    """What was raised, in one line."""
    from mesh_core._serialize.exceptions import actor_error, text_of

    told = actor_error(exception)
    kind = type(exception) if told is None else told.cause_type
    text = text_of(exception) if told is None else told.message
    first, _, more = text.strip().partition("\n")
    first = f"{first[:_LINE]}{' ...' if more or len(first) > _LINE else ''}"
    if kind is MeshError:
        # Of Mesh's own making, such as a kill: the text says it all.
        return first
    name = type_name(type(exception)) if told is None else told.cause_name
    return f"raised {name}{f': {first}' if first else ''}"


def _traceback(exception: BaseException | None) -> str:
    """Where it was raised, as far as that is known."""
    if exception is None:
        return ""
    from mesh_core._serialize.exceptions import actor_error, format_traceback

    told = actor_error(exception)
    if told is not None:
        return told.remote_traceback
    return format_traceback(exception) if exception.__traceback__ is not None else ""


def _indented(lines: Any) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]
