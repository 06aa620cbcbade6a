"""The life of a worker, from start to exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

from mesh_core._common.current import holder
from mesh_core._common.import_hooks import Afterwards
from mesh_core._common.settings import configure
from mesh_core._geometry.location import Location
from mesh_core._native import Extent, Placement, Region, learn_moves
from mesh_core._process import process as _process
from mesh_core._process.multiprocess import teach
from mesh_core._system import streams
from mesh_core._system.interpreter import show_flags_of_users
from mesh_core._system.leaving import leave
from mesh_core._system.process_title import Title
from mesh_core._system.seeds import Seeds, seed_process

_GOODBYE_S = 5.0


def run(
    config: dict[str, Any],
    *,
    addr: tuple[int, int, int],
    seat: int,
    link: int,
    board: int,
    forked: bool,
) -> int:
    """Be the worker that ``config`` describes until told to stop; return the exit status."""
    rank, host = addr[1:]
    if config["ranks"]:
        rank = config["ranks"][rank]
    streams.install()
    # Before any user module is imported.
    if forked:
        os.environ.clear()
        if not config["afar"]:
            # The fork server on another machine has set the path.
            sys.path[:] = config["path"]
    os.environ.update(config["env"])
    sys.argv[:] = config["argv"]
    seeds = Seeds(config["seed"], rank)
    imports = Afterwards()
    imports.install()
    imports.once("multiprocessing.reduction", teach)
    seed_process(seeds, imports)
    region = Region.whole(Extent(config["labels"], config["sizes"]))
    identity = _process.Identity(
        mesh_id=config["mesh_id"],
        mesh_name=config["mesh_name"],
        region=region,
        rank=rank,
        host=config["host"],
        host_no=host,
        location=Location(Placement.from_wire(bytes.fromhex(config["placement"])), {host: config["host"]}),
        scratch=config.get("scratch", ""),
    )
    # Before the spawner is told that it is up.
    Title(identity).show({})
    process = _process.become_worker(
        identity, configure(**config["settings"]), addr=addr, link=link, board=board, seat=seat
    )
    if config["moves"]:
        version, runs = config["moves"]
        learn_moves(process.runtime, config["mesh_id"], version, [tuple(run) for run in runs])
    process.job = tuple(config["job"])
    if config["credentials"] and config["credentials"][0] == host:
        process.credentials = tuple(config["credentials"][1:])
    process.seeds = seeds
    process.python = config["interpreter"]
    process.env_changes = {**config["changes"], **config["own"]}
    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._system.stack_dumps import arm

    if (teacher := config.get("teacher", -1)) >= 0:
        from mesh_core._process.lessons import Teacher

        process.hooks.hosting.append(Teacher(teacher).tell)
    holder().equip_worker(process)
    arm(process.runtime)
    actor_host = ActorHost(process)
    process.adopt_actor_host(actor_host)
    if config["extensions"]:
        process.extensions.begin(config["extensions"])
    status = actor_host.run()
    process.end_extensions()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    process.runtime.goodbye(_GOODBYE_S, actor_host.unready)
    return status


def main_exec(config: dict[str, Any]) -> None:
    """Entry point of a worker with a fresh interpreter; see ``_process.fork_server``."""
    mesh, rank, host, seat, link, board, parent = config["numbers"]
    from mesh_core._native import die_with_parent

    show_flags_of_users()
    for fd in (link, board):
        os.set_inheritable(fd, False)
    die_with_parent(parent)
    leave(run(config, addr=(mesh, rank, host), seat=seat, link=link, board=board, forked=False))
