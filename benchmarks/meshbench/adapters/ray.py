# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator, attr-defined, no-any-return"
"""Ray on this machine alone, without dashboard and usage reports. Actors need no CPU slot, so none waits for one."""

from __future__ import annotations

import asyncio
import os
from time import perf_counter
from typing import Any

import ray

from meshbench.adapter import PAYLOAD
from meshbench.adapters.ray_hosts import Hosts
from meshbench.adapters.ray_pairs import Pairs
from meshbench.adapters.ray_pool import Pools
from meshbench.adapters.ray_queue import Queues
from meshbench.timing import sample, sample_async


@ray.remote(num_cpus=0)
class Echo:
    """Plain methods: one thread."""

    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x

    def pid(self) -> int:
        """Which process this is."""
        return os.getpid()


@ray.remote(num_cpus=0)
class AsyncEcho:
    """A coroutine makes the actor an asyncio actor."""

    async def aecho(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


class System(Hosts, Pools, Queues, Pairs):
    """See `meshbench.adapter.ActorSystem`; over several hosts, `Hosts`."""

    module = "ray"
    names = "get, init, remote"
    distribution = "ray"

    def start(self, procs: int) -> None:
        """Start a local cluster (Ray has to) and `procs` actors; Ray gives each a process of its own."""
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self._all = [Echo.remote() for _ in range(procs)]
        ray.get([actor.echo.remote(PAYLOAD) for actor in self._all])
        self._one = self._all[0]

    def close(self) -> None:
        """Stop the cluster."""
        ray.shutdown()

    def call_sync(self, calls: int) -> list[float]:
        """Blocking calls from this thread."""
        remote = self._one.echo.remote
        return sample(calls, lambda: ray.get(remote(PAYLOAD)))

    def call_async(self, calls: int) -> list[float]:
        """Object references are awaitable."""
        remote = AsyncEcho.remote().aecho.remote

        async def measure() -> list[float]:
            return await sample_async(calls, lambda: remote(PAYLOAD))

        return asyncio.run(measure())

    def pipelined(self, calls: int) -> float:
        """Issue all, then one `get` for all."""
        remote = self._one.echo.remote
        start = perf_counter()
        ray.get([remote(PAYLOAD) for _ in range(calls)])
        return perf_counter() - start

    def call_all(self, calls: int) -> list[float]:
        """One call per actor, one `get` for all."""
        actors = self._all
        return sample(calls, lambda: ray.get([actor.echo.remote(PAYLOAD) for actor in actors]), warm_up=5)

    def broadcast(self, casts: int) -> float:
        """Ray has no cast: calls whose results nobody keeps."""
        start = perf_counter()
        for _ in range(casts):
            for actor in self._all:
                actor.echo.remote(PAYLOAD)
        ray.get([actor.echo.remote(PAYLOAD) for actor in self._all])
        return perf_counter() - start

    def tensor(self, data: Any, times: int) -> list[float]:
        """As an argument and a result: both go through Ray's shared object store."""
        remote = self._one.echo.remote
        return sample(times, lambda: ray.get(remote(data)), warm_up=1)

    def pids(self) -> list[int]:
        """Asked from the actors."""
        return [int(pid) for pid in ray.get([actor.pid.remote() for actor in self._all])]
