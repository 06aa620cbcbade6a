"""Ranks of a process group that hang in collectives, each in another way."""

from __future__ import annotations

import threading
import time
from typing import Any

from mesh_core import Actor, endpoint
from mesh_supervision import watch_collectives


class Rank(Actor):
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist, self.rank = torch, dist, dist.get_rank()
        self.pairs: Any = None

    def tensor(self, *shape: int) -> Any:
        return self.torch.ones(*(shape or (4,)))

    def load(self) -> None:
        threading.Event().wait()

    @endpoint
    def step(self, count: int) -> int:
        for _ in range(count):
            self.dist.all_reduce(self.tensor())
            self.dist.broadcast(self.tensor(2, 3), 0)
            self.dist.barrier()
        return self.rank

    @endpoint
    def work_and_meet(self, slow: int, usual: float, longer: float) -> None:
        """Work for a while, one rank longer than the others, and meet."""
        time.sleep(longer if self.rank == slow else usual)
        self.dist.all_reduce(self.tensor())

    @endpoint
    def late(self, rank: int) -> None:
        """One rank loads data when the others wait for it."""
        self.dist.all_reduce(self.tensor())
        if self.rank == rank:
            self.load()
        self.dist.all_reduce(self.tensor(8))

    @endpoint
    def late_for_asynchronous(self, rank: int) -> None:
        if self.rank == rank:
            self.load()
        works = [self.dist.all_reduce(self.tensor(8), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()

    @endpoint
    def other_root(self, rank: int) -> None:
        """One rank waits for what another one sends, and the others for what it sends."""
        self.dist.broadcast(self.tensor(), (rank + 1) % 3 if self.rank == rank else rank)

    @endpoint
    def own_root(self, rank: int) -> None:
        """One rank sends what nobody expects, and the others receive what rank 0 sends, and go on."""
        self.dist.broadcast(self.tensor(), rank if self.rank == rank else 0)

    @endpoint
    def left_out(self, rank: int) -> None:
        """One rank does not take part in the last collective."""
        self.dist.barrier()
        if self.rank != rank:
            self.dist.all_reduce(self.tensor())

    @endpoint
    def waits_for(self, rank: int) -> None:
        """All wait for a message of one that sends none."""
        if self.rank == rank:
            self.load()
        else:
            self.dist.recv(self.tensor(), src=rank)

    @endpoint
    def circle(self) -> None:
        """Each waits for a message of the next."""
        self.dist.recv(self.tensor(), src=(self.rank + 1) % 3)

    @endpoint
    def make_pairs(self) -> None:
        """A group of the first two, watched as the program wants it."""
        self.pairs = self.dist.new_group([0, 1])
        if self.rank < 2:
            watch_collectives(self.pairs)

    @endpoint
    def late_in_pair(self) -> None:
        if self.rank == 1:
            self.load()
        self.dist.all_reduce(self.tensor(), group=self.pairs)

    @endpoint
    def shown(self) -> list[str]:
        """What this process has threads for."""
        return [each.name for each in threading.enumerate()]
