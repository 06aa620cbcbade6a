"""Futures of what may take long: while somebody waits for them, the terminal shows how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mesh_core._common.progress import progress
from mesh_core._futures.future import Changed, Future

R = TypeVar("R")
S = TypeVar("S")


class Watched(Future[R]):
    """A future of a call. ``text`` says how far it is; see :func:`progress`."""

    __slots__ = ("_text",)

    def __init__(self, text: Callable[[], str], *args: Any) -> None:
        super().__init__(*args)
        self._text = text

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        with progress(self._text):
            return super()._wait(timeout, heed)

    async def _arrive(self) -> None:
        with progress(self._text):
            await super()._arrive()


class _WatchedChange(Changed[S]):
    __slots__ = ("_text",)

    def __init__(self, text: Callable[[], str], source: Future[Any], change: Callable[[Any], S]) -> None:
        super().__init__(source, change)
        self._text = text

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        with progress(self._text):
            return super()._wait(timeout, heed)

    async def _arrive(self) -> None:
        with progress(self._text):
            await super()._arrive()


def watched(future: Future[R], text: Callable[[], str]) -> Future[R]:
    """Return a future of the same result that shows on the terminal how far it is while somebody waits for it.

    ``text`` is as for :func:`progress`.

    >>> from mesh_core import Promise
    >>> from mesh_core.extensions import watched
    >>> promise, written = Promise[str](), 0
    >>> future = watched(promise.future, lambda: f"export: {written} of 10 files")
    >>> _ = promise.set_result("done")
    >>> future.get(timeout=30)
    'done'
    """
    return _WatchedChange(text, future, lambda result: result)
