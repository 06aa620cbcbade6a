# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator, attr-defined, no-any-return"
"""Ray: actors, each in a process of its own, that call each other."""

from __future__ import annotations

import time
from typing import Any

import ray

from meshbench.adapter import PAYLOAD
from meshbench.timing import PairTimes, sample, sample_async


@ray.remote(num_cpus=0)
class Peer:
    """A plain method."""

    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


@ray.remote(num_cpus=0)
class AsyncPeer:
    """A coroutine."""

    async def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


@ray.remote(num_cpus=0)
class Caller:
    """Calls from a plain method."""

    def calls(self, peer: Any, times: int) -> list[float]:
        """Seconds of each call."""
        return sample(times, lambda: ray.get(peer.echo.remote(PAYLOAD)))


@ray.remote(num_cpus=0)
class AsyncCaller:
    """Calls from a coroutine."""

    async def calls(self, peer: Any, times: int) -> list[float]:
        """Seconds of each call."""
        return await sample_async(times, lambda: peer.echo.remote(PAYLOAD))


class Pairs:
    """See `meshbench.adapter.PairSystem`."""

    def pairs(self, calls: int) -> PairTimes:
        """Four actors."""
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            peer, async_peer = Peer.remote(), AsyncPeer.remote()
            caller, async_caller = Caller.remote(), AsyncCaller.remote()
            script = sample(calls, lambda: ray.get(peer.echo.remote(PAYLOAD)))
            before = time.process_time()
            sync = ray.get(caller.calls.remote(peer, calls))
            cpu = (time.process_time() - before) / calls
            awaited = ray.get(async_caller.calls.remote(peer, calls))
            coroutines = ray.get(async_caller.calls.remote(async_peer, calls))
        finally:
            ray.shutdown()
        return PairTimes(script, sync, awaited, coroutines, cpu)
