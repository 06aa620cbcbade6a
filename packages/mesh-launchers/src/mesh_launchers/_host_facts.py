"""What a host has: its Python, its packages, and the modules of the script. A part of the host's program (`_program.py`), which needs
nothing of this package there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

MOST_FILES = 2000


def digest(path: Path) -> str | None:
    """Return what the source files of a module or a package amount to; none where they are too many to look at."""
    found = hashlib.sha256()
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    if len(files) > MOST_FILES:
        return None
    for each in files:
        found.update(f"{each.relative_to(path)}\0".encode())
        found.update(each.read_bytes())
    return found.hexdigest()


def sources(name: str, path: Sequence[str]) -> Path | None:
    """Return where a module or a package would be imported from, without doing so."""
    spec = PathFinder.find_spec(name, list(path))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    origin = Path(spec.origin)
    return origin.parent if spec.submodule_search_locations else origin


def code(asked: Sequence[str], path: Sequence[str]) -> dict[str, list[str]]:
    """Return where modules that the script has are here, and what their sources amount to."""
    # As in workers: what the script has, and is here too, comes first.
    there = [each for each in path if Path(each).is_dir() and each not in sys.path]
    found = {}
    for name in asked:
        # One that cannot be read is none that could be imported.
        with contextlib.suppress(OSError):
            at = sources(name, [*there, *sys.path])
            what = None if at is None else digest(at)
            if at is not None and what is not None:
                found[name] = [str(at), what]
    return found


def installed(path: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages in these directories, by the names of their metadata: reading it takes ten times as long."""
    packages: dict[str, str] = {}
    for each in path:
        try:
            names = os.listdir(each or ".")  # noqa: PTH208 - names are all that is wanted
        except OSError:
            continue
        for name in names:
            stem, _, kind = name.rpartition(".")
            project, dash, version = stem.partition("-")
            if dash and kind in ("dist-info", "egg-info"):
                # Of two of a name the first is the one that is imported. An egg also names its Python.
                packages.setdefault(normal(project), version.partition("-py")[0])
    return packages


def normal(project: str) -> str:
    """Return the name of a project as it is compared."""
    return project.lower().replace("_", "-").replace(".", "-")


def environment() -> dict[str, Any]:
    """Return which Python this is, and which packages it has."""
    packages = installed(sys.path)
    if "mesh-core" not in packages:
        # They come from an archive, or by an importer of somebody's own.
        from importlib.metadata import distributions

        for each in distributions():
            packages.setdefault(normal(each.metadata["Name"] or ""), each.version)
    return {"python": sys.version.split()[0], "executable": sys.executable, "packages": packages}
