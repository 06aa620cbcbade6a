"""Addresses of hosts that are attached before the addresses are known: futures of them, and a thread that follows those."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError
from mesh_core._futures.combined import _Watch, adopt
from mesh_core._futures.future import _FAILED
from mesh_core._native import displace_host, place_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh_core._futures.future import Future
    from mesh_core._process.process import Process


class Addresses:
    """The addresses of an attachment, each given as a string or as a future of one."""

    def __init__(self, workers: Sequence[Any], process: Process) -> None:
        self._process = process
        self.known: list[str | None] = []
        """In order; ``None`` for a future that is not done."""
        self._awaited: dict[int, Future[Any]] = {}
        for place, worker in enumerate(workers):
            self.known.append(self._look(place, worker))

    def _look(self, place: int, worker: Any) -> str | None:
        if isinstance(worker, str):
            return worker
        if not hasattr(worker, "result") and not hasattr(worker, "__await__"):
            raise TypeError(
                "each of workers= must be an address such as 'tcp://b7:7411', or a future of one, got "
                f"{worker!r}"
            )
        self._awaited[place] = adopt(worker, self._process, "addresses of workers")
        return None

    def follow(self, base: int, ready: Future[None]) -> None:
        """Tell the runtime each address as it becomes known.

        Args:
            base: the number of the first host.
            ready: done when all hosts are attached, or when the runtime is closed, which ends the wait for addresses.
        """
        if self._awaited:
            threading.Thread(
                target=self._follow, args=(base, ready), name="mesh-addresses", daemon=True
            ).start()

    def _follow(self, base: int, ready: Future[None]) -> None:
        places, futures = list(self._awaited), list(self._awaited.values())
        self._awaited = {}
        watch = _Watch(self._process, [*futures, ready])
        # If the runtime is closed, those that wait for the hosts are notified anyway.
        with contextlib.suppress(MeshError):
            for n in range(len(futures) + 1):
                # Other failures in the job are not for this thread.
                watch.wait(n + 1, None, heed=False)
                if self._process.closed or len(watch.done) <= n:
                    break
                done = watch.done[n]
                if done == len(futures):
                    if ready._state == _FAILED and isinstance(ready._value, CancelledError):
                        continue  # nobody waits for the hosts, but they are attached all the same
                    break
                why = self._place(places[done], futures[done], base)
                if why is not None:
                    displace_host(self._process.runtime, base + places[done], why)
        watch.close()

    def _place(self, place: int, future: Future[Any], base: int) -> str | None:
        """Place a host at its address; return what is wrong with the address, if anything is."""
        try:
            address = future.get(0)
        except BaseException as error:  # noqa: BLE001 - of somebody else's future, who may have cancelled it
            return f"its address was not found: {type(error).__name__}: {error}".rstrip(": ")
        if not isinstance(address, str):
            return f"its address was not found: a future must give an address such as 'tcp://b7:7411', and gave {address!r}"
        if address in self.known:
            twin = self.known.index(address)
            return f"{address} is already the address of host {twin} of this mesh; attach each host once"
        try:
            place_host(self._process.runtime, base + place, address)
        except ValueError as error:
            return str(error)
        self.known[place] = address
        return None
