"""What is measured: figures (a number with a unit and a direction) and the items of work that give them."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from time import perf_counter
from typing import Any

from meshbench.flood import alternate, garbage_cpu, slower
from meshbench.network import octets_sent
from meshbench.processes import cpu_seconds, descendants, pss_bytes

FLOOR = ("mesh", "monarch", "ray", "xoscar", "socket", "socket-1core")
SYSTEMS = ("mesh", "monarch", "ray", "xoscar")
LARGE = ("mesh", "monarch")
SPINNING = ("mesh", "mesh-nospin")
ONLY_MESH = ("mesh",)
BLOCKS = ("mesh", "ray")
HOSTS_FLOOR = ("mesh", "monarch", "ray", "rawtls")
HOSTS = ("mesh", "monarch", "ray")
PAIRS = ("mesh", "monarch", "ray")

TENSOR_BYTES = 64 << 20
IDLE_PROCS = 32
IDLE_SECONDS = 3.0
LINES_PER_SECOND = 100_000
FAR_TENSOR_BYTES = 256 << 20
CAST_BYTES = 1 << 20
_SETTLE_SECONDS = 1.0
"""Idle figures are taken after this, so that what starting up left behind has run out."""


@dataclass(frozen=True)
class Figure:
    """One number of the table."""

    title: str
    unit: str
    more_is_better: bool = False
    tail: bool = False
    """Whether its p99 means something: single operations yes, totals and rates no."""


@dataclass(frozen=True)
class Scale:
    """How much work a measurement does, and what the child knows from before it."""

    quick: bool = False
    import_seconds: float = 0.0

    def of(self, full: int, quick: int) -> int:
        """`full`, or `quick` for a quick look.

        Example:
            >>> Scale(quick=True).of(2000, 200)
            200
        """
        return quick if self.quick else full


Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Item:
    """One piece of work, done in a fresh interpreter, and the systems it is done on."""

    systems: tuple[str, ...]
    run: Callable[[Any, Scale], Samples]
    figures: tuple[str, ...]
    rounds: int | None = None
    """At most so many rounds, for work that takes some systems a minute each time."""
    time_limit: float = 180.0

    def is_for(self, system: str) -> bool:
        """Whether it is done on a system; an older mesh does what mesh does."""
        return system in self.systems or (system == "mesh-before" and "mesh" in self.systems)


FIGURES: Mapping[str, Figure] = {
    "call_sync": Figure("one call, round trip, plain endpoint from a script", "µs", tail=True),
    "call_async": Figure("one call, round trip, async endpoint awaited from asyncio", "µs", tail=True),
    "call_mixed": Figure(
        "the plain and the async endpoint of one actor called in turn, a call", "µs", tail=True
    ),
    "call_mixed_sync": Figure("the plain endpoint alone, in the same run", "µs", tail=True),
    "neighbour": Figure("one call of an actor to another in its proc, plain endpoints", "µs"),
    "neighbour_await": Figure("the same between coroutines of one class, awaited", "µs"),
    "neighbour_await_other": Figure("the same between coroutines of two classes, on two event loops", "µs"),
    "neighbour_script": Figure("one call of the script to this actor, in the same run", "µs"),
    "pipelined": Figure("pipelined calls to one actor", "1/s", more_is_better=True),
    "call_2": Figure("call to 2 procs, all replies", "µs", tail=True),
    "call_8": Figure("call to 8 procs, all replies", "µs", tail=True),
    "call_32": Figure("call to 32 procs, all replies", "µs", tail=True),
    "broadcast_2": Figure("broadcasts to 2 procs", "1/s", more_is_better=True),
    "pair_sync": Figure("one call of an actor to one of another proc, plain endpoints", "µs", tail=True),
    "pair_await": Figure("the same, awaited in a coroutine", "µs", tail=True),
    "pair_coroutines": Figure("the same, awaited, to a coroutine", "µs", tail=True),
    "pair_script": Figure("the script's call, in the same run", "µs", tail=True),
    "pair_cpu": Figure("processor time of the script's process for each call between plain endpoints", "µs"),
    "tensor": Figure("64 MiB tensor echo, both ways counted", "GB/s", more_is_better=True),
    "tensors_joined": Figure("32 MiB tensor echo", "ms"),
    "tensors_2000": Figure("the same bytes as a dict of 2,000 tensors of 16 KiB", "ms"),
    "tensors_20000": Figure("echo of a dict of 20,000 tensors of 32 bytes", "ms"),
    "tensors_pickled": Figure("that dict pickled and loaded twice, as numpy arrays", "ms"),
    "spawn_2": Figure("spawn 2 procs to first reply, cold", "s"),
    "spawn_8": Figure("spawn 8 procs to first reply, cold", "s"),
    "spawn_32": Figure("spawn 32 procs to first reply, cold", "s"),
    "spawn_2_import": Figure("the same for 2, importing included", "s"),
    "spawn_8_import": Figure("the same for 8, importing included", "s"),
    "spawn_32_import": Figure("the same for 32, importing included", "s"),
    "proc_memory": Figure("memory of an idle proc (PSS, mean of 8)", "MB"),
    "tree_memory": Figure("the same with all helper processes shared out over the procs", "MB"),
    "import": Figure("import over bare Python", "ms"),
    "import_names": Figure("the same with the names that a first script takes from it", "ms"),
    "wheel": Figure("wheel", "MB"),
    "installed": Figure("installed, without dependencies", "MB"),
    "idle_cpu": Figure("processor time of an idle mesh of 32 procs in 3 s, controller included", "ms"),
    "kill_detection": Figure("SIGKILL of a proc until the waiting caller has its error", "ms"),
    "failure_100": Figure("SIGKILL of a proc until the last of 100 waiting threads has its error", "ms"),
    "failure_100_tasks": Figure("the same with 100 tasks of one event loop", "ms"),
    "procs_1000": Figure("1,000 procs spawned, called and stopped", "s"),
    "procs_1000_left": Figure("of these, still there 2 s after stop", "procs"),
    "actors_10000": Figure("10,000 async actors in one proc, spawned and called", "s"),
    "actor_memory": Figure("memory of each of them in its proc", "KB"),
    "actor_memory_here": Figure("memory of each of them in the controller", "KB"),
    "actors_2000": Figure("2,000 actors with a plain endpoint in one proc, spawned and called", "s"),
    "actors_2000_again": Figure("all of them called again", "s"),
    "actors_2000_memory": Figure("memory of each of them in its proc", "KB"),
    "reduce_floats": Figure("floats of 256 procs, summed on the way up (reduce=)", "ms"),
    "gather_floats": Figure("the same, all replies summed here", "ms"),
    "reduce_arrays": Figure("1 MiB arrays of 256 procs, summed on the way up (reduce=)", "ms"),
    "gather_arrays": Figure("the same, all replies summed here", "ms"),
    "reduce_cpu": Figure("processor time here for these arrays, summed on the way up", "ms"),
    "gather_cpu": Figure("the same, all replies summed here", "ms"),
    "pool_makespan": Figure("pool of 8, tasks of 1 ms with a heavy tail: makespan over the ideal", "x"),
    "pool_floor": Figure("the same tasks dealt out before, one call for each replica", "x"),
    "pool_task": Figure("empty task of a pool of 8", "µs"),
    "pool_lost": Figure(
        "100,000 tasks, a replica killed every 2 s, no retries: tasks without an outcome", "tasks"
    ),
    "pool_twice": Figure("of these, run more than once", "tasks"),
    "queue_rate": Figure("small items through a queue, 4 producers and 4 takers", "1/s", more_is_better=True),
    "busy_work": Figure("calls/s, twice as many computing procs as cores", "1/s", more_is_better=True),
    "busy_pingpong": Figure(
        "round trips/s, twice as many calling pairs as cores", "1/s", more_is_better=True
    ),
    "log_rate": Figure("lines of 2 procs that are shown, at most", "1/s", more_is_better=True),
    "log_call": Figure("one call, round trip, beside 100,000 lines/s that are shown", "µs"),
    "log_call_null": Figure("the same, the lines printed to /dev/null", "µs"),
    "hosts_call": Figure("one call to another host, round trip", "µs", tail=True),
    "hosts_call_here": Figure("the same to this host, the others connected", "µs", tail=True),
    "hosts_pair": Figure("one call of an actor to one on another host, round trip", "µs", tail=True),
    "hosts_pair_here": Figure("the same to one on its own host", "µs", tail=True),
    "hosts_tensor": Figure("256 MiB tensor to another host", "GB/s", more_is_better=True),
    "hosts_tensor_back": Figure("256 MiB tensor from another host", "GB/s", more_is_better=True),
    "hosts_cast": Figure("1 MiB to 16 hosts of 8 procs, all replies", "ms"),
    "hosts_cast_copies": Figure("how often this 1 MiB went over TCP, all hosts together", "copies"),
    "hosts_kill": Figure("SIGKILL of a host's agent until the waiting caller has its error", "ms"),
    "flood_quiet": Figure(
        "calls to another host one after the other, nothing thrown", "1/s", more_is_better=True
    ),
    "flood_sink": Figure(
        "the same, 1,000 garbage connections in 5 s to a plain server beside", "1/s", more_is_better=True
    ),
    "flood_gateway": Figure("the same, to that host's gateway", "1/s", more_is_better=True),
    "flood": Figure("fewer calls with the garbage at the gateway than without any", "%"),
    "flood_beside": Figure("fewer calls with the garbage at the gateway than at the plain server", "%"),
    "flood_cpu": Figure("processor time of the gateway's process for each garbage connection", "µs"),
    "hosts_64": Figure("64 running hosts attached, 4 procs spawned on each, all called", "s"),
    "hosts_64_left": Figure("of these, still there 2 s after stop", "procs"),
}
"""All figures, in the order of the table. Samples are in these units."""


@contextmanager
def running(system: Any, procs: int) -> Iterator[None]:
    """So many processes with an actor each."""
    system.start(procs)
    try:
        yield
    finally:
        system.close()


def _micro(seconds: list[float]) -> list[float]:
    return [s * 1e6 for s in seconds]


def _milli(seconds: list[float]) -> list[float]:
    return [s * 1e3 for s in seconds]


def _call_sync(system: Any, scale: Scale) -> Samples:
    with running(system, 1):
        return {"call_sync": _micro(system.call_sync(scale.of(3000, 300)))}


def _call_async(system: Any, scale: Scale) -> Samples:
    with running(system, 1):
        return {"call_async": _micro(system.call_async(scale.of(3000, 300)))}


def _call_mixed(system: Any, scale: Scale) -> Samples:
    with running(system, 1):
        calls = scale.of(3000, 300)
        return {
            "call_mixed": _micro(system.call_mixed(calls)),
            "call_mixed_sync": _micro(system.call_sync(calls)),
        }


def _neighbours(system: Any, scale: Scale) -> Samples:
    with running(system, 1):
        calls = scale.of(3000, 300)
        return {
            "neighbour": _micro(system.call_neighbour(calls, "plain")),
            "neighbour_await": _micro(system.call_neighbour(calls, "awaited")),
            "neighbour_await_other": _micro(system.call_neighbour(calls, "two loops")),
            "neighbour_script": _micro(system.call_sync(calls)),
        }


def _pipelined(system: Any, scale: Scale) -> Samples:
    calls = scale.of(5000, 1000)
    with running(system, 1):
        system.pipelined(200)
        return {"pipelined": [calls / system.pipelined(calls) for _ in range(scale.of(5, 2))]}


def _call_all(procs: int, full: int) -> Callable[[Any, Scale], Samples]:
    def run(system: Any, scale: Scale) -> Samples:
        with running(system, procs):
            return {f"call_{procs}": _micro(system.call_all(scale.of(full, full // 10)))}

    return run


def _broadcast(system: Any, scale: Scale) -> Samples:
    casts = scale.of(5000, 1000)
    with running(system, 2):
        system.broadcast(200)
        return {"broadcast_2": [casts / system.broadcast(casts) for _ in range(scale.of(5, 2))]}


def _pairs(system: Any, scale: Scale) -> Samples:
    times = system.pairs(scale.of(3000, 500))
    return {
        "pair_sync": _micro(times.sync),
        "pair_await": _micro(times.awaited),
        "pair_coroutines": _micro(times.coroutines),
        "pair_script": _micro(times.script),
        "pair_cpu": [times.cpu * 1e6],
    }


def _tensor(system: Any, scale: Scale) -> Samples:
    # One kind for every system of a run; the driver decides, since torch is large.
    if os.environ.get("MESH_BENCH_TENSOR") == "torch":
        data = import_module("torch").ones(TENSOR_BYTES // 4)
    else:
        data = import_module("numpy").ones(TENSOR_BYTES // 4, dtype="float32")
    with running(system, 1):
        taken = system.tensor(data, scale.of(10, 3))
    return {"tensor": [2 * TENSOR_BYTES / seconds / 1e9 for seconds in taken]}


def _tensors(system: Any, scale: Scale) -> Samples:
    numpy = import_module("numpy")
    of = (
        import_module("torch").from_numpy
        if os.environ.get("MESH_BENCH_TENSOR") == "torch"
        else lambda array: array
    )
    small = {f"layers.{number}.weight": numpy.full(4096, number, dtype="float32") for number in range(2000)}
    tiny = {f"layers.{number}.bias": numpy.full(8, number, dtype="float32") for number in range(20_000)}
    work = {
        "tensors_joined": of(numpy.ones(32 << 18, dtype="float32")),
        "tensors_2000": {name: of(each) for name, each in small.items()},
        "tensors_20000": {name: of(each) for name, each in tiny.items()},
    }
    samples: dict[str, list[float]] = {name: [] for name in (*work, "tensors_pickled")}
    with running(system, 1):
        for _ in range(scale.of(5, 2)):
            for name, data in work.items():
                samples[name] += [1e3 * seconds for seconds in system.tensor(data, 1)]
            start = perf_counter()
            for _ in range(2):
                pickle.loads(pickle.dumps(tiny, 5))
            samples["tensors_pickled"].append(1e3 * (perf_counter() - start))
    return samples


def _spawn(procs: int) -> Callable[[Any, Scale], Samples]:
    def run(system: Any, scale: Scale) -> Samples:
        start = perf_counter()
        system.start(procs)
        taken = perf_counter() - start
        system.close()
        return {f"spawn_{procs}": [taken], f"spawn_{procs}_import": [taken + scale.import_seconds]}

    return run


def _memory(system: Any, scale: Scale) -> Samples:
    with running(system, 8):
        workers = system.pids()
        time.sleep(_SETTLE_SECONDS)
        tree = sum(map(pss_bytes, descendants(os.getpid())))
        procs = sum(map(pss_bytes, workers))
    return {"proc_memory": [procs / 8 / 1e6], "tree_memory": [tree / 8 / 1e6]}


def _import(system: Any, scale: Scale) -> Samples:
    """Fresh interpreters in turn: one without the import, one with it, and one that takes what a script needs from it."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def seconds(code: str) -> float:
        start = perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env=bare)
        return perf_counter() - start

    whole, names = f"import {system.module}", f"from {system.module} import {system.names}"
    seconds(names)  # so that bytecode and files are cached
    taken = [(seconds("pass"), seconds(whole), seconds(names)) for _ in range(scale.of(10, 3))]
    return {
        "import": [(with_it - without) * 1e3 for without, with_it, _ in taken],
        "import_names": [(with_them - without) * 1e3 for without, _, with_them in taken],
    }


