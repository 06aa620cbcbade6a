"""What whoever has started hosts knows of their ends: :class:`HostReasons`.

HRS-1: what has failed on a host that somebody may explain is told to its owner once, after the explanation or after a limit, whichever comes
first; at the end of the script, at once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mesh_core._common.codes import FailureKind

if TYPE_CHECKING:
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._native import Lost

_PATIENCE_S = 0.5
_AGAIN_S = 10.0
"""After so long, a failure on the same host is waited for anew."""

_BY_HOST = frozenset(
    {
        FailureKind.HOST_DEAD,
        FailureKind.HOST_UNREACHABLE,
        FailureKind.FORK_SERVER_DIED,
        FailureKind.CONNECTION_LOST,
    }
)


class HostReasons:
    """What a launcher or scheduler knows of the ends of hosts, which the mesh cannot know: for packages that start hosts.

    >>> from mesh_core import attach_to_workers
    >>> from mesh_core.extensions import HostReasons
    >>> from mesh_core.testing import LocalCluster
    >>> with LocalCluster(hosts=1) as cluster, cluster.attach() as hosts:
    ...     reasons = HostReasons(hosts)
    ...     reasons.tell(0, "the cluster is being repaired")

    A process that dies with its host, or with the process that forks workers, or of SIGTERM, gets these words in its failure
    (:attr:`MeshFailure.reason`). Owners, policies and calls of threads wait for them for at most ``patience`` seconds, once for everything that
    fails on a host. Calls of coroutines do not wait.

    Args:
        hosts: the hosts that may be explained.
        patience: how many seconds are waited for words.
    """

    def __init__(self, hosts: HostMesh, patience: float = _PATIENCE_S) -> None:
        self._patience = patience
        self._numbers = list(hosts._numbers)
        self._known = hosts._process.supervision.explained
        self._known.add(self._numbers, patience)

    def tell(self, place: int, why: str) -> None:
        """Say why a host, given by its place in the mesh, ends or has ended; the latest counts. From any thread."""
        self._known.tell(self._numbers[place], why)


class Explained:
    """What a process knows of the ends of hosts. Thread-safe."""

    def __init__(self, later: Callable[[Callable[[], object]], object]) -> None:
        self._later = later
        """Calls what was held back, where others of its kind are called."""
        self._changed = threading.Condition()
        self._patience: dict[int, float] = {}
        self._words: dict[int, str] = {}
        self._until: dict[int, float] = {}
        """When what has failed on a host is told in any case."""
        self._timers: dict[int, threading.Timer] = {}
        self._held: list[tuple[int, Callable[[], object]]] = []

    def add(self, hosts: list[int], patience: float) -> None:
        """Wait for words about hosts from now on."""
        with self._changed:
            self._patience.update(dict.fromkeys(hosts, patience))

    def tell(self, host: int, why: str) -> None:
        """Record what is known of a host."""
        with self._changed:
            self._words[host] = why
            self._changed.notify_all()
        self._release(lambda each: each == host)

    def of(self, lost: Lost) -> str:
        """Return what is known of a host, if that may be why a process ended."""
        return self._words.get(lost.host, "") if self._words and _may_explain(lost) else ""

    def added_to(self, reason: str, lost: Lost) -> str:
        """Return a reason together with what is known of the host."""
        said = self.of(lost)
        if not said or said in reason:
            return reason
        return f"{reason}; {said}" if reason else said

    def wait(self, lost: Lost) -> None:
        """Wait until there are words, or the limit is over. In a coroutine this returns at once."""
        if not self._may_come(lost) or _on_event_loop():
            return
        host = lost.host
        with self._changed:
            until = self._limit(host)
            self._changed.wait_for(lambda: host in self._words, max(0.0, until - time.monotonic()))

    def hold(self, lost: Lost, then: Callable[[], object]) -> bool:
        """Call ``then`` once there are words, or the limit is over; false if nothing is to be waited for."""
        if not self._may_come(lost):
            return False
        host = lost.host
        with self._changed:
            left = self._limit(host) - time.monotonic()
            if host in self._words or left <= 0:
                return False
            self._held.append((host, then))
            if host not in self._timers:
                timer = self._timers[host] = threading.Timer(left, self._release, [lambda each: each == host])
                timer.daemon = True
                timer.start()
        return True

    def end_waiting(self) -> None:
        """Call whatever was held back now, here."""
        for then in self._taken(lambda _: True):
            then()

    def _may_come(self, lost: Lost) -> bool:
        host = lost.host
        return host in self._patience and host not in self._words and _may_explain(lost)

    def _limit(self, host: int) -> float:
        now = time.monotonic()
        if now > self._until.get(host, 0.0) + _AGAIN_S:
            self._until[host] = now + self._patience[host]
        return self._until[host]

    def _release(self, which: Callable[[int], bool]) -> None:
        for then in self._taken(which):
            self._later(then)

    def _taken(self, which: Callable[[int], bool]) -> list[Callable[[], object]]:
        with self._changed:
            due = [then for host, then in self._held if which(host)]
            self._held = [each for each in self._held if not which(each[0])]
            for host in [each for each in self._timers if which(each)]:
                self._timers.pop(host).cancel()
        return due


def _may_explain(lost: Lost) -> bool:
    return not lost.orderly and (lost.kind in _BY_HOST or lost.signal == signal.SIGTERM)


def _on_event_loop() -> bool:
    # Nobody runs a loop who has not imported it.
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
