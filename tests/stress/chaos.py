"""Random kills under load, from a seed: every call ends, every failure reaches its owner once, nothing is left.

    python tests/stress/chaos.py --seconds 600 --seed 7

Several threads and an event loop build small trees of owners, put them under load, and harm them: signals, exits,
exceptions in calls and broadcasts, exhausted memory, `Instance.kill`, `abort` and `stop`, stopped processes, dead owners.
Every owner writes down what it is told. A case waits for what has to be told, and for the end of what has lost its
owner; after a round nothing else may have been told, and nothing may be left.

A seed fixes what each client does, not how they interleave.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import faulthandler
import functools
import itertools
import os
import random
import resource
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leftovers import TOKEN, Before, growth, resident, runtime_folder

from mesh_core import (
    Actor,
    ActorError,
    ActorTimeout,
    MailboxFull,
    MeshFailure,
    SpawnError,
    SupervisionError,
    Undeliverable,
    configure,
    context,
    endpoint,
    get_or_spawn_controller,
    set_fault_handler,
    shutdown,
    this_host,
)
from mesh_core._common import current as internals

LIMIT = 60.0
"""Nothing takes this long, whatever happened to the machine meanwhile."""
STOP = 2.0
NAMED = (ActorError, ActorTimeout, MailboxFull, SpawnError, SupervisionError, Undeliverable)

DEADLY = ("SIGKILL", "SIGTERM", "SIGSEGV", "exit", "abort", "starve")
"""What a process dies of."""
FATAL = ("broadcast", "async broadcast", "exit in a broadcast", "kill")
"""What an actor fails of; its process lives on."""
HARMLESS = ("call", "async call", "exit in a call", "memory", "SIGSTOP", "stop")
"""What is no failure."""


class Violation(Exception):
    """A promise was broken."""


class Part(Actor):
    """What is owned, called, and harmed."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def aecho(self, value: Any) -> Any:
        return value

    @endpoint(concurrent=True)
    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def count(self, data: bytes) -> None:
        pass

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def afail(self) -> None:
        raise OSError(5, "chaos")

    @endpoint
    def exit(self) -> None:
        os._exit(3)

    @endpoint
    def end(self, how: str) -> None:
        getattr(context().actor_instance, how)("chaos")

    @endpoint
    def exhaust(self, *, for_good: bool) -> int:
        """Ask for more memory than this process may have."""
        before = resource.getrlimit(resource.RLIMIT_AS)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), before[1]))
        try:
            return len(bytearray(1 << 30))
        finally:
            if not for_good:
                resource.setrlimit(resource.RLIMIT_AS, before)


