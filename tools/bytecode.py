"""Compiled modules, which the environments of a checkout share.

Each session has an environment of its own, and what it imports would be compiled there by each of its processes: PyTorch and
the tools of tests are some thousand modules. Installers give the same file the same time in each environment, and a compiled
module says which file it is of, by time and size. An interpreter compiles again what does not fit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CACHE = "__pycache__"


class Bytecode:
    """A folder of compiled modules, laid out as packages are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lend(self, packages: Path) -> None:
        """Put what is known into a folder with installed packages, beside the sources that are there.

        Example:
            >>> Bytecode(Path(".nox/bytecode")).lend(Path(".venv/lib/python3.11/site-packages"))  # doctest: +SKIP
        """
        for compiled in _compiled(self._folder):
            cache = packages / compiled.parent.relative_to(self._folder)
            if (cache.parent / f"{compiled.name.partition('.')[0]}.py").exists():
                cache.mkdir(exist_ok=True)
                # It may be there, or on another file system.
                with suppress(OSError):
                    os.link(compiled, cache / compiled.name)

    def keep(self, packages: Path) -> None:
        """Take what has been compiled there; of two that differ the later one stays."""
        for compiled in _compiled(packages):
            place = self._folder / compiled.relative_to(packages)
            if place.exists() and place.samefile(compiled):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            # Other sessions do the same beside this one.
            link = place.with_name(f"{place.name}.{os.getpid()}")
            with suppress(OSError):
                os.link(compiled, link)
                link.replace(place)


def _compiled(folder: Path) -> Iterator[Path]:
    for at, _, names in os.walk(folder):
        if at.endswith(_CACHE):
            for name in names:
                if name.endswith(".pyc"):
                    yield Path(at, name)
