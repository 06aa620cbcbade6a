"""Restore meshes that have lost ranks: :func:`heal_mesh`.

HEA-1: a mesh that is returned has lost nothing, as far as is known by then; otherwise the error says what it has lost.
HEA-2: replicas have one state after a heal: that of a survivor, or else the snapshot that was kept last.
HEA-3: a heal that has raised is not forgotten: the next one continues with what is left of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from mesh_core import (
    ActorError,
    ActorMesh,
    DeviceMeshError,
    Future,
    HostMesh,
    MeshError,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    concat,
    mesh_of,
    wait,
)
from mesh_core.extensions import (
    NOT_CARRIED,
    Extension,
    ProcEnd,
    Spawning,
    actor_id,
    actor_ranks,
    find,
    install,
    procs_of,
    settled,
    watch,
)
from mesh_supervision._groups import Group, group_of
from mesh_supervision._snapshots import Adopt, Fetch, Snapshots, result_of
from mesh_supervision._store import Kept, Owner, Store

M = TypeVar("M")
_MESHES: tuple[type, ...] = (ActorMesh, ProcMesh)
_TRIES = 10
"""How often a heal starts over as more ranks die."""
_LEAVE_S = 2.0
"""How long survivors have to leave a collective before it is checked whether they can."""
_GRACE_S = 1.0
"""How long an error of a rank waits for the news of a death that may have caused it."""


@runtime_checkable
class OnProcs(Protocol):
    """What lives on processes and can be used again once they are whole, such as the `Mesh` of mesh-tensor."""

    @property
    def procs(self) -> ProcMesh:
        """The processes, which this process has spawned."""


class _Subject:
    """A mesh to heal: as it was spawned, or the places of one dimension that are left of it."""

    def __init__(
        self, spawned: Any, dim: str = "", places: Sequence[int] = (), group: Group | None = None
    ) -> None:
        self.spawned = spawned
        """Processes or actors that this process has spawned."""
        self.dim = dim
        self.places = tuple(places)
        """The places of the dimension that are left, in order; none without a dimension, if all are left."""
        self.is_actors = not isinstance(spawned, ProcMesh)
        self.below: ProcMesh = procs_of(spawned) if self.is_actors else spawned
        """The processes of the spawned mesh, place by place."""
        self.group = group or group_of(self.below)

    def _left_of(self, mesh: Any) -> Any:
        if not self.dim:
            return mesh
        parts = [mesh.slice(**{self.dim: slice(first, last + 1)}) for first, last in _runs(self.places)]
        return parts[0] if len(parts) == 1 else concat(parts, self.dim)

    @cached_property
    def mesh(self) -> Any:
        """The mesh to heal, without gaps."""
        return self._left_of(self.spawned)

    @cached_property
    def procs(self) -> ProcMesh:
        """Its processes, place by place."""
        procs: ProcMesh = self._left_of(self.below)
        return procs

    def origin(self, place: int) -> int:
        """The place in the spawned mesh of a place in what is left."""
        if not self.dim:
            return place
        point = dict(self.mesh.extent.point(place))
        point[self.dim] = self.places[point[self.dim]]
        return self.spawned.extent.rank(**point)  # type: ignore[no-any-return]

    def one(self, place: int) -> Any:
        """The mesh of one at a place of what is left."""
        point = self.spawned.extent.point(self.origin(place))
        return self.spawned.slice(**point) if len(point) else self.spawned

    def owner(self, place: int) -> Owner:
        """The key of an actor's snapshots."""
        return Owner(actor_id(self.spawned), actor_ranks(self.one(place))[0])

    def lost(self) -> list[int]:
        """The places that have lost their actor, or their process."""
        lost = {point.rank for point in mesh_of(self.spawned).failed()}
        return [place for place in range(len(self.mesh)) if self.origin(place) in lost]

    def smaller(self, lost: Sequence[int]) -> _Subject:
        """The same without these places."""
        extent = self.mesh.extent
        points = [extent.point(place) for place in lost]
        best: tuple[int, str, list[int]] | None = None
        for label in [self.dim] if self.dim else extent.labels:
            gone = {point[label] for point in points}
            left = [place for place in range(extent.size(label)) if place not in gone]
            survivors = len(self.mesh) // extent.size(label) * len(left)
            if left and (best is None or survivors > best[0]):
                best = survivors, label, left
        if best is None:
            raise DeviceMeshError.of(self.mesh)
        _, dim, left = best
        places = [self.places[place] for place in left] if self.dim else left
        return _Subject(self.spawned, dim, places, self.group)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = places[0]
    for place in places[1:]:
        if place != last + 1:
            yield first, last
            first = place
        last = place
    yield first, last


