"""What a process knows about workspaces."""

from __future__ import annotations

from typing import Any, NamedTuple


class Synced:
    """The state of workspaces in a process; kept in its slots."""

    __slots__ = ("progress", "stale", "synchronizer", "told")

    def __init__(self) -> None:
        self.told: list[list[Any]] = []
        """The workspaces whose copies processes import from."""
        self.stale: set[str] = set()
        """Modules that have changed since they were imported here."""
        self.synchronizer: Any = None
        """The actor that copies them; spawned by the first sync."""
        self.progress = ""
        """How far it is with the sync that runs."""


class Told(NamedTuple):
    """The message to a running process."""

    workspaces: list[list[Any]]
    """All workspaces, as in ``Synced.told``."""
    source: str
    to: str
    """With ``source``: which of them was synced."""
    changed: list[str]
    """Its files of which old versions may have been imported."""
    again: bool
    """Whether to reload them."""


class Answer(NamedTuple):
    """The result in one process."""

    reloaded: tuple[str, ...]
    kept: tuple[str, ...]
    failed: str
    """Why nothing was reloaded; empty if nothing went wrong."""
