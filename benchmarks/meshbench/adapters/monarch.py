# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator"
"""Monarch, as its getting-started page shows it. It needs no torch for actors; without it, it imports faster."""

from __future__ import annotations

import asyncio
import os
import threading
from time import perf_counter
from typing import Any

from monarch import actor as actor_module
from monarch.actor import Actor, endpoint, shutdown_context, this_host

from meshbench.adapter import PAYLOAD
from meshbench.adapters.monarch_hosts import Hosts
from meshbench.adapters.monarch_pairs import Pairs
from meshbench.processes import Killer
from meshbench.timing import sample, sample_async

_TIMEOUT = 60.0


class Echo(Actor):
    """Plain endpoints; Monarch does not mix them with coroutines in one actor."""

    @endpoint
    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x

    @endpoint
    def pid(self) -> int:
        """Which process this is."""
        return os.getpid()


class AsyncEcho(Actor):
    """The same as a coroutine."""

    @endpoint
    async def aecho(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


class Stuck(Actor):
    """Never answers."""

    @endpoint
    def pid(self) -> int:
        """Which process this is."""
        return os.getpid()

    @endpoint
    def hold(self) -> None:
        """Wait for ever."""
        threading.Event().wait()


class System(Hosts, Pairs):
    """See `meshbench.adapter.KillSystem`; over several hosts, `Hosts`."""

    module = "monarch.actor"
    names = "Actor, endpoint, this_host"
    distribution = "torchmonarch"
    kills = 1  # each takes about nine seconds

    def start(self, procs: int) -> None:
        """Spawn `procs` processes with an actor each."""
        self._procs = this_host().spawn_procs(per_host={"gpus": procs})
        self._all = self._procs.spawn("echo", Echo)
        self._one = self._all.slice(gpus=0)
        self._all.echo.call(PAYLOAD).get()

    def close(self) -> None:
        """Stop the processes, then the runtime in this one."""
        self._procs.stop().get()
        shutdown_context().get()

    def call_sync(self, calls: int) -> list[float]:
        """Blocking calls from this thread."""
        call = self._one.echo.call_one
        return sample(calls, lambda: call(PAYLOAD).get())

    def call_async(self, calls: int) -> list[float]:
        """Awaited calls from a loop."""
        call = self._procs.spawn("aecho", AsyncEcho).slice(gpus=0).aecho.call_one
        return asyncio.run(sample_async(calls, lambda: call(PAYLOAD)))

    def pipelined(self, calls: int) -> float:
        """Issue all, then wait for all."""
        call = self._one.echo.call_one
        start = perf_counter()
        futures = [call(PAYLOAD) for _ in range(calls)]
        for future in futures:
            future.get()
        return perf_counter() - start

    def call_all(self, calls: int) -> list[float]:
        """Calls to the whole mesh."""
        call = self._all.echo.call
        return sample(calls, lambda: call(PAYLOAD).get(), warm_up=5)

    def broadcast(self, casts: int) -> float:
        """Broadcasts, then a call as a barrier."""
        cast = self._all.echo.broadcast
        start = perf_counter()
        for _ in range(casts):
            cast(PAYLOAD)
        self._all.echo.call(PAYLOAD).get()
        return perf_counter() - start

    def tensor(self, data: Any, times: int) -> list[float]:
        """The array as an ordinary argument and result."""
        call = self._one.echo.call_one
        return sample(times, lambda: call(data).get(), warm_up=1)

    def pids(self) -> list[int]:
        """Asked from the actors."""
        return [int(pid) for pid in self._all.pid.call().get().values()]

    def kill_detection(self, kills: int) -> list[float]:
        """Kill a process whose reply this thread waits for, from another thread."""
        # By default a failure that no actor handles ends the script.
        actor_module.unhandled_fault_hook = lambda failure: None
        taken = []
        for _ in range(min(kills, self.kills)):
            procs = this_host().spawn_procs(per_host={"gpus": 1})
            stuck = procs.spawn("stuck", Stuck)
            killer = Killer(stuck.pid.call_one().get())
            waiting = stuck.hold.call_one()
            killer.start()
            try:
                waiting.get(timeout=_TIMEOUT)
            except Exception:  # noqa: BLE001 - whatever it calls it
                taken.append(perf_counter() - killer.struck())
            else:
                raise RuntimeError("a killed process has answered")
        shutdown_context().get()
        return taken
