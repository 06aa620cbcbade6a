# mypy: disable-error-code="untyped-decorator"
"""Mesh: actors of two procs of one host that call each other."""

from __future__ import annotations

import os
import time
from typing import Any

from mesh_core import Actor, endpoint, this_host
from meshbench.adapter import PAYLOAD
from meshbench.timing import PairTimes, sample, sample_async

_TIMEOUT = 120.0


class Peer(Actor):
    """A plain endpoint."""

    @endpoint
    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


class AsyncPeer(Actor):
    """A coroutine."""

    @endpoint
    async def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


class Caller(Actor):
    """Calls from a plain endpoint."""

    @endpoint
    def calls(self, peer: Any, times: int) -> list[float]:
        """Seconds of each call."""
        return sample(times, lambda: peer.echo.call_one(PAYLOAD).get())


class AsyncCaller(Actor):
    """Calls from a coroutine."""

    @endpoint
    async def calls(self, peer: Any, times: int) -> list[float]:
        """Seconds of each call."""
        return await sample_async(times, lambda: peer.echo.call_one(PAYLOAD))


class Pairs:
    """See `meshbench.adapter.PairSystem`."""

    def pairs(self, calls: int) -> PairTimes:
        """Two procs with three actors and one, which have a direct link unless the environment says otherwise."""
        # Older versions know no such setting.
        os.environ.setdefault("MESH_DIRECT_LINKS", "64")
        with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
            here, there = procs.slice(gpus=0), procs.slice(gpus=1)
            peer, async_peer = there.spawn("peer", Peer), there.spawn("async_peer", AsyncPeer)
            caller, async_caller = here.spawn("caller", Caller), here.spawn("async_caller", AsyncCaller)
            script = sample(calls, lambda: peer.echo.call_one(PAYLOAD).get())
            before = time.process_time()
            sync = caller.calls.call_one(peer, calls).get(timeout=_TIMEOUT)
            cpu = (time.process_time() - before) / calls
            awaited = async_caller.calls.call_one(peer, calls).get(timeout=_TIMEOUT)
            coroutines = async_caller.calls.call_one(async_peer, calls).get(timeout=_TIMEOUT)
        return PairTimes(script, sync, awaited, coroutines, cpu)