def _installed(system: Any, scale: Scale) -> Samples:
    files = metadata.files(system.distribution) or []
    sizes = [os.path.getsize(path) for path in (file.locate() for file in files) if os.path.isfile(path)]
    return {"installed": [sum(sizes) / 1e6]}


def _idle_cpu(system: Any, scale: Scale) -> Samples:
    with running(system, IDLE_PROCS):
        others = descendants(os.getpid())
        time.sleep(_SETTLE_SECONDS)
        # This process is read last before and first after, so that reading the others does not count; and by its own
        # clock, since the kernel brings a running thread's `schedstat` up to date with the next tick only.
        before = cpu_seconds(others)
        mine = time.process_time()
        time.sleep(IDLE_SECONDS)
        mine = time.process_time() - mine
        spent = cpu_seconds(others) - before
    return {"idle_cpu": [(mine + spent) * 1e3]}


def _kill_detection(system: Any, scale: Scale) -> Samples:
    return {"kill_detection": _milli(system.kill_detection(scale.of(system.kills, 2)))}


def _failure_100(system: Any, scale: Scale) -> Samples:
    rounds = scale.of(5, 2)
    return {
        "failure_100": _milli([system.failure_in_threads(100) for _ in range(rounds)]),
        "failure_100_tasks": _milli([system.failure_in_tasks(100) for _ in range(rounds)]),
    }


