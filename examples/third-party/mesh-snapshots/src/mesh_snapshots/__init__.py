"""Actors whose state survives the death of their process.

>>> import tempfile
>>> import mesh_snapshots
>>> from mesh_core.extensions import uninstall
>>> with tempfile.TemporaryDirectory() as folder:
...     snapshots = mesh_snapshots.enable(folder)
...     number = snapshots.save({"step": 7}, name="script").get(timeout=30).number
...     state = snapshots.restore({"step": 0}, name="script").get(timeout=30)
...     uninstall("snapshots")
>>> number, state
(1, {'step': 7})
"""

from mesh_snapshots._contract import WRITERS, Writer, WriterCapabilities, WriterPlugin
from mesh_snapshots._files import Owner, Snapshot, SnapshotError
from mesh_snapshots._revive import REVIVE, REVIVE_PROCS, Revive
from mesh_snapshots._snapshots import Snapshots, enable, here

__all__ = [
    "REVIVE",
    "REVIVE_PROCS",
    "WRITERS",
    "Owner",
    "Revive",
    "Snapshot",
    "SnapshotError",
    "Snapshots",
    "Writer",
    "WriterCapabilities",
    "WriterPlugin",
    "enable",
    "here",
]
