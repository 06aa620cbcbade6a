"""The public part of one sandbox."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from mesh_core import _serialize
from mesh_core._blocks.in_thread import in_thread
from mesh_core._blocks.sandboxes import plain as _plain
from mesh_core._blocks.sandboxes import wire
from mesh_core._blocks.sandboxes.isolation import Isolation
from mesh_core._blocks.sandboxes.outcome import SandboxDied, SandboxError, SandboxTimeout, rebuild_exception
from mesh_core._blocks.sandboxes.stock import Box, Stock
from mesh_core._blocks.tools import ToolLimit, ToolResult, ToolUsage, checked_words
from mesh_core._common.display import printable
from mesh_core._common.errors import SerializationError
from mesh_core._failures.failure import signal_name

R = TypeVar("R")

_KEPT_OUTPUT = 1 << 20
# A worker reports the timeout of its tool by itself, unless something is wrong with it.
_TOOL_GRACE_S = 5.0
# Shorter than the pause between two checks by a keeper.
_SHORT_S = 0.01
_SOON_S, _REPORT_S = 0.2, 2.0
_SIGXCPU, _SIGXFSZ = 24, 25


class Sandbox:
    """A separate process for code that may crash, hang or be hostile; from :meth:`Sandboxes.take`.

    >>> from mesh_core import Sandboxes
    >>> with Sandboxes(network=None) as boxes, boxes.take() as box:
    ...     box.call(divmod, 17, 5)
    (3, 2)

    Calls in one sandbox run one after the other, in one process, and see the effects of earlier calls. When the sandbox is given
    back, everything in it is ended and its folder is removed.
    """

    def __init__(self, stock: Stock, box: Box) -> None:
        self._stock = stock
        self._box = box
        self._lock = threading.Lock()  # held during a call
        self._closing = threading.Lock()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._died: SandboxError | None = None
        self._watched = False  # whether the keeper checks its limits
        self._given_back = False
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _drop, stock, box, self._stop, self._pid)
        self._finalizer.atexit = False

    @property
    def folder(self) -> Path:
        """Its private folder, the working directory of calls and tools. You may read and write it until you give the sandbox back."""
        return Path(self._box.folder)

    @property
    def isolation(self) -> Isolation:
        """What it is isolated from."""
        return self._box.isolation

    def call(
        self, function: Callable[..., R], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> R:
        """Run a function in the sandbox; return its result, or raise its exception.

        >>> import time
        >>> from mesh_core import Sandboxes, SandboxTimeout
        >>> with Sandboxes(network=None) as boxes, boxes.take() as box:
        ...     try:
        ...         box.call(int, "one")
        ...     except ValueError as error:
        ...         print(error)
        ...     try:
        ...         box.call(time.sleep, 60, timeout=0.1)
        ...     except SandboxTimeout as error:
        ...         print(error.timeout)
        invalid literal for int() with base 10: 'one'
        0.1

        The function and its arguments are sent like those of calls to actors. The result must be plain data: ``None``, booleans,
        numbers, text, bytes, and lists, tuples, dictionaries and sets of these. Nothing that a sandbox sends is unpickled.

        Args:
            function: what to run; use ``functools.partial`` if it has an argument ``timeout`` of its own.
            args: its arguments.
            timeout: seconds after which the sandbox is ended.
            kwargs: its arguments by name.

        Raises:
            SandboxTimeout: it took longer.
            SandboxDied: the process has ended; the sandbox can no longer be used.
            SerializationError: the function has returned something other than plain data.
        """
        name = getattr(function, "__qualname__", repr(function))
        data, buffers = _serialize.dumps(("call", function, args, dict(kwargs)), root=f"the call of {name}")
        answer = self._ask([data, *buffers], timeout, timeout, f"{name}()", watch=True)
        try:
            kind, value = answer
            if kind == "value":
                return value  # type: ignore[no-any-return]
            if kind == "refused":
                error: Exception = SerializationError(
                    f"{name}() cannot return this from a sandbox of {self._stock.name!r}: {value}. What comes from a "
                    f"sandbox must be plain data of up to {wire.LONGEST_ANSWER >> 20} MiB and {_plain.MOST_VALUES:,} values: numbers, text, bytes, and lists, "
                    "tuples, dictionaries or sets of these"
                )
            elif kind == "raised":
                error = rebuild_exception(value, self._stock.name, f"{name}()")
            else:
                raise self._garbage()
        except (TypeError, ValueError, KeyError, AttributeError):
            raise self._garbage() from None
        raise error

    async def call_async(
        self,
        function: Callable[..., R],
        /,
        *args: Any,
        timeout: float | None = None,  # noqa: ASYNC109 - it ends the sandbox
        **kwargs: Any,
    ) -> R:
        """Like :meth:`call`, without blocking the event loop. If this is cancelled, the sandbox is ended."""
        return await in_thread(
            lambda: self.call(function, *args, timeout=timeout, **kwargs), "mesh-sandbox", self._interrupt
        )

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        timeout: float | None = None,
        input: bytes | str | None = None,  # noqa: A002 - as subprocess.run has it
        env: Mapping[str, str | None] | None = None,
        max_output: int = _KEPT_OUTPUT,
    ) -> ToolResult:
        r"""Run a program in the sandbox's folder, like :func:`run_tool`, under the limits of the sandbox.

        >>> from mesh_core import Sandboxes
        >>> with Sandboxes(network=None) as boxes, boxes.take() as box:
        ...     result = box.run(["sh", "-c", "echo hello > greeting"], timeout=10)
        ...     result.ok, (box.folder / "greeting").read_text()
        (True, 'hello\n')

        A program that exceeds a limit is ended, and the result says so; the sandbox can still be used.
        """
        words = checked_words(argv)
        options = {
            "argv": words,
            "timeout": timeout,
            "data": input,
            "cwd": None,
            "env": None if env is None else dict(env),
            "max_output": max_output,
        }
        part, buffers = _serialize.dumps(("tool", options))
        limit = None if timeout is None else timeout + _TOOL_GRACE_S
        answer = self._ask(
            [part, *buffers], limit, timeout, f"the program {words[0] if words else ''!r}", watch=False
        )
        try:
            kind, told = answer
            if kind == "tool":
                return _tool_result(told)
            if kind != "raised":
                raise self._garbage()
            error = rebuild_exception(told, self._stock.name, "run()")
        except (TypeError, ValueError, KeyError, AttributeError):
            raise self._garbage() from None
        raise error

    async def run_async(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it limits the tool, and the result reports it
        input: bytes | str | None = None,  # noqa: A002 - as subprocess.run has it
        env: Mapping[str, str | None] | None = None,
        max_output: int = _KEPT_OUTPUT,
    ) -> ToolResult:
        """Like :meth:`run`, without blocking the event loop. If this is cancelled, the sandbox is ended."""
        return await in_thread(
            lambda: self.run(argv, timeout=timeout, input=input, env=env, max_output=max_output),
            "mesh-sandbox",
            self._interrupt,
        )

    def give_back(self) -> None:
        """End everything in it and remove its folder. A call in progress raises an error. Does not wait."""
        if self._given_back or self._pid != os.getpid():
            return  # a forked copy leaves the sandbox to its parent
        self._given_back = True
        self._interrupt()
        with self._lock, self._closing:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def __repr__(self) -> str:
        state = "given back" if self._given_back else "ended" if self._died is not None else "taken"
        return f"<Sandbox {self._box.number} of {self._stock.name!r}: {state}>"

    # --- internals

    def _interrupt(self) -> None:
        with self._closing:
            if self._finalizer.alive:
                os.eventfd_write(self._stop, 1)

    def _ask(
        self, parts: Sequence[Any], limit: float | None, timeout: float | None, what: str, *, watch: bool
    ) -> Any:
        """Send one request, and wait for its answer."""
        self._stock.check()
        with self._lock:
            if self._given_back:
                raise SandboxError(
                    f"this sandbox of {self._stock.name!r} was given back; take another one",
                    sandboxes=self._stock.name,
                )
            if self._died is not None:
                raise self._died.with_traceback(None)
            until = None if limit is None else time.monotonic() + limit
            try:
                if self._stock.watched and not self._watched:
                    self._watch(b"idle")
                    self._watched = True
                data = self._talk(parts, until, timeout, what, watch=self._stock.watched and watch)
                return _plain.decode(data, partial(self._look, until, timeout, what))
            except SandboxError as error:
                self._died = error
                self._stock.end(self._box)
                raise
            except (_plain.Garbage, RecursionError, MemoryError):
                raise self._garbage() from None
            except BaseException:
                # Interrupted: the state of the sandbox is unknown.
                self._died = self._ended(what)
                self._stock.end(self._box)
                raise

    def _look(self, until: float | None, timeout: float | None, what: str) -> None:
        """Raise if the answer that is being read is no longer wanted."""
        if select.select([self._stop], [], [], 0)[0]:
            raise self._ended(what)
        if until is not None and time.monotonic() >= until:
            raise self._too_late(what, timeout)

    def _watch(self, how: bytes) -> None:
        with suppress(OSError):  # it has ended, which is seen next
            self._box.told.send(how, socket.MSG_DONTWAIT)

    def _talk(
        self, parts: Sequence[Any], until: float | None, timeout: float | None, what: str, *, watch: bool
    ) -> bytes:
        # The keeper need not watch most calls: they return before its next look.
        watch_at = time.monotonic() + _SHORT_S if watch else None
        watching = False
        connection, told = self._box.connection, self._box.told
        due = [memoryview(part).cast("B") for part in wire.pack(parts)]
        poll = select.poll()
        poll.register(connection, select.POLLIN | select.POLLOUT)
        poll.register(told, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        answer = wire.Answer()
        while True:
            due_at = min((at for at in (until, watch_at) if at is not None), default=None)
            pause = None if due_at is None else max(0.0, due_at - time.monotonic()) * 1000
            ready = dict(poll.poll(pause))
            if watch_at is not None and time.monotonic() >= watch_at:
                self._watch(b"busy")
                watch_at, watching = None, True
            if self._stop in ready:
                raise self._ended(what)
            events = ready.get(connection.fileno(), 0)
            if events & select.POLLIN:
                found = self._receive(connection, answer, what)
                if found is not None:
                    if watching:
                        self._watch(b"idle")
                    return found
                if answer.too_long:
                    raise self._garbage()
            elif events & (select.POLLHUP | select.POLLERR) or told.fileno() in ready:
                raise self._dead(what)
            elif events & select.POLLOUT:
                due = _send(connection, due)
                if not due:
                    poll.modify(connection, select.POLLIN)
            elif until is not None and time.monotonic() >= until:
                raise self._too_late(what, timeout)

    def _receive(self, connection: socket.socket, answer: wire.Answer, what: str) -> bytes | None:
        try:
            data = connection.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            raise self._dead(what)
        return answer.feed(data)

    def _report(self, *, ask: bool) -> dict[str, Any]:
        """The keeper's report about the end, if there is one."""
        told = self._box.told
        if ask:
            self._watch(b"end")
        poll = select.poll()
        poll.register(told, select.POLLIN)
        if not poll.poll(1000 * (_REPORT_S if ask else _SOON_S)):
            return {}
        try:
            return wire.receive_packet(told)[0] or {}
        except (ValueError, OSError):
            return {}

    def _dead(self, what: str) -> SandboxDied:
        report = self._report(ask=False)
        silent = not report
        if silent:
            # Either its worker lives and has closed its connection, or everything was killed from outside.
            report = self._report(ask=True)
        status, limit, output = (
            report.get("ended"),
            report.get("limit") or None,
            str(report.get("output", "")),
        )
        if status == -_SIGXCPU:
            limit = "cpu"
        if limit is not None:
            how = f"exceeded its limit {limit}="
        elif status is None:
            how = "was killed, or closed its connection"
        elif status < 0:
            how = f"was killed by signal {-status} ({signal_name(-status)})"
        else:
            how = f"ended with exit status {status}"
        return SandboxDied(
            f"a sandbox of {self._stock.name!r} {how} while {what} ran; take another one{_tail(output)}",
            sandboxes=self._stock.name,
            exitcode=status,
            limit=limit,
            output=output,
        )

    def _too_late(self, what: str, timeout: float | None) -> SandboxTimeout:
        output = str(self._report(ask=True).get("output", ""))
        return SandboxTimeout(
            f"{what} did not return within {timeout} s in a sandbox of {self._stock.name!r}, which was ended; take another "
            f"one{_tail(output)}",
            sandboxes=self._stock.name,
            timeout=timeout or 0.0,
            output=output,
        )

    def _ended(self, what: str) -> SandboxError:
        return SandboxError(
            f"a sandbox of {self._stock.name!r} was given back, or a call in it was cancelled, while {what} ran; take "
            "another one",
            sandboxes=self._stock.name,
        )

    def _garbage(self) -> SandboxDied:
        """Return the error for something that no worker sends. The sandbox must not be used again."""
        self._died = SandboxDied(
            f"a sandbox of {self._stock.name!r} has sent something that is not an answer: code in it has written to its "
            "connection. It was ended; take another one",
            sandboxes=self._stock.name,
        )
        self._stock.end(self._box)
        return self._died