def _procs_1000(system: Any, scale: Scale) -> Samples:
    taken, left = system.many_procs(1000)
    return {"procs_1000": [taken], "procs_1000_left": [float(left)]}


def _actors_10000(system: Any, scale: Scale) -> Samples:
    taken, there, here = system.many_actors(10_000)
    return {"actors_10000": [taken], "actor_memory": [there / 1e3], "actor_memory_here": [here / 1e3]}


def _actors_2000(system: Any, scale: Scale) -> Samples:
    taken, again, there = system.many_threads(2000)
    return {
        "actors_2000": [taken],
        "actors_2000_again": [again],
        "actors_2000_memory": [there / 1e3],
    }


def _reduce_256(system: Any, scale: Scale) -> Samples:
    found: Samples = {}
    with running(system, 256):
        for what, size in (("floats", 0), ("arrays", 1 << 20)):
            for way in ("reduce", "gather"):
                samples = system.reduce_all(way == "reduce", size, scale.of(10, 3))
                found[f"{way}_{what}"] = [1e3 * taken for taken, _ in samples]
                if size:
                    found[f"{way}_cpu"] = [1e3 * here for _, here in samples]
    return found


def _pool(system: Any, scale: Scale) -> Samples:
    """Most tasks are short, one in a hundred takes 20 to 60 times as long; the same for all."""
    luck = random.Random(1)
    is_mesh = system.module == "mesh_core"
    count = scale.of(10_000, 1_000) if is_mesh else scale.of(3_000, 300)
    naps = [luck.uniform(0.02, 0.06) if luck.random() < 0.01 else 0.0006 for _ in range(count)]
    empty = scale.of(10_000, 1_000) if is_mesh else scale.of(2_000, 200)
    taken, nothing = system.pool(8, naps, empty)
    # The ideal is that of a machine on which a sleep takes as long as it was asked for, and nothing else takes time.
    ideal = sum(naps) / 8
    shares: list[list[float]] = [[] for _ in range(8)]
    loads = [0.0] * 8
    for nap in naps:
        least = loads.index(min(loads))
        loads[least] += nap
        shares[least].append(nap)
    return {
        "pool_makespan": [taken / ideal],
        "pool_floor": [system.dealt(shares) / ideal],
        "pool_task": [nothing / empty * 1e6],
    }


