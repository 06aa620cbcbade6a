"""What killed processes of this user have left in folders. The minder of a fork server imports this: it must be quick where there is nothing."""

from __future__ import annotations

from mesh_core._common import private_folders
from mesh_core._features.debug import places
from mesh_core._system import scratch


def sweep() -> None:
    """Remove folders of jobs that have ended, their sockets, and folders of keys."""
    scratch.sweep_all()
    places.sweep()
    private_folders.sweep_secret_folders()