class _Healed(Extension):
    """Knows, in the process that heals, which meshes it has put together from survivors, and of what."""

    name = "supervision.healed"

    def for_spawn(self, spawning: Spawning) -> Any:
        """Stay in this process."""
        return NOT_CARRIED

    def start(self) -> None:
        """Begin without any."""
        self.subjects: weakref.WeakKeyDictionary[Any, _Subject] = weakref.WeakKeyDictionary()
        self.unfinished: weakref.WeakSet[Any] = weakref.WeakSet()
        """Meshes as they were spawned, whose last heal has raised (HEA-3)."""


class _Healer:
    """One heal."""

    def __init__(
        self, subject: _Subject, on: HostMesh | None, replicas: bool, until: float, is_continued: bool
    ) -> None:
        self.subject = subject
        self._is_continued = is_continued
        """Whether the previous heal has raised."""
        self._on = on
        self._until = until
        self._snapshots = find(Snapshots) if subject.is_actors else None
        self._store: Store | None = None if self._snapshots is None else self._snapshots.store
        self._replicas = replicas and self._store is not None
        self._state: Kept | None = None
        self.carried: Kept | None = None
        """The state that an earlier attempt got from a rank that was alive then."""
        self.is_joining = False
        """Whether the group is being formed, which fails if one of its members cannot continue."""

    @property
    def state(self) -> Kept | None:
        """The state for the replicas, as far as it is known."""
        return self._state or self.carried

    def _wait(self, future: Future[M]) -> M:
        return result_of(future, max(0.0, self._until - time.monotonic()))

    def replace(self, lost: Sequence[int]) -> None:
        """Restart the lost ranks in their places."""
        subject = self.subject
        if subject.group is not None:
            subject.group.abort()
        broken = self._find_broken(lost)
        self._find_state([*lost, *broken])
        dead = [point.rank for point in subject.procs.failed()]
        if dead:
            for future in _respawned(subject.below, [subject.origin(place) for place in dead], self._on):
                self._wait(future)
        self._join()
        if subject.is_actors:
            # A restarted process has none of its actors.
            lost = sorted({*subject.lost(), *broken})
            self._plant(lost)
            if lost:
                self._wait(mesh_of(subject.spawned).respawn([subject.origin(place) for place in lost]))
            self._share(lost)

    def shrink(self, lost: Sequence[int]) -> None:
        """Continue with the survivors."""
        if self.subject.group is not None:
            self.subject.group.abort()
        self.subject = self.subject.smaller([*lost, *self._find_broken(lost)])
        self._find_state(self.subject.lost())
        self._join()
        self._share(self.subject.lost())

    def _join(self) -> None:
        if self.subject.group is not None:
            self.is_joining = True
            self.subject.group.form(self.subject.procs)
            self.is_joining = False

    def _find_broken(self, lost: Sequence[int]) -> list[int]:
        """Return the actors that an earlier heal could not restore. They exist, and their mesh does not know that they have failed."""
        if not (self._is_continued and self.subject.is_actors):
            return []
        alive = [place for place in range(len(self.subject.mesh)) if place not in lost]
        return self._settle({place: settled(self.subject.one(place)) for place in alive}, may_be_broken=True)

    def _find_state(self, lost: Sequence[int]) -> None:
        """Wait until the survivors have left everything in progress; take the state of one of them, or the last snapshot."""
        if self.subject.is_actors:
            # Earlier messages must not run in the next group.
            alive = [place for place in range(len(self.subject.mesh)) if place not in lost]
            self._settle({place: settled(self.subject.one(place)) for place in alive})
        if not self._replicas:
            return
        assert self._snapshots is not None and self._store is not None
        subject, error = self.subject, None
        for place in range(len(subject.mesh)):
            if place in lost:
                continue
            asked = self._snapshots.call(subject.one(place), Fetch(actor_id(subject.spawned)))
            try:
                self._state = self._wait(asked).item()
            except Exception as raised:  # noqa: BLE001 - another one may do
                error = raised
                continue
            return
        if error is not None and self.carried is None:
            raise error
        if self._state is None:
            last = self._store.last(actor_id(subject.spawned))
            self._state = self.carried or self._snapshots.fetched(last, str(subject.spawned))

    def _settle(self, asked: dict[int, Future[None]], *, may_be_broken: bool = False) -> list[int]:
        """Wait until the survivors have handled their messages; one that cannot leave a collective is ended.

        Return the places of those that were never constructed, if that is allowed.
        """
        group, broken = self.subject.group, []
        while asked:
            wait(list(asked.values()), timeout=min(_LEAVE_S, max(0.0, self._until - time.monotonic())))
            for place in [place for place, future in asked.items() if future.done()]:
                try:
                    self._wait(asked.pop(place))
                except ActorError:
                    if not may_be_broken:
                        raise
                    broken.append(place)
            if time.monotonic() >= self._until:
                for future in asked.values():
                    self._wait(future)
            if group is not None and len(group.members) == len(self.subject.mesh):
                for place in asked:
                    group.give_up(group.members[place])
        return broken

    def _plant(self, lost: Sequence[int]) -> None:
        if self._state is not None and self._store is not None:
            for place in lost:
                self._store.plant(self.subject.owner(place), self._state)

    def _share(self, made: Sequence[int]) -> None:
        """Give the state to those that have not just started with it, including its owner, so that all of them start over in the same way."""
        if self._state is None or self._store is None or self._snapshots is None:
            return
        subject = self.subject
        others = [place for place in range(len(subject.mesh)) if place not in made]
        lives = {}
        for place in others:
            owner = subject.owner(place)
            lives[owner.rank] = self._store.plant(owner, self._state).life
        if lives:
            adopt = Adopt(actor_id(subject.spawned), self._state, lives)
            self._wait(self._snapshots.call(subject.mesh, adopt))


