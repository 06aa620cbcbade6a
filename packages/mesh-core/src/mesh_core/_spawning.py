"""How a mesh of processes is spawned: what is asked of the hosts' agents, and what comes back.

A module of its own, imported by the first spawn: a script's start does not pay for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mesh_core._config import executable, pack
from mesh_core._context import current_instance
from mesh_core._control import Control
from mesh_core._errors import AuthenticationError, MeshError, SpawnError
from mesh_core._estate import check_policy
from mesh_core._future import Future
from mesh_core._mesh import check_name
from mesh_core._native import Lost, Region, roll
from mesh_core._outcomes import Addressee, error_of
from mesh_core._procs import ProcMesh, all_well
from mesh_core._seeds import checked_seed
from mesh_core._surroundings import (
    Refusal,
    checked_binding,
    checked_env,
    free_port,
    own_device,
    visible_devices,
)
from mesh_core._tracing import notice

if TYPE_CHECKING:
    from mesh_core._home import Home
    from mesh_core._native import Call, Extent, Point
    from mesh_core._policy_run import Supervise
    from mesh_core._process import Process
    from mesh_core._surroundings import Env


def interpreter_command(python: str | None) -> list[str]:
    # The flags of this interpreter (-O, -W, -X ...) hold for its workers too.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [python or sys.executable, *flags]


def _check_devices(environ: Mapping[str, str], per_host: int) -> None:
    """Refuse before anything is made; on other hosts their agents do."""
    try:
        own_device(visible_devices(environ), 0, per_host)
    except Refusal as error:
        raise SpawnError(str(error)) from None


def spawn(
    process: Process,
    extent: Extent,
    home: Home,
    *,
    per_host: int,
    name: str | None,
    bootstrap: Callable[[], object] | None,
    env: Env | Callable[[Point], Env] | None,
    preload: list[str],
    fresh: bool,
    python: str | None,
    proc_bind: object,
    seed: int | None,
    devices: str | None,
    torch_env: bool,
    supervise: Supervise | None,
) -> ProcMesh:
    """Ask the host's agent for a mesh of processes."""
    if bootstrap is not None and not callable(bootstrap):
        raise TypeError(f"bootstrap is a function without arguments, not {bootstrap!r}")
    if devices not in (None, "own"):
        raise ValueError(f"devices is 'own' (a device for each process) or None, not {devices!r}")
    binding = checked_binding(proc_bind, per_host)
    changes, own = checked_env(env, extent)
    # What runs on another machine has that machine's environment and interpreter.
    afar = home.placement.only != process.identity.host_no
    inherited = {} if afar else dict(os.environ)
    if afar:
        changes = {**process.env_changes, **changes}
    else:
        python = python or process.python
        if python is not None and shutil.which(python) is None:
            raise SpawnError(
                f"python={python!r} is not a program that can be run here; give the path of an interpreter"
            )
    check_name(name or "")
    policy = check_policy(supervise)
    owner = current_instance()
    owner_id = 0 if owner is None else owner.actor_id
    process.check_owner(owner_id)
    region = Region.whole(extent)
    here = _working_directory()
    changed = _changed(inherited, changes)
    if devices is not None and not afar and not own:
        _check_devices(changed, per_host)
    for begin in process.hooks.spawning:
        begin()
    mesh_id = process.runtime.new_id()
    shown = name or process.unique_name("procs")
    told = {
        "mesh_name": shown,
        "host": process.identity.host,
        "placement": home.placement.to_wire().hex(),
        "labels": extent.labels,
        "sizes": extent.sizes,
        "per_host": per_host,
        "env": inherited,
        "changes": changes,
        "devices": devices,
        "torch": [_master(process, home), free_port(here=not afar)] if torch_env else None,
        "seed": checked_seed(seed),
        "afar": afar,
        "path": [entry or here for entry in sys.path],
        "argv": sys.argv,
        "cwd": here,
        "settings": process.settings.as_dict(),
        "bind": binding,
        "job": process.job,
        "python": interpreter_command(python) if fresh and (python or not afar) else None,
        "interpreter": python,
        "extensions": process.carried(shown, extent, home),
    }
    # A nursery serves all spawns that look alike to modules imported before the fork: without preloaded ones that is
    # every spawn, with them it is those of one environment.
    env_there, late = executable(changed if preload else {} if afar else process.environ)
    plan = {
        "path": told["path"],
        "preload": preload,
        # Copies of the script's directories, for one, which are imported anew once they have changed.
        "prepare": [step for each in process.hooks.preparing if (step := each())] if preload else [],
        "afar": afar,
        "env": late,
        "unset": [key for key, value in changes.items() if value is None] if preload else [],
        "argv": sys.argv if preload else [""],
    }
    call = process.runtime.spawn_procs(
        mesh_id,
        region,
        home.placement,
        argv=[*([""] if afar else interpreter_command(process.python)), "-c", _NURSERY],
        env=sorted(env_there.items()),
        plan=json.dumps(plan).encode(),
        fresh=fresh,
        config=pack(told, own),
        within=process.settings.spawn_timeout,
        title=f"{shown}\0{','.join(f'{k}={v}' for k, v in extent.items())}",
    )
    notice(process)
    if process.tracer is not None:
        process.tracer.spawn_procs(shown, len(region), home.label)
    mesh = ProcMesh(
        process,
        name=shown,
        home=home,
        procs_id=mesh_id,
        root=region,
        view=region,
        ready=None,
        spawned=call,
    )
    who = Addressee(shown, home, region, region, mesh)
    ready = Future(process, call, lambda call: _all_up(call, who), lambda: f"the spawn of {shown!r}")
    if told["extensions"]:
        # An extension that cannot start ends its process; this asks for the reason.
        sender = process.runtime.sender(mesh._target(), 0, Control.STARTED, "extension")
        ready = Future(
            process,
            sender.call(None),
            lambda call: all_well(call, who),
            lambda: f"the start of the extensions of {shown!r}",
        )
        mesh._boots = True
    if bootstrap is not None:
        mesh._boots = True
        sender = process.runtime.sender(mesh._target(), 0, Control.BOOTSTRAP, "extension")
        ready = Future(
            process,
            sender.call(bootstrap),
            lambda call: all_well(call, who),
            lambda: f"the bootstrap of {shown!r}",
        )
        process.boots[mesh_id] = ready
    mesh._ready = ready
    process.own(owner_id, mesh, 0, policy)
    return mesh


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


