"""Random use and abuse of a running mesh, from a seed: spawns, calls, cancellations, kills, all at once.

    python tests/stress/stress.py --seconds 600 --seed 7

Several threads and an event loop act on the same meshes. Every call has to end, in its result or in a named error,
before a generous limit; a mesh that nobody harmed has to answer rightly. A run is cut into rounds. Each ends with
`shutdown()`, after which nothing may be left: no process, thread, descriptor, file or waiting call.

A seed fixes what each thread asks for, not how the threads interleave: a failure prints the seed and what was done
last, and is best repeated with the same seed and `--threads`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import faulthandler
import functools
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from leftovers import TOKEN, Before, children, command, resident

from mesh_core import (
    Actor,
    ActorError,
    ActorTimeout,
    MailboxFull,
    MeshError,
    SpawnError,
    SupervisionError,
    Undeliverable,
    configure,
    endpoint,
    set_fault_handler,
    shutdown,
    this_host,
    this_proc,
)
from mesh_core import _process as internals

LIMIT = 60.0
"""Nothing takes this long, whatever happened to the machine meanwhile."""
STOP = 1.0
"""How long processes may take to stop before they are killed."""
CROWD = 14
"""The most processes at once."""
NAMED = (ActorError, ActorTimeout, MailboxFull, SpawnError, SupervisionError, Undeliverable)


class Violation(Exception):
    """A promise was broken."""


class Worker(Actor):
    """What is called."""

    def __init__(self, fail: str = "") -> None:
        if fail:
            raise ValueError(fail)
        self.seen: dict[str, int] = {}
        self.bytes = 0

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def aecho(self, value: Any) -> Any:
        return value

    @endpoint
    def next(self, sender: str, number: int) -> int:
        """Return how far behind the sender's last message this one is; 1 if they came in order."""
        step = number - self.seen.get(sender, number - 1)
        self.seen[sender] = number
        return step

    @endpoint
    def total(self, data: bytearray) -> tuple[int, bytearray]:
        data[0] = 7  # what arrives may be written to
        return len(data), data

    @endpoint(concurrent=True)
    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def lull(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    def block(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @endpoint
    def fail(self, kind: str) -> None:
        raise {
            "value": ValueError,
            "key": KeyError,
            "exit": SystemExit,
            "interrupt": KeyboardInterrupt,
            "own": Odd,
        }[kind](kind)

    @endpoint
    async def afail(self) -> None:
        raise OSError(5, "afail")

    @endpoint
    def die(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV}[how])
        time.sleep(LIMIT)  # another thread may be the one that takes the signal

    @endpoint
    def nested(self, value: int) -> int:
        """Spawn an actor beside this one, call it, stop it."""
        beside: Any = this_proc().spawn("beside", Beside)
        got: int = beside.double.call_one(value).get(LIMIT)
        beside.stop().get(LIMIT)
        return got

    @endpoint
    def count(self, data: bytes) -> None:
        self.bytes += len(data)


class Beside(Actor):
    """Spawned by actors."""

    @endpoint
    async def double(self, value: int) -> int:
        return 2 * value


class Quick(Actor):
    """Has no thread: coroutines only."""

    @endpoint
    async def aecho(self, value: Any) -> Any:
        return value

    @endpoint(concurrent=True)
    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds


class Odd(Exception):
    """Cannot be unpickled from its arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, "and more")


@dataclass(eq=False)
class Site:
    """A mesh of processes, with actors on it."""

    name: str
    size: int
    procs: Any
    workers: Any
    quick: Any
    harmed: bool = False
    stopping: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 60)))
    paused: set[int] = field(default_factory=set)


class World:
    """What all the threads share."""

    def __init__(self, seed: int, log: collections.deque[str]) -> None:
        self.seed = seed
        self.sites: list[Site] = []
        self.lock = threading.Lock()
        self.violations: list[str] = []
        self.over = threading.Event()
        self.history = log
        self.done: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()
        self.pending = 0
        """Processes that are being spawned."""
        self.spawned = 0

    def note(self, text: str) -> None:
        self.history.append(
            f"{time.monotonic() - self.started:9.3f} {threading.current_thread().name}: {text}"
        )

    def violate(self, text: str) -> None:
        self.violations.append(text)
        self.note(f"VIOLATION: {text}")
        self.over.set()


class Client:
    """One thread's (or task's) random actions. Each is a coroutine that a thread runs without a loop."""

    def __init__(self, world: World, name: str, seed: int, *, awaits: bool) -> None:
        self.world = world
        self.name = name
        self.random = random.Random(f"{seed}/{name}")
        self.awaits = awaits
        self.number = 0

    # Waiting, in this client's way.

    async def result(self, future: Any, limit: float = LIMIT) -> Any:
        if self.awaits:
            async with asyncio.timeout(limit):
                return await future
        return future.get(limit)

    async def settle(
        self, what: str, site: Site | None, wait: Callable[[], Any], check: Callable[[Any], bool]
    ) -> None:
        """Wait for a call; only a harmed site may fail it, and only with a named error."""
        started = time.monotonic()
        try:
            value = await wait()
        except NAMED as error:
            took = time.monotonic() - started
            late = isinstance(error, ActorTimeout) and took > LIMIT - 1
            if late or (site is not None and not site.harmed):
                self.world.violate(f"{what}: {type(error).__name__} after {took:.1f} s: {error}")
            else:
                self.world.note(f"{what}: {type(error).__name__}")
        except TimeoutError:
            self.world.violate(f"{what}: no answer within {LIMIT} s")
        else:
            if not check(value):
                self.world.violate(f"{what}: wrong answer {str(value)[:200]}")

    def pick(self) -> Site | None:
        with self.world.lock:
            return self.random.choice(self.world.sites) if self.world.sites else None

    def some(self, site: Site) -> tuple[Any, int]:
        """The whole mesh of workers, a part of it, or one."""
        first = self.random.randrange(site.size)
        last = self.random.randint(first + 1, site.size)
        if self.random.random() < 0.3:
            return site.workers, site.size
        return site.workers.slice(gpus=slice(first, last)), last - first

    def one(self, site: Site) -> Any:
        return site.workers.slice(gpus=self.random.randrange(site.size))

    # Actions on meshes.

    async def spawn(self) -> None:
        world, rng = self.world, self.random
        size = rng.choice([1, 1, 2, 3, 5])
        with world.lock:
            crowd = sum(site.size for site in world.sites) + world.pending
            if crowd + size > CROWD:
                return
            world.pending += size
            world.spawned += 1
            name = f"site-{world.spawned}"
        try:
            start: Literal["fork", "exec"] = "exec" if rng.random() < 0.25 else "fork"
            preload = rng.choice([[], [], [], ["decimal"]])
            world.note(f"spawn {name} of {size} by {start}, preload={preload}")
            procs = this_host().spawn_procs(
                {"gpus": size}, name, start=start, preload=preload, env={"SITE": name}, bootstrap=None
            )
            workers: Any = procs.spawn("worker", Worker)
            quick: Any = procs.spawn("quick", Quick)
            site = Site(name, size, procs, workers, quick)
            with world.lock:
                world.sites.append(site)
        finally:
            with world.lock:
                world.pending -= size
        if rng.random() < 0.5:
            await self.settle(
                f"start of {name}", site, lambda: self.result(procs.initialized), lambda v: v is None
            )

    async def stop(self) -> None:
        with self.world.lock:
            if len(self.world.sites) < 2:
                return
            site = self.random.choice(self.world.sites)
            self.world.sites.remove(site)
            site.harmed = site.stopping = True
        self.world.note(f"stop {site.name}")
        stopped = site.procs.stop()
        if self.random.random() < 0.8:
            await self.settle(f"stop of {site.name}", None, lambda: self.result(stopped), lambda v: v is None)

    async def extra(self) -> None:
        """Actors that come and go on a site."""
        site = self.pick()
        if site is None:
            return
        broken = self.random.random() < 0.3
        # A mesh whose constructor raises fails its calls; the site itself is unharmed.
        made: Any = site.procs.spawn("extra", Worker, "no") if broken else site.procs.spawn("extra", Worker)
        future = made.echo.call(3)
        if broken:
            try:
                await self.result(future)
            except NAMED as error:
                if not site.harmed and not isinstance(error, ValueError):
                    self.world.violate(f"call to a broken actor of {site.name}: {error!r}")
            else:
                self.world.violate(f"call to a broken actor of {site.name} succeeded")
        else:
            await self.settle(f"extra of {site.name}", site, lambda: self.result(future), lambda v: True)
        if self.random.random() < 0.8:
            stopped = made.stop()
            await self.settle(
                f"stop of extra of {site.name}", None, lambda: self.result(stopped), lambda v: True
            )

    # Calls.

    async def call(self) -> None:
        site = self.pick()
        if site is None:
            return
        mesh, size = self.some(site)
        value = self.random.randrange(1000)
        name = self.random.choice(["echo", "aecho"])
        future = getattr(mesh, name).call(value)
        await self.settle(
            f"{name} of {size} on {site.name}",
            site,
            lambda: self.result(future),
            lambda got: got.values() == [value] * size,
        )

    async def burst(self) -> None:
        """Many calls to one actor, in order."""
        site = self.pick()
        if site is None:
            return
        rank = self.random.randrange(site.size)
        actor = site.workers.slice(gpus=rank)
        sender = f"{self.name}/{self.world.done['burst']}/{self.random.random()}"
        futures = [actor.next.call_one(sender, n) for n in range(self.random.randint(1, 200))]
        kept = futures if self.random.random() < 0.7 else futures[:3]
        del futures
        for n, future in enumerate(kept):
            await self.settle(
                f"burst {n} to rank {rank} of {site.name}",
                site,
                functools.partial(self.result, future),
                lambda step: step == 1,
            )

    async def big(self) -> None:
        """Through shared memory, there and back."""
        site = self.pick()
        if site is None:
            return
        mesh, size = self.some(site)
        length = self.random.choice([1, 65536, 300_000, 3_000_000, 20_000_000])
        data = bytearray(b"\x05") * length
        future = mesh.total.call(data)

        def check(got: Any) -> bool:
            return all(n == length and len(back) == length and back[0] == 7 for n, back in got.values())

        await self.settle(
            f"{length} bytes to {size} of {site.name}", site, lambda: self.result(future), check
        )
        if data[0] != 5:
            self.world.violate(f"{site.name} wrote into its caller's buffer")

    async def broadcast(self) -> None:
        site = self.pick()
        if site is None:
            return
        mesh, _ = self.some(site)
        try:
            for _ in range(self.random.randint(1, 50)):
                mesh.count.broadcast(b"x" * self.random.choice([1, 1000, 100_000]))
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"broadcast to {site.name}: {error!r}")

    async def stream(self) -> None:
        site = self.pick()
        if site is None:
            return
        mesh, size = self.some(site)
        stream = mesh.nap.stream(self.random.random() / 50)
        taken = size if self.random.random() < 0.7 else self.random.randint(0, size)
        for n, future in enumerate(stream):
            if n == taken:
                break
            await self.settle(
                f"stream {n} of {size} of {site.name}",
                site,
                functools.partial(self.result, future),
                lambda got: isinstance(got, float),
            )
        if taken < size and self.random.random() < 0.5:
            stream.cancel()

    async def choose(self) -> None:
        site = self.pick()
        if site is None:
            return
        futures = [site.workers.nap.choose(0.001) for _ in range(self.random.randint(1, 10))]
        for future in futures:
            await self.settle(
                f"choose of {site.name}",
                site,
                functools.partial(self.result, future),
                lambda got: got == 0.001,
            )

    async def cancel(self) -> None:
        site = self.pick()
        if site is None:
            return
        name = self.random.choice(["nap", "lull", "block"])
        future = getattr(self.one(site), name).call_one(0.02 if name == "block" else 0.2)
        if self.awaits and self.random.random() < 0.5:
            task = asyncio.ensure_future(self.result(future))
            await asyncio.sleep(self.random.random() / 100)
            task.cancel()
            try:
                await task
            except (asyncio.CancelledError, *NAMED):
                pass
            return
        future.cancel()
        try:
            await self.result(future)
        except (asyncio.CancelledError, *NAMED):
            pass

    async def deadline(self) -> None:
        """A call that cannot make it."""
        site = self.pick()
        if site is None:
            return
        mesh, _ = self.some(site)
        limit = self.random.choice([0.0001, 0.005, 0.05])
        future = mesh.nap.with_options(timeout=limit).call(30.0)
        started = time.monotonic()
        try:
            await self.result(future)
        except ActorTimeout:
            pass
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"deadline on {site.name}: {error!r}")
        else:
            self.world.violate(f"deadline on {site.name}: 30 s passed in {time.monotonic() - started:.1f} s")
        if time.monotonic() - started > LIMIT / 2:
            self.world.violate(
                f"deadline of {limit} s on {site.name} took {time.monotonic() - started:.1f} s"
            )

    async def drop(self) -> None:
        """Futures that nobody looks at."""
        site = self.pick()
        if site is None:
            return
        mesh, _ = self.some(site)
        mesh.nap.call(self.random.random() / 20)
        mesh.fail.call("value")
        mesh.nap.stream(0.01)
        mesh.total.call(bytearray(200_000))

    async def fail(self) -> None:
        site = self.pick()
        if site is None:
            return
        kind = self.random.choice(["value", "key", "own", "exit", "interrupt"])
        future = self.one(site).fail.call_one(kind)
        try:
            await self.result(future)
        except ActorError:
            pass
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"fail({kind}) on {site.name}: {error!r}")
        else:
            self.world.violate(f"fail({kind}) on {site.name} succeeded")
        whole = site.workers.afail.call()
        try:
            await self.result(whole)
        except OSError:
            pass
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"afail on {site.name}: {error!r}")

    async def nested(self) -> None:
        site = self.pick()
        if site is None:
            return
        future = self.one(site).nested.call_one(21)
        await self.settle(f"nested on {site.name}", site, lambda: self.result(future), lambda got: got == 42)

    async def local(self) -> None:
        """An actor in the controller itself."""
        mine: Any = this_proc().spawn("mine", Beside)
        future = mine.double.call_one(4)
        await self.settle("local", None, lambda: self.result(future), lambda got: got == 8)
        stopped = mine.stop()
        await self.settle("stop of local", None, lambda: self.result(stopped), lambda got: got is None)

    # Harm.

    def harm(self) -> Site | None:
        with self.world.lock:
            if not self.world.sites:
                return None
            site = self.random.choice(self.world.sites)
            site.harmed = True
            return site

    async def kill(self) -> None:
        site = self.harm()
        if site is None:
            return
        rank = self.random.randrange(site.size)
        how = self.random.choice(["kill", "term", "segv", "exit", "from outside"])
        self.world.note(f"kill rank {rank} of {site.name}: {how}")
        if how == "from outside":
            pid = site.procs.pids[rank]
            if pid is not None:
                _signal(pid, signal.SIGKILL)
            return
        future = site.workers.slice(gpus=rank).die.call_one(how)
        try:
            await self.result(future)
        except (SupervisionError, Undeliverable, SpawnError):
            pass
        except NAMED as error:
            self.world.violate(f"die({how}) on rank {rank} of {site.name}: {error!r}")
        else:
            self.world.violate(f"die({how}) on rank {rank} of {site.name} returned")

    async def pause(self) -> None:
        """Stop a process for a moment; nothing may fail, only wait."""
        site = self.pick()
        if site is None:
            return
        pid = site.procs.pids[self.random.randrange(site.size)]
        if pid is None:
            return
        self.world.note(f"pause {pid} of {site.name}")
        _signal(pid, signal.SIGSTOP)
        future = None
        try:
            # Waiting for room would wait for the process that this very thread has stopped.
            with contextlib.suppress(MailboxFull):
                future = site.workers.echo.with_options(block=False).call(1)
            if self.awaits:
                await asyncio.sleep(self.random.random() / 10)
            else:
                self.world.over.wait(self.random.random() / 10)
        finally:
            _signal(pid, signal.SIGCONT)
        if future is None:
            return
        await self.settle(
            f"echo after a pause of {site.name}", site, lambda: self.result(future), lambda got: True
        )

    async def freeze(self) -> None:
        """Stop a process for good: only killing it can end it."""
        site = self.harm()
        if site is None or self.random.random() < 0.7:
            return
        with self.world.lock:
            if site not in self.world.sites:
                return
            self.world.sites.remove(site)
        pid = site.procs.pids[self.random.randrange(site.size)]
        self.world.note(f"freeze {pid} of {site.name} and stop it")
        if pid is not None:
            _signal(pid, signal.SIGSTOP)
        stopped = site.procs.stop()
        await self.settle(
            f"stop of frozen {site.name}", None, lambda: self.result(stopped), lambda v: v is None
        )

    async def raze(self) -> None:
        """Kill a process that forks workers, and with it all of them."""
        if self.random.random() < 0.9:
            return
        with self.world.lock:
            for site in self.world.sites:
                site.harmed = True
            if self.world.pending:
                return
            nurseries = [pid for pid in children(os.getpid()) if "mesh_core._nursery" in command(pid)]
            if nurseries:
                pid = self.random.choice(nurseries)
                self.world.note(f"kill nursery {pid}")
                _signal(pid, signal.SIGKILL)
                # A spawn before its end is noticed would be its victim too, and rightly fail: none begins until then.
                _until_gone(pid)

    def actions(self) -> tuple[list[Callable[[], Any]], list[int]]:
        table: dict[Callable[[], Any], int] = {
            self.spawn: 6, self.stop: 3, self.extra: 4, self.call: 30, self.burst: 10, self.big: 8,
            self.broadcast: 8, self.stream: 8, self.choose: 6, self.cancel: 10, self.deadline: 4, self.drop: 4,
            self.fail: 6, self.nested: 3, self.local: 2, self.kill: 2, self.pause: 2, self.freeze: 1, self.raze: 1,
        }  # fmt: skip
        return list(table), list(table.values())

    async def run(self, until: float) -> None:
        actions, weights = self.actions()
        while time.monotonic() < until and not self.world.over.is_set():
            (action,) = self.random.choices(actions, weights)
            name = action.__name__
            self.world.note(f"{self.name} {name}")
            try:
                await action()
            except NAMED as error:
                # A site that is stopped or dead refuses at once.
                self.world.note(f"{self.name} {name}: {error!r}"[:300])
            except MeshError as error:
                self.world.violate(f"{name}: an error without a name of its own: {error!r}")
            except BaseException:
                self.world.violate(f"{name}: {traceback.format_exc()}")
            self.world.done[name] += 1
            if self.awaits:
                await asyncio.sleep(0)


def _drive(coroutine: Any) -> None:
    """Run a coroutine that never really awaits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("a client of a thread awaited")


