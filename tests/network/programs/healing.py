"""A controller with counters on all hosts but the last, which is a spare; requests and answers as in `serving.py`."""

from __future__ import annotations

from typing import Any

from serving import run

from mesh_core import Actor, DeviceMeshError, attach_to_workers, endpoint
from mesh_core.extensions import current_proc
from mesh_supervision import Ignore, heal_mesh, keep_snapshots, whole

LIMIT = 40.0


class Counter(Actor):
    """Counts steps, by a number of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __snapshot__(self) -> int:
        return self.count

    def __restore__(self, state: int) -> None:
        self.count = state

    @endpoint
    def step(self, by: int) -> int:
        self.count += by
        return self.count

    @endpoint
    def where(self) -> str:
        return current_proc().host


class Job:
    """The counters, and who keeps their state."""

    def __init__(self, workers: list[str], credentials: str) -> None:
        self.snapshots = keep_snapshots()
        self.hosts = attach_to_workers(workers, credentials=credentials)
        self.spare = self.hosts.slice(hosts=len(workers) - 1)
        used = self.hosts.slice(hosts=slice(0, len(workers) - 1))
        self.procs = used.spawn_procs(supervise=Ignore())
        self.counters: Any = self.procs.spawn("counters", Counter, supervise=Ignore())
        self.counters.initialized.get(timeout=LIMIT)

    def do_step(self, by: int, host: int | None = None) -> list[int]:
        """Have all of them, or one, go on."""
        counters = self.counters if host is None else self.counters.slice(hosts=host)
        found: list[int] = counters.step.call(by).get(timeout=LIMIT).values()
        return found

    def do_keep(self) -> list[tuple[str, ...]]:
        """Take a snapshot of each; where they are."""
        self.snapshots.take(self.counters).get(timeout=LIMIT)
        return self.snapshots.places(self.counters)

    def do_heal(self, replicas: bool) -> list[str]:
        """Call until hosts are lost, then heal; the hosts that were lost."""
        while True:
            try:
                with whole(self.counters):
                    self.counters.step.call(0).get(timeout=LIMIT)
            except DeviceMeshError as error:
                heal_mesh(self.counters, on=self.spare, replicas=replicas)
                return [str(each) for each in error.coordinates]

    def do_where(self) -> list[str]:
        """The hosts that they are on."""
        found: list[str] = self.counters.where.call().get(timeout=LIMIT).values()
        return found


if __name__ == "__main__":
    run(Job)
