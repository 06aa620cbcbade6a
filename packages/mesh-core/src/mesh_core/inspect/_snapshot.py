"""Snapshots of a whole job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import Question
from mesh_core._common.current import current
from mesh_core._native import seat
from mesh_core._system.process_state import is_stopped
from mesh_core.inspect._ask import ROOT, Addr, addr_of, ask, point_of, proc_name, split_title
from mesh_core.inspect._event import Event
from mesh_core.inspect._events import Names, read_event
from mesh_core.inspect._hosts import look

if TYPE_CHECKING:
    from mesh_core._process.process import Process
    from mesh_core.inspect._hosts import Host, Tree

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Running:
    """A message that an actor is handling."""

    endpoint: str
    seconds: float
    """For how long."""
    caller: str
    """The process that sent it."""


@dataclass(frozen=True)
class Awaited:
    """A named promise that somebody waits for."""

    name: str
    seconds: float
    """Seconds since it was created."""


@dataclass(frozen=True)
class ActorState:
    """One actor."""

    name: str
    class_name: str
    """Empty until the actor's process has read the spawn message."""
    rank: int
    point: Mapping[str, int]
    proc: str
    """The process it lives in, as :attr:`ProcState.name`."""
    owner: str
    """The process that spawned it."""
    state: str
    """``starting`` until its constructor returns, then ``busy`` or ``idle``."""
    age: float
    """Seconds since its spawn message arrived."""
    queue: int
    """Messages that have arrived but were not started."""
    queue_bytes: int
    received: int
    """Messages that have arrived, including those in the queue."""
    received_bytes: int
    handled: int
    failed: int
    """How many of those raised."""
    rate: float
    """Messages handled in the last second."""
    mean: float
    """Seconds per message: a moving average that weights recent messages most."""
    longest: float
    running: tuple[Running, ...]
    actor_id: int = field(repr=False)
    waited: float = 0.0
    """The part of :attr:`mean` spent waiting for other processes, if something in the process reports it
    (:class:`mesh_core.extensions.ClockStop`)."""


@dataclass(frozen=True)
class ProcState:
    """One process. Unknown values are ``None``, or 0 for values that only the process itself reports."""

    name: str
    mesh: str
    rank: int
    point: Mapping[str, int]
    host: str
    pid: int | None
    owner: str
    """The process that spawned it; empty for the controller."""
    state: str
    """``starting``, ``running``, ``stopping``, ``ending``, ``stopped`` (by a signal such as SIGSTOP), or ``silent``
    (running, but its runtime did not answer in time)."""
    cpu: float | None
    """CPU time used, in seconds."""
    rss: int | None
    """Resident memory in bytes, including shared memory."""
    pss: int | None
    """The same, with shared memory divided among the processes that share it."""
    threads: int | None
    outgoing: int
    """Bytes waiting to be sent to it."""
    calls: int
    """How many of its calls wait for replies."""
    shm_bytes: int
    """Bytes of shared memory that it owns."""
    actors: tuple[ActorState, ...]
    incarnation: int = 0
    """How many times the process of this rank was respawned."""
    promises: tuple[Awaited, ...] = ()
    """The oldest hundred of its named promises that somebody waits for, oldest first."""


@dataclass(frozen=True)
class ForkServerState:
    """A process that forks workers of a host, with modules that it has imported for them."""

    pid: int
    workers: int
    """How many processes it has forked, or is about to fork, that have not ended."""
    importing: str
    """The module that it is importing; until then its new workers are ``starting``. Usually empty."""
    preloaded: tuple[str, ...]
    """The modules that its workers start with: those of ``preload=``, or those that Mesh has chosen, and modules of actor classes."""


