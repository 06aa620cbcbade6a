"""One change of the members of an elastic mesh; see :mod:`mesh_supervision._elastic`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mesh_core import Future, HostMesh, MeshError, ProcMesh, concat, mesh_of, wait
from mesh_core.extensions import actor_id, actor_ranks, find, settled, watch
from mesh_supervision._groups import Group, form_group
from mesh_supervision._simple import Ignore
from mesh_supervision._snapshots import Adopt, Fetch, Snapshots, result_of
from mesh_supervision._store import Kept, Owner, Store

R = TypeVar("R")
_LEAVE_S = 2.0
"""How long members have to leave a collective before it is checked whether they can."""
_GRACE_S = 1.0
"""How long an error waits for the news of the death that may have caused it."""


class Member:
    """Processes on one host, and their actors."""

    def __init__(self, host: str, procs: ProcMesh) -> None:
        self.host = host
        self.procs = procs
        self.actors: Any = None

    @property
    def is_lost(self) -> bool:
        """Whether it is no longer whole."""
        return bool(self.procs.failed()) or (self.actors is not None and bool(mesh_of(self.actors).failed()))

    def owners(self) -> list[Owner]:
        """The keys of its actors' snapshots."""
        number = actor_id(self.actors)
        return [Owner(number, rank) for rank in actor_ranks(self.actors)]

    def ranks(self) -> Iterator[Any]:
        """Return each of its actors, as a mesh of one."""
        extent = self.actors.extent
        for place in range(len(self.actors)):
            point = extent.point(place)
            yield self.actors.slice(**point) if len(point) else self.actors


@dataclass
class Members:
    """The state of an elastic mesh, which changes carry from one to the next."""

    dim: str
    sizes: Mapping[str, int]
    spawn: Mapping[str, Any]
    make: Callable[[ProcMesh], Any]
    """Spawns a member's actors."""
    with_group: bool
    store: Store | None
    """Where snapshots are kept; ``None`` if the actors have none."""
    all: list[Member] = field(default_factory=list)
    mesh: Any = None
    group: Group | None = None
    state: list[Kept] | None = None
    """The state of a member's actors when it was last read, for the next members (ELA-2)."""


@dataclass(frozen=True)
class Change:
    """What a safe point has changed about the members."""

    size: int
    """The number of members now."""
    joined: tuple[str, ...] = ()
    """The hosts of new members."""
    left: tuple[str, ...] = ()
    """The hosts of members that left."""
    lost: tuple[str, ...] = ()
    """The hosts of members that had died."""


@dataclass(frozen=True)
class Plan:
    """The changes that are due."""

    stay: list[Member]
    leave: list[Member]
    lost: list[Member]
    hosts: list[tuple[str, HostMesh]]
    """Hosts for new members."""

    @property
    def change(self) -> Change:
        """Return a description of it."""
        joined = tuple(name for name, _ in self.hosts)
        left, lost = (tuple(each.host for each in some) for some in (self.leave, self.lost))
        return Change(len(self.stay) + len(joined), joined, left, lost)


