"""Sandboxes of one kind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self

from mesh_core._blocks.sandboxes.isolation import Isolation
from mesh_core._blocks.sandboxes.outcome import SandboxTimeout
from mesh_core._blocks.sandboxes.sandbox import Sandbox
from mesh_core._blocks.sandboxes.stock import Box, Stock, folders_to_hide, folders_to_keep, plain_environment
from mesh_core._common.checks import check_positive
from mesh_core._common.closing import Closing
from mesh_core._common.errors import SerializationError
from mesh_core._system.child_status import require_child_status

_MOST, _READY = 64, 4


class Sandboxes(Closing):
    """Disposable processes for code that may crash, hang or be hostile. They start in milliseconds, from a warm template.

    >>> from mesh_core import Sandboxes
    >>> with Sandboxes(preload=["json"], memory=512 << 20, pids=64, network=None) as boxes:
    ...     with boxes.take() as box:
    ...         box.call(eval, "6 * 7", timeout=5)
    42

    The first use starts the template, a process that imports the modules once. Each sandbox is a copy of that process, in
    a private copy of the folder. A sandbox is used once, and ended when it is given back. All sandboxes end with the process that
    made them, even if that is killed. They belong to that process and cannot be sent to others.

    Args:
        preload: modules that are already imported in the sandboxes.
        folder: each sandbox starts in a copy of this folder, taken when the template starts; by default, in an empty folder.
        memory: bytes that the processes of a sandbox may use together, in addition to what the template uses. The kernel also
            refuses more to each of them, which is a ``MemoryError`` in Python; a sandbox that exceeds the limit is ended.
        pids: how many processes a sandbox may have; with more, it is ended.
        cpu: processor time for each process, in whole seconds.
        file_size: maximum size in bytes of each file that is written.
        network: ``False`` for no network, and an error if that is not possible here; ``None`` for no network if that is possible;
            ``True`` for this process's network.
        isolate: ``None`` to isolate the sandboxes with namespaces as far as this system allows (see
            :attr:`isolation`); ``True`` to raise an error if anything is missing; ``False`` for limits only.
        env: changes to their environment. From this process's environment, it contains only ``PATH``, ``LANG``, ``PYTHON...`` and
            the like, because the rest may be secret.
        most: how many may be taken at once; further takers wait.
        ready: how many are prepared ahead.
        name: their name in errors and in ``ps``.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        folder: str | os.PathLike[str] | None = None,
        *,
        memory: int | None = None,
        pids: int | None = None,
        cpu: float | None = None,
        file_size: int | None = None,
        network: bool | None = False,
        isolate: bool | None = None,
        env: Mapping[str, str | None] | None = None,
        most: int = _MOST,
        ready: int = _READY,
        name: str = "sandboxes",
    ) -> None:
        limits = {"memory": memory, "pids": pids, "cpu": cpu, "file_size": file_size}
        check_positive(**limits, most=most)
        if ready < 0:
            raise ValueError(f"ready must not be negative, got {ready!r}")
        if isinstance(preload, str):
            raise TypeError(
                f"preload must be a list of names of modules, got {preload!r}; write [{preload!r}]"
            )
        if isolate is False and network is False:
            raise ValueError(
                "network=False needs isolation, got isolate=False; pass network=None or network=True with it"
            )
        where = None if folder is None else os.path.abspath(os.fsdecode(folder))  # noqa: PTH100
        if where is not None and not os.path.isdir(where):  # noqa: PTH112
            raise NotADirectoryError(f"folder={where!r} is not a folder")
        require_child_status(f"sandboxes {name!r}")
        here = os.getcwd()  # noqa: PTH109
        path = [entry or here for entry in sys.path]
        plan = {
            "owner": os.getpid(),
            "name": name,
            "preload": list(preload),
            "folder": where,
            "limits": limits,
            "network": network,
            "isolate": isolate,
            "path": path,
            "keep": folders_to_keep(path),
            "hide": folders_to_hide(),
            "argv": list(sys.argv),
        }
        self.name = name
        """Their name in errors and in ``ps``."""
        self.most = most
        """How many may be taken at once."""
        self._stock = Stock(name, plan, plain_environment(env or {}), most, min(ready, most))
        self._finalizer = weakref.finalize(self, self._stock.abandon)
        self._finalizer.atexit = False

    @property
    def isolation(self) -> Isolation:
        """What they are isolated from; waits for the template."""
        self._stock.check()
        return self._stock.started.result()

    @property
    def taken(self) -> int:
        """How many are taken or still ending."""
        return self._stock.counts()[0]

    @property
    def ready(self) -> int:
        """How many are prepared and can be taken without waiting."""
        return self._stock.counts()[1]

    def take(self, timeout: float | None = None) -> Sandbox:
        """Take a fresh sandbox. Waits while the maximum number is taken.

        >>> from mesh_core import Sandboxes
        >>> with Sandboxes(network=None) as boxes:
        ...     box = boxes.take(timeout=30)
        ...     box.call(len, "four")
        ...     box.give_back()
        4

        Args:
            timeout: seconds to wait; ``None`` for as long as it takes.

        Raises:
            SandboxTimeout: none was free in time.
            SandboxError: none can be made; the message says why.
        """
        asked = self._stock.ask()
        try:
            box = asked.result(timeout)
        except concurrent.futures.TimeoutError:
            if asked.cancel():
                raise self._none_free(timeout) from None
            box = asked.result()
        except BaseException:
            self._forgo(asked)
            raise
        return Sandbox(self._stock, box)

    def take_async(self, timeout: float | None = None) -> Taking:
        """Like :meth:`take`, for coroutines: ``async with boxes.take_async() as box``, or ``box = await boxes.take_async()``."""
        return Taking(self, timeout)

    def close(self) -> None:
        """End all sandboxes, including taken ones, and the template, and wait for that. A ``with`` block does this at its end."""
        self._finalizer.detach()
        self._stock.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        out, ready = self._stock.counts()
        return f"<Sandboxes {self.name!r}: {out} of {self.most} taken, {ready} ready>"

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"sandboxes {self.name!r} belong to the process that made them, and cannot be sent; make some in the actor"
        )

    async def _take_async(self, timeout: float | None) -> Sandbox:  # noqa: ASYNC109 - as for threads
        asked = self._stock.ask()
        try:
            box = await asyncio.wait_for(asyncio.wrap_future(asked), timeout)
        except TimeoutError:
            self._forgo(asked)
            raise self._none_free(timeout) from None
        except BaseException:
            self._forgo(asked)
            raise
        return Sandbox(self._stock, box)

    def _none_free(self, timeout: float | None) -> SandboxTimeout:
        out, _ = self._stock.counts()
        why = (
            f"all {self.most} are taken; give some back, or allow more with most="
            if out >= self.most
            else ("they are still being made")
        )
        return SandboxTimeout(
            f"no sandbox of {self.name!r} was free within {timeout} s: {why}",
            sandboxes=self.name,
            timeout=timeout or 0.0,
        )

    def _forgo(self, asked: concurrent.futures.Future[Box]) -> None:
        """Withdraw a request; a box that has arrived meanwhile is given back."""
        if not asked.cancel() and not asked.cancelled() and asked.exception() is None:
            box = asked.result()
            self._stock.end(box)
            box.close()


class Taking:
    """The result of :meth:`Sandboxes.take_async`: await it, or use it with ``async with``.

    >>> import asyncio
    >>> from mesh_core import Sandboxes
    >>> async def lengths(words: list[str]) -> list[int]:
    ...     async with Sandboxes(network=None) as boxes:
    ...         async def length(word: str) -> int:
    ...             async with boxes.take_async() as box:
    ...                 return await box.call_async(len, word, timeout=5)
    ...         return await asyncio.gather(*map(length, words))
    >>> asyncio.run(lengths(["one", "three"]))
    [3, 5]
    """

    def __init__(self, boxes: Sandboxes, timeout: float | None) -> None:
        self._boxes = boxes
        self._timeout = timeout
        self._sandbox: Sandbox | None = None

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._boxes._take_async(self._timeout).__await__()

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        if self._sandbox is not None:
            self._sandbox.give_back()