def _pool_crashes(system: Any, scale: Scale) -> Samples:
    lost, twice = system.pool_crashes(8, scale.of(100_000, 20_000), 2.0)
    return {"pool_lost": [float(lost)], "pool_twice": [float(twice)]}


def _queue_rate(system: Any, scale: Scale) -> Samples:
    # Ray takes some hundred items a second, and would need minutes for what mesh needs to come into its stride.
    items = scale.of(20_000, 2_000) if system.module == "mesh_core" else scale.of(500, 100)
    return {"queue_rate": [system.queue_rate(4, 4, items)]}


def _busy_work(system: Any, scale: Scale) -> Samples:
    return {"busy_work": [system.busy_work(scale.of(1000, 200))]}


def _busy_pingpong(system: Any, scale: Scale) -> Samples:
    return {"busy_pingpong": [system.busy_pingpong(scale.of(2000, 300))]}


def _logs(system: Any, scale: Scale) -> Samples:
    seconds = scale.of(3, 1)
    rate = system.log_rate(seconds)
    null = system.calls_beside_lines(seconds, LINES_PER_SECOND, False)
    shown = system.calls_beside_lines(seconds, LINES_PER_SECOND, True)
    return {"log_rate": [rate], "log_call": _micro(shown), "log_call_null": _micro(null)}


