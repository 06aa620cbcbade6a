"""Values that reach a process outside the stream of instructions: tensors from other processes, results of actors, tensors for actors.

Such messages have an extension and a thread of their own: the thread that computes may be waiting for them.

ARV-1: a waiter gets the value that it waits for, or the reason why it does not come. Each value is taken once.

Imported in every process of a job, and therefore without PyTorch.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError, Promise
from mesh_core.extensions import Extension, Proc

if TYPE_CHECKING:
    from mesh_core import Future
    from mesh_tensor._meeting import Exchange

Address = tuple[int, int, int]
Key = tuple[Address, str, int]
"""The controller that made the number, the kind of number, and the number."""
LENT = "lent"
MOVED = "moved"
RETURNED = "returned"
KEPT = 1024
"""The most tensors that wait for actors, for each controller, including those meant for calls that were given up."""


class Arrivals(Extension):
    """Keeps what has arrived until it is taken."""

    name = "mesh_tensor.arrivals"

    def start(self) -> None:
        """Make room."""
        self._lock = threading.Lock()
        self._there: dict[Key, Any] = {}
        self._awaited: dict[Key, tuple[Any, list[Promise[None]]]] = {}
        """The waiters, by where their values come from."""
        self._lost: dict[Any, str] = {}
        """Senders from which nothing more comes, and why."""
        self._given_up: set[Key] = set()
        self._is_over = False
        self._places: dict[tuple[Address, int], int] = {}
        """This process's ranks in the meshes that it has tensors of."""
        self._controllers: dict[Address, Proc] = {}
        self.exchanges: dict[int, Exchange] = {}
        """At a controller: its meshes."""

    def stop(self) -> None:
        """Release all waiters."""
        with self._lock:
            self._is_over = True
            waiting = [each for _, promises in self._awaited.values() for each in promises]
        for each in waiting:
            each.set_result(None)

    def receive(self, message: tuple[Any, ...], sender: Proc) -> Any:
        """Store what has arrived."""
        kind, *rest = message
        return getattr(self, f"_on_{kind}")(sender, *rest)

    def _on_join(self, sender: Proc) -> Address:
        """A controller sends tensors here."""
        self._controllers[sender.address] = sender
        return self.proc.address

    def _on_places(self, sender: Proc, mesh: int, ranks: dict[Address, int]) -> None:
        """The controller says which rank of a mesh this process is."""
        self._places[sender.address, mesh] = ranks[self.proc.address]

    def _on_value(self, _: Proc, key: Key, value: Any) -> None:
        self.put(key, value)

    def _on_lost(self, _: Proc, source: Any, why: str) -> None:
        """Nothing more comes from there."""
        with self._lock:
            self._lost[source] = why
            waiting = [
                each for where, promises in self._awaited.values() if where == source for each in promises
            ]
        for each in waiting:
            each.set_result(None)

    def _on_taken(self, _: Proc, mesh: int, number: int, of: int) -> None:
        exchange = self.exchanges.get(mesh)
        if exchange is not None:
            exchange.taken(number, of)

    def _on_kept(self, sender: Proc) -> int:
        """Return how many of a controller's values have not been taken yet."""
        with self._lock:
            return sum(key[0] == sender.address for key in self._there)

    def rank(self, controller: Address, mesh: int) -> int | None:
        """Return this process's rank in a mesh that the controller has tensors on; ``None`` if it is not in it."""
        return self._places.get((controller, mesh))

    def put(self, key: Key, value: Any) -> None:
        """Store a value that will be taken."""
        with self._lock:
            if key in self._given_up:
                self._given_up.remove(key)
                return
            self._there[key] = value
            _, promises = self._awaited.pop(key, (None, ()))
        for each in promises:
            each.set_result(None)

    def lend(self, key: Key, value: Any) -> None:
        """Store a tensor for an actor; if there are too many, the oldest that was not taken is dropped."""
        controller, kind, _ = key
        with self._lock:
            waiting = [each for each in self._there if each[1] == kind and each[0] == controller]
            if len(waiting) >= KEPT:
                del self._there[waiting[0]]
        self.put(key, value)

    def drop(self, key: Key) -> None:
        """Drop it, because nobody will take it."""
        with self._lock:
            self._there.pop(key, None)

    def later(self, key: Key) -> Future[None] | None:
        """Return a future of its arrival; ``None`` if it is there."""
        with self._lock:
            return None if key in self._there else self._promise(key, None).future

    def take(self, key: Key, source: Any = None) -> Any:
        """Wait for a value from there, and take it."""
        while True:
            with self._lock:
                if key in self._there:
                    return self._there.pop(key)
                why = "the process ends" if self._is_over else self._lost.get(source)
                if why is not None:
                    self._given_up.add(key)
                    self._awaited.pop(key, None)
                    raise MeshError(why)
                promise = self._promise(key, source)
            promise.future.get()

    def _promise(self, key: Key, source: Any) -> Promise[None]:
        promise: Promise[None] = Promise(f"a tensor ({key[1]})")
        self._awaited.setdefault(key, (source, []))[1].append(promise)
        return promise

    def tell_taken(self, controller: Address, mesh: int, number: int, of: int) -> None:
        """Tell the controller that an actor has taken a tensor, of so many that will."""
        with suppress(MeshError):
            self.tell(self._controllers[controller], ("taken", mesh, number, of))
