"""The pool as its users see it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast

from mesh_core._blocks.pool.following import Following, Steps
from mesh_core._blocks.pool.places import State
from mesh_core._blocks.pool.results import Completed, Ordered, Unordered
from mesh_core._blocks.pool.sharing import Addr, FarTurns, Options, Pools, Shared
from mesh_core._blocks.pool.tasks import Call, Runner, Task
from mesh_core._blocks.pool.turns import OnCrash, OwnTurns, Turns
from mesh_core._common.checks import one_of, seconds, whole
from mesh_core._common.context import running_loop
from mesh_core._common.current import current
from mesh_core._common.errors import ActorTimeout, MeshError, Unsendable
from mesh_core._futures.promise import Promise
from mesh_core._meshes.actors import ActorMesh
from mesh_core._meshes.adverbs import Endpoint, ItemsEndpoint

if TYPE_CHECKING:
    from typing import Self

    from mesh_core._blocks.pool.results import Results
    from mesh_core._futures.future import Future
    from mesh_core._process.process import Process

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PoolProgress:
    """How far a pool is; see :attr:`Pool.progress`."""

    waiting: int
    """Tasks that wait for a replica."""
    running: int
    """Tasks that replicas are working on."""
    done: int
    """Tasks that have a result."""
    failed: int
    """Tasks that have raised, or were cancelled."""
    retried: int
    """How many times a task was run again because its replica was lost."""
    rate: float
    """Tasks finished per second, over at most the last ten seconds."""
    replicas: int
    """Replicas that take work. If the pool was made in another process: as many as are known here."""
    lost: int
    """Replicas that are dead or are being respawned."""

    def __str__(self) -> str:
        parts = [f"{self.done} done", f"{self.running} running", f"{self.waiting} waiting"]
        parts += [f"{self.failed} failed"] * bool(self.failed) + [f"{self.retried} retried"] * bool(
            self.retried
        )
        return f"{', '.join(parts)}; {self.rate:,.1f}/s on {self.replicas} replicas" + (
            f", {self.lost} lost" if self.lost else ""
        )


class Pool(Generic[A]):
    """Keeps identical actors busy: each task goes to one that is free.

    >>> from mesh_core import Actor, Pool, endpoint, this_host
    >>> class Scorer(Actor):
    ...     @endpoint
    ...     def score(self, text: str) -> int:
    ...         return len(text)
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     scorers = procs.spawn("scorers", Scorer)
    ...     with Pool(scorers) as pool:
    ...         future = pool.submit(scorers.score, "one")
    ...         future.get(timeout=30), list(pool.map(scorers.score, ["a", "bb", "ccc"]))
    (3, [1, 2, 3])

    Tasks wait in the pool, so none is stuck behind a long task while another replica is free. The owner of the actors does not
    change; :meth:`close` ends the pool and not the actors. A pool may be sent to other processes: all holders share the
    replicas.

    Args:
        actors: the replicas. Replicas can be added and removed later.
        per_rank: how many tasks a replica gets at the same time. More than one is useful if the endpoint is ``concurrent``;
            if tasks are short, the next one is sent to the replica ahead of time anyway.
        retries: how often a task may be run again if its replica dies while it runs. It may have run in part by then, so
            allow this only for tasks that may run twice.
        timeout: seconds that a task may run, as with ``with_options(timeout=)``. Waiting for a replica does not count.
        waiting: how many tasks may wait for a replica before :meth:`submit` waits; by default, as many as can run at the same
            time.
        drain: seconds that the end of a ``with`` block waits for running tasks before it cancels them; by default, forever.
        on_crash: what happens when a replica dies. ``"raise"``: its task fails, its owner is notified as usual, and the other
            replicas continue. ``"retry"``: the pool handles the failure, and the other replicas continue. ``"respawn"``: the
            pool also respawns the replica.
    """

    _own: OwnTurns | None
    _shared: Shared | None

    def __init__(
        self,
        actors: A,
        *,
        per_rank: int = 1,
        retries: int = 0,
        timeout: float | None = None,
        waiting: int | None = None,
        drain: float | None = None,
        on_crash: Literal["raise", "retry", "respawn"] = "raise",
    ) -> None:
        mesh = _mesh_of(actors, "Pool()")
        process = mesh._process
        name = f"the pool of {mesh._name!r}"
        options = Options(
            per_rank=whole(per_rank, "Pool(per_rank=)", 1),
            retries=whole(retries, "Pool(retries=)", 0),
            timeout=seconds(timeout, "Pool(timeout=)"),
            waiting=None if waiting is None else whole(waiting, "Pool(waiting=)", 1),
            drain=seconds(drain, "Pool(drain=)"),
        )
        one_of(on_crash, "Pool(on_crash=)", OnCrash)
        following = Following.of(process)
        own = OwnTurns(name, options.per_rank, OnCrash(on_crash), following)
        own.add(mesh)
        self._begin(process, mesh, own, options)
        self._own = own
        # Weakly, so that a pool is freed as soon as nothing refers to it.
        resized = weakref.WeakMethod(self._resized)
        own.resized = lambda: (notify := resized()) and notify()
        self._shared = Shared(self, _revive)

    @classmethod
    def _from_elsewhere(cls, process: Process, actors: Any, turns: FarTurns, options: Options) -> Pool[Any]:
        """A pool that was made in another process."""
        self = cls.__new__(cls)
        self._begin(process, actors, turns, options)
        return self

    def _begin(self, process: Process, actors: Any, turns: Turns, options: Options) -> None:
        self._process = process
        self._actors = actors
        self._options = options
        self._own = None
        self._shared = None
        self._turns = options.per_rank * len(actors)
        self._resizing = threading.Lock()
        following = Following.of(process)
        name = f"the pool of {actors._name!r}"
        self._runner = Runner(name, turns, following, options.waiting or max(1, self._turns))

    def _resized(self) -> None:
        """There are more or fewer replicas."""
        assert self._own is not None
        with self._resizing:
            self._turns = self._own.turns()
            if self._options.waiting is None:
                self._runner.set_room(max(1, self._turns))

    # Tasks.

    def submit(self, endpoint: Endpoint[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call an endpoint on a free replica: ``pool.submit(scorers.score, text)``.

        The arguments are pickled when the task begins; do not change them before that. If the queue of waiting tasks is
        full, a thread waits here. A coroutine gets :class:`MailboxFull`; use :meth:`submit_async` there.
        """
        call = self._call(endpoint, args, kwargs)
        with Steps() as steps:
            room = self._runner.room(wait=running_loop() is None)
            if room is not None:
                self._await_room(room, steps)
            return self._submit(call, args, kwargs)

    async def submit_async(self, endpoint: Endpoint[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Like :meth:`submit`, for coroutines: waits for room, and returns the future of the result.

        >>> import asyncio
        >>> from mesh_core import Actor, Pool, endpoint, this_host
        >>> class Squarer(Actor):
        ...     @endpoint
        ...     async def square(self, n: int) -> int:
        ...         return n * n
        >>> async def squares(squarers, pool):
        ...     futures = [await pool.submit_async(squarers.square, n) for n in range(5)]
        ...     return [await future for future in futures]
        >>> with this_host().spawn_procs({"gpus": 2}) as procs:
        ...     squarers = procs.spawn("squarers", Squarer)
        ...     with Pool(squarers) as pool:
        ...         asyncio.run(squares(squarers, pool))
        [0, 1, 4, 9, 16]
        """
        call = self._call(endpoint, args, kwargs)
        room = self._runner.room(wait=True)
        if room is not None:
            await self._await_room_async(room)
        return self._submit(call, args, kwargs)

    def _await_room(self, room: Future[bool], steps: Steps) -> None:
        try:
            if not room.done():
                call: Any = room._call
                self._runner.following.help(call, None, steps)
            steps.wait(room.get)
        except BaseException:
            self._runner.leave_room(room)
            raise

    async def _await_room_async(self, room: Future[bool]) -> None:
        try:
            await room
        except BaseException:
            self._runner.leave_room(room)
            raise

    def _submit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        runner = self._runner
        name = f"{self._actors._name}.{call.endpoint} in a pool"
        task = Task(runner, call, args, kwargs, retries=self._options.retries, name=name)
        runner.begin(task)
        return task.future

    def _call(self, endpoint: Endpoint[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call that a replica will get. Raises if the endpoint or the arguments do not fit."""
        # Raises in a forked copy, and after the process has left the mesh, before any lock is taken.
        self._process.runtime.completion()
        if not isinstance(endpoint, Endpoint):
            raise TypeError(
                f"a pool calls an endpoint of its actors, such as {self._actors._name}.step; got {endpoint!r}"
            )
        if isinstance(endpoint, ItemsEndpoint) or endpoint._reducer is not None:
            kind = "a generator" if isinstance(endpoint, ItemsEndpoint) else "with reduce="
            raise ValueError(
                f"{endpoint!r} is {kind}, and a task of a pool has one result from one replica; call it with stream() or call()"
            )
        if endpoint._mesh._actor_id != self._actors._actor_id and (
            endpoint._mesh._interface.class_name != self._actors._interface.class_name
        ):
            raise ValueError(f"{endpoint!r} is not an endpoint of the actors of {self._runner.name}")
        if not endpoint._arity.fits(args, kwargs):
            raise endpoint._refuse(args, kwargs)
        limit = self._options.timeout if endpoint._limit is None else endpoint._limit
        arity = endpoint._arity
        keep = bool(endpoint._keeps)
        return Call(endpoint._name, not (arity.overlaps or arity.port), limit, keep, arity)

    def _call_again(self, endpoint: Endpoint[..., Any], last: Call, args: tuple[Any, ...]) -> Call:
        """Like :meth:`_call`, for an endpoint that was checked already."""
        if self._process.pid == os.getpid() and endpoint._arity.fits(args, {}):
            return last
        return self._call(endpoint, args, {})

    # Many at once.

    def map(
        self,
        endpoint: Endpoint[..., R],
        /,
        *values: Iterable[Any] | AsyncIterable[Any],
        ahead: int | None = None,
        bar: bool = False,
    ) -> Results[R]:
        """Call an endpoint with each of the values; iterate over the results in the order of the values.

        Iterate with ``for`` or, in a coroutine, with ``async for``; with ``async for``, ``values`` may be asynchronous too.
        With several iterables, the endpoint gets one value from each, as with Python's ``map``. Values are read as they are
        needed, so they may be endless. The first error is raised in place of its result, and cancels the remaining tasks.

        Args:
            endpoint: an endpoint of the pool's actors.
            values: the arguments.
            ahead: how many tasks may be submitted before their results are taken; by default, four times as many as can
                run at the same time.
            bar: whether to show a progress bar on stderr.
        """
        return Ordered(self, endpoint, values, ahead, bar)

    def map_unordered(
        self,
        endpoint: Endpoint[..., R],
        /,
        *values: Iterable[Any] | AsyncIterable[Any],
        ahead: int | None = None,
        bar: bool = False,
    ) -> Results[R]:
        """Like :meth:`map`, with results as they arrive, so that a slow task does not delay others."""
        return Unordered(self, endpoint, values, ahead, bar)

    def as_completed(
        self,
        endpoint: Endpoint[..., R],
        /,
        *values: Iterable[Any] | AsyncIterable[Any],
        ahead: int | None = None,
        bar: bool = False,
    ) -> Results[tuple[Any, Future[R]]]:
        """Like :meth:`map_unordered`, with pairs of a value and its finished future. An error does not end the other tasks.

        >>> from mesh_core import Actor, Pool, endpoint, this_host
        >>> class Divider(Actor):
        ...     @endpoint
        ...     def divide(self, n: int) -> float:
        ...         return 12 / n
        >>> with this_host().spawn_procs({"gpus": 2}) as procs:
        ...     dividers = procs.spawn("dividers", Divider)
        ...     with Pool(dividers) as pool:
        ...         done = {n: future.exception() or future.get() for n, future in pool.as_completed(dividers.divide, [3, 0, 4])}
        >>> done[3], done[4], type(done[0].original).__name__
        (4.0, 3.0, 'ZeroDivisionError')
        """
        return Completed(self, endpoint, values, ahead, bar)

    def __len__(self) -> int:
        """How many tasks that were submitted here have no outcome yet."""
        return len(self._runner)

    def __bool__(self) -> bool:
        return True

    @property
    def progress(self) -> PoolProgress:
        """The progress of the tasks that were submitted in this process."""
        waiting, running, done, failed, retried, rate = self._runner.counts()
        if self._own is None:
            replicas, lost = len(self._actors), 0
        else:
            states = self._own.states()
            replicas, lost = states[State.READY], states[State.LOST] + states[State.REPAIRING]
        return PoolProgress(waiting, running, done, failed, retried, rate, replicas, lost)

    @property
    def actors(self) -> A:
        """The actors that the pool was made of: ``pool.submit(pool.actors.score, text)``."""
        return cast("A", self._actors)

    # Replicas.

    def add(self, actors: A) -> None:
        """Add replicas of the same class, or lost ones that have been respawned."""
        own = self._in_charge("add")
        mesh = _mesh_of(actors, "add()")
        if mesh._interface.class_name != self._actors._interface.class_name:
            raise ValueError(
                f"{self._runner.name} must be given actors of class {self._actors._interface.class_name}, got "
                f"{mesh!r}, which are of {mesh._interface.class_name}"
            )
        with Steps():
            own.add(mesh)

    def drain(self, part: A | None = None) -> Future[None]:
        """Give these replicas no more tasks; the future is done when they have none left. :meth:`resume` undoes this."""
        own = self._in_charge("drain")
        places = own.places_of(None if part is None else _mesh_of(part, "drain()"))
        promise: Promise[None] = Promise(f"draining {self._runner.name}")
        left = _Countdown(len(places), promise)
        with Steps():
            own.drain(places, left)
        if not places:
            promise.set_result(None)
        return promise.future

    def resume(self, part: A | None = None) -> None:
        """Give these replicas tasks again, after :meth:`drain`."""
        own = self._in_charge("resume")
        places = own.places_of(None if part is None else _mesh_of(part, "resume()"))
        with Steps():
            own.resume(places)

    def remove(self, part: A) -> Future[None]:
        """Remove these replicas; the future is done when they have finished their tasks.

        Their processes and actors keep running. Stop them then, if nobody else needs them.
        """
        own = self._in_charge("remove")
        places = own.places_of(_mesh_of(part, "remove()"))
        drained = self.drain(part)
        with Steps():
            own.remove(places)
        return drained

    def _in_charge(self, what: str) -> OwnTurns:
        if self._own is None:
            raise MeshError(
                f"cannot {what}() here: {self._runner.name} was made in another process, which alone decides about its replicas"
            )
        if self._runner.closed:
            raise MeshError(f"cannot {what}(): {self._runner.name} is closed")
        return self._own

    # The end.

    def close(self, *, cancel: bool = False) -> Future[None]:
        """Take no more tasks; the future is done when those that were submitted here are finished.

        With ``cancel`` they are cancelled. If this process made the pool, other processes can no longer use it either.
        """
        runner = self._runner
        with Steps():
            runner.close()
            if cancel:
                runner.cancel_all()
            idle = runner.idle()
            if idle.done():
                self._closed()
            else:
                runner.following.follow(idle, self._closed)
        return idle

    def _closed(self) -> None:
        """All tasks are finished."""
        if self._shared is not None:
            self._shared.close()
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process.pid != os.getpid():
            return  # a forked copy leaves the pool to its parent
        idle = self.close(cancel=kind is not None)
        try:
            idle.get(self._options.drain)
        except ActorTimeout:
            self.close(cancel=True).get()
        finally:
            self._closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import asyncio

        idle = self.close(cancel=kind is not None)
        try:
            async with asyncio.timeout(self._options.drain):
                await idle
        except TimeoutError:
            await self.close(cancel=True)
        finally:
            self._closed()

    def __reduce__(self) -> Any:
        if self._shared is None:
            raise Unsendable(
                f"cannot send {self._runner.name} on from here: it was made in another process",
                "Send it from the process that made it.",
            )
        return self._shared.reduce()

    def __repr__(self) -> str:
        return f"<Pool of {self._actors._name!r}: {self.progress}{', closed' if self._runner.closed else ''}>"


class _Countdown:
    """Sets the result of a promise at the last of ``n`` calls."""

    def __init__(self, n: int, promise: Promise[None]) -> None:
        self._left = iter(range(n - 1))
        self._promise = promise

    def __call__(self) -> None:
        if next(self._left, None) is None:
            with contextlib.suppress(MeshError):
                self._promise.set_result(None)


def _mesh_of(actors: object, where: str) -> ActorMesh[Any]:
    if not isinstance(actors, ActorMesh):
        raise TypeError(f"{where} takes a mesh of actors, as spawn() returns it; got {actors!r}")
    return actors


def _revive(location: Addr, number: int, desk: Any, actors: Any, options: Options) -> Pool[Any]:
    """Unpickle a pool."""
    process = current()
    pools = process.slots.of(Pools)
    is_home = process.runtime.me == location
    with pools.lock:
        found = pools.made.get(number) if is_home else pools.known.get((location, number))
        if found is None and not is_home:
            turns = FarTurns(process, desk, f"the pool of {actors._name!r}")
            found = pools.known[location, number] = Pool._from_elsewhere(process, actors, turns, options)
    if found is None:
        raise MeshError("the pool was closed meanwhile")
    return found