@contextmanager
def over(system: Any, hosts: int, procs: int) -> Iterator[None]:
    """So many hosts, with so many of these on each."""
    system.start_hosts(hosts, procs)
    try:
        yield
    finally:
        system.close_hosts()


def _hosts_call(system: Any, scale: Scale) -> Samples:
    with over(system, 1, 1):
        return {"hosts_call": _micro(system.host_call(scale.of(3000, 300)))}


def _hosts_call_here(system: Any, scale: Scale) -> Samples:
    with over(system, 1, 1):
        return {"hosts_call_here": _micro(system.host_call_here(scale.of(3000, 300)))}


def _hosts_pair(system: Any, scale: Scale) -> Samples:
    calls = scale.of(3000, 300)
    with over(system, 2, 2):
        return {
            "hosts_pair": _micro(system.host_pair(calls, False)),
            "hosts_pair_here": _micro(system.host_pair(calls, True)),
        }


def _hosts_tensor(system: Any, scale: Scale) -> Samples:
    times = scale.of(7, 2)
    with over(system, 1, 1):
        ways = {
            "hosts_tensor": system.host_put(FAR_TENSOR_BYTES, times),
            "hosts_tensor_back": system.host_get(FAR_TENSOR_BYTES, times),
        }
    return {way: [FAR_TENSOR_BYTES / seconds / 1e9 for seconds in taken] for way, taken in ways.items()}


