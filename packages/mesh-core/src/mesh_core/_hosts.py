"""Meshes of hosts, and where a script or an actor finds its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mesh_core import _process
from mesh_core._mesh import Mesh, describe
from mesh_core._native import Extent, Point, Region

if TYPE_CHECKING:
    from mesh_core._estate import Policy
    from mesh_core._process import Process
    from mesh_core._procs import ProcMesh

MAX_PROCS = 100_000
"""More processes than any one host can hold: asking for them is a slip of the pen."""


class HostMesh(Mesh):
    """Hosts, on which processes are spawned; :func:`this_host` is the one this code runs on."""

    def __init__(self, process: Process, view: Region, name: str) -> None:
        self._process = process
        self._view = view
        self._name = name

    def _with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._process, region, self._name)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        name: str | None = None,
        *,
        bootstrap: Callable[[], object] | None = None,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        start: Literal["fork", "exec"] = "fork",
        python: str | None = None,
        proc_bind: Sequence[Sequence[int]] | None = None,
        supervise: Policy | None = None,
    ) -> ProcMesh:
        """Spawn processes: as many on each host as ``per_host`` says, one without it. Returns at once.

        Args:
            per_host: named sizes, for example ``{"gpus": 8}``.
            name: what errors and listings call the mesh.
            bootstrap: runs in every process before anything else does.
            env: environment variables, set before any module of yours is imported there.
            preload: modules that workers find imported already, shared by all that are forked.
            start: ``"fork"`` takes milliseconds; ``"exec"`` gives a fresh interpreter.
            python: another interpreter, for ``start="exec"``.
            proc_bind: for each process of a host, the CPUs that it may run on.
            supervise: hears of a process's death before the owner does; true from it means handled.

        >>> from mesh_core import this_host
        >>> with this_host().spawn_procs(per_host={"gpus": 2}, env={"OMP_NUM_THREADS": "1"}) as procs:
        ...     procs.sizes
        {'gpus': 2}
        """
        from mesh_core._procs import spawn

        sizes = dict(per_host or {})
        clash = sorted(set(sizes) & set(self._view.extent.labels))
        if clash:
            raise ValueError(
                f"per_host has a dimension {clash[0]!r}, which the hosts have already; rename one"
            )
        for label, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"per_host[{label!r}] is a whole number of at least 1, not {size!r}")
        extent = Extent([*self._view.extent.labels, *sizes], [*self._view.extent.sizes, *sizes.values()])
        if extent.nelements > MAX_PROCS:
            raise ValueError(
                f"{extent.nelements:,} processes ({describe(Region.whole(extent))}) are more than a host can hold; "
                f"the most is {MAX_PROCS:,}"
            )
        if start not in ("fork", "exec"):
            raise ValueError(f"start is 'fork' or 'exec', not {start!r}")
        if python is not None and start != "exec":
            raise ValueError(
                "python= names another interpreter, which needs start='exec': a fork keeps this one"
            )
        if proc_bind is not None and len(proc_bind) != extent.nelements:
            raise ValueError(
                f"proc_bind names CPUs for {len(proc_bind)} processes, and {extent.nelements} are asked for"
            )
        return spawn(
            self._process,
            extent,
            name=name,
            bootstrap=bootstrap,
            env=dict(env or {}),
            preload=list(preload),
            fresh=start == "exec",
            python=python,
            proc_bind=None if proc_bind is None else [list(cpus) for cpus in proc_bind],
            supervise=supervise,
        )

    def __reduce__(self) -> Any:
        return _revive_host, (self._view, self._name)

    def __repr__(self) -> str:
        return f"<HostMesh {self._name!r}: {describe(self._view)}>"

    def _repr_html_(self) -> str:
        from mesh_core._show import Table, listed, place

        extent = self._view.extent
        table = Table(["place", "host"])
        return listed(table, len(self), lambda index: (place(Point(index, extent)) or "0", self._name)).html(
            repr(self)
        )


def _revive_host(view: Region, name: str) -> HostMesh:
    return HostMesh(_process.current(), view, name)


def this_host() -> HostMesh:
    """The host on which this code runs; inside an actor, the actor's."""
    process = _process.current()
    return HostMesh(process, Region.whole(Extent([], [])), process.identity.host)


def this_proc() -> ProcMesh:
    """The process in which this code runs, as a mesh of one; actors can be spawned in it."""
    from mesh_core._procs import ProcMesh

    process = _process.current()
    me = process.identity
    process.stage()
    root = me.region
    view = root if me.mesh_id == 0 else Region.whole(Extent([], []))
    if me.mesh_id != 0:
        from mesh_core._native import Slice

        view = Region([], Slice(root.rank_at(me.rank), [], []))
    return ProcMesh(
        process, name=me.proc_id, host=me.host, procs_id=me.mesh_id, root=root, view=view, ready=None
    )


def proc_mesh(
    *,
    name: str | None = None,
    bootstrap: Callable[[], object] | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    start: Literal["fork", "exec"] = "fork",
    **sizes: int,
) -> ProcMesh:
    """Spawn processes on this host; short for ``this_host().spawn_procs``. May be awaited.

    >>> from mesh_core import proc_mesh
    >>> with proc_mesh(gpus=2) as procs:
    ...     len(procs)
    2
    """
    return this_host().spawn_procs(sizes, name, bootstrap=bootstrap, env=env, preload=preload, start=start)
