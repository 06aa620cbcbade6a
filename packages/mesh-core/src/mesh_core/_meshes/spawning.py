"""How a mesh of processes is spawned: the orders to the hosts' agents, and their answers.

A separate module, imported by the first spawn, so that scripts start faster.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_core._common.codes import Request
from mesh_core._common.context import current_instance
from mesh_core._common.control import Control
from mesh_core._common.display import counted
from mesh_core._common.errors import SpawnError
from mesh_core._common.tracing import notice
from mesh_core._failures.owned_meshes import check_policy
from mesh_core._futures.future import Future
from mesh_core._futures.watched import Watched
from mesh_core._geometry.mesh import check_name
from mesh_core._meshes.outcomes import Addressee, all_up
from mesh_core._meshes.procs import ProcMesh, all_well
from mesh_core._native import Region
from mesh_core._system.config import executable, pack
from mesh_core._system.environment import (
    Refusal,
    checked_binding,
    checked_env,
    free_port,
    own_device,
    visible_devices,
)
from mesh_core._system.interpreter import code_words, interpreter_words, searching
from mesh_core._system.seeds import checked_seed

if TYPE_CHECKING:
    from mesh_core._failures.owned_meshes import Holding
    from mesh_core._failures.policy_run import Supervise
    from mesh_core._geometry.location import Location
    from mesh_core._native import Call, Extent, Placement, Point, Target
    from mesh_core._process.process import Process
    from mesh_core._system.environment import Env


def _check_devices(environ: Mapping[str, str], per_host: int) -> None:
    """Refuse before anything is spawned; on other hosts, their agents do."""
    try:
        own_device(visible_devices(environ), 0, per_host)
    except Refusal as error:
        raise SpawnError(str(error)) from None


def _check_runs(python: str) -> None:
    """Refuse an interpreter that this host cannot run."""
    import shutil  # takes long to import, and most spawns name no interpreter

    if shutil.which(python) is None:
        raise SpawnError(
            f"python={python!r} is not a program that can be run here; give the path of an interpreter"
        )


def spawn(
    process: Process,
    extent: Extent,
    location: Location,
    *,
    per_host: int,
    name: str | None,
    bootstrap: Callable[[], object] | None,
    env: Env | Callable[[Point], Env] | None,
    preload: list[str] | None,
    fresh: bool,
    python: str | None,
    proc_bind: object,
    seed: int | None,
    devices: str | None,
    torch_env: bool,
    supervise: Supervise | None,
) -> ProcMesh:
    """Order a mesh of processes from the hosts' agents."""
    if bootstrap is not None and not callable(bootstrap):
        raise TypeError(f"bootstrap must be a function without arguments, got {bootstrap!r}")
    if devices not in (None, "own"):
        raise ValueError(f"devices must be 'own' (a device for each process) or None, got {devices!r}")
    binding = checked_binding(proc_bind, per_host)
    changes, own = checked_env(env, extent)
    afar = location.only != process.identity.host_no
    if not afar:
        python = python or process.python
        if python is not None:
            _check_runs(python)
    check_name(name or "")
    checked_seed(seed)
    policy = check_policy(supervise)
    owner = current_instance()
    owner_id = 0 if owner is None else owner.actor_id
    process.check_owner(owner_id)
    region = Region.whole(extent)
    _working_directory()
    chosen: list[str] = []
    # What comes first in a worker may set what the modules look at when they are imported (PRL-1).
    if preload is None and not (fresh or callable(env) or bootstrap is not None or binding is not None):
        from mesh_core._meshes.preloads import choose

        chosen = choose(process, changes)
    if devices is not None and not afar and not own:
        _check_devices(_changed(dict(os.environ), changes), per_host)
    for begin in process.hooks.spawning:
        begin()
    mesh_id = process.runtime.new_id()
    recipe = Recipe(
        process,
        name or process.unique_name("procs"),
        mesh_id,
        owner_id,
        location,
        options=Options(
            per_host=per_host,
            bootstrap=bootstrap,
            env=env,
            preload=chosen if preload is None else preload,
            chosen=preload is None,
            fresh=fresh,
            python=python,
            binding=binding,
            seed=seed,
            devices=devices,
            torch=[_master(process, location), free_port(here=not afar)] if torch_env else None,
        ),
        size=len(region),
    )
    notice(process)
    if process.tracer is not None:
        process.tracer.spawn_procs(recipe.name, len(region), location.label)
    mesh = ProcMesh(
        process,
        name=recipe.name,
        location=location,
        procs_id=mesh_id,
        root=region,
        view=region,
        ready=None,
        recipe=recipe,
    )
    if location.is_joined:
        # The hosts are not contiguous: each has its own mesh of processes, as after a repair.
        recipe.size = 0
    process.recording(owner_id, mesh, 0)
    if location.is_joined:
        from mesh_core._meshes.repair import begin_apart

        recipe.holding = process.own(owner_id, mesh, 0, policy)
        mesh._ready = begin_apart(mesh, recipe)
    else:
        mesh._spawned = recipe.order(mesh_id, region, location.placement, extent, own=own)
        who = Addressee(recipe.name, location, region, region, mesh)
        mesh._ready, mesh._boots = recipe.begin(mesh._spawned, mesh._target(), who)
        recipe.holding = process.own(owner_id, mesh, 0, policy)
    if bootstrap is not None:
        process.boots[mesh_id] = mesh._ready
    return mesh