def _hosts_cast(system: Any, scale: Scale) -> Samples:
    """Each cast to 16 hosts of 8 processes, and how often the bytes went over TCP."""
    times = scale.of(20, 5)
    with over(system, 16, 8):
        time.sleep(_SETTLE_SECONDS)
        system.host_cast(CAST_BYTES, 1)  # before counting: connections are made
        before = octets_sent()
        taken = system.host_cast(CAST_BYTES, times)
        sent = octets_sent() - before
    # Two more than `times`, which warm up.
    return {"hosts_cast": _milli(taken), "hosts_cast_copies": [sent / CAST_BYTES / (times + 2)]}


def _hosts_kill(system: Any, scale: Scale) -> Samples:
    return {"hosts_kill": _milli(system.host_kill(scale.of(system.host_kills, 1)))}


def _flood(system: Any, scale: Scale) -> Samples:
    with over(system, 1, 1):
        turns = alternate(system, scale.of(4, 1))
    quiet, sink, gateway = ([turn[i].calls for turn in turns] for i in range(3))
    return {
        "flood_quiet": quiet,
        "flood_sink": sink,
        "flood_gateway": gateway,
        "flood": [slower(turns, 0)],
        "flood_beside": [slower(turns, 1)],
        "flood_cpu": _micro(garbage_cpu(turns)),
    }


def _hosts_64(system: Any, scale: Scale) -> Samples:
    taken, left = system.attach(64, 4)
    return {"hosts_64": [taken], "hosts_64_left": [float(left)]}


