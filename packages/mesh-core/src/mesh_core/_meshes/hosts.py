"""Meshes of hosts, and the host and process that code runs on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from mesh_core._common.codes import HostState
from mesh_core._common.current import current
from mesh_core._common.errors import MeshError, Undeliverable
from mesh_core._geometry.location import ListedLocation, Location, Names, evenly, is_host_mesh
from mesh_core._geometry.mesh import Kind, Mesh, describe
from mesh_core._native import Extent, Placement, Point, Region, Slice, release_hosts, roll

if TYPE_CHECKING:
    import os
    from typing import Never, Self

    from mesh_core._failures.policy_run import Supervise
    from mesh_core._features.workspace.report import WorkspaceReport
    from mesh_core._futures.future import Future
    from mesh_core._meshes.host_traits import Host
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._native import Call
    from mesh_core._process.process import Process
    from mesh_core._system.environment import Env

# How long the report of an end may take, in addition to the time that processes may take to end.
_GRACE_S = 5.0
# How many hosts a repr names.
_SHOWN = 4

MAX_PROCS = 100_000
"""More processes than any host can hold: asking for more is a typo."""


class HostMesh(Mesh):
    """Hosts on which processes are spawned; :func:`this_host` is the one this code runs on."""

    _kind = Kind.HOSTS

    def __init__(
        self, process: Process, view: Region, name: str, location: Location, *, root: Region | None = None
    ) -> None:
        self._process = process
        self._view = view
        self._name = name
        self._location = location
        self._root = root
        """All hosts that were attached together, if they were attached here."""
        self._ready: Future[None] | None = None

    def _with_region(self, region: Region) -> HostMesh:
        part = HostMesh(self._process, region, self._name, self._location, root=self._root)
        part._ready = self._ready
        return part

    def __iter__(self) -> Iterator[tuple[Point, HostMesh]]:
        extent = self._view.extent
        for index, host in enumerate(self._view):
            yield Point(index, extent), self._with_region(Region([], Slice(host, [], [])))

    @property
    def name(self) -> str:
        """The name of the mesh in errors and listings."""
        return self._name

    @property
    def names(self) -> list[str]:
        """The name of each host, as far as it is known."""
        return [self._location.name_of(host) for host in self._view]

    @property
    def addresses(self) -> list[str]:
        """The address of each host's agent, as it was attached.

        Empty for this host and for hosts that dialed in. Only the script knows addresses; elsewhere all are empty.
        """
        known = self._process.addresses()
        return [known.get(host, "") for host in self._numbers]

    @property
    def _numbers(self) -> list[int]:
        """The numbers of the hosts in the job."""
        return [self._location.host_of(rank) for rank in self._view]

    @property
    def labels(self) -> list[dict[str, str]]:
        """The labels that each host's agent was started with, in the order of the mesh.

        The script knows them once the hosts are attached.

        >>> from mesh_core.testing import LocalCluster
        >>> with LocalCluster(hosts=2, labels=[{"zone": "a"}, {"zone": "b"}]) as cluster:
        ...     hosts = cluster.attach()
        ...     hosts.initialized.get(timeout=60)
        ...     hosts.labels
        [{'zone': 'a'}, {'zone': 'b'}]
        """
        from mesh_core._meshes.host_traits import traits

        return [dict(host.labels) for host in traits(self)]

    @property
    def resources(self) -> list[dict[str, float]]:
        """The resources that each host's agent was started with, and its ``"cpus"``, in the order of the mesh.

        The script knows them once the hosts are attached.

        >>> from mesh_core.testing import LocalCluster
        >>> with LocalCluster(hosts=1, resources={"gpus": 8}) as cluster:
        ...     hosts = cluster.attach()
        ...     hosts.initialized.get(timeout=60)
        ...     hosts.resources[0]["gpus"]
        8.0
        """
        from mesh_core._meshes.host_traits import traits

        return [dict(host.resources) for host in traits(self)]

    def join(self, other: HostMesh) -> HostMesh:
        """Return these hosts and others as one mesh: those of several attachments, or a mesh and a spare.

        Both must have one dimension, or none for a single host. The result is a mesh like any other.

        >>> from mesh_core.testing import LocalCluster
        >>> with LocalCluster(hosts=3) as cluster, cluster.attach() as hosts:
        ...     first, last = hosts.slice(hosts=0), hosts.slice(hosts=2)
        ...     both = first.join(last)
        ...     both.sizes, len(both.spawn_procs({"gpus": 2}))
        ({'hosts': 2}, 4)
        """
        if not isinstance(other, HostMesh):
            raise TypeError(f"join() takes a mesh of hosts, got {other!r}")
        labels = [*self._view.extent.labels, *other._view.extent.labels]
        if len(self._view.extent.labels) > 1 or len(other._view.extent.labels) > 1 or len(set(labels)) > 1:
            raise ValueError(
                f"cannot join {describe(self._view)} and {describe(other._view)}: both must have exactly "
                "one dimension, of the same name; flatten('hosts') both first"
            )
        numbers = [*self._numbers, *other._numbers]
        twice = sorted({host for host in numbers if numbers.count(host) > 1})
        if twice:
            raise ValueError(
                f"{self._process.name_of_host(twice[0])} is in both meshes, and a mesh contains a host "
                "once; join others"
            )
        name = self._name if self._name == other._name else f"{self._name}+{other._name}"
        names = Names.of(self._location.names, other._location.names)
        return self._listed(numbers, (labels or ["hosts"])[0], name, names, other)

    def _listed(
        self,
        numbers: list[int],
        label: str,
        name: str,
        names: Mapping[int, str],
        other: HostMesh | None = None,
    ) -> HostMesh:
        """Return a mesh of hosts by number; the numbers need not be evenly spaced."""
        region = Region.whole(Extent([label], [len(numbers)]))
        parts = [self] if other is None else [self, other]
        owned = all(part._root is not None for part in parts)
        made = HostMesh(
            self._process, region, name, ListedLocation(numbers, names), root=region if owned else None
        )
        waits = [part._ready for part in parts if part._ready is not None]
        if len(waits) == 1:
            made._ready = waits[0]
        elif waits:
            from mesh_core._futures.combined import all_done

            made._ready = all_done(self._process, waits, f"the attachment of {name!r}")
        return made

    def _location_of(self, each: int) -> Location:
        """Return the location of a mesh with this many processes on each host."""
        if isinstance(self._location, ListedLocation):
            return ListedLocation(self._numbers, self._location.names, each)
        return Location(Placement.spread(self._view, each), self._location.names)

    def select(self, predicate: Callable[[Host], object] | None = None, /, **labels: str) -> HostMesh:
        """Return the hosts that have these labels and satisfy ``predicate``, of those that are attached and not dead.

        If no host matches, it raises a :class:`ValueError` that lists what there is.

        >>> from mesh_core.testing import LocalCluster
        >>> zones = [{"zone": "a"}, {"zone": "b"}, {"zone": "a"}]
        >>> with LocalCluster(hosts=3, labels=zones) as cluster, cluster.attach() as hosts:
        ...     hosts.initialized.get(timeout=60)
        ...     hosts.select(zone="a").names
        ['host-0', 'host-2']
        """
        from mesh_core._meshes.host_traits import select

        return select(self, predicate, labels)

    @property
    def initialized(self) -> Future[None]:
        """Done when every host is attached.

        Raises :class:`SpawnError` if one cannot be used, or :class:`AuthenticationError` if its credentials are the reason.
        """
        if self._ready is None:
            raise MeshError(
                f"{self!r} was not attached here; only the script that attached it is notified of that"
            )
        return self._ready

    def __await__(self) -> Generator[Any, None, HostMesh]:
        if self._ready is not None:
            yield from self._ready.__await__()
        return self

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        name: str | None = None,
        *,
        bootstrap: Callable[[], object] | None = None,
        env: Env | Callable[[Point], Env] | None = None,
        preload: Sequence[str] | None = None,
        start: Literal["fork", "exec"] = "fork",
        python: str | None = None,
        proc_bind: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
        devices: Literal["own"] | None = None,
        torch_env: bool = False,
        supervise: Supervise | None = None,
        **unknown: Never,
    ) -> ProcMesh:
        """Spawn processes: as many on each host as ``per_host`` says, by default one. Returns at once.

        Args:
            per_host: named sizes, for example ``{"gpus": 8}``.
            name: the name of the mesh in errors and listings.
            bootstrap: a function that runs in every process before anything else does.
            env: environment variables, set before any of your modules is imported there; ``None`` removes one. A function
                is called here with each rank's :class:`Point`, and returns the variables of that rank.
            preload: modules to import before workers are forked; all forked workers share them. By default, those of numpy,
                torch and the like that this process has imported and an actor class refers to; ``[]`` imports none.
            start: ``"fork"`` takes milliseconds; ``"exec"`` gives a fresh interpreter.
            python: another interpreter, for ``start="exec"``; processes spawned from these use it too.
            proc_bind: for each process of a host, the CPUs that it may run on.
            seed: makes the random numbers of ``random``, numpy and torch reproducible, and different on each rank. Without
                it they differ on each rank and in each run. See also :func:`rank_seed`.
            devices: ``"own"`` gives each process of a host one of the CUDA devices there, by ``CUDA_VISIBLE_DEVICES``.
            torch_env: set ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``
                as ``torchrun`` does, and ``GROUP_RANK`` and ``TORCHELASTIC_RUN_ID``, by which Lightning recognizes such ranks.
            supervise: is asked about a process's death before the owner is: a function of the failure that returns true if it
                handled the failure, a :class:`mesh_core.policies.Policy`, or the name of an installed policy.
            **unknown: refused, with a hint at what was probably meant.

        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs(per_host={"gpus": 2}, env={"OMP_NUM_THREADS": "1"}) as procs:
        ...     procs.sizes
        {'gpus': 2}
        """
        from mesh_core._meshes.spawning import spawn

        if unknown:
            raise TypeError(_unknown(unknown))
        sizes = _sizes(per_host)
        clash = sorted(set(sizes) & set(self._view.extent.labels))
        if clash:
            raise ValueError(
                f"per_host has a dimension {clash[0]!r}, which the hosts already have; rename one"
            )
        for label, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"per_host[{label!r}] must be a whole number of at least 1, got {size!r}")
        extent = Extent([*self._view.extent.labels, *sizes], [*self._view.extent.sizes, *sizes.values()])
        if extent.nelements > MAX_PROCS:
            raise ValueError(
                f"{extent.nelements:,} processes ({describe(Region.whole(extent))}) are more than a host can hold; "
                f"the most is {MAX_PROCS:,}"
            )
        if start not in ("fork", "exec"):
            raise ValueError(f"start must be 'fork' or 'exec', got {start!r}")
        if python is not None and start != "exec":
            raise ValueError(
                "python= needs start='exec', got start='fork': a forked process keeps this interpreter"
            )
        self._check_attached()
        per = extent.nelements // len(self._view)
        return spawn(
            self._process,
            extent,
            self._location_of(per),
            per_host=per,
            name=name,
            bootstrap=bootstrap,
            env=env,
            preload=_modules(preload),
            fresh=start == "exec",
            python=python,
            proc_bind=proc_bind,
            seed=seed,
            devices=devices,
            torch_env=torch_env,
            supervise=supervise,
        )

    def sync_workspace(
        self,
        path: str | os.PathLike[str] = ".",
        *,
        to: str | os.PathLike[str] | None = None,
        reload: bool = False,
        exclude: Iterable[str] = (),
    ) -> Future[WorkspaceReport]:
        """Copy the files below ``path`` to the hosts, and make processes import from the copies. Returns at once.

        Only files that a host does not have yet are sent, once for all hosts. Files deleted here are deleted there.
        Running processes and those spawned later import from the copy what the script would import from ``path``.

        Args:
            path: a directory on the machine on which the script runs.
            to: where to put the copies; by default in a directory of the job, which is removed with the job.
            reload: reimport changed modules in running processes; existing actors get the new code.
            exclude: more patterns of files to leave out, as in ``.gitignore``; ``"!build"`` includes one again.

        >>> import pathlib, tempfile
        >>> from mesh_core import shutdown, this_host
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "recipe.py").write_text("RATE = 0.5")
        >>> this_host().sync_workspace(folder).get().sent
        ('recipe.py',)
        >>> _ = (folder / "schedule.py").write_text("STEPS = 100")
        >>> this_host().sync_workspace(folder).get().sent
        ('schedule.py',)
        >>> _ = shutdown()
        """
        return self._process.hooks.sync(self, path, to=to, reload=reload, exclude=exclude)

    def stop(self) -> Future[None]:
        """Stop everything that this script runs on these hosts, and release them. Returns at once; their agents serve others.

        They can be attached again, by this script or another. ``with`` and ``async with`` do this at their end.

        >>> from mesh_core.testing import LocalCluster
        >>> with LocalCluster(hosts=2) as cluster, cluster.attach() as hosts:
        ...     procs = hosts.spawn_procs({"gpus": 2})
        ...     len(procs)
        4
        """
        root = self._attached()
        if len(self._view) != len(root):
            raise ValueError(
                f"cannot stop a part of a mesh of hosts ({describe(self._view)} of {describe(root)}); "
                "release these hosts with detach(), or stop the whole mesh"
            )
        return self._release("stop")

    def shutdown(self) -> Future[None]:
        """Stop everything on these hosts, and release them: the same as :meth:`stop`. Their agents serve others."""
        return self.stop()

    def detach(self, part: HostMesh | None = None) -> Future[None]:
        """Release these hosts while the job and its other hosts go on. Returns at once; their agents serve others.

        Processes there stop in order, and are killed if that takes longer than ``stop_timeout``. If a mesh is also on
        other hosts, its ranks on these hosts count as stopped: that is no failure, and calls to them raise
        :class:`Undeliverable`. The future is done when the hosts are gone, even if one died meanwhile. They can be
        attached again, as new hosts of the job. Only the script that attached hosts can release them.

        Args:
            part: some of these hosts; by default all of them.

        >>> from mesh_core.testing import LocalCluster
        >>> with LocalCluster(hosts=3) as cluster:
        ...     hosts = cluster.attach()
        ...     procs = hosts.spawn_procs({"gpus": 1})
        ...     hosts.detach(hosts.slice(hosts=2)).get(timeout=60)
        ...     procs.slice(hosts=slice(0, 2)).sizes
        {'hosts': 2, 'gpus': 1}
        """
        self._attached()
        if part is None:
            return self._release("detachment")
        if not isinstance(part, HostMesh):
            raise TypeError(
                f"detach() must be given a part of this mesh, such as hosts.slice(hosts=0), got {part!r}"
            )
        mine = set(self._numbers)
        others = [host for host in part._numbers if host not in mine]
        if others:
            names = ", ".join(self._process.name_of_host(host) for host in others[:_SHOWN])
            raise ValueError(
                f"{names} is not in {self!r}; call detach() on the mesh that it was attached with"
            )
        return part._release("detachment")

    def _release(self, what: str) -> Future[None]:
        from mesh_core._meshes.outcomes import stopping

        process = self._process
        if process.closed:
            raise MeshError(f"{self._name!r} has been stopped already: the runtime is shut down")
        mine = set(self._numbers)
        # Meshes that are also on other hosts are left out: the agents end the processes on these hosts.
        meshes = [
            procs
            for _, owned_meshes in process.owners.all()
            for procs in owned_meshes.procs()
            # Processes for host extensions; the agents end them last.
            if procs._hosts_now() <= mine and not is_host_mesh(procs._procs_id)
        ]
        process.forget_hosts(self._numbers)
        # In reverse order: a mesh may use those that were spawned before it.
        ending = [cast("Call", procs.stop()._call) for procs in reversed(meshes)]
        within = process.settings.stop_timeout
        limit, said = within + _GRACE_S, f"the {what} of {self._name!r}"
        futures = [
            stopping(
                process,
                release_hosts(process.runtime, hosts, ending, within, limit, what == "stop"),
                said,
            )
            for hosts in evenly(self._numbers)
        ]
        if len(futures) == 1:
            return futures[0]
        from mesh_core._futures.combined import all_done

        return all_done(process, futures, said)

    def _attached(self) -> Region:
        if self._root is None:
            raise MeshError(
                f"{self!r} was not attached here: only the script that attached hosts can release them"
            )
        return self._root

    def __enter__(self) -> Self:
        self._attached()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._process.in_charge:
            from mesh_core._meshes import with_blocks

            with_blocks.end(self._process, self.stop(), error)

    async def __aenter__(self) -> Self:
        self._attached()
        await self
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._process.in_charge:
            from mesh_core._meshes import with_blocks

            await with_blocks.end_async(self._process, self.stop(), error)

    def __reduce__(self) -> Any:
        names, numbers = self._location.names, self._numbers
        known = {host: names[host] for host in numbers if host in names}
        location = (
            ListedLocation(self._location.hosts, known)
            if self._location.is_joined
            else Location(self._location.placement, known)
        )
        return _revive_host, (self._view, self._name, location)

    def _check_attached(self) -> None:
        """Raise if some of these hosts are known to have been released."""
        released = [host for host, state in self._unwell().items() if state is HostState.STOPPED]
        if not released:
            return
        names = ", ".join(self._process.name_of_host(host) for host in released[:_SHOWN])
        more = f" and {len(released) - _SHOWN} more" if len(released) > _SHOWN else ""
        why = next(why for host, *_, why in roll(self._process.runtime) if host == released[0])
        raise Undeliverable(
            f"cannot spawn processes on {self._name!r}: {names}{more} was let go: {why}; attach it again",
            reason=why,
        )

    def _unwell(self) -> dict[int, str]:
        """Return the state of each host that is known not to run as it should."""
        told = {
            host: state
            for host, _, _, _, state, *_ in roll(self._process.runtime)
            if state is not HostState.RUNNING
        }
        return {host: told[host] for host in self._numbers if host in told} if told else {}

    def __repr__(self) -> str:
        shown = f"{self._name!r}: {describe(self._view)}"
        if len(self) > 1 or self._location.name_of(self._view.rank_at(0)) != self._name:
            first = [self._location.name_of(host) for host, _ in zip(self._view, range(_SHOWN), strict=False)]
            shown += f" on {', '.join(first)}{', …' if len(self) > len(first) else ''}"
        states = list(self._unwell().values())
        counts = [f"{states.count(state)} {state}" for state in sorted(set(states))]
        return f"<HostMesh {', '.join([shown, *counts])}>"

    def _repr_html_(self) -> str:
        from mesh_core._common.display import Table, listed, place

        extent, unwell = self._view.extent, self._unwell()
        table = Table(["place", "host", "state"] if unwell else ["place", "host"])

        def row(index: int) -> list[str]:
            rank = self._view.rank_at(index)
            states = [unwell.get(self._location.host_of(rank), "running")] if unwell else []
            return [place(Point(index, extent)) or "0", self._location.name_of(rank), *states]

        return listed(table, len(self), row).html(repr(self))


def _revive_host(view: Region, name: str, location: Location) -> HostMesh:
    return HostMesh(current(), view, name, location)


_OPTIONS = (
    "bootstrap",
    "devices",
    "env",
    "name",
    "per_host",
    "preload",
    "proc_bind",
    "python",
    "seed",
    "start",
    "supervise",
    "torch_env",
)


def _unknown(unknown: Mapping[str, object]) -> str:
    """Return the error for an unknown argument of ``spawn_procs``; most of them are meant as sizes."""
    name, value = next(iter(unknown.items()))
    complaint = f"spawn_procs() got an unexpected keyword argument {name!r}"
    if name == "bootstrap_command":
        return (
            f"{complaint}: give the variables in env=, and another interpreter in python= with start='exec'"
        )
    if isinstance(value, int):
        sizes = ", ".join(f"{label!r}: {size!r}" for label, size in unknown.items())
        return f"{complaint}; sizes are given as a mapping: spawn_procs({{{sizes}}})"
    from mesh_core._common.suggestions import did_you_mean

    return complaint + did_you_mean(name, _OPTIONS)


def _sizes(per_host: object) -> dict[str, Any]:
    """Return the named sizes of ``per_host``."""
    if per_host is None:
        return {}
    if isinstance(per_host, int) and not isinstance(per_host, bool):
        raise TypeError(
            f"per_host must be named sizes such as {{'gpus': {per_host}}}, got the number {per_host}; the names are the "
            "mesh's dimensions, by which it is sliced"
        )
    if not isinstance(per_host, Mapping):
        raise TypeError(f"per_host must be named sizes such as {{'gpus': 8}}, got {per_host!r}")
    return dict(per_host)


def _modules(preload: object) -> list[str] | None:
    """Check the ``preload`` option of a spawn; returns the modules that it names, or ``None`` if Mesh is to choose them."""
    if preload is None:
        return None
    if isinstance(preload, str) or not isinstance(preload, Iterable):
        raise TypeError(f"preload must be a list of modules' names such as ['numpy'], got {preload!r}")
    names = list(preload)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"preload must hold modules' names, got {name!r}")
    return names


def this_host() -> HostMesh:
    """Return the host on which this code runs; inside an actor, the actor's."""
    process = current()
    me = process.identity
    here = Region([], Slice(me.host_no, [], []))
    return HostMesh(process, here, me.host, process.here)


