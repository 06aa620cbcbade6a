"""Actors whose state outlives their process: an extension takes snapshots of them, and gives the last one to their next life.

Each process has an instance, which makes the actors of that process. The instance in the process that has called
:func:`keep_snapshots`, the keeper, lives as long as the job. It decides which snapshot is the newest, and keeps those of
actors on its own host. Those of other hosts are kept by the hosts' own instances (``_shelves.py``).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from mesh_core import Future, MeshError, Promise, ValueMesh, context, this_host
from mesh_core.extensions import (
    NOT_CARRIED,
    ActorEnd,
    Extension,
    LocalActor,
    Proc,
    Spawning,
    actor_id,
    actor_ranks,
    current_proc,
    dumps,
    find,
    install,
    loads,
    local_actor,
)
from mesh_supervision._shelves import (
    COPY_S,
    Commit,
    Copy,
    Drop,
    Get,
    Here,
    Holder,
    Keep,
    Neighbour,
    Remove,
    Ring,
)
from mesh_supervision._store import Entry, Kept, Owner, Placed, Store, Version

R = TypeVar("R")
_ANSWER_S = 60.0
"""The time limit for an answer of the process that keeps snapshots."""
_END_S = 1.0


@dataclass(frozen=True)
class _Settings:
    """The payload of every instance."""

    keeper: Proc
    every: float | None
    on_hosts: bool
    """Whether snapshots of other hosts than the keeper's are kept on those hosts."""


@dataclass(frozen=True)
class _Begin:
    owner: Owner


@dataclass(frozen=True)
class _Save:
    owner: Owner
    kept: Kept


@dataclass(frozen=True)
class _End:
    owner: Owner
    life: int


@dataclass(frozen=True)
class Take:
    """A message to the processes of actors: keep a snapshot of them."""

    actor: int


@dataclass(frozen=True)
class Fetch:
    """A message: answer with the actor's present state, or with nothing if it has no state to keep."""

    actor: int


@dataclass(frozen=True)
class Adopt:
    """A message: give another state to those of the named actors that are alive."""

    actor: int
    kept: Kept
    lives: dict[int, int]
    """By rank: the life that it is in from now on."""


class _Local:
    """An actor of this process whose state is kept."""

    def __init__(self, actor: LocalActor, owner: Owner) -> None:
        self.actor = actor
        self.owner = owner
        self.life = 0
        self.is_pending = False
        """Whether a snapshot that the interval asked for is in progress."""
        self.complained = False
        self._lock = threading.Lock()
        self.number = 0

    def pack(self, state_of: Any) -> Kept:
        """Take a snapshot. Must be called where the actor's code may run."""
        state = state_of.__snapshot__()
        if inspect.isawaitable(state):
            raise TypeError(
                f"__snapshot__ of {self.actor.cls.__qualname__} must be a plain method, not a coroutine"
            )
        data, buffers = dumps(state)
        with self._lock:
            self.number += 1
            version = Version(self.life, self.number)
        return Kept(version, data, tuple(bytes(each) for each in buffers))

    def adopt(self, state_of: Any, kept: Kept, life: int) -> None:
        """Replace the actor's state."""
        restore(state_of, kept)
        with self._lock:
            self.life, self.number = life, 0