class Options(NamedTuple):
    """How the processes of a mesh are started; see :meth:`HostMesh.spawn_procs`."""

    per_host: int = 1
    bootstrap: Callable[[], object] | None = None
    env: Env | Callable[[Point], Env] | None = None
    preload: Sequence[str] = ()
    chosen: bool = False
    """Whether Mesh has chosen what is preloaded; the fork server may then add what it learns from its workers."""
    fresh: bool = False
    """Whether each has a fresh interpreter, started by exec."""
    python: str | None = None
    binding: list[list[int]] | None = None
    seed: int | None = None
    devices: str | None = None
    torch: list[Any] | None = None
    """The host of the first rank and a port there, if the processes get the variables of ``torchrun``."""


class Recipe:
    """What the spawner of a mesh needs to spawn its processes, and to respawn some later."""

    def __init__(
        self,
        process: Process,
        name: str,
        procs_id: int,
        owner_id: int,
        location: Location,
        *,
        options: Options,
        size: int,
        carries: Callable[[], str] | None = None,
    ) -> None:
        self.process = process
        self.name = name
        self.procs_id = procs_id
        self.size = size
        """How many ranks the mesh was spawned with."""
        self.root: Region | None = None
        """The mesh after the last grow or shrink."""
        self.owner_id = owner_id
        self.holding: Holding | None = None
        """The owner's record of the mesh; set once it is owned."""
        self.lock = threading.RLock()
        """Held while the mesh is repaired or told to stop, so that a stop covers all its processes."""
        self.stopped = False
        self.log_as: Callable[[Target, list[int]], object] | None = None
        """Applies this mesh's logging options to new processes, if any were set."""
        self.repair: Future[None] | None = None
        """The last repair."""
        self._location = location
        self._options = options
        self._carries = carries
        """Makes the text about extensions, if it differs from that of other spawns of this process."""
        self._extended = False

    def saved(self) -> dict[str, Any]:
        """Return what another process needs to spawn such processes, for :meth:`restored`."""
        return {
            "name": self.name,
            "procs_id": self.procs_id,
            "location": self._location,
            "options": self._options,
            "size": self.size,
        }

    @classmethod
    def restored(cls, process: Process, saved: Mapping[str, Any], holding: Holding) -> Recipe:
        """Return a recipe for a mesh that another script spawned."""
        recipe = cls(process, owner_id=0, **saved)
        recipe.root = holding.mesh._root
        recipe.holding = holding
        return recipe

    def order(
        self,
        mesh_id: int,
        region: Region,
        placement: Placement,
        extent: Extent,
        *,
        ranks: Sequence[int] = (),
        own: Sequence[Env] | None = None,
        moves: object = None,
    ) -> Call:
        """Order processes from agents: those of the whole mesh, or a separate mesh that has these ranks of it.

        Args:
            mesh_id: the mesh in the processes' addresses.
            region: the ranks of that mesh.
            placement: the hosts of those ranks.
            extent: the shape of the mesh that references name.
            ranks: which ranks of it the processes are; empty for all.
            own: each rank's environment from :func:`checked_env`, if it is known already.
            moves: where respawned ranks of it are.
        """
        process, options = self.process, self._options
        # Processes on another machine get that machine's environment and interpreter.
        afar = placement.only != process.identity.host_no
        python = options.python
        inherited = {} if afar else dict(os.environ)
        changes, each = checked_env(options.env, extent) if own is None else ({}, own)
        if not callable(options.env):
            changes = dict(options.env or {})
        if afar:
            changes = {**process.env_changes, **changes}
        if ranks and each:
            each = [each[rank] for rank in ranks]
        here = _working_directory()
        changed = _changed(inherited, changes)
        told = {
            "mesh_id": self.procs_id,
            "mesh_name": self.name,
            "ranks": list(ranks),
            "moves": moves,
            "host": process.identity.host,
            "placement": self._location.placement.to_wire().hex(),
            "labels": extent.labels,
            "sizes": extent.sizes,
            "per_host": options.per_host,
            "env": inherited,
            "changes": changes,
            "devices": options.devices,
            "torch": options.torch,
            "seed": checked_seed(options.seed),
            "afar": afar,
            "path": [entry or here for entry in sys.path],
            "argv": sys.argv,
            "cwd": here,
            "settings": process.settings.as_dict(),
            "bind": options.binding,
            "job": process.job,
            "credentials": _credentials(process),
            "python": interpreter_words(python) if options.fresh and (python or not afar) else None,
            "interpreter": python,
            "extensions": self._extensions(extent, placement),
        }
        self._extended = bool(told["extensions"])
        # A fork server serves all spawns that look the same to modules imported before the fork: without preloaded modules that
        # is every spawn, with them every spawn with the same environment.
        preload = list(options.preload)
        env_there, late = executable(changed if preload else {} if afar else process.environ)
        plan = {
            "path": told["path"],
            "preload": preload,
            "chosen": options.chosen and bool(preload),
            # For example for copies of the script's directories, which are reimported after they changed.
            "prepare": [step for each in process.hooks.preparing if (step := each())] if preload else [],
            "afar": afar,
            "env": late,
            "unset": [key for key, value in changes.items() if value is None] if preload else [],
            "argv": sys.argv if preload else [""],
        }
        return process.runtime.spawn_procs(
            mesh_id,
            region,
            placement,
            argv=[
                *([""] if afar else interpreter_words(process.python)),
                *code_words(searching(_FORK_SERVER)),
            ],
            env=sorted(env_there.items()),
            plan=json.dumps(plan).encode(),
            fresh=options.fresh,
            config=pack(told, each),
            within=process.settings.spawn_timeout,
            title=f"{self.name}\0{','.join(f'{k}={v}' for k, v in extent.items())}",
        )

    def _extensions(self, extent: Extent, placement: Placement) -> str:
        """Start the extensions that are wanted on the hosts; return the text about extensions for the processes."""
        if self._carries is not None:
            return self._carries()
        self.process.bring_to_hosts(placement)
        return self.process.carried(self.name, extent, self._location)

    def begin(self, call: Call, target: Target, who: Addressee) -> tuple[Future[None], bool]:
        """Return a future that is done when these processes are ready, and whether they run anything before that."""
        process, name = self.process, self.name
        ready: Future[None] = Watched(
            lambda: f"{name}: {call.arrived():,} of {counted(len(call), 'process', 'processes')} up",
            *(process, call, lambda call: all_up(call, who), lambda: f"the spawn of {name!r}"),
        )
        if self._extended:
            # An extension that cannot start ends its process; this asks for the reason.
            sender = process.runtime.sender(target, 0, Control.STARTED, Request.EXTENSION)
            ready = Future(
                process,
                sender.call(None),
                lambda call: all_well(call, who),
                lambda: f"the start of the extensions of {name!r}",
            )
        bootstrap = self._options.bootstrap
        if bootstrap is not None:
            sender = process.runtime.sender(target, 0, Control.BOOTSTRAP, Request.EXTENSION)
            run = sender.call(bootstrap)
            ready = Watched(
                lambda: (
                    f"{name}: the bootstrap has run in {run.arrived():,} of {counted(len(run), 'process', 'processes')}"
                ),
                *(process, run, lambda call: all_well(call, who), lambda: f"the bootstrap of {name!r}"),
            )
        return ready, self._extended or bootstrap is not None


