"""What a process knows of workspaces."""

from __future__ import annotations

from typing import Any


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
