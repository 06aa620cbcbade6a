"""Where copies of workspaces are, and how processes learn of them."""

from __future__ import annotations

import importlib
import os
import re
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple


class Workspace(NamedTuple):
    """One directory of the controller's that has copies on hosts; travels with every spawn of processes."""

    source: str
    """The directory at the controller."""
    key: str
    """What its copies are called."""
    to: str
    """Where they are; empty for a place of the job's own."""
    scratch: str
    """The controller's directory for this job, which serves its own host."""
    paths: tuple[str, ...]
    """What of it can be imported from: directories below it, itself if empty."""
    version: int
    """Counts the syncs that have changed something."""

    @classmethod
    def told(cls, told: list[Any]) -> Workspace:
        """Read it from JSON."""
        source, key, to, scratch, paths, version = told
        return cls(source, key, to, scratch, tuple(paths), version)

    def root(self, scratch: str) -> Path:
        """Its copy on this host, whose directory for the job is ``scratch`` where the host has one of its own."""
        if self.to:
            return Path(self.to).expanduser()
        return Path(scratch or self.scratch) / "workspace" / self.key


def key_of(source: str) -> str:
    """What the copies of a directory are called: its name, told apart from others of that name."""
    name = re.sub(r"[^\w.-]", "_", Path(source).name) or "root"
    return f"{name}-{blake2b(os.fsencode(source), digest_size=4).hexdigest()}"


def put_on_path(workspaces: list[list[Any]], scratch: str) -> None:
    """Have this process import from the copies; those that this host does not have are passed over."""
    front = []
    for told in workspaces:
        workspace = Workspace.told(told)
        root = workspace.root(scratch)
        front += [str(root / path) for path in workspace.paths if (root / path).is_dir()]
    sys.path[:] = [*front, *(entry for entry in sys.path if entry not in front)]
    # What importlib has listed of directories is as old as their last look to the second.
    importlib.invalidate_caches()


def lead_packages(source: str, root: Path) -> None:
    """Have packages that were imported from the directory itself find their other modules in its copy."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__path__", None)
        if isinstance(path, list):
            for at, entry in enumerate(path):
                if isinstance(entry, str) and entry.startswith(f"{source}/"):
                    copy = root / entry[len(source) + 1 :]
                    if copy.is_dir():
                        path[at] = str(copy)
