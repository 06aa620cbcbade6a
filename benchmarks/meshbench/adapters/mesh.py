# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator"
"""Mesh, as its README shows it: one script, `this_host()`, a mesh of procs, an actor in each."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from mesh_core import Actor, SupervisionError, endpoint, this_host
from meshbench.adapter import PAYLOAD
from meshbench.adapters.mesh_hosts import Hosts
from meshbench.adapters.mesh_pairs import Pairs
from meshbench.adapters.mesh_pieces import Pieces
from meshbench.adapters.mesh_pool import Pools
from meshbench.adapters.mesh_queue import Queues
from meshbench.processes import Killer, alive, pss_bytes
from meshbench.timing import sample, sample_async

_TIMEOUT = 120.0
_WORK = (
    1500  # additions in `Echo.work`: some tens of microseconds, the same count however busy the machine is
)
_SETTLE = 0.05  # seconds in which those who are to wait have begun to
_GRACE = 2.0  # seconds in which a stopped process may still be on its way out before it counts as left behind


class Echo(Actor):
    """Answers with what it was sent."""

    @endpoint
    def echo(self, x: Any) -> Any:
        """A plain endpoint."""
        return x

    @endpoint
    async def aecho(self, x: Any) -> Any:
        """The same as a coroutine."""
        return x

    @endpoint
    def pid(self) -> int:
        """Which process this is."""
        return os.getpid()

    @endpoint
    def work(self, additions: int) -> int:
        """A fixed amount of computing, so that a processor taken away shows as fewer calls."""
        return sum(range(additions))

    @endpoint
    def share(self, size: int) -> Any:
        """A float, or an array of so many bytes."""
        return import_module("numpy").ones(size // 8) if size else 1.0

    @endpoint
    def rally(self, peer: Any, rounds: int) -> int:
        """Call `peer` back and forth `rounds` times."""
        for _ in range(rounds):
            peer.echo.call_one(PAYLOAD).get()
        return rounds


class Printer(Actor):
    """Prints at a rate."""

    @endpoint
    def print_lines(self, seconds: float, rate: float, shown: bool) -> float:
        """Print for `seconds` seconds, at most `rate` lines a second; return how many a second it became."""
        out = sys.stdout if shown else Path(os.devnull).open("w", buffering=1)  # noqa: SIM115 - ends with the process
        start, count = perf_counter(), 0
        while (passed := perf_counter() - start) < seconds:
            if count >= passed * rate:
                time.sleep(0.001)
                continue
            for _ in range(20):
                print(f"step {count}: loss 0.123, as long a line as people print", file=out)
                count += 1
        return count / (perf_counter() - start)


class AsyncEcho(Actor):
    """An actor with nothing but a coroutine, as spawned by the thousand."""

    @endpoint
    async def aecho(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


class PlainEcho(Actor):
    """An actor with nothing but a plain function."""

    @endpoint
    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x


class Caller(Actor):
    """Calls another, and waits for it on its thread."""

    @endpoint
    def times(self, peer: Any, calls: int) -> list[float]:
        """Seconds of each call."""
        call = peer.echo.call_one
        return sample(calls, lambda: call(PAYLOAD).get())


class AsyncCaller(Actor):
    """The same as a coroutine."""

    @endpoint
    async def aecho(self, x: Any) -> Any:
        """Answer with `x`."""
        return x

    @endpoint
    async def times(self, peer: Any, calls: int) -> list[float]:
        """Seconds of each call."""
        call = peer.aecho.call_one
        return await sample_async(calls, lambda: call(PAYLOAD))


class Stuck(Actor):
    """Never answers."""

    @endpoint
    def pid(self) -> int:
        """Which process this is."""
        return os.getpid()

    @endpoint(concurrent=True)
    async def hold(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


class System(Hosts, Pools, Queues, Pairs, Pieces):
    """See `meshbench.adapter.MeshSystem`; over several hosts, `Hosts`."""

    module = "mesh_core"
    names = "Actor, endpoint, this_host"
    distribution = "mesh-core"
    kills = 20

    def start(self, procs: int) -> None:
        """Spawn `procs` processes with an actor each."""
        self._procs = this_host().spawn_procs(per_host={"gpus": procs})
        self._all = self._procs.spawn("echo", Echo)
        self._one = self._all.slice(gpus=0)
        self._all.echo.call(PAYLOAD).get(timeout=_TIMEOUT)

    def close(self) -> None:
        """Stop the processes."""
        self._procs.stop().get(timeout=_TIMEOUT)

    def call_sync(self, calls: int) -> list[float]:
        """Blocking calls from this thread."""
        call = self._one.echo.call_one
        return sample(calls, lambda: call(PAYLOAD).get())

    def call_async(self, calls: int) -> list[float]:
        """Awaited calls from a loop."""
        call = self._one.aecho.call_one
        return asyncio.run(sample_async(calls, lambda: call(PAYLOAD)))

    def promises(self, count: int) -> float:
        """Make promises, keep each and get its result, one at a time."""
        promise = getattr(import_module("mesh_core"), "Promise", None)
        if promise is None:
            return math.nan  # an earlier version, beside which a later one is held
        start = perf_counter()
        for _ in range(count):
            one = promise()
            one.set_result(PAYLOAD)
            one.future.get()
        return perf_counter() - start

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
        return [int(pid) for pid in self._all.pid.call().get(timeout=_TIMEOUT).values()]

    def many_procs(self, procs: int) -> tuple[float, int]:
        """Spawn, call, stop; then look whether any worker is still there."""
        start = perf_counter()
        self.start(procs)
        pids = self.pids()
        self.close()
        taken = perf_counter() - start
        if len(set(pids)) != procs:
            raise RuntimeError(f"asked for {procs} processes, reached {len(set(pids))}")
        give_up = perf_counter() + _GRACE
        while alive(pids) and perf_counter() < give_up:
            time.sleep(0.02)
        return taken, len(alive(pids))

    def _stuck(self) -> tuple[Any, Any, int]:
        procs = this_host().spawn_procs()
        stuck = procs.spawn("stuck", Stuck)
        return procs, stuck, stuck.pid.call_one().get(timeout=_TIMEOUT)

    def kill_detection(self, kills: int) -> list[float]:
        """Kill a process whose reply this thread waits for, from another thread."""
        taken = []
        for _ in range(kills):
            procs, stuck, pid = self._stuck()
            waiting = stuck.hold.call_one()
            killer = Killer(pid)
            killer.start()
            error = waiting.exception(timeout=_TIMEOUT)
            taken.append(perf_counter() - killer.struck())
            _expect_death(error)
            procs.stop().get(timeout=_TIMEOUT)
        return taken

    def failure_in_threads(self, callers: int) -> float:
        """All of them wait when the process dies."""
        procs, stuck, pid = self._stuck()
        calls = [stuck.hold.call_one() for _ in range(callers)]
        ready = threading.Barrier(callers + 1)

        def wait(call: Any) -> float:
            ready.wait(_TIMEOUT)
            error = call.exception(timeout=_TIMEOUT)
            now = perf_counter()
            _expect_death(error)
            return now

        with ThreadPoolExecutor(callers) as pool:
            waiting = [pool.submit(wait, call) for call in calls]
            ready.wait(_TIMEOUT)
            time.sleep(_SETTLE)
            start = perf_counter()
            os.kill(pid, signal.SIGKILL)
            last = max(each.result() for each in waiting)
        procs.stop().get(timeout=_TIMEOUT)
        return last - start

    def failure_in_tasks(self, callers: int) -> float:
        """All of them await a reply when the process dies."""
        procs, stuck, pid = self._stuck()

        async def main() -> float:
            calls = [stuck.hold.call_one().as_asyncio() for _ in range(callers)]
            await asyncio.sleep(_SETTLE)
            start = perf_counter()
            os.kill(pid, signal.SIGKILL)
            errors = await asyncio.gather(*calls, return_exceptions=True)
            taken = perf_counter() - start
            for error in errors:
                _expect_death(error)
            return taken

        taken = asyncio.run(main())
        procs.stop().get(timeout=_TIMEOUT)
        return taken

    def call_mixed(self, calls: int) -> list[float]:
        """Each kind in turn."""
        plain, coroutine = self._one.echo.call_one, self._one.aecho.call_one
        turns = itertools.cycle((plain, coroutine))
        return sample(calls, lambda: next(turns)(PAYLOAD).get())

    def call_neighbour(self, calls: int, how: str) -> list[float]:
        """Timed in the actor that calls."""
        caller: Any
        peer: Any
        if how == "plain":
            caller, peer = self._procs.spawn("caller", Caller), self._one
        else:
            caller = self._procs.spawn("caller", AsyncCaller)
            # Actors of a class share an event loop.
            peer = self._procs.spawn("peer", AsyncCaller if how == "awaited" else AsyncEcho)
        taken: list[float] = caller.times.call_one(peer, calls).get(timeout=_TIMEOUT)
        caller.stop().get(timeout=_TIMEOUT)
        return taken

    def many_threads(self, actors: int) -> tuple[float, float, float]:
        """Spawn and call them one by one."""
        self.start(1)
        (worker,) = self.pids()
        there, start = pss_bytes(worker), perf_counter()
        meshes = [self._procs.spawn(f"actor{i}", PlainEcho) for i in range(actors)]
        self._all_answer(meshes)
        between = perf_counter()
        self._all_answer(meshes)
        taken, again = between - start, perf_counter() - between
        there = pss_bytes(worker) - there
        self.close()
        return taken, again, there / actors

    def _all_answer(self, meshes: list[Any]) -> None:
        futures = [mesh.echo.call_one(i) for i, mesh in enumerate(meshes)]
        for i, future in enumerate(futures):
            if future.get(timeout=_TIMEOUT) != i:
                raise RuntimeError(f"actor {i} answered for another")

    def many_actors(self, actors: int) -> tuple[float, float, float]:
        """Spawn and call async actors one by one, all in the first process."""
        self.start(1)
        (worker,) = self.pids()
        there, here = pss_bytes(worker), pss_bytes(os.getpid())
        start = perf_counter()
        meshes = [self._procs.spawn(f"actor{i}", AsyncEcho) for i in range(actors)]
        futures = [mesh.aecho.call_one(i) for i, mesh in enumerate(meshes)]
        for i, future in enumerate(futures):
            if future.get(timeout=_TIMEOUT) != i:
                raise RuntimeError(f"actor {i} answered for another")
        taken = perf_counter() - start
        del futures
        there, here = pss_bytes(worker) - there, pss_bytes(os.getpid()) - here
        self.close()
        return taken, there / actors, here / actors

    def reduce_all(self, reduce: bool, size: int, times: int) -> list[tuple[float, float]]:
        """`with_options(reduce="sum")`, or a call and `sum`."""
        total = self._all.share.with_options(reduce="sum")
        samples = []
        for _ in range(times + 1):
            start, here = perf_counter(), time.process_time()
            if reduce:
                total.call(size).get(timeout=_TIMEOUT)
            else:
                sum(self._all.share.call(size).get(timeout=_TIMEOUT).values())
            samples.append((perf_counter() - start, time.process_time() - here))
        return samples[1:]  # the first maps memory

    def busy_work(self, rounds: int) -> float:
        """Every process computes, twice as many of them as cores."""
        procs = max(4, 2 * (os.cpu_count() or 1))
        self.start(procs)
        work = self._all.work.call
        for future in [work(_WORK) for _ in range(20)]:
            future.get()
        start = perf_counter()
        for future in [work(_WORK) for _ in range(rounds)]:
            future.get()
        taken = perf_counter() - start
        self.close()
        return rounds * procs / taken

    def busy_pingpong(self, rounds: int) -> float:
        """Twice as many pairs as cores, so waiting processes always have others to stand back for."""
        pairs = max(4, 2 * (os.cpu_count() or 1))
        self.start(2 * pairs)
        self._rally(pairs, 20)  # makes the connections
        taken = self._rally(pairs, rounds)
        self.close()
        return pairs * rounds / taken

    def log_rate(self, seconds: float) -> float:
        """Two processes print as fast as they can; what is shown goes nowhere."""
        self.start(2)
        printers = self._procs.spawn("printers", Printer)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            start = perf_counter()
            rates = printers.print_lines.call(seconds, 1e9, True).get(timeout=_TIMEOUT).values()
            lasted = perf_counter() - start
            self.close()
            taken = perf_counter() - start
        return sum(rates) * lasted / taken

    def calls_beside_lines(self, seconds: float, rate: float, shown: bool) -> list[float]:
        """Two processes print, a third answers."""
        self.start(1)
        call = self._one.echo.call_one
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        printers = procs.spawn("printers", Printer)
        printers.print_lines.call(0.01, rate / 2, shown).get(timeout=_TIMEOUT)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            printing = printers.print_lines.call(seconds, rate / 2, shown)
            taken = []
            while not printing.done():
                taken += sample(200, lambda: call(PAYLOAD).get(), warm_up=0)
            reached = sum(printing.get(timeout=_TIMEOUT).values())
            procs.stop().get(timeout=_TIMEOUT)
            self.close()
        if reached < 0.8 * rate:
            raise RuntimeError(f"only {reached:,.0f} of {rate:,.0f} lines a second were printed")
        return taken

    def _rally(self, pairs: int, rounds: int) -> float:
        start = perf_counter()
        rallies = [
            self._all.slice(gpus=2 * i).rally.call_one(self._all.slice(gpus=2 * i + 1), rounds)
            for i in range(pairs)
        ]
        for rally in rallies:
            rally.get(timeout=_TIMEOUT)
        return perf_counter() - start


def _expect_death(error: Any) -> None:
    if not isinstance(error, SupervisionError):
        raise RuntimeError(f"a killed process gave {error!r}")
