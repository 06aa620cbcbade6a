"""The actor on each host that keeps the host's copies of workspaces."""

from __future__ import annotations

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import endpoint
from mesh_core._common.current import current
from mesh_core._features.workspace.manifest import Manifest
from mesh_core._features.workspace.mirror import Committed, Mirror, Piece
from mesh_core._features.workspace.placing import Workspace


class Keeper(Actor):
    """One per host, in a process of its own; spawned by the first sync of the host."""

    def __init__(self) -> None:
        self._mirrors: dict[str, Mirror] = {}

    @endpoint
    def survey(self, workspace: Workspace, digest: bytes, manifest: bytes | None) -> bytes | None:
        """Begin a sync: return which entries lack content here, or ``None`` to ask for the whole manifest."""
        root = str(workspace.root(current().identity.scratch))
        mirror = self._mirrors.get(root)
        if mirror is None:
            mirror = self._mirrors[root] = Mirror(workspace.root(current().identity.scratch))
        if manifest is None and mirror.digest != digest:
            return None
        return mirror.survey(None if manifest is None else Manifest.decode(manifest))

    @endpoint
    def take(self, workspace: Workspace, pieces: list[Piece]) -> None:
        """Receive pieces of files."""
        self._of(workspace).take(pieces)

    @endpoint
    def commit(self, workspace: Workspace) -> Committed:
        """Put the received files in place."""
        return self._of(workspace).commit()

    @endpoint
    def discard(self, workspace: Workspace) -> None:
        """Discard what was received."""
        root = str(workspace.root(current().identity.scratch))
        if root in self._mirrors:
            self._mirrors[root].discard()

    def _of(self, workspace: Workspace) -> Mirror:
        return self._mirrors[str(workspace.root(current().identity.scratch))]