ITEMS: Mapping[str, Item] = {
    "call_sync": Item(FLOOR, _call_sync, ("call_sync",)),
    "call_async": Item(SYSTEMS, _call_async, ("call_async",)),
    "call_mixed": Item(ONLY_MESH, _call_mixed, ("call_mixed", "call_mixed_sync")),
    "neighbours": Item(
        ONLY_MESH, _neighbours, ("neighbour", "neighbour_await", "neighbour_await_other", "neighbour_script")
    ),
    "pipelined": Item(FLOOR, _pipelined, ("pipelined",)),
    "call_2": Item(SYSTEMS, _call_all(2, 2000), ("call_2",)),
    "call_8": Item(SYSTEMS, _call_all(8, 1000), ("call_8",), rounds=3),
    "call_32": Item(SYSTEMS, _call_all(32, 300), ("call_32",), rounds=3),
    "broadcast_2": Item(SYSTEMS, _broadcast, ("broadcast_2",)),
    "pairs": Item(
        PAIRS,
        _pairs,
        ("pair_sync", "pair_await", "pair_coroutines", "pair_script", "pair_cpu"),
    ),
    "tensor": Item(FLOOR, _tensor, ("tensor",)),
    "tensors": Item(
        ONLY_MESH, _tensors, ("tensors_joined", "tensors_2000", "tensors_20000", "tensors_pickled"), rounds=3
    ),
    "spawn_2": Item(SYSTEMS, _spawn(2), ("spawn_2", "spawn_2_import")),
    "spawn_8": Item(SYSTEMS, _spawn(8), ("spawn_8", "spawn_8_import"), rounds=3),
    "spawn_32": Item(SYSTEMS, _spawn(32), ("spawn_32", "spawn_32_import"), rounds=3),
    "memory": Item(SYSTEMS, _memory, ("proc_memory", "tree_memory"), rounds=3),
    "import": Item(SYSTEMS, _import, ("import", "import_names")),
    "size": Item(SYSTEMS, _installed, ("installed",), rounds=1),
    "idle_cpu": Item(LARGE, _idle_cpu, ("idle_cpu",), rounds=3),
    "kill_detection": Item(LARGE, _kill_detection, ("kill_detection",), rounds=3),
    "failure_100": Item(ONLY_MESH, _failure_100, ("failure_100", "failure_100_tasks"), rounds=3),
    "procs_1000": Item(ONLY_MESH, _procs_1000, ("procs_1000", "procs_1000_left")),
    "actors_10000": Item(ONLY_MESH, _actors_10000, ("actors_10000", "actor_memory", "actor_memory_here")),
    "actors_2000": Item(ONLY_MESH, _actors_2000, ("actors_2000", "actors_2000_again", "actors_2000_memory")),
    "reduce_256": Item(
        ONLY_MESH,
        _reduce_256,
        (
            "reduce_floats",
            "gather_floats",
            "reduce_arrays",
            "gather_arrays",
            "reduce_cpu",
            "gather_cpu",
        ),
        rounds=3,
    ),
    "pool": Item(BLOCKS, _pool, ("pool_makespan", "pool_floor", "pool_task")),
    "pool_crashes": Item(ONLY_MESH, _pool_crashes, ("pool_lost", "pool_twice"), rounds=3),
    "queue_rate": Item(BLOCKS, _queue_rate, ("queue_rate",)),
    "busy_work": Item(SPINNING, _busy_work, ("busy_work",)),
    "busy_pingpong": Item(SPINNING, _busy_pingpong, ("busy_pingpong",)),
    "logs": Item(ONLY_MESH, _logs, ("log_rate", "log_call", "log_call_null")),
    "hosts_call": Item((*HOSTS_FLOOR, "chain"), _hosts_call, ("hosts_call",)),
    "hosts_call_here": Item((*HOSTS, "chain"), _hosts_call_here, ("hosts_call_here",)),
    "hosts_pair": Item(HOSTS, _hosts_pair, ("hosts_pair", "hosts_pair_here"), rounds=3),
    "hosts_tensor": Item(HOSTS_FLOOR, _hosts_tensor, ("hosts_tensor", "hosts_tensor_back")),
    "hosts_cast": Item(LARGE, _hosts_cast, ("hosts_cast", "hosts_cast_copies"), rounds=3, time_limit=400.0),
    "hosts_kill": Item(LARGE, _hosts_kill, ("hosts_kill",), rounds=3),
    "flood": Item(
        ONLY_MESH,
        _flood,
        ("flood_quiet", "flood_sink", "flood_gateway", "flood", "flood_beside", "flood_cpu"),
        rounds=3,
    ),
    "hosts_64": Item(ONLY_MESH, _hosts_64, ("hosts_64", "hosts_64_left"), rounds=3),
}
"""All work, in the order in which it is done."""