class Boss(Part):
    """Owns parts, or other bosses. Answers as it was told to, and writes down what it is asked."""

    def __init__(self, name: str, answer: str, ledger: str) -> None:
        self.name = name
        self.answer = answer
        self.ledger = ledger

    @endpoint
    def hire(self, name: str, n: int) -> tuple[Any, list[int]]:
        self.parts = this_host().spawn_procs({"n": n}, f"{name}-procs").spawn(name, Part)
        return self.parts, self.parts.pid.call().get(LIMIT).values()

    @endpoint
    def promote(self, name: str, answer: str) -> tuple[Any, int]:
        """Have a boss below this one."""
        kind: Any = type(self)
        self.below = (
            this_host().spawn_procs(name=f"{name}-procs").spawn(name, kind, name, answer, self.ledger)
        )
        return self.below, self.below.pid.call_one().get(LIMIT)

    @endpoint
    def place(self, procs: Any, name: str) -> Any:
        """Have an actor on processes that another owns."""
        self.placed = procs.spawn(name, Part)
        self.placed.pid.call().get(LIMIT)
        return self.placed

    @endpoint
    def relay(self, value: Any) -> Any:
        return self.parts.aecho.call(value).get(LIMIT, return_exceptions=True).values()

    @endpoint
    def controller(self, name: str) -> int:
        return int(get_or_spawn_controller(name, Part).get(LIMIT).pid.call_one().get(LIMIT))

    def note(self, failure: MeshFailure) -> bool:
        fd = os.open(self.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{self.name} {failure.mesh_name} {failure.rank}\n".encode())
        os.close(fd)
        if self.answer == "raise":
            raise LookupError("the boss fails")
        return self.answer in {"handle", "slow"}

    def __supervise__(self, failure: MeshFailure) -> Any:
        if self.answer == "slow":
            time.sleep(0.05)
        return self.note(failure)


class SoftBoss(Boss):
    """The same as a coroutine."""

    async def __supervise__(self, failure: MeshFailure) -> Any:
        await asyncio.sleep(0.05 if self.answer == "slow" else 0)
        return self.note(failure)


class World:
    """What all clients share: what was told to whom, and what had to be."""

    def __init__(self, ledger: str, log: collections.deque[str]) -> None:
        self.ledger = ledger
        self.history = log
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.violations: list[str] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.root: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.wanted: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.allowed: set[tuple[str, str, str]] = set()
        self.numbers = itertools.count()

    def note(self, text: str) -> None:
        self.history.append(
            f"{time.monotonic() - self.started:9.3f} {threading.current_thread().name}: {text}"
        )

    def violate(self, text: str) -> None:
        self.violations.append(text)
        self.note(f"VIOLATION: {text}")
        self.over.set()

    def handler(self, failure: MeshFailure) -> None:
        with self.lock:
            self.root["script", failure.mesh_name, str(failure.rank)] += 1
        if failure.pid is None or not failure.host or str(failure.pid) not in failure.report():
            self.violate(f"a failure that does not say where: {failure!r}")

    def told(self) -> collections.Counter[tuple[str, str, str]]:
        """Who was told of which mesh and rank, how often."""
        path = Path(self.ledger)
        lines = path.read_text().splitlines() if path.exists() else []
        with self.lock:
            found = collections.Counter(self.root)
        found.update((who, mesh, rank) for who, mesh, rank in map(str.split, lines))
        return found

    def check(self) -> None:
        """Everything that had to be told was told once, and nothing else."""
        told = self.told()
        for key, times in self.wanted.items():
            if told[key] != times:
                raise Violation(f"{key} was told {told[key]} times, not {times}")
        for key, times in told.items():
            if key not in self.wanted and (key not in self.allowed or times > 1):
                raise Violation(f"{key} was told {times} times, and had not to be")


class Client:
    """One thread's (or task's) random cases. Each is a coroutine that a thread runs without a loop."""

    def __init__(self, world: World, name: str, seed: int, *, awaits: bool) -> None:
        self.world = world
        self.name = name
        self.random = random.Random(f"{seed}/{name}")
        self.awaits = awaits

    def new(self, stem: str) -> str:
        return f"{stem}-{next(self.world.numbers)}"

    async def sleep(self, seconds: float) -> None:
        if self.awaits:
            await asyncio.sleep(seconds)
        else:
            self.world.over.wait(seconds)

    async def result(self, future: Any) -> Any:
        if self.awaits:
            async with asyncio.timeout(LIMIT):
                return await future
        return future.get(LIMIT)

    async def outcome(self, what: str, future: Any) -> Any:
        """A call's value, or its named error; anything else breaks a promise."""
        started = time.monotonic()
        try:
            return await self.result(future)
        except NAMED as error:
            if isinstance(error, ActorTimeout) and time.monotonic() - started > LIMIT - 1:
                self.world.violate(f"{what}: {error}")
            return error
        except TimeoutError:
            self.world.violate(f"{what}: no answer within {LIMIT} s")
            return None

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            if self.world.over.is_set():
                return
            if time.monotonic() > end:
                self.world.violate(f"{what} has not come about")
                return
            await self.sleep(0.005)

    async def expect(self, who: str, mesh: str, rank: int) -> None:
        """Somebody is to be told, once."""
        key = (who, mesh, str(rank))
        with self.world.lock:
            self.world.wanted[key] += 1
        await self.until(f"the telling of {key}", lambda: self.world.told()[key] > 0)

    # Load.

    def load(self, mesh: Any, size: int) -> list[tuple[str, Any, Callable[[Any], bool]]]:
        """Calls of all kinds that are under way, with what their values have to be."""
        rng = self.random
        calls: list[tuple[str, Any, Callable[[Any], bool]]] = []
        for _ in range(rng.randint(1, 6)):
            kind = rng.choice(["echo", "aecho", "nap", "large", "stream", "broadcast", "timeout"])
            try:
                if kind in {"echo", "aecho"}:
                    value = rng.random()
                    future = getattr(mesh, kind).call(value)
                    calls.append((kind, future, functools.partial(_are, [value] * size)))
                elif kind == "nap":
                    calls.append((kind, mesh.nap.call(0.02), lambda got: len(got) == size))
                elif kind == "large":
                    data = bytes(rng.choice([70_000, 3_000_000]))
                    calls.append(
                        (
                            kind,
                            mesh.echo.call(data),
                            functools.partial(_are_long, len(data)),
                        )
                    )
                elif kind == "stream":
                    calls += [(kind, future, lambda got: got == 0.01) for future in mesh.nap.stream(0.01)]
                elif kind == "timeout":
                    calls.append((kind, mesh.nap.with_options(timeout=0.01).call(20.0), lambda got: False))
                else:
                    for _ in range(30):
                        mesh.count.broadcast(b"x" * 1000)
            except NAMED as error:
                # It is dead already, and says so at once.
                self.world.note(f"{kind}: {error!r}"[:200])
        return calls

    async def settle(self, calls: list[tuple[str, Any, Callable[[Any], bool]]], *, harmed: bool) -> None:
        for kind, future, right in calls:
            got = await self.outcome(kind, future)
            if isinstance(got, NAMED):
                if not harmed and not (kind == "timeout" and isinstance(got, ActorTimeout)):
                    self.world.violate(f"{kind} of a mesh that nobody has harmed: {got!r}")
            elif got is not None and not right(got):
                self.world.violate(f"{kind}: a wrong answer {str(got)[:200]}")

    # Harm.

    async def harm(self, how: str, part: Any, pid: int) -> None:
        """Do it to one actor; returns when it is done, or under way."""
        self.world.note(f"{self.name} harms {pid}: {how}")
        if how == "SIGSTOP":
            _signal(pid, signal.SIGSTOP)
            await self.sleep(self.random.random() / 20)
            _signal(pid, signal.SIGCONT)
        elif how.startswith("SIG"):
            _signal(pid, signal.Signals[how])
        elif how == "exit":
            await self.lost(part.exit.call_one())
        elif how in {"abort", "kill", "stop"}:
            await self.outcome(how, part.end.call_one(how))
        elif how == "broadcast":
            part.fail.broadcast(ValueError("chaos"))
        elif how == "async broadcast":
            part.afail.broadcast()
        elif how == "exit in a broadcast":
            part.fail.broadcast(SystemExit(3))
        elif how in {"call", "exit in a call", "async call", "memory"}:
            error = await self.outcome(
                how,
                {
                    "call": lambda: part.fail.call_one(ValueError("chaos")),
                    "exit in a call": lambda: part.fail.call_one(SystemExit(3)),
                    "async call": part.afail.call_one,
                    "memory": lambda: part.exhaust.call_one(for_good=False),
                }[how](),
            )
            wanted = {"call": ValueError, "async call": OSError}.get(how, ActorError)
            if not isinstance(error, wanted) or (how == "memory" and "MemoryError" not in str(error)):
                self.world.violate(f"{how} gave {error!r}")
        elif how == "starve":
            # Whatever becomes of a process that gets no memory any more; then it is put to an end.
            await self.outcome(how, part.exhaust.call_one(for_good=True))
            await self.settle(self.load(part, 1), harmed=True)
            _signal(pid, signal.SIGKILL)

    async def lost(self, future: Any) -> None:
        error = await self.outcome("a deadly call", future)
        if not isinstance(error, SupervisionError):
            self.world.violate(f"the call that a process died of gave {error!r}")

    async def ended(self, what: str, pidfds: list[int]) -> None:
        """All these processes end."""
        for fd in pidfds:
            await self.until(f"the end of {what}", functools.partial(_readable, fd))
            os.close(fd)

    async def stopped(self, procs: Any) -> None:
        error = await self.outcome("a stop", procs.stop())
        if error is not None:
            self.world.violate(f"a stop gave {error!r}")

    # Cases.

    async def parts(self) -> None:
        """The script owns a mesh; one of it is harmed under load."""
        name, n, how = (
            self.new("parts"),
            self.random.randint(1, 3),
            self.random.choice(DEADLY + FATAL + HARMLESS),
        )
        handled = self.random.random() < 0.2
        policy = (lambda failure: True) if handled else None
        procs = this_host().spawn_procs({"n": n}, f"{name}-procs")
        mesh: Any = procs.spawn(name, Part, supervise=policy)
        pids = (await self.result(mesh.pid.call())).values()
        rank = self.random.randrange(n)
        one = mesh.slice(n=rank)
        harmless = how in HARMLESS and how != "stop"
        calls = self.load(mesh, n)
        await self.harm(how, one, pids[rank])
        calls += self.load(mesh, n)
        await self.settle(calls, harmed=not harmless)
        if how not in HARMLESS and not handled:
            await self.expect("script", name, rank)
        elif handled:
            # Its policy goes with the stop below, which may overtake the notice.
            self.world.allowed.add(("script", name, str(rank)))
        others = [each for each in range(n) if each != rank or harmless]
        for each in others:
            if await self.outcome("a survivor", mesh.slice(n=each).echo.call_one(each)) != each:
                self.world.violate(f"{name}: {how} of rank {rank} harmed rank {each}")
        if not harmless:
            error = await self.outcome("the dead", one.echo.call_one(0))
            if not isinstance(error, (SupervisionError, Undeliverable)):
                self.world.violate(f"{name}: {how} left rank {rank} answering {error!r}")
        await self.stopped(procs)

    async def bosses(self) -> None:
        """An actor owns the mesh, and is asked about the harm."""
        rng = self.random
        name, n = self.new("boss"), rng.randint(1, 2)
        answer = rng.choice(["handle", "slow", "pass", "raise"])
        how = rng.choice(DEADLY + FATAL)
        procs = this_host().spawn_procs(name=f"{name}-procs")
        boss: Any = procs.spawn(name, rng.choice([Boss, SoftBoss]), name, answer, self.world.ledger)
        hired = self.new("hired")
        mesh, pids = await self.result(boss.hire.call_one(hired, n))
        fds = [os.pidfd_open(pid) for pid in pids]
        rank = rng.randrange(n)
        calls = self.load(mesh, n)
        calls += [("relay", boss.relay.call_one(7), lambda got: True) for _ in range(3)]
        await self.harm(how, mesh.slice(n=rank), pids[rank])
        await self.settle(calls, harmed=True)
        await self.expect(name, hired, rank)
        if answer == "pass":
            await self.expect("script", hired, rank)
        elif answer == "raise":
            await self.expect("script", name, 0)
        await self.stopped(procs)
        await self.ended(f"what {name} owned", fds)

    async def dynasties(self) -> None:
        """Bosses below bosses: one in the middle is harmed, and all below it ends."""
        rng = self.random
        top = self.new("top")
        procs = this_host().spawn_procs(name=f"{top}-procs")
        kind: Any = rng.choice([Boss, SoftBoss])
        boss: Any = procs.spawn(top, kind, top, "handle", self.world.ledger)
        chain = [(top, boss, await self.result(boss.pid.call_one()))]
        for _ in range(rng.randint(1, 2)):
            name = self.new("middle")
            below, pid = await self.result(chain[-1][1].promote.call_one(name, "pass"))
            chain.append((name, below, pid))
        hired = self.new("hired")
        mesh, pids = await self.result(chain[-1][1].hire.call_one(hired, 1))
        # And one that lives on processes of the script's.
        guest = self.new("placed")
        placed: Any = await self.result(chain[-1][1].place.call_one(procs, guest))
        # It dies with the top's process; those who still live then may hear of it.
        self.world.allowed |= {(who, guest, "0") for who in ("script", *(name for name, _, _ in chain))}
        fds = [os.pidfd_open(pid) for pid in pids]
        at = rng.randrange(len(chain))
        how = rng.choice(DEADLY + FATAL + ("stop",))
        below_fds = [os.pidfd_open(pid) for _, _, pid in chain[at + 1 :]]
        calls = self.load(mesh, 1) + self.load(placed, 1)
        name, victim, pid = chain[at]
        await self.harm(how, victim, pid)
        await self.settle(calls, harmed=True)
        await self.ended(f"what {name} owned", fds + below_fds)
        if how != "stop":
            await self.expect("script" if at == 0 else chain[at - 1][0], name, 0)
            if at > 1:
                # The top handles what the middle has passed on.
                await self.expect(top, name, 0)
        if at > 0 or how in FATAL or how == "stop":
            # Its owner has died, its process has not.
            end = await self.outcome("an orphan", placed.echo.call_one(1))
            if end == 1:
                await self.until(
                    "the end of an orphan",
                    lambda: isinstance(placed.echo.call_one(1).exception(LIMIT), Undeliverable),
                )
        await self.stopped(procs)

    async def controllers(self) -> None:
        """Many ask for the one of its kind at once; it dies, and they get another."""
        name = self.new("controller")
        procs = this_host().spawn_procs({"n": 2}, f"{name}-askers")
        askers: Any = procs.spawn(self.new("asker"), Boss, "asker", "handle", self.world.ledger)
        for _ in range(2):
            there = askers.controller.call(name)
            here = [get_or_spawn_controller(name, Part) for _ in range(3)]
            found = [await self.result(future) for future in here]
            pids = {await self.result(each.pid.call_one()) for each in found}
            pids |= set((await self.result(there)).values())
            if len(pids) != 1:
                self.world.violate(f"{len(pids)} controllers {name!r} at once")
            how = self.random.choice(("SIGKILL", "exit", "broadcast", "kill"))
            await self.harm(how, found[0], min(pids))
            await self.until("the death of a controller", functools.partial(_dead, found[0]))
            with self.world.lock:
                self.world.wanted["script", name, "0"] += 1
        await self.stopped(procs)

    async def stops(self) -> None:
        """Stop in the middle of everything: calls end, and nobody has failed."""
        name, n = self.new("stopped"), self.random.randint(1, 3)
        procs = this_host().spawn_procs({"n": n}, f"{name}-procs")
        mesh: Any = procs.spawn(name, Part)
        fds = [os.pidfd_open(pid) for pid in (await self.result(mesh.pid.call())).values()]
        calls = self.load(mesh, n)
        stop = (mesh if self.random.random() < 0.3 else procs).stop()
        calls += self.load(mesh, n)
        await self.settle(calls, harmed=True)
        await self.outcome("a stop", stop)
        await self.stopped(procs)
        await self.ended(name, fds)

    async def run(self, until: float) -> None:
        cases: dict[Callable[[], Any], int] = {
            self.parts: 6, self.bosses: 5, self.dynasties: 3, self.controllers: 1, self.stops: 2,
        }  # fmt: skip
        while time.monotonic() < until and not self.world.over.is_set():
            (case,) = self.random.choices(list(cases), list(cases.values()))
            self.world.note(f"{self.name} {case.__name__}")
            try:
                await case()
            except BaseException:
                self.world.violate(f"{case.__name__}: {traceback.format_exc()}")
            self.world.done[case.__name__] += 1


def _are(values: list[Any], got: Any) -> bool:
    return bool(got.values() == values)


def _are_long(length: int, got: Any) -> bool:
    return {len(value) for value in got.values()} == {length}


def _readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _dead(mesh: Any) -> bool:
    # The registry stops the process of one that has failed.
    return isinstance(mesh.echo.call_one(1).exception(LIMIT), (SupervisionError, Undeliverable))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _drive(coroutine: Any) -> None:
    """Run a coroutine that never really awaits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("a client of a thread awaited")


def one_round(seed: int, seconds: float, folder: str, options: Any, log: collections.deque[str]) -> World:
    """Let everybody loose for a while; then shut down, and look at what is left and who was told."""
    before = Before.now(os.environ[TOKEN])
    world = World(str(Path(folder) / f"ledger-{seed}"), log)
    set_fault_handler(world.handler)
    until = time.monotonic() + seconds

    def run_thread(index: int) -> None:
        _drive(Client(world, f"thread-{index}", seed, awaits=False).run(until))

    def run_loop() -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for index in range(options.tasks):
                    group.create_task(Client(world, f"task-{index}", seed, awaits=True).run(until))

        asyncio.run(main())

    crew = [
        threading.Thread(target=run_thread, args=(i,), name=f"thread-{i}", daemon=True)
        for i in range(options.threads)
    ]
    crew.append(threading.Thread(target=run_loop, name="loop", daemon=True))
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(max(0.0, until - time.monotonic()) + 4 * LIMIT)
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            raise Violation(f"{thread.name} hangs")
    if world.violations:
        raise Violation("; ".join(world.violations))
    runtime = internals.current().runtime
    shutdown()
    world.check()
    # Not what results hold that this script has: those go when Python lets them go.
    held = ("shm_bytes", "held_reply_bytes")
    wrong = {key: value for key, value in runtime.counts().items() if key not in held and value}
    if wrong:
        raise Violation(f"after shutdown() the runtime counts {wrong}")
    set_fault_handler(None)
    del runtime
    if found := before.leftovers():
        raise Violation("left after shutdown(): " + "; ".join(found))
    return world


def main() -> int:
    """Run rounds until the time is up; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description="Random kills under load, from a seed.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--round", type=float, default=10.0, help="seconds of one round")
    parser.add_argument("--threads", type=int, default=2, help="client threads")
    parser.add_argument("--tasks", type=int, default=2, help="tasks of the client event loop")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    os.environ[TOKEN] = f"chaos-{os.getpid()}-{seed}"
    faulthandler.enable()
    configure(stop_timeout=STOP)
    log: collections.deque[str] = collections.deque(maxlen=200)
    done: collections.Counter[str] = collections.Counter()
    sizes: list[int] = []
    rounds = told = 0
    end = time.monotonic() + options.seconds
    print(f"seed {seed}, {options.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder, runtime_folder():
        try:
            while rounds == 0 or time.monotonic() < end - 0.5 * options.round:
                length = min(options.round, max(1.0, end - time.monotonic()))
                world = one_round(seed + rounds, length, folder, options, log)
                done += world.done
                told += sum(world.wanted.values())
                rounds += 1
                sizes.append(resident())
                print(f"round {rounds}: {sum(world.done.values())} cases, {sizes[-1] >> 20} MiB", flush=True)
            if (grown := growth(sizes)) > 64 << 20:
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
        f"seed {seed}: {sum(done.values())} cases in {rounds} rounds, {told} failures told once each, nothing left: "
        f"{dict(done)}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
