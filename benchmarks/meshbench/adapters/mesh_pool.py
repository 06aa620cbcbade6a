# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator"
"""A pool of Mesh, as the page about pools shows it."""

from __future__ import annotations

import os
import random
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

from mesh_core import Actor, endpoint, this_host

_TIMEOUT = 120.0
_NUMBER = struct.Struct("I")


class Replica(Actor):
    """Sleeps, or does nothing."""

    def __init__(self, folder: str = "") -> None:
        # One write a task, so that a kill leaves whole numbers.
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._ran = os.open(f"{folder}/{os.getpid()}", flags) if folder else -1

    @endpoint
    def nap(self, seconds: float) -> float:
        """One of many tasks."""
        time.sleep(seconds)
        return seconds

    @endpoint
    def naps(self, many: list[float]) -> None:
        """Many of them."""
        for seconds in many:
            time.sleep(seconds)

    @endpoint
    def nothing(self, n: int) -> int:
        """The least that a task can be."""
        return n

    @endpoint
    def note(self, n: int) -> int:
        """Write down that it has run."""
        os.write(self._ran, _NUMBER.pack(n))
        return n


class Pools:
    """See `meshbench.adapter.PoolSystem`."""

    def pool(self, replicas: int, naps: list[float], empty: int) -> tuple[float, float]:
        """Results as they come."""
        # Not at the top: an older mesh has none.
        from mesh_core import Pool

        with this_host().spawn_procs({"replicas": replicas}) as procs:
            actors: Any = procs.spawn("replicas", Replica)
            actors.initialized.get(timeout=_TIMEOUT)
            with Pool(actors) as pool:
                list(pool.map_unordered(actors.nothing, range(200)))
                start = perf_counter()
                assert sum(1 for _ in pool.map_unordered(actors.nap, naps)) == len(naps)
                napped = perf_counter() - start
                start = perf_counter()
                assert sum(pool.map_unordered(actors.nothing, range(empty))) == empty * (empty - 1) // 2
                return napped, perf_counter() - start

    def dealt(self, shares: list[list[float]]) -> float:
        """One call for each."""
        with this_host().spawn_procs({"replicas": len(shares)}) as procs:
            actors: Any = procs.spawn("replicas", Replica)
            actors.initialized.get(timeout=_TIMEOUT)
            each = [actors.slice(replicas=n).naps for n in range(len(shares))]
            start = perf_counter()
            for future in [one.call_one(share) for one, share in zip(each, shares, strict=True)]:
                future.get(timeout=_TIMEOUT)
            return perf_counter() - start

    def pool_crashes(self, replicas: int, tasks: int, every: float) -> tuple[int, int]:
        """Replicas are made again; what ran on a dead one fails, and says so."""
        from mesh_core import Pool, SupervisionError

        over = threading.Event()
        with (
            tempfile.TemporaryDirectory() as folder,
            this_host().spawn_procs({"replicas": replicas}) as procs,
        ):
            actors: Any = procs.spawn("replicas", Replica, folder)
            actors.initialized.get(timeout=_TIMEOUT)

            def kill() -> None:
                while not over.wait(every):
                    pid = random.choice(procs.pids)
                    if pid is not None:
                        os.kill(pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            outcomes: Counter[int] = Counter()
            try:
                with Pool(actors, on_crash="respawn") as pool:
                    for n, future in pool.as_completed(actors.note, range(tasks)):
                        outcomes[n] += 1
                        error = future.exception()
                        assert error is None or isinstance(error, SupervisionError), error
            finally:
                over.set()
                killer.join()
            ran: Counter[int] = Counter()
            for file in Path(folder).iterdir():
                ran.update(n for (n,) in _NUMBER.iter_unpack(file.read_bytes()))
        twice = sum(count > 1 for count in ran.values()) + sum(count > 1 for count in outcomes.values())
        return tasks - len(outcomes), twice