class Turn:
    """Carries out a plan, or, as far as the members are concerned, nothing of it."""

    def __init__(self, members: Members, plan: Plan, until: float) -> None:
        self._members = members
        self._plan = plan
        self._until = until
        self._fresh: list[Member] = []
        self._snapshots = find(Snapshots)
        self.bad_hosts: dict[str, str] = {}
        """Hosts on which no member could be started, and why."""
        self.doing = "beginning"
        """What it is doing, for people."""

    def _wait(self, future: Future[R]) -> R:
        return result_of(future, max(0.0, self._until - time.monotonic()))

    def run(self) -> None:
        """Carry it out."""
        members, plan = self._members, self._plan
        if members.group is not None:
            members.group.abort()
        self.doing = "waiting until the members have handled their messages"
        self._settle()
        self.doing = "reading a member's state"
        self._find_state()
        self.doing = f"starting processes on {', '.join(name for name, _ in plan.hosts) or 'no host'}"
        self._spawn()
        following = [*plan.stay, *self._fresh]
        if following:
            self.doing = "connecting the members"
            self._join(following)
            for member in self._fresh:
                member.actors = members.make(member.procs)
            self.doing = "giving the members their state"
            self._share(following)
            self.doing = "constructing the new members' actors"
            for member in self._fresh:
                self._wait(member.actors.initialized)
        members.all = following
        members.mesh = concat([each.actors for each in following], members.dim) if following else None
        stop([*plan.leave, *plan.lost])

    def undo(self) -> None:
        """Stop what was started for it."""
        if self._members.group is not None:
            # It must not look whole.
            self._members.group.abort()
        stop(self._fresh)

    def may_be_tried_again(self, error: Exception) -> bool:
        """Return whether another attempt is worthwhile: a host is bad, or a process has died, or will soon be known to have."""
        if self.bad_hosts:
            return True
        news = threading.Event()
        members = [*self._plan.stay, *self._fresh]
        watching = [watch(each.procs, lambda _: news.set()) for each in members]
        until = time.monotonic() + _GRACE_S
        try:
            while not any(each.procs.failed() for each in members):
                if not isinstance(error, (MeshError, RuntimeError)) or not news.wait(
                    until - time.monotonic()
                ):
                    return False
                news.clear()
            return True
        finally:
            for each in watching:
                each.cancel()

    def _settle(self) -> None:
        """Wait until the survivors have handled their messages; one that cannot leave a collective is ended."""
        group = self._members.group
        asked: dict[int, Future[None]] = {}
        place = 0
        for member in self._members.all:
            for one in member.ranks():
                if member not in self._plan.lost:
                    asked[place] = settled(one)
                place += 1
        while asked:
            wait(list(asked.values()), timeout=min(_LEAVE_S, max(0.0, self._until - time.monotonic())))
            for each in [each for each, future in asked.items() if future.done()]:
                self._wait(asked.pop(each))
            if time.monotonic() >= self._until:
                for future in asked.values():
                    self._wait(future)
            if group is not None and len(group.members) == place:
                for each in asked:
                    group.give_up(group.members[each])

    def _find_state(self) -> None:
        """Return the state of one that stays, or else of one that leaves, or else the last snapshot (ELA-2)."""
        members, snapshots = self._members, self._snapshots
        if members.store is None or snapshots is None:
            return
        error: Exception | None = None
        for member in [*self._plan.stay, *self._plan.leave]:
            fetch = Fetch(actor_id(member.actors))
            try:
                asked = [snapshots.call(one, fetch) for one in member.ranks()]
                members.state = [self._wait(each).item() for each in asked]
            except Exception as raised:  # noqa: BLE001 - another one may do
                error = raised
            else:
                return
        for member in self._plan.lost if members.state is None else ():
            entries = [members.store.newest(owner) for owner in member.owners()]
            try:
                fetched = [snapshots.fetched(entry, str(member.actors)) for entry in entries]
            except MeshError as raised:
                error = raised
                continue
            kept = [each for each in fetched if each is not None]
            if len(kept) == len(member.actors):
                members.state = kept
                break
        if error is not None and members.state is None:
            raise error

    def _spawn(self) -> None:
        members = self._members
        for name, host in self._plan.hosts:
            try:
                self._fresh.append(Member(name, host.spawn_procs(members.sizes or None, **members.spawn)))
            except MeshError as error:
                self.bad_hosts[name] = str(error)
                raise
        for member in self._fresh:
            try:
                self._wait(member.procs.initialized)
            except MeshError as error:
                self.bad_hosts[member.host] = str(error)
                raise

    def _join(self, following: list[Member]) -> None:
        members = self._members
        procs = concat([each.procs for each in following], members.dim)
        if members.group is not None:
            members.group.form(procs)
        elif members.with_group:
            members.group = form_group(procs)

    def _share(self, following: list[Member]) -> None:
        """Give the state to all of them; those that stay start over in this way too."""
        members, snapshots = self._members, self._snapshots
        if members.state is None or members.store is None or snapshots is None:
            return
        told = []
        for member in following:
            number = actor_id(member.actors)
            for one, owner, kept in zip(member.ranks(), member.owners(), members.state, strict=True):
                lives = {owner.rank: members.store.plant(owner, kept).life}
                told.append(snapshots.call(one, Adopt(number, kept, lives)))
        for each in told:
            self._wait(each)


def stop(members: list[Member]) -> None:
    """Stop processes, whatever state they are in."""
    waits = []
    for member in members:
        try:
            waits.append(member.procs.stop())
        except MeshError:
            # It was stopped with its host, or the runtime was.
            continue
    for each in waits:
        # Their problems do not concern those who continue without them.
        each.exception()


def ignoring(spawn: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options for `spawn_procs`; a dead member is replaced by the next change, and by nothing else."""
    return {"supervise": Ignore(), **(spawn or {})}
