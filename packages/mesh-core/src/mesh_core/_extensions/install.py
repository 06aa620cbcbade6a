"""Which extensions this process has."""

from __future__ import annotations

from typing import Any, TypeVar

from mesh_core._common.current import current
from mesh_core._extensions.base import Extension

E = TypeVar("E", bound=Extension)


def install(cls: type[E], payload: Any = None) -> E:
    """Have an instance of an extension in this process, and in those that it spawns from now on.

    Processes that exist already do not get it. An extension of that name must not be installed yet. If its ``start``
    raises, so does this, and nothing is installed.
    """
    return current().extensions.install(cls, payload)


def find(cls: type[E]) -> E | None:
    """Return this process's instance of an extension; ``None`` if it is not installed here."""
    found = current().extensions.find(cls.name)
    return found if isinstance(found, cls) else None


def uninstall(name: str) -> None:
    """Stop an extension in this process, and carry it to no further ones. Processes that have it keep it."""
    current().extensions.uninstall(name)