def _until_gone(pid: int) -> None:
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.001)


def _signal(pid: int, number: int) -> None:
    # One of ours at any time: a worker's pid is only used again once its death was told.
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def round_of(world: World, seconds: float, seed: int, threads: int, tasks: int) -> None:
    """Let everybody loose for a while, then shut down."""
    until = time.monotonic() + seconds

    def run_thread(index: int) -> None:
        _drive(Client(world, f"thread-{index}", seed, awaits=False).run(until))

    def run_loop() -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for index in range(tasks):
                    group.create_task(Client(world, f"task-{index}", seed, awaits=True).run(until))

        asyncio.run(main())

    crew = [
        threading.Thread(target=run_thread, args=(index,), name=f"thread-{index}", daemon=True)
        for index in range(threads)
    ]
    if tasks:
        crew.append(threading.Thread(target=run_loop, name="loop", daemon=True))
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(max(0.0, until - time.monotonic()) + 2 * LIMIT)
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            raise Violation(f"{thread.name} hangs")
    if world.violations:
        raise Violation("; ".join(world.violations))


def one_round(
    seed: int, seconds: float, mark: str, *, threads: int, tasks: int, log: collections.deque[str]
) -> World:
    """A round with everything that has to hold after it."""
    before = Before.now(mark)
    world = World(seed, log)
    round_of(world, seconds, seed, threads, tasks)
    runtime = internals.current().runtime
    started = time.monotonic()
    shutdown()
    took = time.monotonic() - started
    counts = runtime.counts()
    for site in world.sites:
        site.procs = site.workers = site.quick = None
    world.sites.clear()
    del runtime
    if took > STOP + 10:
        raise Violation(f"shutdown() took {took:.1f} s")
    wrong = {key: value for key, value in counts.items() if key != "shm_bytes" and value}
    if wrong:
        raise Violation(f"after shutdown() the runtime counts {wrong}")
    if found := before.leftovers():
        raise Violation("left after shutdown(): " + "; ".join(found))
    return world


