"""Meshes with more or fewer members as hosts come and go: :class:`ElasticMesh`.

ELA-1: the members change in :meth:`ElasticMesh.safe_point`, and nowhere else; what it returns is whole.
ELA-2: all members have one state after a change: that of one that stays, or else of one that leaves, or else the last snapshot.
ELA-3: a host that is about to go gets no members; those that it has leave at the next safe point, before their processes are
stopped. The script is notified of such hosts by their agents, and by whatever calls `leaving` or `notice`.
ELA-4: a host on which a member could not be started is set aside for a while, longer after each failure in a row, and then tried again; never for
long while there are fewer members than the minimum. Members that it has stay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mesh_core import HostMesh, MeshError, ProcMesh, inspect, this_host
from mesh_core.extensions import Extension, Proc, current_proc, find, install
from mesh_supervision._elastic_turn import Change, Member, Members, Plan, Turn, ignoring, stop
from mesh_supervision._simple import Ignore
from mesh_supervision._snapshots import Snapshots, is_kept, keep_snapshots

A = TypeVar("A")
_TRIES = 10
"""How often a change starts over as more members die."""
_ASIDE_S, _LONGEST_ASIDE_S = 1.0, 60.0
"""For how long a host is set aside: twice as long after each failure, up to this."""
_LONGEST_HALT_S = 5.0
"""The same while there are fewer members than the minimum: nothing goes on until one has started."""


@dataclass(frozen=True)
class Notice:
    """A notice that a host is about to leave."""

    host: str
    deadline: float
    """When it leaves, by ``time.monotonic()`` of the process that has the mesh."""
    reason: str = ""


@dataclass(frozen=True)
class _Aside:
    """A host on which members could not be started lately (ELA-4)."""

    until: float
    """When it is tried again, by ``time.monotonic()``."""
    failures: int
    why: str

    @classmethod
    def after(cls, before: _Aside | None, why: str, longest: float) -> Self:
        """Return what follows one more failure."""
        failures = 1 if before is None else before.failures + 1
        # The exponent is bounded, as a float is.
        pause = min(_ASIDE_S * 2 ** min(failures - 1, 10), longest)
        return cls(time.monotonic() + pause, failures, why)


@dataclass(frozen=True)
class _Going:
    """A message: this host is about to leave."""

    host: str
    grace: float
    reason: str


class _Notices(Extension):
    """Notifies the process that has elastic meshes of hosts that are about to leave."""

    name = "supervision.notices"
    payload: Proc

    def start(self) -> None:
        """Begin without meshes; in the script, follow what agents report about their hosts."""
        self._lock = threading.Lock()
        self._meshes: list[ElasticMesh[Any]] = []
        self._leaving: dict[str, Notice] = {}
        """The notices of agents, for meshes that are made later."""
        self._is_over = False
        if self.proc == self.payload and self.proc.is_controller:
            events = inspect.events(past=True, actors=False)
            threading.Thread(target=self._follow, args=(events,), name="mesh-leaving", daemon=True).start()

    def stop(self) -> None:
        """Notify nobody from now on; the thread ends with the next event, or with the job."""
        self._is_over = True

    def _follow(self, events: inspect.Events) -> None:
        for event in events:
            if self._is_over:
                return
            if event.kind == "host_attached":
                with self._lock:
                    self._leaving.pop(event.host, None)
            elif event.kind == "host_leaving":
                # The time that the notice took to arrive has passed already, if the two clocks agree.
                grace = max(0.0, (event.grace or 0.0) - max(0.0, time.time() - event.time))
                with self._lock:
                    self._leaving[event.host] = Notice(event.host, time.monotonic() + grace, event.text)
                    meshes = list(self._meshes)
                for mesh in meshes:
                    mesh.notice(event.host, grace, event.text)

    def add(self, mesh: ElasticMesh[Any]) -> None:
        """Notify that mesh too."""
        with self._lock:
            self._meshes.append(mesh)
            before = list(self._leaving.values())
        for each in before:
            mesh.notice(each.host, each.deadline - time.monotonic(), each.reason)

    def remove(self, mesh: ElasticMesh[Any]) -> None:
        """Stop notifying it."""
        with self._lock:
            self._meshes.remove(mesh)

    def receive(self, message: _Going, sender: Proc) -> None:
        """Pass it on."""
        with self._lock:
            meshes = list(self._meshes)
        for mesh in meshes:
            mesh.notice(message.host, message.grace, message.reason)


def leaving(grace: float = 30.0, reason: str = "") -> None:
    """Announce that the host of this process will be gone in ``grace`` seconds: every :class:`ElasticMesh` of the job is notified.

    Call it from whatever learns of it first: a handler of the signal that a scheduler sends before it takes the machine, or a thread that polls a
    cloud's API. It works in any process whose mesh was spawned after the first `ElasticMesh` was created, and in the processes of that mesh.
    """
    found = find(_Notices)
    if found is None:
        raise MeshError(f"{current_proc()} belongs to no ElasticMesh, and was spawned before there was one")
    going = _Going(current_proc().host, grace, reason)
    if found.proc == found.payload:
        found.receive(going, found.proc)
    else:
        found.tell(found.payload, going)


class ElasticMesh(Generic[A]):
    """A mesh of between ``minimum`` and ``maximum`` members, each of which has one host and an actor on each of its processes there.

    The members are replicas of each other: with ``__snapshot__`` and ``__restore__``, a new one starts with the state of the others.

    >>> from mesh_core import Actor, endpoint
    >>> from mesh_core.extensions import uninstall
    >>> from mesh_supervision import ElasticMesh
    >>> class Trainer(Actor):
    ...     def __init__(self) -> None:
    ...         self.done = 0
    ...     def __snapshot__(self) -> int:
    ...         return self.done
    ...     def __restore__(self, done: int) -> None:
    ...         self.done = done
    ...     @endpoint
    ...     def step(self) -> int:
    ...         self.done += 1
    ...         return self.done
    >>> with ElasticMesh(Trainer, minimum=1, maximum=3, members=2) as elastic:
    ...     print(elastic.safe_point().step.call().get(timeout=30).values())
    ...     elastic.resize(3)
    ...     print(elastic.safe_point().step.call().get(timeout=30).values())
    [1, 1]
    [2, 2, 2]
    >>> for name in ("supervision.snapshots", "supervision.notices"):
    ...     uninstall(name)

    Args:
        actor: the class of the actors.
        *args: arguments of its constructor.
        minimum: with fewer members :meth:`safe_point` waits for hosts.
        maximum: there are never more.
        members: the number at first, as far as there is room; without it as many as there is room for.
        hosts: the hosts of members; without it this machine.
        per_host: how many members a host has room for; without it any number.
        sizes: the processes of one member, for example ``{"gpus": 8}``; without it one.
        dim: the dimension along which the members lie in the mesh.
        group: whether all processes are a group of ``torch.distributed``, formed again with every change.
        spawn: options for ``spawn_procs``, such as ``{"preload": ["torch"]}``.
        warm: whether hosts that have no member are kept ready for one (:meth:`ProcMesh.prepare`).
        on_change: called in :meth:`safe_point` with each change, once the mesh is whole again.
        **kwargs: arguments of the constructor.
    """

    def __init__(
        self,
        actor: type[A],
        *args: Any,
        minimum: int = 1,
        maximum: int,
        members: int | None = None,
        hosts: HostMesh | None = None,
        per_host: int | None = None,
        sizes: Mapping[str, int] | None = None,
        dim: str = "members",
        group: bool = False,
        spawn: Mapping[str, Any] | None = None,
        warm: bool = False,
        on_change: Callable[[Change], None] | None = None,
        **kwargs: Any,
    ) -> None:
        if not 1 <= minimum <= maximum:
            raise ValueError(f"1 <= minimum <= maximum must hold, got minimum={minimum}, maximum={maximum}")
        if dim in (sizes or {}):
            raise ValueError(
                f"the members lie along {dim!r}, which is a dimension of each of them too: give another dim="
            )
        self.minimum = minimum
        self.maximum = maximum
        self.changes: list[Change] = []
        """What the safe points did, in order."""
        self._name = actor.__qualname__
        self._per_host = per_host
        self._warm: set[str] | None = set() if warm else None
        """Hosts that are being kept ready."""
        self._on_change = on_change
        self._wanted = maximum if members is None else self._checked(members)
        self._lock = threading.RLock()
        """Held during a change."""
        self._news = threading.Condition()
        """Something has happened that may matter to those who wait for hosts."""
        self._hosts: dict[str, HostMesh] = {}
        self._notices: dict[str, Notice] = {}
        self._aside: dict[str, _Aside] = {}
        self._stopped = False

        def make(procs: ProcMesh) -> Any:
            return procs.spawn(actor.__name__.lower(), actor, *args, supervise=Ignore(), **kwargs)

        store = (find(Snapshots) or keep_snapshots()).store if is_kept(actor) else None
        self._members = Members(dim, dict(sizes or {}), ignoring(spawn), make, group, store)
        self._told = find(_Notices) or install(_Notices, current_proc())
        self.add_hosts(this_host() if hosts is None else hosts)
        self._told.add(self)

    # Called from any thread, about the outside world.

    def add_hosts(self, hosts: HostMesh) -> None:
        """Add hosts. A host that had been about to leave can be used again."""
        with self._news:
            for each in [one for _, one in hosts] if len(hosts) > 1 else [hosts]:
                name = each.names[0]
                self._hosts[name] = each
                self._notices.pop(name, None)
                self._aside.pop(name, None)
                if self._warm is not None:
                    self._warm.discard(name)
            self._news.notify_all()

    def notice(self, host: HostMesh | str, grace: float = 30.0, reason: str = "") -> None:
        """Announce that one or several hosts will be gone in ``grace`` seconds: their members leave at the next safe point (ELA-3)."""
        deadline = time.monotonic() + grace
        with self._news:
            for name in [host] if isinstance(host, str) else host.names:
                self._notices[name] = Notice(name, deadline, reason)
            self._news.notify_all()

    @property
    def notices(self) -> list[Notice]:
        """The notices of hosts that are about to leave or have left."""
        with self._news:
            return list(self._notices.values())

    def resize(self, members: int) -> None:
        """Set the number of members from the next safe point on, as far as there is room."""
        with self._news:
            self._wanted = self._checked(members)
            self._news.notify_all()

    def _checked(self, members: int) -> int:
        if not self.minimum <= members <= self.maximum:
            raise ValueError(
                f"{members} members are not between the minimum, {self.minimum}, and the maximum, {self.maximum}"
            )
        return members

    # Called by the program.

    @property
    def is_settled(self) -> bool:
        """Return whether, as far as is known, the next safe point would change nothing."""
        with self._lock:
            return self._plan() is None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self._members.all)

    def safe_point(self, timeout: float = 120.0) -> Any:
        """Return the mesh of all members, after the changes that are due (ELA-1).

        Call it when no call to the members is in progress, for example before each step. If nothing has happened it costs a quick check and
        returns the same mesh object; otherwise it returns a new one, with new ranks. With fewer members than the minimum, it waits
        up to ``timeout`` seconds for hosts.

        A host on which a member cannot be started in time is tried again later. If this raises, the members and their state are as before, and
        it may be called again.
        """
        until = time.monotonic() + timeout
        with self._lock:
            if self._stopped:
                raise MeshError("the elastic mesh was stopped: make another one")
            tries = 0
            while True:
                plan = self._plan()
                if plan is None:
                    if self.size >= self.minimum:
                        return self._members.mesh
                    self._await_hosts(until)
                    continue
                tries += 1
                turn = Turn(self._members, plan, until)
                before = self._failed_hosts()
                try:
                    turn.run()
                except Exception as error:
                    is_worth_it = turn.may_be_tried_again(error)
                    turn.undo()
                    halted = sum(not each.is_lost for each in self._members.all) < self.minimum
                    longest = _LONGEST_HALT_S if halted else _LONGEST_ASIDE_S
                    with self._news:
                        for host, why in turn.bad_hosts.items():
                            self._aside[host] = _Aside.after(self._aside.get(host), why, longest)
                    if time.monotonic() >= until:
                        raise MeshError(
                            f"the elastic mesh has not changed its members within {timeout:g} s: {turn.doing} took too long ({error}){before and f'; earlier tries: {before}'}. "
                            "The members and their state are as before: call safe_point() again, with a longer timeout if the hosts are slow"
                        ) from error
                    # Hosts that fail are tried at growing intervals, until the time is over.
                    if not is_worth_it or (tries >= _TRIES and not turn.bad_hosts):
                        raise
                else:
                    with self._news:
                        for host in plan.change.joined:
                            self._aside.pop(host, None)
                    self.changes.append(plan.change)
                    self._prepare()
                    if self._on_change is not None:
                        self._on_change(plan.change)

    def _await_hosts(self, until: float) -> None:
        with self._news:
            if self._room(self._members.all):
                return
            again = min([until, *(each.until for name, each in self._aside.items() if name in self._hosts)])
            if not self._news.wait(max(0.0, again - time.monotonic())) and time.monotonic() >= until:
                going = ", ".join(
                    [
                        *(
                            f"{each.host} ({each.reason or 'no reason given'})"
                            for each in self._notices.values()
                        ),
                        *filter(None, [self._failed_hosts()]),
                    ]
                )
                raise MeshError(
                    f"the elastic mesh has {self.size} members and needs {self.minimum}, and no host has room for more: "
                    f"hosts {', '.join(self._hosts) or 'none'}, of which these are about to go, gone, or could not start a member: {going or 'none'}. Give it others with "
                    "add_hosts()"
                )

    def _failed_hosts(self) -> str:
        """Return the hosts that could not start a member when it was last tried, and why."""
        with self._news:
            return ", ".join(f"{name} ({each.why})" for name, each in self._aside.items())

    def _plan(self) -> Plan | None:
        """Return what is due, or ``None``."""
        with self._news:
            going = set(self._notices)
            wanted = self._wanted
        members = self._members.all
        lost = [each for each in members if each.is_lost]
        leave = [each for each in members if each not in lost and each.host in going]
        stay = [each for each in members if each not in lost and each not in leave]
        stay, surplus = stay[:wanted], stay[wanted:]
        hosts = self._room(stay)[: wanted - len(stay)]
        group = self._members.group
        if not (lost or leave or surplus or hosts or (group is not None and group.is_broken)):
            return None
        return Plan(stay, [*leave, *surplus], lost, hosts)

    def _room(self, members: Sequence[Member]) -> list[tuple[str, HostMesh]]:
        """Return the hosts of the next members for which there is room, the emptiest first."""
        with self._news:
            hosts = {
                name: host
                for name, host in self._hosts.items()
                if name not in self._notices and self._is_tried(name) and _is_there(host)
            }
        counts = {name: sum(each.host == name for each in members) for name in hosts}
        found: list[tuple[str, HostMesh]] = []
        while counts and len(found) < self.maximum:
            name = min(counts, key=counts.__getitem__)
            if self._per_host is not None and counts[name] >= self._per_host:
                break
            counts[name] += 1
            found.append((name, hosts[name]))
        return found

    def _is_tried(self, host: str) -> bool:
        """Return whether a host is not set aside just now."""
        aside = self._aside.get(host)
        return aside is None or time.monotonic() >= aside.until

    def _prepare(self) -> None:
        """Prepare hosts without a member for one, and do not wait for them."""
        members = self._members.all
        if self._warm is None or not members:
            return
        used = {each.host for each in members}
        with self._news:
            # Where there was a member, the fork server is waiting.
            self._warm |= used
            fresh = {
                name: host
                for name, host in self._hosts.items()
                if name not in self._warm and name not in self._notices and _is_there(host)
            }
            self._warm |= fresh.keys()
        for host in fresh.values():
            # One that cannot be prepared is noticed when it is needed.
            members[0].procs.prepare(host).add_done_callback(lambda done: done.exception())

    def stop(self) -> None:
        """Stop all members."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._told.remove(self)
            if self._members.group is not None:
                self._members.group.close()
            stop(self._members.all)
            self._members.all, self._members.mesh = [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<ElasticMesh of {self._name}: {self.size} members, {self.minimum} to {self.maximum}>"


def _is_there(host: HostMesh) -> bool:
    """Return whether a host is not known to be dead."""
    try:
        host.select(lambda _: True)
    except ValueError:
        return False
    return True