def _credentials(process: Process) -> list[object] | None:
    """Return the credentials with which new processes on this host identify themselves to other hosts."""
    if process.credentials is None:
        return None
    from mesh_core._common.membership import told

    return told(process)


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - pathlib takes longer to import than this package may
    except FileNotFoundError:
        raise SpawnError(
            "the working directory of this process no longer exists, and new processes would begin in it; change to "
            "another one with os.chdir() before spawning"
        ) from None


def _changed(env: dict[str, str], changes: Env) -> dict[str, str]:
    merged: dict[str, str | None] = {**env, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def _master(process: Process, location: Location) -> str:
    """Return an address at which the processes of a mesh find the host of its first rank."""
    if location.only is not None:
        return "127.0.0.1"
    first = location.host_of(0)
    addresses = {host: _machine(address) for host, address in process.addresses().items()}
    found = addresses.get(first, "")
    local = [host for host in location.hosts if addresses.get(host, "").startswith(_LOOPBACK)]
    # A loopback address is useless to other machines.
    if found and (not found.startswith(_LOOPBACK) or len(local) == len(location.hosts)):
        return found
    return location.name_of(0)


def _machine(address: str) -> str:
    """Return an address without its port."""
    return address.rpartition("//")[2].rpartition(":")[0].strip("[]")


_LOOPBACK = ("127.", "::1", "localhost")

_FORK_SERVER = """
import json
with open(int(sys.argv[3]), "rb") as file: plan = json.load(file)
plan["left out"] = search(plan["path"], afar=plan["afar"])
from mesh_core._process.fork_server import main
main(int(sys.argv[1]), int(sys.argv[2]), plan)
"""