def main() -> int:
    """Run rounds until the time is up; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description="Random use and abuse of a running mesh, from a seed.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--round", type=float, default=10.0, help="seconds of one round")
    parser.add_argument("--threads", type=int, default=3, help="client threads")
    parser.add_argument("--tasks", type=int, default=3, help="tasks of the client event loop")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    mark = f"{os.getpid()}-{seed}"
    os.environ[TOKEN] = mark
    faulthandler.enable()
    configure(stop_timeout=STOP)
    # Deaths are looked for in the calls that they interrupt; who else hears of them is chaos.py's affair.
    set_fault_handler(lambda failure: None)
    log: collections.deque[str] = collections.deque(maxlen=300)
    done: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + options.seconds
    sizes: list[int] = []
    rounds = 0
    print(f"seed {seed}, {options.seconds:.0f} s", flush=True)
    try:
        while rounds == 0 or time.monotonic() < end - 0.5 * options.round:
            length = min(options.round, max(1.0, end - time.monotonic()))
            world = one_round(
                seed + rounds, length, mark, threads=options.threads, tasks=options.tasks, log=log
            )
            done += world.done
            rounds += 1
            sizes.append(resident())
            print(f"round {rounds}: {sum(world.done.values())} actions, {sizes[-1] >> 20} MiB", flush=True)
        grown = sizes[-1] - sizes[min(2, len(sizes) - 1)]
        if grown > 64 << 20:
            raise Violation(f"the controller grew by {grown >> 20} MiB over {rounds} rounds: {sizes}")
    except Violation as violation:
        print(*log, sep="\n", file=sys.stderr)
        print(
            f"\nseed {seed}, round {rounds + 1} (seed {seed + rounds}): {violation}",
            file=sys.stderr,
            flush=True,
        )
        # Threads may hang: the end of this process takes everything with it.
        os._exit(1)
    print(
        f"seed {seed}: {sum(done.values())} actions in {rounds} rounds, nothing left: {dict(done)}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
