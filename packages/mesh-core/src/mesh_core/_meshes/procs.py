"""Meshes of processes: spawning actors on them, repair, logging and stop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from mesh_core._actors.actor import RESERVED, Actor
from mesh_core._actors.endpoint import Interface
from mesh_core._common.codes import Request
from mesh_core._common.context import current_instance
from mesh_core._common.control import LOGGING, Control
from mesh_core._common.current import current
from mesh_core._common.elsewhere import Elsewhere
from mesh_core._common.errors import MeshError, SupervisionError, Undeliverable
from mesh_core._common.tracing import notice
from mesh_core._failures.owned_meshes import Making, check_policy
from mesh_core._futures.future import Future
from mesh_core._geometry.mesh import Kind, Mesh, check_name, describe
from mesh_core._meshes.actors import ActorMesh
from mesh_core._meshes.outcomes import Addressee, error_of, stopping
from mesh_core._native import Placement, Point, Region, Target, incarnation, known_moves, learn_moves, locate

if TYPE_CHECKING:
    from typing import Self

    from mesh_core._failures.policy_run import Supervise
    from mesh_core._geometry.location import Location
    from mesh_core._geometry.values import ValueMesh
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._meshes.repair import Moves, Ranks
    from mesh_core._meshes.spawning import Recipe
    from mesh_core._native import Call
    from mesh_core._process.process import Process

P = ParamSpec("P")
T = TypeVar("T")

# How long to wait for other hosts to report process ids.
_PIDS_S = 1.0

# After Ctrl-C, a stop that takes longer than this says what it is waiting for.
_MOMENT_S = 0.5

# A process whose event loop is busy longer than this applies its new log level later.
_TOLD_S = 1.0


class ProcMesh(Mesh):
    """Processes on which actors are spawned; returned by :meth:`HostMesh.spawn_procs`.

    They are stopped at the end of a ``with`` block, or else when the script ends.
    """

    _kind = Kind.PROCS

    def __init__(
        self,
        process: Process,
        *,
        name: str,
        location: Location,
        procs_id: int,
        root: Region,
        view: Region,
        ready: Future[None] | None,
        spawned: Call | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        self._process = process
        self._name = name
        self._location = location
        self._procs_id = procs_id
        self._root = root
        self._view = view
        self._ready = ready
        self._spawned = spawned
        self._recipe = recipe
        self._boots = False

    @property
    def name(self) -> str:
        """The name of the mesh in errors and listings."""
        return self._name

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same processes in the same shape, wherever the references came from."""
        if not isinstance(other, ProcMesh):
            return NotImplemented
        return self._procs_id == other._procs_id and self._view == other._view

    def __hash__(self) -> int:
        return hash((self._procs_id, self._view))

    def _with_region(self, region: Region) -> ProcMesh:
        return ProcMesh(
            self._process,
            name=self._name,
            location=self._location,
            procs_id=self._procs_id,
            root=self._root,
            view=region,
            ready=self._ready,
            spawned=self._spawned,
            recipe=self._recipe,
        )

    def _resized(self, root: Region) -> ProcMesh:
        """Return the same processes with more or fewer ranks; the caller sets when new ones are ready."""
        return ProcMesh(
            self._process,
            name=self._name,
            location=self._location,
            procs_id=self._procs_id,
            root=root,
            view=root,
            ready=None,
            recipe=self._recipe,
        )

    def __iter__(self) -> Iterator[tuple[Point, ProcMesh]]:
        from mesh_core._native import Slice

        extent = self._view.extent
        for index, rank in enumerate(self._view):
            yield Point(index, extent), self._with_region(Region([], Slice(rank, [], [])))

    @overload
    def spawn(
        self, name: str, cls: Callable[..., T], *args: Any, supervise: Supervise | None, **kwargs: Any
    ) -> T: ...
    @overload
    def spawn(self, name: str, cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    # The constructor's arguments may have any names except those of this method's own parameters.
    def spawn(  # type: ignore[misc]
        self, name: str, cls: Any, *args: Any, supervise: Supervise | None = None, **kwargs: Any
    ) -> Any:
        """Spawn an actor on every process. Returns at once; messages wait until the constructor has returned.

        The actor (or script) that spawns actors owns them: they end with their owner, and it is notified of their
        failures. ``supervise`` is asked first: a function of a :class:`MeshFailure` that returns true if it handled
        the failure, a :class:`mesh_core.policies.Policy`, or the name of an installed policy.

        Returns an :class:`ActorMesh`, typed as the actor class so that type checkers know its endpoints. It can be
        awaited: ``await procs.spawn(...)`` returns it once all actors are constructed, or raises what a constructor raised.
        """
        # For Model[int], a generic class with its parameters, use the class itself.
        cls = getattr(cls, "__origin__", cls)
        if not isinstance(cls, type) or not _is_actor(cls):
            raise TypeError(
                f"spawn() must be given an actor class, got {cls!r}; derive it from mesh_core.Actor and "
                "pass the class, then the constructor's arguments"
            )
        check_name(name)
        policy = check_policy(supervise)
        owner = current_instance()
        owner_id = 0 if owner is None else owner.actor_id
        process = self._process
        process.check_owner(owner_id)
        if process.closed or (self._recipe is not None and self._recipe.stopped):
            end = "its runtime has been shut down" if process.closed else "it has been stopped"
            raise Undeliverable(
                f"cannot spawn {name!r} on {self._name!r}: {end}; spawn new processes first",
                actor=name,
            )
        cls = process.actor_class(cls)
        table = process.table(cls)
        if taken := RESERVED & table.keys():
            raise TypeError(
                f"{cls.__qualname__} has an endpoint named {min(taken)!r}, which is a method of every mesh"
            )
        self._check_constructor(cls, args, kwargs)
        interface = Interface(cls.__qualname__, {key: value.arity for key, value in table.items()}, cls)
        actor_id = process.runtime.new_id()
        blob = process.class_blob(cls)
        sender = process.runtime.sender(self._target(), actor_id, name, Request.SPAWN)
        notice(process)
        creator = "the script" if owner is None else owner.describe()
        spawned = (blob, self._name, (owner_id, creator), args, kwargs)
        mesh: ActorMesh[Any] = ActorMesh(
            process,
            interface,
            name=name,
            location=self._location,
            procs_id=self._procs_id,
            actor_id=actor_id,
            root=self._view,
            view=self._view,
            making=(making := Making(spawned, owner_id, self if self._recipe is not None else None)),
        )
        process.recording(owner_id, mesh, actor_id)
        if process.tracer is None:
            call = sender.call(spawned)
        else:
            call = process.tracer.spawn(sender, spawned, name, cls.__qualname__)
        who = mesh._addressee()
        mesh._ready = Future(
            process, call, lambda call: all_well(call, who), lambda: f"the spawn of {name!r}"
        )
        making.holding = process.own(owner_id, mesh, actor_id, policy)
        if policy is None and process.owners.restarts(owner_id, self._procs_id):
            import logging

            logging.getLogger("mesh").warning(
                "the actors %r will not be restarted: the policy that their processes %r have restarts processes only. Give "
                "spawn(%r, ..., supervise=) the policy; it also restarts the processes",
                name, self._name, name,
            )  # fmt: skip
        if policy is not None and any(each.arity.on_restart != "fail" for each in table.values()):
            from mesh_core._failures.policy_run import can_repair
            from mesh_core._failures.returns import Returns

            if can_repair(policy):
                process.owners.of(owner_id).tell(making.holding, Returns(self._procs_id))
                mesh._owner = process.runtime.me
        if self._location.is_joined or known_moves(process.runtime, self._procs_id) is not None:
            addrs = ((rank, self._location.addr(self._procs_id, rank)) for rank in self._view)
            making.lives = {rank: incarnation(process.runtime, at[0], at[1]) for rank, at in addrs}
        return mesh

    @overload
    def run(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[ValueMesh[T]]: ...
    @overload
    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[T]]: ...
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Run a function or coroutine function once on every process; the future has the result of each.

        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs({"gpus": 2}) as procs:
        ...     procs.run(pow, 2, 10).get(timeout=30).values()
        [1024, 1024]
        """
        from mesh_core._meshes.runs import run

        return run(self, function, args, kwargs)

    def _check_constructor(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if missing := getattr(cls, "__abstractmethods__", None):
            raise TypeError(
                f"cannot spawn {cls.__qualname__}: it is abstract, without {', '.join(sorted(missing))}; "
                "spawn a subclass that has them"
            )
        if cls.__init__ is object.__init__:  # type: ignore[misc]  # only compared
            complaint = "takes no arguments" if args or kwargs else ""
            text = "()"
        else:
            import inspect

            from mesh_core._actors.endpoint import Arity

            arity = Arity(inspect.signature(cls.__init__), skip=1)  # type: ignore[misc]
            complaint, text = arity.complaint(args, kwargs), arity.text
        if complaint:
            raise TypeError(f"{cls.__qualname__}{text} {complaint}")

    if not TYPE_CHECKING:
        # What meshes of processes do with tensors in other libraries.
        activate = Elsewhere("it is a function of mesh_tensor, with activate(procs)")
        rank_tensor = Elsewhere("it is a function of mesh_tensor, rank_tensor(procs, dim)")

    def _target(self) -> Target:
        return self._location.target(self._procs_id, self._view)

    @property
    def initialized(self) -> Future[None]:
        """Done when every process is up and its ``bootstrap`` has run; raises :class:`SpawnError` if one cannot start."""
        if self._ready is None:
            raise MeshError(
                f"{self!r} was not spawned here; only the process that spawned it is notified of its start"
            )
        return self._ready

    def __await__(self) -> Generator[Any, None, ProcMesh]:
        yield from self.initialized.__await__()
        return self

    @property
    def pids(self) -> list[int | None]:
        """The process ids; ``None`` for a process that could not be started or has ended.

        In the process that spawned the mesh, this waits until the processes are up, at most the setting ``spawn_timeout``.
        Elsewhere it returns what is known so far: ``None`` may also mean that a process is not up yet.
        """
        spawned, process = self._spawned, self._process
        if not process.in_charge:
            return self._known_pids()
        if spawned is not None:
            spawned.wait(process.settings.spawn_timeout, heed=False)
        latest = self._ready if spawned is None else None if self._recipe is None else self._recipe.repair
        if latest is not None:
            with contextlib.suppress(TimeoutError):
                latest.exception(process.settings.spawn_timeout)
        return self._known_pids()

    def _known_pids(self) -> list[int | None]:
        process, runtime = self._process, self._process.runtime
        addrs = [locate(runtime, *self._location.addr(self._procs_id, rank)) for rank in self._view]
        pids = {addr: os.getpid() if addr == runtime.me else runtime.pid_of(*addr) for addr in addrs}
        me = process.identity
        # The script's process knows every process on its own host.
        afar = [
            addr for addr, pid in pids.items() if pid is None and (me.mesh_id != 0 or addr[2] != me.host_no)
        ]
        if afar and self._procs_id != 0 and not process.closed:
            pids |= process.hooks.find_pids(afar, _PIDS_S)
        return [pids[addr] for addr in addrs]

    def logging_option(
        self,
        stream_to_client: bool = True,
        aggregate_window_sec: float | None = 3.0,
        level: int | str = 20,  # logging.INFO
        ignore_numbers: bool = False,
    ) -> Future[None]:
        """Set what happens to the output and log records of these processes, for the whole mesh and from now on.

        Without ``stream_to_client`` nothing is shown (the last lines of stderr are still part of a failure). Equal
        lines of several ranks within ``aggregate_window_sec`` seconds are shown as one; with ``None`` every line is shown
        separately. With ``ignore_numbers``, lines that differ only in numbers are also shown as one, with a note.
        Records of :mod:`logging` below ``level``, a number or a name, are dropped. The future that is returned is done.

        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        ...     procs.logging_option(aggregate_window_sec=None, level="WARNING").get()
        """
        from mesh_core._common.proc import signed
        from mesh_core._system import streams

        window = 0.0 if aggregate_window_sec is None else aggregate_window_sec
        if isinstance(window, bool) or not isinstance(window, (int, float)) or not 0.0 <= window <= 86_400.0:
            raise ValueError(
                "aggregate_window_sec must be a number of seconds up to a day, or None, got "
                f"{aggregate_window_sec!r}"
            )
        level = _level(level)
        if not isinstance(ignore_numbers, bool):
            raise ValueError(f"ignore_numbers must be True or False, got {ignore_numbers!r}")
        if self._procs_id == 0:
            raise ValueError("cannot set logging options of the controller: its output is the script's own")
        runtime = self._process.runtime
        me = self._process.identity
        set_options = runtime.logs().set if me.mesh_id == 0 else streams.set_options
        flags = (streams.SHOWN if stream_to_client else 0) | (streams.ALIKE if ignore_numbers else 0)

        def tell(target: Target, meshes: Iterable[int]) -> Call:
            if me.is_guest:
                asked = (list(meshes), flags, round(window * 1000), level)
                controller = runtime.sender(
                    Target.one(0, 0, Placement.on(0)), 0, Control.LOGS, Request.EXTENSION
                )
                controller.tell(asked)
            else:
                for each in meshes:
                    set_options(each, flags, round(window * 1000), level)
            return runtime.sender(target, 0, LOGGING, Request.EXTENSION).call(signed(self._process, level))

        moved = (known_moves(runtime, each) or (0, []) for each in self._location.meshes(self._procs_id))
        meshes = [*self._location.meshes(self._procs_id), *{run[2] for _, runs in moved for run in runs}]
        told = tell(self._location.target(self._procs_id, self._all()), meshes)
        if self._recipe is not None:
            # Respawned processes log like the others.
            self._recipe.log_as = tell
        if self._ready is None or self._ready.done():
            # So that later calls log accordingly. A process that is not up yet receives this before anything else.
            told.wait(_TOLD_S)
        return Future.of(None)

    def alive(self) -> list[Point]:
        """Return the points of this mesh whose processes have not ended, as far as this process knows.

        The process that spawned the mesh learns of an end within milliseconds. Others only know of ends that were
        reported to them, for example by a call.
        """
        lost, extent = set(self._lost()), self._view.extent
        return [Point(place, extent) for place in range(len(self._view)) if place not in lost]

    def failed(self) -> list[Point]:
        """Return the points of this mesh whose processes ended and can be respawned with :meth:`respawn`; see :meth:`alive`."""
        extent = self._view.extent
        return [Point(place, extent) for place in self._lost()]

    def _places(self, ranks: Ranks) -> list[int]:
        """Resolve ``ranks`` to places; ``None`` means all failed ones."""
        from mesh_core._meshes.repair import places_of

        return places_of(self, ranks)

    def _lost(self) -> list[int]:
        from mesh_core._meshes.repair import lost_places

        return lost_places(self)

    @property
    def incarnations(self) -> list[int]:
        """How many times the process of each rank was respawned, in rank order."""
        addrs = (self._location.addr(self._procs_id, rank) for rank in self._view)
        return [incarnation(self._process.runtime, mesh, rank) for mesh, rank, _ in addrs]

    def respawn(self, ranks: Ranks = None, *, on: HostMesh | None = None) -> Future[None]:
        """Respawn processes that ended, in their places. Returns at once; the future is done when they are up.

        The mesh, its slices and all references to it, wherever they are, then refer to the new processes. Messages
        to the old ones are not sent again. Actors are not respawned: see :meth:`ActorMesh.respawn`.

        Args:
            ranks: numbers or points of this mesh; by default all that have :meth:`failed`.
            on: hosts for the new processes; by default those of the old ones. Ranks that were on one host stay
                together.

        Only the process that spawned the mesh can do this, until it stops the mesh; so can the next script of a job
        that outlives its scripts.

        >>> import os, signal
        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs({"gpus": 3}, supervise=lambda failure: True) as procs:
        ...     os.kill(procs.pids[1], signal.SIGKILL)
        ...     while not procs.failed():
        ...         pass
        ...     procs.respawn().get(timeout=30)
        ...     procs.failed(), procs.incarnations
        ([], [0, 1, 0])
        """
        from mesh_core._meshes import repair as _repair

        return _repair.respawn(self, ranks, on)

    def prepare(self, on: HostMesh) -> Future[None]:
        """Prepare spare hosts for ranks of this mesh. Returns at once; the future is done when they are ready.

        Each host starts a fork server for processes like those of this mesh, imports what they preload, and spawns one test
        process, which then ends. A later :meth:`respawn` or :meth:`grow` there forks instead of starting an interpreter.

        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs({"gpus": 2}) as procs:
        ...     procs.prepare(this_host()).get(timeout=30)
        """
        from mesh_core._meshes import repair as _repair

        return _repair.prepare(self, on)

    def grow(self, *, on: HostMesh | None = None, **sizes: int) -> ProcMesh:
        """Add places to the first dimension, with processes like the existing ones. Returns the larger mesh at once.

        This mesh becomes a part of the larger one. The new processes are on the hosts ``on``, by default on those of
        the existing ones, and are up when the larger mesh is :attr:`initialized`.

        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs({"gpus": 2}) as procs:
        ...     procs.grow(gpus=1).sizes
        {'gpus': 3}
        """
        from mesh_core._meshes import repair as _repair

        return _repair.grow(self, sizes, on)

    def shrink(self, **sizes: int) -> ProcMesh:
        """Remove the last places of the first dimension and stop their processes. Returns the smaller mesh at once.

        The processes have ended when the smaller mesh is :attr:`initialized`.

        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs({"gpus": 3}) as procs:
        ...     procs.shrink(gpus=2).sizes
        {'gpus': 1}
        """
        from mesh_core._meshes import repair as _repair

        return _repair.shrink(self, sizes)

    def stop(self, reason: str = "") -> Future[None]:
        """Stop the processes, after they have handled earlier messages; those that take too long are killed.

        Processes of a part of a mesh can be respawned with :meth:`respawn`. A mesh that has grown stops as a whole.
        """
        if self._procs_id == 0:
            raise ValueError(
                "the controller cannot stop itself as a mesh; call shutdown() or leave the script"
            )
        process = self._process
        if process.closed:
            raise MeshError(f"{self._name!r} has been stopped already: the runtime is shut down")
        if len(self._view) != len(self._root):
            from mesh_core._meshes.repair import stop_some

            return stop_some(self)
        what = f"the stop of {self._name!r} {reason}".rstrip()
        # A repair on another thread comes either before, and its processes stop too, or after, and is refused.
        with contextlib.nullcontext() if self._recipe is None else self._recipe.lock:
            process.owners.drop(self._procs_id)
            target = self._location.target(self._procs_id, self._all())
            if self._recipe is not None:
                self._recipe.stopped = True
            call = process.runtime.stop_procs(target, process.settings.stop_timeout)
        return stopping(process, call, what)

    def _hosts_now(self) -> set[int]:
        """Return the numbers of the hosts that the ranks are on now."""
        runtime, location, procs_id = self._process.runtime, self._location, self._procs_id
        return {locate(runtime, *location.addr(procs_id, rank))[2] for rank in self._all()}

    def _all(self) -> Region:
        """Return all ranks of the mesh, including those that were added."""
        grown = None if self._recipe is None else self._recipe.root
        return self._root if grown is None or len(grown) < len(self._root) else grown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._process.in_charge:
            stopped = self.stop()
            if isinstance(error, KeyboardInterrupt):
                self._hurry(stopped)
            from mesh_core._meshes import with_blocks

            with_blocks.end(self._process, stopped, error)

    def _hurry(self, stopped: Future[None]) -> None:
        """Wait for a stop that Ctrl-C asked for; another Ctrl-C kills the processes."""
        from mesh_core._common.interrupts import say_stopping

        try:
            if not stopped._call.wait(_MOMENT_S):
                say_stopping(len(self._root))
                while not stopped._call.wait(None):
                    pass
        except KeyboardInterrupt:
            self._process.runtime.stop_procs(self._location.target(self._procs_id, self._all()), 0.0)
            raise
        except SupervisionError:
            pass  # the block's own error is raised

    async def __aenter__(self) -> Self:
        await self
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._process.in_charge:
            from mesh_core._meshes import with_blocks

            await with_blocks.end_async(self._process, self.stop(), error)

    def __reduce__(self) -> Any:
        moves = known_moves(self._process.runtime, self._procs_id)
        return _revive, (self._name, self._location, self._procs_id, (self._root, self._view), moves)

    def __repr__(self) -> str:
        return f"<ProcMesh {self._name!r}: {describe(self._view)}>"

    def _repr_html_(self) -> str:
        from mesh_core._common.display import Table, listed, place

        pids, extent = self._known_pids(), self._view.extent

        def row(index: int) -> list[str]:
            pid = pids[index]
            return [place(Point(index, extent)) or "0", "-" if pid is None else str(pid)]

        return listed(Table(["place", "pid"]), len(pids), row).html(
            f"{self!r} on {self._location.called(self._view)}"
        )


def _level(level: object) -> int:
    from mesh_core._system.streams import LEVELS

    number = LEVELS.get(level) if isinstance(level, str) else level
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 1000:
        raise ValueError(
            f"level must be one of {', '.join(LEVELS)}, or a number such as logging.INFO, got {level!r}"
        )
    return number


def _is_actor(cls: type) -> bool:
    return issubclass(cls, Actor) and cls is not Actor


def all_well(call: Call, who: Addressee) -> None:
    for index, outcome in enumerate(call.outcomes()):
        error = error_of(outcome, index, who)
        if error is not None:
            raise error


def _revive(
    name: str, location: Location, procs_id: int, regions: tuple[Region, Region], moves: Moves | None
) -> ProcMesh:
    root, view = regions
    process = current()
    if moves is not None:
        learn_moves(process.runtime, procs_id, *moves)
    return ProcMesh(
        process, name=name, location=location, procs_id=procs_id, root=root, view=view, ready=None
    )
