"""Locate copies of workspaces, and make processes import from them."""

from __future__ import annotations

import importlib
import os
import re
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple


class Workspace(NamedTuple):
    """A directory of the controller that has copies on hosts; sent with every spawn of processes."""

    source: str
    """The directory on the controller's host."""
    key: str
    """The name of its copies."""
    to: str
    """Where the copies are; empty for the job's scratch directory."""
    scratch: str
    """The controller's scratch directory for this job, used on its own host."""
    paths: tuple[str, ...]
    """The directories in it to import from; an empty path is the workspace itself."""
    version: int
    """How many syncs have changed something."""

    @classmethod
    def told(cls, told: list[Any]) -> Workspace:
        """Read it from JSON."""
        source, key, to, scratch, paths, version = told
        return cls(source, key, to, scratch, tuple(paths), version)

    def root(self, scratch: str) -> Path:
        """Return its copy on this host; ``scratch`` is this host's directory for the job, if it has its own."""
        if self.to:
            return Path(self.to).expanduser()
        return Path(scratch or self.scratch) / "workspace" / self.key


def key_of(source: str) -> str:
    """Return the name of a directory's copies: its name, with a hash that makes it unique."""
    name = re.sub(r"[^\w.-]", "_", Path(source).name) or "root"
    return f"{name}-{blake2b(os.fsencode(source), digest_size=4).hexdigest()}"


def put_on_path(workspaces: list[list[Any]], scratch: str) -> None:
    """Make this process import from the copies; copies that this host does not have are skipped."""
    front = []
    for told in workspaces:
        workspace = Workspace.told(told)
        root = workspace.root(scratch)
        front += [str(root / path) for path in workspace.paths if (root / path).is_dir()]
    sys.path[:] = [*front, *(entry for entry in sys.path if entry not in front)]
    # importlib caches directory listings by modification time, which can be too coarse.
    importlib.invalidate_caches()


def lead_packages(source: str, root: Path) -> None:
    """Make packages that were imported from the directory itself find their other modules in its copy."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__path__", None)
        if isinstance(path, list):
            for at, entry in enumerate(path):
                if isinstance(entry, str) and entry.startswith(f"{source}/"):
                    copy = root / entry[len(source) + 1 :]
                    if copy.is_dir():
                        path[at] = str(copy)