def _respawned(procs: ProcMesh, ranks: Sequence[int], on: HostMesh | None) -> list[Future[None]]:
    """Restart processes on their own hosts, or on ``on`` if their hosts are dead."""
    if on is None:
        return [procs.respawn(ranks)]
    homeless, waits = [], []
    for rank in ranks:
        try:
            waits.append(procs.respawn(rank))
        except ValueError:
            homeless.append(rank)
    if homeless:
        waits.append(procs.respawn(homeless, on=on))
    return waits


def heal_mesh(
    mesh: M,
    mode: Literal["replace", "shrink"] = "replace",
    *,
    on: HostMesh | None = None,
    replicas: bool = True,
    timeout: float = 120.0,
) -> M:
    """Heal a mesh that has lost ranks, and return the mesh to continue with.

    Of something else that has `procs`, such as the `Mesh` of mesh-tensor, these processes are healed, and it is returned itself: its
    tensors are lost, and it takes new ones. It cannot shrink.

    1. Survivors that wait in a collective with the dead leave it (:func:`form_group`).
    2. ``"replace"``: lost ranks are replaced in their places, and the mesh stays the same. ``"shrink"``: the survivors become a
       mesh without gaps, with new ranks.
    3. The process group, if there was one, is formed again.
    4. With :func:`keep_snapshots`, all actors get the state of a survivor or, if there is none, of the last snapshot.

    A mesh that has lost nothing is returned as it is. Ranks that die during the heal are healed too. After an error, for example from
    ``__restore__``, call it again: it continues with what is not healed yet.

    Args:
        mesh: actors or processes that this process has spawned, what has such processes as its `procs`, or the result of an earlier
            ``heal_mesh``. Give them a policy that restarts nothing, such as ``Ignore()``.
        mode: whether to replace the lost ranks or to shrink the mesh.
        on: hosts for processes whose own host is dead.
        replicas: whether all actors have the same state. If not, each replaced actor starts from its own last snapshot, and the
            others are left alone.
        timeout: the number of seconds that it may take.
    """
    if mode not in ("replace", "shrink"):
        raise ValueError(f"mode must be 'replace' or 'shrink', got {mode!r}")
    if not isinstance(mesh, _MESHES):
        if not isinstance(mesh, OnProcs) or not isinstance(mesh.procs, ProcMesh):
            raise TypeError(
                f"heal_mesh() takes a mesh of actors or of processes, or what has one of processes as its procs, got {mesh!r}"
            )
        if mode == "shrink":
            raise ValueError(
                f"{mesh!r} cannot shrink: its processes have fixed places. Use mode='replace', or make another one of fewer processes"
            )
        heal_mesh(mesh.procs, on=on, timeout=timeout)
        return mesh
    until = time.monotonic() + timeout
    healed = find(_Healed) or install(_Healed)
    subject = _subject(mesh)
    error: Exception | None = None
    carried: Kept | None = None
    for _ in range(_TRIES):
        lost = subject.lost()
        is_whole = subject.group is None or not subject.group.is_broken
        if not lost and error is None and is_whole and subject.spawned not in healed.unfinished:
            break
        healer = _Healer(subject, on, replicas, until, subject.spawned in healed.unfinished)
        healer.carried = carried
        try:
            if mode == "replace":
                healer.replace(lost)
            else:
                healer.shrink(lost)
                subject = healer.subject
        except Exception as raised:
            healed.unfinished.add(subject.spawned)
            # More may have died, and be the cause.
            if time.monotonic() >= until or not (
                healer.is_joining or _loses(subject.mesh, subject.lost, raised, lost)
            ):
                raise
            error, carried = raised, healer.state
        else:
            error = None
            healed.unfinished.discard(subject.spawned)
    else:
        raise DeviceMeshError.of(subject.mesh) from error
    if subject.dim:
        healed.subjects[subject.mesh] = subject
    return subject.mesh  # type: ignore[no-any-return]


