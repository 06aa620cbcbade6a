"""What is known about a death: :class:`MeshFailure`."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh_core._errors import (
    BOOTSTRAP_FAILED,
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
    _key: tuple[int, int, int] = field(default=(0, 0, 0), repr=False, compare=False)

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
        return self.exception is not None and self.signal is None and self.exitcode is None

    def __repr__(self) -> str:
        return f"<MeshFailure: {self.headline()}>"

    def _repr_html_(self) -> str:
        from mesh_core._show import block

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
            return f"killed by signal {self.signal} ({_signal_name(self.signal)}){why}"
        if self.exception is not None:
            return _raised(self.exception)
        if self.exitcode == BOOTSTRAP_FAILED and self.reason:
            return self.reason
        if self.exitcode is not None:
            return f"exited with status {self.exitcode}"
        if self.host_fate not in ("", "absent"):
            return "its host is dead"
        return self.reason or "no reason is known"


def of_loss(
    lost: Lost, mesh: Any, *, name: str, host: str, point: Point, key: tuple[int, int, int]
) -> MeshFailure:
    """What a process's end means for one place of a mesh; ``key`` is the process, whatever mesh it is seen from."""
    return MeshFailure(
        mesh=mesh,
        mesh_name=name,
        rank=point.rank,
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
        _key=key,
    )


class NotAttached(SupervisionError, SpawnError):
    """Its host never was part of the job: nobody listens there, for example."""


class NotAuthenticated(SupervisionError, AuthenticationError):
    """Its host never was part of the job, as one side does not accept the other's credentials."""


def error_of(failure: MeshFailure) -> SupervisionError:
    """What is raised for a failure: of a host that could not be attached, what is wrong with that."""
    told = f"{failure._who()} was never started: {failure.reason}"
    if failure.host_fate == "not_attached":
        error: SupervisionError = NotAttached(told, failure=failure)
    elif failure.host_fate == "not_authenticated":
        refused = NotAuthenticated(told, failure=failure)
        refused.remedy = REMEDY
        error = refused
    else:
        error = SupervisionError(failure=failure)
    return error


def _reason(lost: Lost) -> str:
    # Beside another status, or a signal, it says only how the end was noticed.
    told = lost.exitcode == BOOTSTRAP_FAILED or (lost.exitcode is None and lost.signal is None)
    return lost.reason if told else ""


def bootstrap_raised(error: BaseException) -> str:
    """Say why a process ends whose bootstrap has raised."""
    return f"its bootstrap {_raised(error)}"


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return "unnamed"


def _raised(exception: BaseException) -> str:
    """What was raised, in one line."""
    from mesh_core._exceptions import actor_error, text_of

    told = actor_error(exception)
    name = type_name(type(exception)) if told is None else told.cause_name
    text = text_of(exception) if told is None else told.message
    first, _, more = text.strip().partition("\n")
    first = f"{first[:_LINE]}{' ...' if more or len(first) > _LINE else ''}"
    if name == type_name(MeshError):
        # Of Mesh's own making, such as a kill: the text says it all.
        return first
    return f"raised {name}{f': {first}' if first else ''}"


def _traceback(exception: BaseException | None) -> str:
    """Where it was raised, as far as that is known."""
    if exception is None:
        return ""
    from mesh_core._exceptions import actor_error, format_traceback

    told = actor_error(exception)
    if told is not None:
        return told.remote_traceback
    return format_traceback(exception) if exception.__traceback__ is not None else ""


def _indented(lines: Any) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]
