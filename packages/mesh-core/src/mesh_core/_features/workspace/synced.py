"""What a process knows of workspaces."""

from __future__ import annotations

from typing import Any, NamedTuple


class Synced:
    """One in each process, in its slots."""

    __slots__ = ("stale", "synchronizer", "told")

    def __init__(self) -> None:
        self.told: list[list[Any]] = []
        """The directories that processes import from copies of."""
        self.stale: set[str] = set()
        """Modules that have changed since they were imported here."""
        self.synchronizer: Any = None
        """The actor that copies them; made by the first sync."""


class Told(NamedTuple):
    """What a process that runs is told."""

    workspaces: list[list[Any]]
    """All that there are, as in ``Synced.told``."""
    source: str
    to: str
    """Which of them was synced."""
    changed: list[str]
    """Its files that may have been imported as they were before."""
    again: bool
    """Whether to import them again."""


class Answer(NamedTuple):
    """What came of it in one process."""

    reloaded: tuple[str, ...]
    kept: tuple[str, ...]
    failed: str
    """Why nothing was imported again; empty if nothing went wrong."""