@contextlib.contextmanager
def whole(mesh: Any) -> Iterator[None]:
    """Turn errors in this block that are caused by lost ranks of the mesh into :class:`DeviceMeshError`.

    Before any other error is raised, the block waits up to a second for the news of a death that may have caused it, because survivors of a collective often
    raise before that news arrives.

    >>> from mesh_core import Actor, DeviceMeshError, endpoint, this_host
    >>> from mesh_supervision import Ignore, whole
    >>> class Worker(Actor):
    ...     @endpoint
    ...     def work(self) -> int:
    ...         return 1
    >>> with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
    ...     workers = procs.spawn("workers", Worker, supervise=Ignore())
    ...     _ = workers.work.call().get(timeout=30)
    ...     procs.slice(gpus=1).stop().get(timeout=30)
    ...     try:
    ...         with whole(workers):
    ...             workers.work.call().get(timeout=30)
    ...     except DeviceMeshError as error:
    ...         print(error.coordinates)
    ({'gpus': 1},)
    """
    try:
        yield
    except DeviceMeshError:
        raise
    except Exception as error:
        healed = find(_Healed)
        subject = None if healed is None else healed.subjects.get(mesh)
        lost = (lambda: [point.rank for point in mesh_of(mesh).failed()]) if subject is None else subject.lost
        if _loses(mesh, lost, error, ()):
            raise DeviceMeshError.of(mesh) from error
        raise


def _loses(mesh: Any, lost: Callable[[], list[int]], error: Exception, before: Sequence[int]) -> bool:
    """Return whether more ranks were lost than those known before, or soon will be, which may have caused an error."""
    news = threading.Event()

    def on_end(_: ProcEnd) -> None:
        news.set()

    until, known = time.monotonic() + _GRACE_S, set(before)
    if known and isinstance(error, (SupervisionError, Undeliverable)):
        return True
    watching = watch(mesh, on_end)
    try:
        while not set(lost()) - known:
            if not isinstance(error, (MeshError, RuntimeError)) or not news.wait(until - time.monotonic()):
                return False
            news.clear()
        return True
    finally:
        watching.cancel()


def _subject(mesh: Any) -> _Subject:
    healed = find(_Healed)
    return (None if healed is None else healed.subjects.get(mesh)) or _Subject(mesh)
