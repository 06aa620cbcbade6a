"""Folding over replies: :class:`Accumulator`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from mesh_core._futures.future import Future
from mesh_core._meshes.outcomes import value_of

if TYPE_CHECKING:
    from mesh_core._meshes.adverbs import Endpoint
    from mesh_core._native import Call
    from mesh_core._process.process import Process

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


class Accumulator(Generic[P, R, A]):
    """Call every actor of a mesh and fold over the replies as they arrive: ``combine(combine(identity, r0), r1)``...

    Replies are folded in any order, and each is dropped once it is folded in; ``combine`` runs here, where the future is
    waited for. To have the ranks combine their replies themselves, use ``with_options(reduce=...)``.

    >>> from mesh_core import Accumulator, Actor, endpoint, this_host
    >>> class Counter(Actor):
    ...     @endpoint
    ...     def count(self, word: str) -> int:
    ...         return len(word)
    >>> with this_host().spawn_procs(per_host={"gpus": 3}) as procs:
    ...     counters = procs.spawn("counters", Counter)
    ...     Accumulator(counters.count, 0, lambda total, n: total + n).accumulate("seven").get(timeout=30)
    15
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        from mesh_core._meshes.adverbs import Endpoint

        if not isinstance(endpoint, Endpoint):
            raise TypeError(f"Accumulator() must be given an endpoint of a mesh, got {endpoint!r}")
        if endpoint._arity.port:
            raise ValueError(
                f"{endpoint!r} may answer any number of times; iterate over its stream() instead"
            )
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call every actor and return a future of the folded replies. The first failure is raised once all replies have arrived."""
        folding: Future[A] = self._endpoint._begin("accumulate", self._fold, None, args, kwargs, stream=True)
        return folding

    def _fold(
        self, process: Process, call: Call, _finish: None, what: Callable[[], str], limit: float | None
    ) -> _Folding[A]:
        return _Folding(self, process, call, what, limit)


class _Folding(Future[A]):
    """A future that folds replies while it is waited for."""

    __slots__ = ("_combine", "_error", "_folded", "_lock", "_n", "_who")

    _call: Call

    def __init__(
        self,
        accumulator: Accumulator[Any, Any, A],
        process: Process,
        call: Call,
        what: Callable[[], str],
        limit: float | None,
    ) -> None:
        super().__init__(process, call, self._finish_fold, what, limit)
        self._who = accumulator._endpoint._who
        self._folded = accumulator._identity
        self._combine = accumulator._combine
        self._error: BaseException | None = None
        self._n = 0
        # A lock of its own, because `combine` is user code and may wait for other calls.
        self._lock = threading.RLock()

    def _fold(self) -> None:
        with self._lock:
            while (arrived := self._call.take_nth(self._n)) is not None:
                self._n += 1
                if self._error is not None:
                    continue
                index, outcome = arrived
                try:
                    self._folded = self._combine(self._folded, value_of(outcome, index, self._who))
                except Exception as error:  # noqa: BLE001 - kept, and raised at the end
                    self._error = error

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._fold()
            if self._call.done():
                return True
            left = None if until is None else until - time.monotonic()
            if not self._call.wait(left, self._n, heed):
                return False

    async def _arrive(self) -> None:
        while not self._call.done():
            await self._process.bridge().wait(self._call, self._n)
            self._fold()

    def _settle(self) -> None:
        # Before `super()` takes the lock for settling: `combine` may wait for other calls.
        self._fold()
        super()._settle()

    def _finish_fold(self, call: Call) -> A:
        if self._error is not None:
            raise self._error
        if self._n < len(call):
            from mesh_core._futures.future import not_here

            raise not_here()
        return self._folded
