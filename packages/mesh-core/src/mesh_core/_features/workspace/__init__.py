"""Copy a directory of the controller to hosts: :meth:`HostMesh.sync_workspace`.

The controller has one ``Synchronizer``, an actor in the script's process; each host has one ``Keeper``. A sync asks the
keepers what they lack (a cast of hashes), sends that once to all (casts of pieces, of which each keeper takes what it
lacks), and has them put it in place. Running processes learn by a message where to import from, new ones by their
configuration. Programs that do not sync load none of this.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mesh_core._common.current import current, holder
from mesh_core._common.errors import MeshError
from mesh_core._features.workspace.rules import Rules
from mesh_core._features.workspace.synced import Synced
from mesh_core._futures.watched import watched

if TYPE_CHECKING:
    from mesh_core._features.workspace.report import WorkspaceReport
    from mesh_core._futures.future import Future
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._process.process import Process


def sync(
    hosts: HostMesh,
    path: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str] | None,
    reload: bool,
    exclude: Iterable[str],
) -> Future[WorkspaceReport]:
    """Start a sync; see :meth:`HostMesh.sync_workspace`."""
    process = current()
    if process.identity.is_guest:
        raise MeshError(
            "sync_workspace() works in the controller of a job, and this script is a part of a job that outlives it (keep=): bring the files to "
            "the hosts by other means, or launch the job without keep="
        )
    if process.identity.mesh_id != 0:
        raise MeshError(
            f"sync_workspace() sends files of the machine on which the script runs, and this is {process.identity.proc_id}, "
            "one of its workers; call it in the script"
        )
    source = os.path.realpath(os.fspath(path))
    if not Path(source).is_dir():
        raise NotADirectoryError(
            f"sync_workspace({os.fspath(path)!r}): {source} is not a directory here; give the directory "
            "whose files the hosts should get"
        )
    place = "" if to is None else os.fspath(to)
    if place and not place.startswith(("/", "~")):
        raise ValueError(f"to={place!r} is a path on other machines; it must begin with '/' or '~'")
    if place and os.path.realpath(Path(place).expanduser()).startswith(f"{source}/"):
        raise ValueError(f"to={place!r} lies inside of {source}: each sync would copy the last one's copy")
    if isinstance(exclude, str):
        raise TypeError(f"exclude= takes several patterns, as in exclude=[{exclude!r}]")
    patterns = tuple(exclude)
    Rules(patterns)  # wrong ones are refused here
    future = _synchronizer(process).sync.call_one(hosts, source, place, reload, patterns)
    synced = process.slots.of(Synced)
    return cast(
        "Future[WorkspaceReport]",
        watched(future, lambda: f"sync_workspace: {synced.progress}").then(_outcome),
    )


def _synchronizer(process: Process) -> Any:
    with holder().lock:
        if process.slots.of(Synced).synchronizer is None:
            from mesh_core._features.workspace.synchronizer import Synchronizer
            from mesh_core._meshes.hosts import this_proc

            # Outside any actor, so that the script owns it, whatever code syncs first.
            process.slots.of(Synced).synchronizer = contextvars.Context().run(
                this_proc().spawn, "workspace", Synchronizer
            )
        return process.slots.of(Synced).synchronizer


def _outcome(outcome: WorkspaceReport | BaseException) -> WorkspaceReport:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