@dataclass(frozen=True)
class HostState:
    """One machine."""

    name: str
    cpus: int
    load: float
    """The load average of the last minute."""
    memory: int
    memory_free: int
    """Bytes available without swapping."""
    procs: tuple[ProcState, ...]
    state: str = "running"
    """``attaching`` until its agent answers for the first time, then ``running``; ``suspect`` if it has been silent for a
    while, ``unreachable`` if there is no connection to it at the moment, ``silent`` if its agent did not answer in time,
    or ``dead``. Unless it is running or suspect, nothing else is known about it."""
    number: int = 0
    """Its number in the job; the script's host is 0."""
    address: str = ""
    """The address at which it was attached."""
    pid: int | None = None
    """The pid of its agent; for the script's host, of the controller."""
    why: str = ""
    """Why it is dead or unreachable."""
    dead: tuple[ProcState, ...] = ()
    """Ranks whose process died here, with its host or alone, until they are respawned, or their mesh or its owner ends: their
    state is ``dead``."""
    fork_servers: tuple[ForkServerState, ...] = ()
    """The processes that fork this host's processes."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a job at one moment; printing it shows a table."""

    time: float
    """When the snapshot was taken, in seconds since the epoch."""
    hosts: tuple[HostState, ...]
    failures: tuple[Event, ...]
    """The latest failures, oldest first."""

    @property
    def procs(self) -> tuple[ProcState, ...]:
        """All processes, the controller first."""
        return tuple(proc for host in self.hosts for proc in host.procs)

    @property
    def dead(self) -> tuple[ProcState, ...]:
        """All ranks whose process has died and was not replaced, of meshes that were not stopped."""
        return tuple(proc for host in self.hosts for proc in host.dead)

    @property
    def actors(self) -> tuple[ActorState, ...]:
        """All actors, in the order of their processes."""
        return tuple(actor for proc in self.procs for actor in proc.actors)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, strings and numbers, ready for JSON."""
        return {
            "time": self.time,
            "hosts": [asdict(host) for host in self.hosts],
            "failures": [event.as_dict() for event in self.failures],
        }

    def __repr__(self) -> str:
        from mesh_core.inspect._table import as_text

        return as_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from mesh_core.inspect._table import as_html

        return as_html(self)


def snapshot(timeout: float = 1.0, *, pss: bool = True) -> Snapshot:
    """Take a snapshot of the job: hosts, processes, actors, queues, rates, latencies, failures.

    Works in the script and inside actors. Processes answer without running any Python. A process that does not answer
    within ``timeout`` seconds appears as ``silent``, one that a signal has stopped as ``stopped``.

    Args:
        timeout: how long to wait for processes, in seconds.
        pss: whether to compute each process's share of shared memory, which takes the kernel about a millisecond per
            process.

    >>> from mesh_core import inspect, this_host
    >>> with this_host().spawn_procs(per_host={"gpus": 2}, name="workers") as procs:
    ...     _ = procs.initialized.get()
    ...     [(proc.name, proc.state) for proc in inspect.snapshot().procs]
    [('controller', 'running'), ('workers[0]', 'running'), ('workers[1]', 'running')]
    """
    process = current()
    tree, deadline = look(process, timeout, pss=pss)
    return _Taker(process, tree, pss).take(deadline)


class _Taker:
    def __init__(self, process: Process, tree: Tree, pss: bool) -> None:
        self.process = process
        self.here = process.identity.host_no
        self.tree = tree
        self.titles = tree.titles
        self.names = {mesh: name for mesh, (name, _) in self.titles.items()}
        self.procs: list[Any] = sorted(
            tree.procs, key=lambda proc: (self.names.get(proc[0][0], ""), *seat(process.runtime, *proc[0]))
        )
        self.pss = pss

    def _stopped(self, pid: int | None, host: int) -> bool:
        """Return whether a signal has stopped a process."""
        if host == self.here:
            return is_stopped(pid)
        used = self.tree.hosts[host].used.get(pid or 0)
        return used is not None and used[0] in "Tt"

    def take(self, deadline: float) -> Snapshot:
        frozen = {
            (mesh, rank, host) for (mesh, rank, host), _, pid, *_ in self.procs if self._stopped(pid, host)
        }
        able = {
            (mesh, rank, host): pid if host == self.here else None
            for (mesh, rank, host), stage, pid, *_ in self.procs
            if stage in ("running", "stopping") and (mesh, rank, host) not in frozen
        }
        answers = ask(self.process, Question.STATE, {ROOT: None, **able}, deadline)
        root = self._proc(ROOT, "running", None, None, answers=answers)
        states: dict[int, list[ProcState]] = {0: [root]}
        for (mesh, rank, host), stage, pid, owner, outgoing in self.procs:
            addr = (mesh, rank, host)
            if addr in frozen:
                stage = "stopped"  # noqa: PLW2901 - the kernel's view overrides the agent's
            elif addr not in answers and stage == "running":
                # A signal may have stopped it after it was asked.
                stage = "stopped" if self._stopped(pid, host) else "silent"  # noqa: PLW2901
            states.setdefault(host, []).append(
                self._proc(addr, stage, pid, addr_of(owner), outgoing, answers=answers)
            )
        dead = self._dead(answers)
        names = Names(self.process, self.names)
        failures = [read_event(self.process, one, names) for one in self.tree.failures]
        hosts = sorted(self.tree.hosts.values(), key=lambda host: host.number)
        return Snapshot(
            time=time.time(),
            hosts=tuple(
                replace(
                    _host(host, tuple(states.get(host.number, ())), host.number == self.here, root.pid),
                    dead=tuple(dead.get(host.number, ())),
                    fork_servers=_fork_servers(self.tree.fork_servers.get(host.number, [])),
                )
                for host in hosts
            ),
            failures=tuple(event for event in failures if event is not None),
        )

    def _dead(self, answers: Mapping[Addr, dict[str, Any]]) -> dict[int, list[ProcState]]:
        """Return the ranks that have died and were neither replaced nor stopped, as their owners report them, by host."""
        told = {addr_of(who): title for answer in answers.values() for who, title in answer.get("dead", ())}
        for (mesh, *_), title in told.items():
            # Nobody else knows the name of a mesh without any process.
            self.titles.setdefault(mesh, split_title(title))
            self.names.setdefault(mesh, self.titles[mesh][0])
        found: dict[int, list[ProcState]] = {}
        for addr in sorted(told, key=lambda addr: (self.names[addr[0]], *seat(self.process.runtime, *addr))):
            if addr[2] in self.tree.hosts:
                found.setdefault(addr[2], []).append(self._proc(addr, "dead", None, None, answers={}))
        return found

    def _proc(
        self,
        addr: Addr,
        stage: str,
        pid: int | None,
        owner: Addr | None,
        outgoing: int = 0,
        *,
        answers: dict[Addr, dict[str, Any]],
    ) -> ProcState:
        answer = answers.get(addr, {})
        pid = answer.get("pid", pid)
        mesh, sizes = self.titles.get(addr[0], ("controller" if addr == ROOT else "?", {}))
        name = proc_name(self.process, addr, self.names)
        _, rank, life = seat(self.process.runtime, *addr)
        if addr[2] == self.here:
            used = _Used(pid, self.pss)
        else:
            used = _Used.told(self.tree.hosts[addr[2]].used.get(pid or 0))
        actors = [self._actor(told, name) for told in answer.get("actors", ())]
        return ProcState(
            name=name,
            mesh=mesh,
            rank=rank,
            point=point_of(rank, sizes),
            incarnation=life,
            host=self.tree.host_name(addr[2]),
            pid=pid,
            owner="" if owner is None else proc_name(self.process, owner, self.names),
            state=stage,
            cpu=used.cpu,
            rss=used.rss,
            pss=used.pss,
            threads=used.threads,
            outgoing=outgoing,
            calls=answer.get("calls", 0),
            promises=tuple(Awaited(*told) for told in answer.get("promises", ())),
            shm_bytes=answer.get("shm", 0),
            actors=tuple(sorted(actors, key=lambda actor: (actor.name, actor.actor_id))),
        )

    def _actor(self, told: dict[str, Any], proc: str) -> ActorState:
        name, sizes = split_title(told["title"])
        running = tuple(
            Running(endpoint, seconds, proc_name(self.process, addr_of(caller), self.names))
            for endpoint, seconds, caller in told["running"]
        )
        return ActorState(
            name=name,
            class_name=told["class"],
            rank=told["rank"],
            point=point_of(told["rank"], sizes),
            proc=proc,
            owner=proc_name(self.process, addr_of(told["owner"]), self.names),
            state="busy" if running else "idle" if told["up"] else "starting",
            age=told["age"],
            queue=told["queue"],
            queue_bytes=told["queue_bytes"],
            received=told["received"],
            received_bytes=told["bytes"],
            handled=told["handled"],
            failed=told["failed"],
            rate=told["rate"],
            mean=told["mean"],
            longest=told["longest"],
            running=running,
            actor_id=told["id"],
            waited=told.get("waited", 0.0),
        )


def _fork_servers(told: list[Any]) -> tuple[ForkServerState, ...]:
    return tuple(
        ForkServerState(pid, workers, importing, tuple(name for name in preloaded.split(",") if name))
        for pid, workers, importing, preloaded in told
    )


class _Used:
    """The resource usage of a process on this host, from the kernel; all ``None`` if it is gone."""

    def __init__(self, pid: int | None, pss: bool) -> None:
        self.cpu: float | None = None
        self.rss: int | None = None
        self.pss: int | None = None
        self.threads: int | None = None
        if pid is None:
            return
        folder = Path(f"/proc/{pid}")
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(") ")[2].split()
            self.cpu = (int(fields[11]) + int(fields[12])) / _TICK
            self.threads = int(fields[17])
            self.rss = int(fields[21]) * _PAGE
            if pss:
                self.pss = next(_kilobytes(folder / "smaps_rollup", "Pss:"), None)
        except (OSError, ValueError, IndexError):
            return  # the process has ended

    @classmethod
    def told(cls, used: list[Any] | None) -> _Used:
        """Make the usage of a process on another host from its agent's report."""
        made = cls(None, pss=False)
        if used is not None:
            _, made.cpu, made.rss, made.pss, made.threads = used
        return made


def _kilobytes(file: Path, *labels: str) -> Iterator[int]:
    for line in file.read_text().splitlines():
        words = line.split()
        if words and words[0] in labels:
            yield int(words[1]) * 1024


def _host(host: Host, procs: tuple[ProcState, ...], here: bool, root: int | None) -> HostState:
    cpus, load, memory, free = 0, 0.0, 0, 0
    if here:
        cpus, load = os.cpu_count() or 0, os.getloadavg()[0]
        with contextlib.suppress(OSError, ValueError):
            memory, free = _kilobytes(Path("/proc/meminfo"), "MemTotal:", "MemAvailable:")
    elif (told := host.told) is not None:
        cpus, load, memory, free = told["cpus"], told["load"], told["memory"], told["free"]
    return HostState(
        name=host.name or f"host {host.number}",
        cpus=cpus,
        load=load,
        memory=memory,
        memory_free=free,
        procs=procs,
        state=host.state,
        number=host.number,
        address=host.address,
        pid=root if host.number == 0 else host.pid,
        why=host.why,
    )
