"""The part of each process in syncs: import from the copies, and reload what has changed."""

from __future__ import annotations

from typing import Any

from mesh_core._common.current import current
from mesh_core._common.hooks import Preparation
from mesh_core._features.workspace.placing import put_on_path
from mesh_core._features.workspace.synced import Answer, Synced, Told
from mesh_core._features.workspace.told import hear
from mesh_core.extensions import NOT_CARRIED, Extension, Proc, Spawning


class Copies(Extension):
    """Makes a process import from copies of workspaces; ``payload`` lists those that its spawner knew."""

    name = "mesh.workspace"

    def for_spawn(self, spawning: Spawning) -> Any:
        """Tell new processes about the workspaces known here."""
        return _told() or NOT_CARRIED

    def start(self) -> None:
        """Start importing from the copies."""
        process = current()
        if not self.proc.is_controller:
            process.slots.of(Synced).told = self.payload
            put_on_path(self.payload, process.identity.scratch)
        self._hooks = process.hooks
        self._hooks.preparing.append(_preparation)

    def stop(self) -> None:
        """Stop preloading from the copies."""
        self._hooks.preparing.remove(_preparation)

    async def receive(self, message: Told, sender: Proc) -> list[Answer]:
        """Do what a sync asks of this process and of the processes that it spawned."""
        return await hear(self, current().actor_host(), message)


def _told() -> list[list[Any]]:
    return current().slots.of(Synced).told


def _preparation() -> Preparation | None:
    """Return what a fork server calls before it imports from the copies."""
    told = _told()
    return (put_on_path.__module__, put_on_path.__name__, told) if told else None
