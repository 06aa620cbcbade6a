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
import faulthandler
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from calls import Caller
from harm import Vandal
from leftovers import TOKEN, Before, growth, resident, runtime_folder
from world import LIMIT, NAMED, STOP, Violation, World

from mesh_core import MeshError, configure, set_fault_handler, shutdown
from mesh_core._common import current as internals


class Anybody(Caller, Vandal):
    """Does everything, each thing more or less often."""

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


def round_of(world: World, seconds: float, seed: int, threads: int, tasks: int) -> None:
    """Let everybody loose for a while, then shut down."""
    until = time.monotonic() + seconds

    def run_thread(index: int) -> None:
        _drive(Anybody(world, f"thread-{index}", seed, awaits=False).run(until))

    def run_loop() -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for index in range(tasks):
                    group.create_task(Anybody(world, f"task-{index}", seed, awaits=True).run(until))

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
    # Not what results hold that this script has: those go when Python lets them go.
    held = ("shm_bytes", "held_reply_bytes")
    wrong = {key: value for key, value in counts.items() if key not in held and value}
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
        f"seed {seed}: {sum(done.values())} actions in {rounds} rounds, nothing left: {dict(done)}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    with runtime_folder():
        sys.exit(main())
