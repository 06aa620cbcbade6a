"""Errors."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh_core import ProcMesh


class RemoteException(MeshError):
    """An operator has failed on a process of the mesh, and with it everything that depends on its result."""

    def __init__(self, message: str, *, operator: str, point: Any, trace: str) -> None:
        super().__init__(message)
        self.operator = operator
        self.point = point
        self.trace = trace

    def __reduce__(self) -> Any:
        return _again, (str(self), self.operator, self.point, self.trace)


def _again(message: str, operator: str, point: Any, trace: str) -> RemoteException:
    return RemoteException(message, operator=operator, point=point, trace=trace)


class RanksDisagree(MeshError):
    """The processes of a mesh have different values where a single value is needed."""


class CaptureError(MeshError):
    """A step cannot be captured, because a replay would not do the same as a call."""


class StreamError(MeshError, ValueError):
    """A tensor was used where its stream or a loan does not allow it."""


def line_of(place: tuple[Any, int] | None) -> str:
    """Return where an instruction was issued, with the line itself."""
    if place is None:
        return "a line that is too long ago to be known"
    code, instruction = place
    number = next(
        (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None),
        code.co_firstlineno,
    )
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number} in {code.co_qualname}" + (f": {text}" if text else "")


def described(tensor: Any) -> str:
    """Name a tensor, its mesh, and the line that has made it."""
    return f"{tensor!r}, made at {tensor.descriptor.stream.made_at(tensor.ref)}"


def part_of(tensor: Any, procs: ProcMesh, coords: Mapping[str, int | slice]) -> ProcMesh:
    """Return the processes at these coordinates of a tensor's mesh."""
    try:
        return procs.slice(**coords)
    except (ValueError, IndexError, TypeError) as error:
        raise type(error)(f"{error}. It is the mesh of {described(tensor)}") from None


def among(values: Any) -> Any:
    """Return the first tensor of a mesh that is among arguments, or ``None``."""
    if isinstance(values, dict):
        return among(list(values.values()))
    if isinstance(values, (list, tuple)):
        return next((found for each in values if (found := among(each)) is not None), None)
    return values if hasattr(values, "descriptor") else None