def _master(process: Process, home: Home) -> str:
    """Where the processes of a mesh find the host of its first rank."""
    if home.placement.only is not None:
        return "127.0.0.1"
    first = home.placement.host_of(0)
    addresses = {host: _machine(address) for host, _, address, *_ in roll(process.runtime)}
    found = addresses.get(first, "")
    local = [host for host in home.placement.hosts() if addresses.get(host, "").startswith(_LOOPBACK)]
    # The address of this machine for itself is none for others.
    if found and (not found.startswith(_LOOPBACK) or len(local) == len(home.placement.hosts())):
        return found
    return home.name_of(0)


def _machine(address: str) -> str:
    """An address without its port."""
    return address.rpartition("//")[2].rpartition(":")[0].strip("[]")


_LOOPBACK = ("127.", "::1", "localhost")

_NURSERY = """\
import json, os, sys
with open(int(sys.argv[3]), "rb") as file: plan = json.load(file)
there = [p for p in plan["path"] if os.path.isdir(p) and p not in sys.path]
sys.path[:] = [*there, *sys.path] if plan["afar"] else plan["path"]
from mesh_core._nursery import main
main(int(sys.argv[1]), int(sys.argv[2]), plan)
"""


def _all_up(call: Call, who: Addressee) -> None:
    outcomes = call.outcomes()
    for index, outcome in enumerate(outcomes):
        error = error_of(outcome, index, who)
        if isinstance(outcome, Lost) and not outcome.orderly:
            if not isinstance(error, SpawnError | AuthenticationError):
                said = SpawnError(
                    f"a process of {who.name!r} died while it started: {error}",
                    host=who.host(index),
                    pid=outcome.pid,
                    exitcode=outcome.exitcode,
                    signal=outcome.signal,
                    stderr_tail="\n".join(outcome.stderr_tail),
                )
                said.__cause__ = error
                error = said
            # Whoever is told of this has heard of all that died then (SUP-1).
            assert isinstance(error, MeshError)  # a loss is one of those
            error._deaths = tuple(
                (who.mesh._procs_id, who.view.rank_at(place), 0)
                for place, other in enumerate(outcomes)
                if isinstance(other, Lost)
            )
        if error is not None:
            raise error