def _tail(output: str) -> str:
    return printable(f"\nIts output ends with:\n{output.strip()}") if output.strip() else ""


def _send(connection: socket.socket, due: list[memoryview]) -> list[memoryview]:
    try:
        sent = connection.send(due[0][: 1 << 20])
    except BlockingIOError:
        return due
    except OSError:
        return []  # it no longer reads; what it sent before is read next
    rest = due[0][sent:]
    return [rest, *due[1:]] if rest else [part for part in due[1:] if part.nbytes]


def _drop(stock: Stock, box: Box, stop: int, pid: int) -> None:
    """A box was given back, or nothing refers to it any longer."""
    if os.getpid() == pid:
        stock.end(box)
        box.close()
        os.close(stop)


def _tool_result(told: dict[str, Any]) -> ToolResult:
    """The result that a worker has reported. Every field is converted to its type, whatever was sent."""
    usage = told["usage"]
    if type(told["stdout"]) is not bytes or type(told["stderr"]) is not bytes:
        raise TypeError("output must be bytes")
    return ToolResult(
        argv=tuple(map(str, told["argv"])),
        returncode=int(told["returncode"]),
        stdout=told["stdout"],
        stderr=told["stderr"],
        truncated=bool(told["truncated"]),
        limit=None if told["limit"] is None else ToolLimit(told["limit"]),
        usage=ToolUsage(float(usage["wall_s"]), float(usage["cpu_s"]), int(usage["peak_memory"])),
    )