def this_proc() -> ProcMesh:
    """Return the process in which this code runs, as a mesh of one; actors can be spawned in it."""
    me = current().identity
    root = me.region
    view = root if me.mesh_id == 0 else Region([], Slice(root.rank_at(me.rank), [], []))
    return _here(me.proc_id, view)


def this_mesh() -> ProcMesh:
    """Return the mesh of processes in which this code runs."""
    me = current().identity
    return _here(me.mesh_name, me.region)


def _here(name: str, view: Region) -> ProcMesh:
    from mesh_core._meshes.procs import ProcMesh

    process = current()
    me = process.identity
    process.actor_host()
    return ProcMesh(
        process, name=name, location=me.location, procs_id=me.mesh_id, root=me.region, view=view, ready=None
    )


def proc_mesh(
    *,
    name: str | None = None,
    bootstrap: Callable[[], object] | None = None,
    env: Env | Callable[[Point], Env] | None = None,
    preload: Sequence[str] | None = None,
    start: Literal["fork", "exec"] = "fork",
    seed: int | None = None,
    devices: Literal["own"] | None = None,
    torch_env: bool = False,
    **sizes: int,
) -> ProcMesh:
    """Spawn processes on this host; short for ``this_host().spawn_procs``. Can be awaited.

    >>> from mesh_core import proc_mesh
    >>> with proc_mesh(gpus=2) as procs:
    ...     len(procs)
    2
    """
    return this_host().spawn_procs(
        sizes,
        name,
        bootstrap=bootstrap,
        env=env,
        preload=preload,
        start=start,
        seed=seed,
        devices=devices,
        torch_env=torch_env,
    )
