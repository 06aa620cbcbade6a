"""Meshes of processes: spawning them, and spawning actors on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mesh_core import _process
from mesh_core._actors import ActorMesh
from mesh_core._context import current_instance
from mesh_core._endpoint import Interface, table_of
from mesh_core._errors import MeshError, SpawnError, SupervisionError
from mesh_core._estate import check_policy
from mesh_core._future import Future
from mesh_core._mesh import RESERVED, Mesh, describe
from mesh_core._native import Lost, Point, Region, Target
from mesh_core._outcomes import Addressee, error_of

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from mesh_core._estate import Policy
    from mesh_core._native import Call, Extent
    from mesh_core._process import Process

T = TypeVar("T")

# What a worker is told travels in one packet of a Unix socket.
_CONFIG_LIMIT = 120_000


class ProcMesh(Mesh):
    """Processes, on which actors are spawned; made by :meth:`HostMesh.spawn_procs`.

    Leaving a ``with`` block stops them; so does the end of the script.
    """

    def __init__(
        self,
        process: Process,
        *,
        name: str,
        host: str,
        procs_id: int,
        root: Region,
        view: Region,
        ready: Future[None] | None,
    ) -> None:
        self._process = process
        self._name = name
        self._host = host
        self._procs_id = procs_id
        self._root = root
        self._view = view
        self._ready = ready

    @property
    def name(self) -> str:
        """What errors and listings call the mesh."""
        return self._name

    def _with_region(self, region: Region) -> ProcMesh:
        return ProcMesh(
            self._process,
            name=self._name,
            host=self._host,
            procs_id=self._procs_id,
            root=self._root,
            view=region,
            ready=self._ready,
        )

    def __iter__(self) -> Iterator[tuple[Point, ProcMesh]]:
        from mesh_core._native import Slice

        extent = self._view.extent
        for index, rank in enumerate(self._view):
            yield Point(index, extent), self._with_region(Region([], Slice(rank, [], [])))

    def spawn(
        self, name: str, cls: Callable[..., T], *args: Any, supervise: Policy | None = None, **kwargs: Any
    ) -> T:
        """Spawn an actor on every process. Returns at once; messages wait until its constructor has returned.

        The actor (or the script) that spawns owns what it has spawned: it ends with its owner, and its owner hears of
        its failures. A policy given as ``supervise`` hears of them first: a function of a :class:`MeshFailure` that
        returns true if it has handled it.

        What comes back is an :class:`ActorMesh`, typed as the class itself so that its endpoints are known. It may be
        awaited: ``await procs.spawn(...)`` returns it once all are constructed, or raises what a constructor raised.
        """
        if not isinstance(cls, type) or not _is_actor(cls):
            raise TypeError(
                f"spawn() takes an actor class, not {cls!r}; derive it from mesh_core.Actor and pass the class, "
                "then the constructor's arguments"
            )
        check_policy(supervise)
        owner = current_instance()
        owner_id = 0 if owner is None else owner.actor_id
        self._process.check_owner(owner_id)
        table = table_of(cls)
        taken = sorted(RESERVED & set(table))
        if taken:
            raise TypeError(
                f"{cls.__qualname__} has an endpoint named {taken[0]!r}, which is a method of every mesh"
            )
        self._check_constructor(cls, args, kwargs)
        process = self._process
        interface = Interface(cls.__qualname__, {key: value.arity for key, value in table.items()})
        actor_id = process.runtime.new_id()
        blob = process.class_blob(cls)
        sender = process.runtime.sender(self._target(), actor_id, name, "spawn")
        creator = "the script" if owner is None else owner.describe()
        call = sender.call((blob, self._name, self._host, (owner_id, creator), args, kwargs))
        mesh: ActorMesh[T] = ActorMesh(
            process,
            interface,
            name=name,
            host=self._host,
            procs_id=self._procs_id,
            actor_id=actor_id,
            root=self._view,
            view=self._view,
        )
        who = mesh._addressee()
        mesh._ready = Future(
            process, call, lambda call: _all_well(call, who), lambda: f"the spawn of {name!r}"
        )
        process.own(owner_id, mesh, actor_id, supervise)
        return cast("T", mesh)

    def _check_constructor(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import inspect

        from mesh_core._endpoint import Arity

        if cls.__init__ is object.__init__:  # type: ignore[misc]  # only compared
            complaint = "takes no arguments" if args or kwargs else ""
            text = "()"
        else:
            arity = Arity(inspect.signature(cls.__init__), skip=1)  # type: ignore[misc]
            complaint, text = arity.complaint(args, kwargs), arity.text
        if complaint:
            raise TypeError(f"{cls.__qualname__}{text} {complaint}")

    def _target(self) -> Target:
        if len(self._view) == 1:
            return Target.one(self._procs_id, self._view.rank_at(0))
        return Target.many(self._procs_id, self._view)

    @property
    def initialized(self) -> Future[None]:
        """Done when every process is up (and its ``bootstrap`` has run); raises :class:`SpawnError` if one cannot be."""
        if self._ready is None:
            raise MeshError(
                f"{self!r} was not spawned here; only the process that spawned it hears of its start"
            )
        return self._ready

    def __await__(self) -> Generator[Any, None, ProcMesh]:
        yield from self.initialized.__await__()
        return self

    @property
    def pids(self) -> list[int | None]:
        """The processes' ids, as far as they are known here."""
        runtime = self._process.runtime
        mesh, own = runtime.me
        return [
            os.getpid() if (self._procs_id, rank) == (mesh, own) else runtime.pid_of(self._procs_id, rank)
            for rank in self._view
        ]

    def stop(self, reason: str = "") -> Future[None]:
        """Stop the processes, after what was sent to them before; those that take too long are killed."""
        if len(self._view) != len(self._root):
            raise ValueError(
                f"only a whole mesh of processes can be stopped, and this is a part of it ({describe(self._view)} of "
                f"{describe(self._root)}); stop the actors there, or the whole mesh"
            )
        if self._procs_id == 0:
            raise ValueError(
                "the controller cannot stop itself as a mesh; call shutdown() or leave the script"
            )
        process = self._process
        if process.closed:
            raise MeshError(f"{self._name!r} has been stopped already: the runtime is shut down")
        process.estates.drop(self._procs_id)
        what = f"the stop of {self._name!r} {reason}".rstrip()
        call = process.runtime.stop_procs(self._procs_id, self._root, process.settings.stop_timeout)
        return Future(process, call, _nothing, lambda: what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.in_charge:
            stopped = self.stop()
            failed: BaseException | None = None
            while not stopped.done():
                try:
                    stopped.get()
                except SupervisionError as unheard:
                    # Raised here as by any call, but for the block's own error, and after the end.
                    failed = failed or unheard
            if error is None and (failed := failed or self._process.faults.catch_up()) is not None:
                raise failed

    async def __aenter__(self) -> Self:
        await self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.in_charge:
            stopped = self.stop()
            failed: BaseException | None = None
            while not stopped.done():
                try:
                    await stopped
                except SupervisionError as unheard:
                    failed = failed or unheard
            # Not for long: what has ended has sent its notices before.
            if error is None and (failed := failed or self._process.faults.catch_up()) is not None:
                raise failed

    def __reduce__(self) -> Any:
        return _revive, (self._name, self._host, self._procs_id, self._root, self._view)

    def __repr__(self) -> str:
        return f"<ProcMesh {self._name!r}: {describe(self._view)}>"

    def _repr_html_(self) -> str:
        import html

        rows = "".join(
            f"<tr><td>{html.escape(', '.join(f'{k}={v}' for k, v in point.items()) or '0')}</td><td>{pid}</td></tr>"
            for (point, _), pid in zip(self, self.pids, strict=True)
        )
        return f"<table><caption>{html.escape(repr(self))}</caption><tr><th>place</th><th>pid</th></tr>{rows}</table>"


def _is_actor(cls: type) -> bool:
    from mesh_core._actor import Actor

    return issubclass(cls, Actor) and cls is not Actor


def _nothing(call: Call) -> None:
    """However the processes ended: they are gone."""


def _all_well(call: Call, who: Addressee) -> None:
    for index, outcome in enumerate(call.outcomes()):
        error = error_of(outcome, index, who)
        if error is not None:
            raise error


def _revive(name: str, host: str, procs_id: int, root: Region, view: Region) -> ProcMesh:
    return ProcMesh(
        _process.current(), name=name, host=host, procs_id=procs_id, root=root, view=view, ready=None
    )


def _interpreter(python: str | None) -> list[str]:
    import subprocess

    # The flags of this interpreter (-O, -W, -X ...) hold for its workers too.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [python or sys.executable, *flags]


def spawn(
    process: Process,
    extent: Extent,
    *,
    name: str | None,
    bootstrap: Callable[[], object] | None,
    env: dict[str, str],
    preload: list[str],
    fresh: bool,
    python: str | None,
    proc_bind: list[list[int]] | None,
    supervise: Policy | None,
) -> ProcMesh:
    """Ask the host's agent for a mesh of processes."""
    import json

    for key, value in env.items():
        if (
            not isinstance(key, str)
            or not isinstance(value, str)
            or not key
            or "=" in key
            or "\0" in key + value
        ):
            raise ValueError(
                f"env[{key!r}] = {value!r}: names and values are strings, names not empty and without '='"
            )
    if bootstrap is not None and not callable(bootstrap):
        raise TypeError(f"bootstrap is a function without arguments, not {bootstrap!r}")
    if python is not None:
        import shutil

        if shutil.which(python) is None:
            raise SpawnError(
                f"python={python!r} is not a program that can be run here; give the path of an interpreter"
            )
    check_policy(supervise)
    owner = current_instance()
    owner_id = 0 if owner is None else owner.actor_id
    process.check_owner(owner_id)
    region = Region.whole(extent)
    mesh_id = process.runtime.new_id()
    shown = name or process.unique_name("procs")
    inherited = dict(os.environ)
    here = os.getcwd()  # noqa: PTH109 - pathlib takes longer to import than this package may
    config = {
        "mesh_name": shown,
        "host": process.identity.host,
        "labels": extent.labels,
        "sizes": extent.sizes,
        "env": {**inherited, **env},
        "path": [entry or here for entry in sys.path],
        "cwd": here,
        "settings": process.settings.as_dict(),
        "bind": proc_bind,
        "python": _interpreter(python) if fresh else None,
    }
    encoded = json.dumps(config).encode()
    if len(encoded) > _CONFIG_LIMIT:
        raise MeshError(
            f"the environment, sys.path and CPU binding of {shown!r} take {len(encoded):,} bytes, above the "
            f"{_CONFIG_LIMIT:,} that can be passed to a new process; pass large values as arguments of actors"
        )
    # A nursery serves all spawns that look alike to modules imported before the fork: without preloaded ones that is
    # every spawn, with them it is those of one environment.
    nursery_env = {**inherited, **env} if preload else process.environ
    plan = json.dumps({"path": config["path"], "preload": preload})
    argv = [*_interpreter(None), "-c", _NURSERY, plan]
    call = process.runtime.spawn_procs(
        mesh_id,
        region,
        argv=argv,
        env=sorted(nursery_env.items()),
        fresh=fresh,
        config=encoded,
        within=process.settings.spawn_timeout,
    )
    mesh = ProcMesh(
        process,
        name=shown,
        host=process.identity.host,
        procs_id=mesh_id,
        root=region,
        view=region,
        ready=None,
    )
    who = Addressee(shown, process.identity.host, region, region, mesh)
    ready = Future(process, call, lambda call: _all_up(call, who), lambda: f"the spawn of {shown!r}")
    if bootstrap is not None:
        sender = process.runtime.sender(mesh._target(), process.runtime.new_id(), "@bootstrap", "spawn")
        ready = Future(
            process,
            sender.call(bootstrap),
            lambda call: _all_well(call, who),
            lambda: f"the bootstrap of {shown!r}",
        )
    mesh._ready = ready
    process.own(owner_id, mesh, 0, supervise)
    return mesh


_NURSERY = (
    "import json, sys; plan = json.loads(sys.argv[1]); sys.path[:] = plan['path']; "
    "from mesh_core._nursery import main; main(plan['preload'], int(sys.argv[2]), int(sys.argv[3]))"
)


def _all_up(call: Call, who: Addressee) -> None:
    for index, outcome in enumerate(call.outcomes()):
        error = error_of(outcome, index, who)
        if isinstance(outcome, Lost) and not outcome.orderly and not isinstance(error, SpawnError):
            raise SpawnError(f"a process of {who.name!r} died while it started: {error}") from error
        if error is not None:
            raise error
