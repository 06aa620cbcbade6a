"""Outcomes of calls into a sandbox: errors, and exceptions that leave it as plain data (BOX-1)."""

from __future__ import annotations

import builtins
import sys
import traceback
from contextlib import suppress
from typing import Any

from mesh_core._blocks.sandboxes import plain as _plain
from mesh_core._common.display import printable
from mesh_core._common.errors import MeshError
from mesh_core._serialize.exceptions import in_user_code

_LONGEST_TEXT = 64 << 10
# Python gives these a special meaning when they leave a generator or a coroutine.
_NOT_RAISED = (StopIteration, StopAsyncIteration, SystemError)


class SandboxError(MeshError):
    """A sandbox cannot be made or used, or an exception in it is of a class that is not known here.

    >>> str(SandboxError("sandboxes 'python' are closed", sandboxes="python"))
    "sandboxes 'python' are closed"
    """

    def __init__(self, message: str = "", *, sandboxes: str = "") -> None:
        super().__init__(message)
        self.sandboxes = sandboxes
        """The name of the sandboxes."""


class SandboxDied(SandboxError):
    """The process in a sandbox has ended: it crashed, was killed, exited, or exceeded a limit. Take another one.

    >>> error = SandboxDied("...", exitcode=-11, limit=None, output="Fatal Python error")
    >>> error.exitcode, error.limit, error.output
    (-11, None, 'Fatal Python error')
    """

    def __init__(
        self,
        message: str = "",
        *,
        sandboxes: str = "",
        exitcode: int | None = None,
        limit: str | None = None,
        output: str = "",
    ) -> None:
        super().__init__(message, sandboxes=sandboxes)
        self.exitcode = exitcode
        """Its exit status, negative for a signal; ``None`` if it was ended from outside, or if that is not known."""
        self.limit = limit
        """The limit that it exceeded: ``"memory"``, ``"pids"`` or ``"cpu"``; ``None`` if none did, or if that is not known."""
        self.output = output
        """The end of its stdout and stderr."""


class SandboxTimeout(SandboxError, TimeoutError):
    """A call took too long, and its sandbox was ended; or no sandbox was free in time.

    >>> issubclass(SandboxTimeout, TimeoutError)
    True
    """

    def __init__(
        self, message: str = "", *, sandboxes: str = "", timeout: float = 0.0, output: str = ""
    ) -> None:
        super().__init__(message, sandboxes=sandboxes)
        self.timeout = timeout
        """The time limit in seconds."""
        self.output = output
        """The end of the sandbox's stdout and stderr."""


def tell_exception(error: BaseException) -> dict[str, Any]:
    """Turn an exception into plain data; never fails."""
    kind = type(error)
    told: dict[str, Any] = {"module": str(kind.__module__), "name": str(kind.__qualname__)}
    try:
        told["text"] = str(error)[:_LONGEST_TEXT]
    except BaseException:  # noqa: BLE001 - foreign __str__ may raise anything
        told["text"] = ""
    try:
        frames = in_user_code(error.__traceback__)
        told["traceback"] = "".join(traceback.format_exception(kind, error, frames))[-_LONGEST_TEXT:]
    except BaseException:  # noqa: BLE001
        told["traceback"] = f"{told['name']}: {told['text']}\n"
    told["args"], told["fields"] = None, {}
    with suppress(BaseException):
        _plain.encode(error.args)
        told["args"] = error.args
    for name, value in list(getattr(error, "__dict__", {}).items()):
        with suppress(BaseException):
            _plain.encode(value)
            told["fields"][str(name)] = value
    return told


def rebuild_exception(told: Any, sandboxes: str, function: str) -> Exception:
    """Make the exception again, or a :class:`SandboxError` if its class is not known here. Runs no code of its class.

    Raises ``KeyError`` and others for data that is not from :func:`tell_exception`.
    """
    module, name, text, trace = (
        str(told[each])[:_LONGEST_TEXT] for each in ("module", "name", "text", "traceback")
    )
    error = _remake(module, name, told["args"], dict(told["fields"]))
    if error is None:
        error = SandboxError(
            printable(f"{function} raised {name} in a sandbox of {sandboxes!r}: {text}"), sandboxes=sandboxes
        )
    # It may be shown on a terminal, which code in a sandbox is not to control.
    error.add_note(printable(f"raised in a sandbox of {sandboxes!r}:\n{trace.rstrip()}"))
    return error


def _remake(module: str, name: str, args: Any, fields: dict[str, Any]) -> Exception | None:
    """An exception of a class that is loaded in this process; nothing is imported for it."""
    if args is None or type(args) is not tuple:
        return None
    found: Any = builtins if module == "builtins" else sys.modules.get(module)
    for part in name.split("."):
        # Not getattr, which may run a module's or a class's own code.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if found is None:
            return None
    if not isinstance(found, type) or not issubclass(found, Exception) or issubclass(found, _NOT_RAISED):
        return None
    error: Exception
    try:
        if module == "builtins":
            error = found(*args)
        else:
            error = _native_base(found).__new__(found, *args)
            error.args = args
    except Exception:  # noqa: BLE001 - it does not accept these arguments
        return None
    with suppress(AttributeError):
        error.__dict__.update((key, value) for key, value in fields.items() if key != "__notes__")
    return error


def _native_base(kind: type) -> type:
    """Return the first of its base classes that is built in."""
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")