class Snapshots(Extension):
    """Keeps the state of actors; get it from :func:`keep_snapshots`."""

    name = "supervision.snapshots"
    on_hosts = True
    payload: _Settings

    def for_spawn(self, spawning: Spawning) -> Any:
        """Start an instance on hosts that will keep snapshots; the keeper's own host needs none."""
        if spawning.is_host and (not self.payload.on_hosts or spawning.is_local):
            return NOT_CARRIED
        return self.payload

    def start(self) -> None:
        """Start keeping or taking snapshots."""
        keeper = self.payload.keeper
        self.store = Store(dropped=self._dropped) if self.proc == keeper else None
        """The snapshots, in the keeper."""
        self._ring = Ring(keeper)
        self._holder = Holder(self.proc, keeper, self._asked)
        self._sends_to_host = self.payload.on_hosts and self.proc.host != keeper.host
        if self.proc.is_host:
            self.tell(keeper, Here())
        self._locals: dict[int, _Local] = {}
        self._lock = threading.Lock()
        self._timer: threading.Thread | None = None
        self._over = threading.Event()

    def stop(self) -> None:
        """Stop taking snapshots."""
        self._over.set()
        if self._timer is not None:
            self._timer.join(_END_S)

    # Called by users.

    def take(self, mesh: Any) -> Future[ValueMesh[Version]]:
        """Take and keep a snapshot of each actor of a mesh, between two of its messages; the future has their versions.

        If ``__snapshot__`` raises, so does the future, and the previous snapshot stays.
        """
        return self.call(mesh, Take(actor_id(mesh)))

    def newest(self, mesh: Any) -> list[Version | None]:
        """Return the version of each actor that is kept. Only in the process that keeps snapshots."""
        store, actor = self._keeping(), actor_id(mesh)
        kept = [store.newest(Owner(actor, rank)) for rank in actor_ranks(mesh)]
        return [None if each is None else each.version for each in kept]

    def places(self, mesh: Any) -> list[tuple[str, ...]]:
        """Return the hosts that have the newest snapshot of each actor, its own host first. Only in the process that keeps snapshots."""
        store, actor = self._keeping(), actor_id(mesh)
        return [self._hosts_of(store.newest(Owner(actor, rank))) for rank in actor_ranks(mesh)]

    def _hosts_of(self, entry: Entry | None) -> tuple[str, ...]:
        if isinstance(entry, Placed):
            return tuple(place.host for place in entry.places)
        return () if entry is None else (self.proc.host,)

    def forget(self, mesh: Any) -> None:
        """Drop the snapshots of a mesh of actors. Only in the process that keeps snapshots."""
        self._keeping().forget(actor_id(mesh))

    def fetched(self, entry: Entry | None, whose: str) -> Kept | None:
        """Return a snapshot, from one of the hosts that have it (SNP-5)."""
        if not isinstance(entry, Placed):
            return entry
        errors = []
        for place in sorted(entry.places, key=lambda place: place.host != self.proc.host):
            try:
                found: Kept | None = result_of(
                    self.call(place, Get(entry.owner, entry.version), timeout=_ANSWER_S)
                ).item()
            except MeshError as error:
                errors.append(f"{place}: {str(error).partition(chr(10))[0]}")
                continue
            if found is not None:
                return found
            errors.append(f"{place}: it was started again since, and has no copy")
        raise MeshError(
            f"the newest snapshot of {whose}, {entry.version}, cannot be read from any host that kept it "
            f"({'; '.join(errors)}). It does not continue from an older one; after forget() it starts with its constructor"
        )

    def _settle_in(self, local: _Local, kept: Kept) -> None:
        """Keep a snapshot that came from other hosts on this one: it is the first of this life."""
        local.number = 1
        promise = Promise[Version](f"a copy of the snapshot of {local.actor!r}")
        # If that fails, the original copies are still there.
        promise.future.add_done_callback(lambda done: done.exception())
        self._send(local, Kept(Version(local.life, 1), kept.data, kept.buffers), promise)

    async def _asked(self, proc: Proc, message: Any) -> Any:
        return (await self.call(proc, message, timeout=COPY_S)).item()

    def _dropped(self, owner: Owner, version: Version, places: tuple[Proc, ...]) -> None:
        for place in places:
            # A dead host has nothing to drop.
            with contextlib.suppress(MeshError):
                self.tell(place, Drop(owner, version))

    def _keeping(self) -> Store:
        if self.store is None:
            raise MeshError(f"{self.proc} keeps no snapshots; {self.payload.keeper} does")
        return self.store

    # Hooks.

    def actor_class(self, cls: type) -> type:
        """Refuse a class whose state could be kept but not restored."""
        if is_kept(cls) and not hasattr(cls, "__restore__"):
            raise TypeError(
                f"{cls.__qualname__} has __snapshot__ and no __restore__(state), which takes what it returns"
            )
        return cls

    def make_actor(self, actor: LocalActor) -> Any:
        """Construct an actor, or restore it from its snapshot."""
        if not is_kept(actor.cls):
            return actor.construct()
        owner = Owner(actor.id, actor.point.rank)
        local = _Local(actor, owner)
        entry: Entry | None
        local.life, entry = self._ask(_Begin(owner))
        found = self.fetched(entry, str(actor))
        if found is None:
            made = actor.construct()
        else:
            made = object.__new__(actor.cls)
            restore(made, found)
            if isinstance(entry, Placed) and self.proc.host not in (place.host for place in entry.places):
                self._settle_in(local, found)
        with self._lock:
            self._locals[actor.id] = local
            if self.payload.every is not None and self._timer is None and not self._over.is_set():
                self._timer = threading.Thread(target=self._tick, name="mesh-snapshots", daemon=True)
                self._timer.start()
        return made

    def actor_ended(self, end: ActorEnd) -> None:
        """Let what is kept of an ended actor be dropped, unless it is restarted."""
        with self._lock:
            ended = [each for each in self._locals.values() if each.actor.has_ended]
            for each in ended:
                del self._locals[each.owner.actor]
        for each in ended:
            if self.store is not None:
                self.store.end(each.owner, each.life)
            else:
                self.tell(self.payload.keeper, _End(each.owner, each.life))

    async def receive(self, message: Any, sender: Proc) -> Any:
        """Answer another instance."""
        match message:
            case Take(actor):
                return await self._take(self._living(actor))
            case Fetch(actor):
                living = self._living(actor)
                packing = partial(self._pack, living)
                return (await living.between_messages(packing))[1] if is_kept(living.cls) else None
            case Adopt(actor, kept, lives):
                living = self._living(actor)
                if living.point.rank in lives:
                    adopt = partial(self._adopt, living, kept, lives[living.point.rank])
                    await living.between_messages(adopt)
                return None
            case Keep(owner, kept):
                return await self._holder.keep(owner, kept)
            case Copy() | Get() | Drop() | Remove():
                return self._holder.shelf.handle(message)
        return self._decide(message, sender)

    def _decide(self, message: Any, sender: Proc) -> Any:
        """Answer as the keeper."""
        match message:
            case _Begin(owner):
                return self._keeping().begin(owner)
            case _Save(owner, kept):
                return self._keeping().save(owner, kept)
            case _End(owner, life):
                return self._keeping().end(owner, life)
            case Here():
                return self._ring.add(sender)
            case Neighbour(lost):
                for each in lost:
                    self._ring.lose(each)
                return self._ring.neighbour(sender)
            case Commit(placed):
                return self._keeping().save(placed.owner, placed), self._ring.neighbour(sender)
        raise TypeError(f"not a message of snapshots: {message!r}")

    # Taking.

    def take_here(self) -> Future[Version]:
        """See :func:`snapshot`."""
        instance = context().actor_instance
        local = self._local(instance.actor_id)
        promise = Promise[Version](f"snapshot of {local.actor!r}")
        try:
            kept = local.pack(local.actor.object)
        except BaseException as error:  # noqa: BLE001 - raised where the snapshot is waited for
            promise.set_exception(error)
        else:
            self._send(local, kept, promise)
        return promise.future

    def _living(self, actor: int) -> LocalActor:
        found = local_actor(actor)
        if found is None:
            raise MeshError(f"{self.proc} has no such actor, or has none any more")
        return found

    def _local(self, actor: int) -> _Local:
        found = self._locals.get(actor)
        if found is None:
            raise MeshError(f"{self.proc} keeps no snapshots of that actor: its class has no __snapshot__")
        return found

    def _pack(self, actor: LocalActor, made: Any) -> tuple[_Local, Kept]:
        # Only here is it certain that the actor has been constructed.
        local = self._local(actor.id)
        return local, local.pack(made)

    def _adopt(self, actor: LocalActor, kept: Kept, life: int, made: Any) -> None:
        self._local(actor.id).adopt(made, kept, life)

    def _take(self, actor: LocalActor) -> Future[Version]:
        promise = Promise[Version](f"snapshot of {actor!r}")

        def packed(done: Future[tuple[_Local, Kept]]) -> None:
            error = done.exception()
            if error is None:
                self._send(*done.get(), promise)
            else:
                promise.set_exception(error)

        actor.between_messages(partial(self._pack, actor)).add_done_callback(packed)
        return promise.future

    def _send(self, local: _Local, kept: Kept, promise: Promise[Version]) -> None:
        def saved(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                promise.set_exception(error)
            elif not done.get().item():
                promise.set_exception(_stale(local))
            else:
                promise.set_result(kept.version)

        if self.store is not None:
            if self.store.save(local.owner, kept):
                promise.set_result(kept.version)
            else:
                promise.set_exception(_stale(local))
            return
        try:
            if self._sends_to_host:
                asked = self.call(this_host(), Keep(local.owner, kept))
            else:
                asked = self.call(self.payload.keeper, _Save(local.owner, kept))
            asked.add_done_callback(saved)
        except Exception as error:  # noqa: BLE001 - the process is about to end, say
            promise.set_exception(error)

    def _tick(self) -> None:
        """Take snapshots at intervals, on a thread of its own."""
        while not self._over.wait(self.payload.every):
            with self._lock:
                due = [each for each in self._locals.values() if not each.is_pending]
            for local in due:
                local.is_pending = True
                self._take(local.actor).add_done_callback(_ticked(local))

    def _ask(self, message: _Begin) -> Any:
        if self.store is not None:
            return self.store.begin(message.owner)
        asked = self.call(self.payload.keeper, message, timeout=_ANSWER_S)
        return result_of(asked).item()


def _ticked(local: _Local) -> Callable[[Future[Version]], None]:
    def done(future: Future[Version]) -> None:
        local.is_pending = False
        error = future.exception()
        if error is not None and not local.complained and not local.actor.has_ended:
            local.complained = True
            logging.getLogger("mesh").warning(
                "no snapshot of %s, and the one before stays; said once: %s: %s",
                local.actor,
                type(error).__name__,
                error,
            )

    return done


def keep_snapshots(every: float | None = None, *, on: Literal["hosts", "script"] = "hosts") -> Snapshots:
    """Keep the state of actors that have ``__snapshot__``, in memory. Call it before ``spawn_procs``.

    When such an actor is restarted, ``__restore__(state)`` of its class is called instead of the constructor, with the last result of ``__snapshot__()``.
    If there is no snapshot, the constructor is called.

    Args:
        every: the number of seconds between two snapshots. Without it they are taken on request, by :func:`snapshot` and
            :meth:`Snapshots.take`.
        on: where to keep the snapshots of actors on other hosts: ``"hosts"`` keeps one copy on the actor's host and
            one on the next host, ``"script"`` one in this process. Snapshots of actors on this machine are kept in this process.

    >>> from mesh_core import Actor, endpoint, this_host
    >>> from mesh_core.extensions import uninstall
    >>> from mesh_supervision import keep_snapshots
    >>> class Counter(Actor):
    ...     def __init__(self) -> None:
    ...         self.count = 0
    ...     def __snapshot__(self) -> int:
    ...         return self.count
    ...     def __restore__(self, state: int) -> None:
    ...         self.count = state
    ...     @endpoint
    ...     def add(self, n: int) -> int:
    ...         self.count += n
    ...         return self.count
    >>> snapshots = keep_snapshots()
    >>> with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
    ...     counters = procs.spawn("counters", Counter, supervise=lambda failure: True)
    ...     _ = counters.add.call(5).get(timeout=30)
    ...     _ = snapshots.take(counters).get(timeout=30)
    ...     _ = counters.slice(gpus=1).stop().get(timeout=30)
    ...     counters.slice(gpus=1).respawn(0).get(timeout=30)
    ...     counters.add.call(1).get(timeout=30).values()
    [6, 6]
    >>> uninstall("supervision.snapshots")
    """
    if every is not None and (
        isinstance(every, bool) or not isinstance(every, (int, float)) or not every > 0
    ):
        raise ValueError(f"every must be a positive number of seconds or None, got {every!r}")
    if on not in ("hosts", "script"):
        raise ValueError(f"on must be 'hosts' or 'script', got {on!r}")
    return install(Snapshots, _Settings(current_proc(), every, on == "hosts"))


def snapshot() -> Future[Version]:
    """Take a snapshot of the calling actor, from one of its endpoints; the future is done when it is kept.

    Anything that the endpoint does after this call is not included.
    """
    found = find(Snapshots)
    if found is None:
        raise MeshError(
            f"{current_proc()} takes no snapshots: call keep_snapshots() in the script, before spawn_procs()"
        )
    return found.take_here()


def is_kept(cls: type) -> bool:
    """Return whether the state of a class's actors is kept."""
    return hasattr(cls, "__snapshot__")


def restore(made: Any, kept: Kept) -> None:
    """Give an object a state."""
    made.__restore__(loads(kept.data, [bytearray(each) for each in kept.buffers]))


def result_of(future: Future[R], timeout: float | None = None) -> R:
    """Wait for this future only: other failures in the meantime are for the script's own calls to raise."""
    error = future.exception(timeout)
    if error is not None:
        raise error
    return future.get()


def _stale(local: _Local) -> MeshError:
    return MeshError(
        f"a snapshot of {local.actor!r} is not kept: a newer one is, or the actor was restarted elsewhere"
    )
