"""What a system's adapter offers, as protocols from narrow to wide: on one host, and over several.

An adapter measures with its own loop written in its system's own style, so no shared indirection is timed.
Times are in seconds, taken with `timing.Sampler`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from meshbench.timing import PairTimes

PAYLOAD = 1
"""What a small call carries."""


class Floor(Protocol):
    """One peer process that answers; also what a raw socket can do."""

    def start(self, procs: int) -> None:
        """Start `procs` worker processes with one echo actor each; return when all have replied once."""

    def close(self) -> None:
        """Stop everything that was started."""

    def call_sync(self, calls: int) -> list[float]:
        """Seconds of each of `calls` round trips to the first actor's plain (`def`) endpoint, one at a time."""

    def pipelined(self, calls: int) -> float:
        """Seconds to issue `calls` calls to the first actor and then to have all replies."""

    def tensor(self, data: Any, times: int) -> list[float]:
        """Seconds of each of `times` round trips of `data` to the first actor and back."""


class ActorSystem(Floor, Protocol):
    """A system with several worker processes and actors in them."""

    module: str
    """What a user imports."""

    names: str
    """What a first script takes from it, with commas between."""

    distribution: str
    """What a user installs."""

    def call_async(self, calls: int) -> list[float]:
        """Seconds of each of `calls` round trips to an `async def` endpoint, awaited from a running asyncio loop."""

    def call_all(self, calls: int) -> list[float]:
        """Seconds of each of `calls` calls to every actor, with all replies."""

    def broadcast(self, casts: int) -> float:
        """Seconds to tell every actor something `casts` times, with one call to all at the end as a barrier."""

    def pids(self) -> list[int]:
        """The worker processes' ids, asked from the actors."""


class PairSystem(Protocol):
    """A system whose actors call each other."""

    def pairs(self, calls: int) -> PairTimes:
        """So many calls, one at a time, of each kind, between two procs of this host that it starts and ends."""


class QueueSystem(Protocol):
    """A system with a queue between processes."""

    def queue_rate(self, producers: int, takers: int, items: int) -> float:
        """Items per second through one queue; each producer puts `items` small ones, one after the other."""


class PoolSystem(Protocol):
    """A system that keeps replicas busy."""

    def pool(self, replicas: int, naps: list[float], empty: int) -> tuple[float, float]:
        """Seconds for tasks that sleep so long, taken by whoever is free; and for `empty` tasks that do nothing."""

    def dealt(self, shares: list[list[float]]) -> float:
        """Seconds for such tasks where each replica is told of all of its own in one call: about the best that a pool can do."""


class KillSystem(ActorSystem, Protocol):
    """A system of which it is measured how soon a caller learns that it waits in vain."""

    kills: int
    """How many kills a measurement makes; few where each takes seconds."""

    def kill_detection(self, kills: int) -> list[float]:
        """Seconds from the SIGKILL of a process to the error of the caller that waits for it, each time anew."""


class MeshSystem(KillSystem, Protocol):
    """What is only measured on mesh."""

    def failure_in_threads(self, callers: int) -> float:
        """Seconds from a SIGKILL until as many threads, which wait for that process, have their errors."""

    def failure_in_tasks(self, callers: int) -> float:
        """The same for tasks of one event loop."""

    def many_procs(self, procs: int) -> tuple[float, int]:
        """Seconds to spawn, call and stop `procs` processes, and how many of them still exist afterwards."""

    def call_mixed(self, calls: int) -> list[float]:
        """Seconds of each of `calls` blocking round trips, in turn to a plain and to an async endpoint of one actor."""

    def call_neighbour(self, calls: int, how: str) -> list[float]:
        """Seconds of each of `calls` round trips of an actor to another of its process: "plain", "awaited" or on "two loops"."""

    def many_threads(self, actors: int) -> tuple[float, float, float]:
        """Seconds to spawn and call `actors` actors with a plain endpoint in one process; to call them again; bytes each there."""

    def many_actors(self, actors: int) -> tuple[float, float, float]:
        """Seconds to spawn and call `actors` async actors in one process; bytes each there, bytes each here."""

    def pool_crashes(self, replicas: int, tasks: int, every: float) -> tuple[int, int]:
        """Of so many tasks, while a replica is killed `every` seconds: how many have no outcome, and how many ran twice."""

    def reduce_all(self, reduce: bool, size: int, times: int) -> list[tuple[float, float]]:
        """Sum what every actor returns, a float or an array of `size` bytes, on the way up or here.

        Seconds of each, and of this process's processor time.
        """

    def busy_work(self, rounds: int) -> float:
        """Calls per second when every process computes a little for each of `rounds` pipelined calls."""

    def busy_pingpong(self, rounds: int) -> float:
        """Round trips per second, in all, of pairs of processes that call each other back and forth."""

    def log_rate(self, seconds: float) -> float:
        """Lines per second that two processes print and this one shows, printing as fast as they can."""

    def calls_beside_lines(self, seconds: float, rate: float, shown: bool) -> list[float]:
        """Seconds of round trips to one process while two others print `rate` lines per second.

        Not `shown`, they print the same to /dev/null: what is left is what the printing itself takes from the cores.
        """


class HostsFloor(Protocol):
    """Something that joins two hosts; what a raw stream can do. This process is on a host of its own."""

    def start_hosts(self, hosts: int, procs: int) -> None:
        """Start so many other hosts on this machine, with `procs` actors in as many processes on each."""

    def close_hosts(self) -> None:
        """Stop everything that was started."""

    def host_call(self, calls: int) -> list[float]:
        """Seconds of each of `calls` round trips from here to an actor on another host, one at a time."""

    def host_put(self, size: int, times: int) -> list[float]:
        """Seconds of each of `times` transfers of an array of `size` bytes to another host, until it has answered."""

    def host_get(self, size: int, times: int) -> list[float]:
        """The same from another host, from the asking on."""


class HostsSystem(HostsFloor, Protocol):
    """A system whose actors are spread over hosts."""

    def host_call_here(self, calls: int) -> list[float]:
        """As `host_call`, but the actor is on this host; the others stay connected."""

    def host_pair(self, calls: int, same: bool) -> list[float]:
        """As `host_call`, from an actor on one of the hosts to one on the next, or on the `same`."""

    def host_cast(self, size: int, times: int) -> list[float]:
        """Seconds of each of `times` calls to all actors with an array of `size` bytes, until all have answered."""


class HostsKillSystem(HostsSystem, Protocol):
    """A system of which it is measured how soon a caller learns that a host is gone."""

    host_kills: int
    """How many kills a measurement makes; few where each takes seconds."""

    def host_kill(self, kills: int) -> list[float]:
        """Seconds from the SIGKILL of a host's agent to the error of the caller that waits for an actor there."""


class MeshHosts(HostsKillSystem, Protocol):
    """What is only measured on mesh."""

    def gateway(self) -> tuple[int, str]:
        """The process that admits connections to the first host, and the address at which it does."""

    def host_calls(self, seconds: float) -> int:
        """How many calls, made one after the other as in `host_call`, are completed in so long."""

    def attach(self, hosts: int, procs: int) -> tuple[float, int]:
        """Seconds to attach to running hosts, spawn on all and call all; and how many processes stay after the stop."""


def load(name: str) -> Any:
    """Import the adapter module `name` and make its `System`.

    Example:
        >>> load("rawsocket").start.__name__
        'start'
    """
    return import_module(f"meshbench.adapters.{name}").System()
