"""Install, find and uninstall extensions of this process."""

from __future__ import annotations

from typing import Any, TypeVar

from mesh_core._common.current import current
from mesh_core._extensions.base import Extension

E = TypeVar("E", bound=Extension)


def install(cls: type[E], payload: Any = None) -> E:
    """Create an instance of an extension in this process, and in processes that it spawns from now on.

    Existing processes do not get it. No extension of that name may be installed yet. If ``start`` raises, the
    exception is passed on and nothing is installed.
    """
    return current().extensions.install(cls, payload)


def find(cls: type[E]) -> E | None:
    """Return this process's instance of an extension, or ``None`` if it is not installed here."""
    found = current().extensions.find(cls.name)
    return found if isinstance(found, cls) else None


def uninstall(name: str) -> None:
    """Stop an extension in this process and carry it to no further processes. Processes that have it keep it."""
    current().extensions.uninstall(name)
