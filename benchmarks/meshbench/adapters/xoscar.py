# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator, attr-defined, no-any-return"
"""xoscar, called from the process that owns the pool, on the event loop it brings (uvloop).

xoscar has no blocking interface: its script-side figures are awaited on a running loop, which is the best it offers.
"""

from __future__ import annotations

import asyncio
import os
from time import perf_counter
from typing import Any

import uvloop
import xoscar
from xoscar.backends.allocate_strategy import ProcessIndex

from meshbench.adapter import PAYLOAD
from meshbench.timing import sample_async


class Echo(xoscar.Actor):
    """Plain and coroutine methods mix."""

    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x

    async def aecho(self, x: Any) -> Any:
        """The same as a coroutine."""
        return x

    def pid(self) -> int:
        """Which process this is."""
        return os.getpid()


class System:
    """See `meshbench.adapter.ActorSystem`."""

    module = "xoscar"
    names = "Actor, create_actor, create_actor_pool"
    distribution = "xoscar"

    def start(self, procs: int) -> None:
        """Start a pool of `procs` processes besides this one, with an actor in each."""
        self._loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start(procs))

    async def _start(self, procs: int) -> None:
        self._pool = await xoscar.create_actor_pool("127.0.0.1", n_process=procs)
        self._all = await asyncio.gather(
            *[
                xoscar.create_actor(
                    Echo,
                    address=self._pool.external_address,
                    uid=f"echo{i}",
                    allocate_strategy=ProcessIndex(i + 1),  # process 0 is this one
                )
                for i in range(procs)
            ]
        )
        self._one = self._all[0]
        await self._echo_all()

    async def _echo_all(self) -> list[Any]:
        return await asyncio.gather(*[actor.echo(PAYLOAD) for actor in self._all])

    def close(self) -> None:
        """Stop the pool."""
        self._loop.run_until_complete(self._pool.stop())

    def call_sync(self, calls: int) -> list[float]:
        """A plain method, awaited (see the module's text)."""
        return self._loop.run_until_complete(sample_async(calls, lambda: self._one.echo(PAYLOAD)))

    def call_async(self, calls: int) -> list[float]:
        """A coroutine method, awaited."""
        return self._loop.run_until_complete(sample_async(calls, lambda: self._one.aecho(PAYLOAD)))

    def pipelined(self, calls: int) -> float:
        """One `gather` over all."""

        async def run() -> float:
            start = perf_counter()
            await asyncio.gather(*[self._one.echo(PAYLOAD) for _ in range(calls)])
            return perf_counter() - start

        return self._loop.run_until_complete(run())

    def call_all(self, calls: int) -> list[float]:
        """One call per actor, gathered."""
        return self._loop.run_until_complete(sample_async(calls, self._echo_all, warm_up=5))

    def broadcast(self, casts: int) -> float:
        """`tell` waits for no reply."""

        async def run() -> float:
            start = perf_counter()
            for _ in range(casts):
                for actor in self._all:
                    await actor.echo.tell(PAYLOAD)
            await self._echo_all()
            return perf_counter() - start

        return self._loop.run_until_complete(run())

    def tensor(self, data: Any, times: int) -> list[float]:
        """The array as an ordinary argument and result."""
        return self._loop.run_until_complete(sample_async(times, lambda: self._one.echo(data), warm_up=1))

    def pids(self) -> list[int]:
        """Asked from the actors."""

        async def ask() -> list[int]:
            return list(await asyncio.gather(*[actor.pid() for actor in self._all]))

        return self._loop.run_until_complete(ask())
