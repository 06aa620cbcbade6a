"""What those who put a mesh under stress share: its limits, its sites, and what went wrong."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mesh_core import ActorError, ActorTimeout, MailboxFull, SpawnError, SupervisionError, Undeliverable

LIMIT = 60.0
"""Nothing takes this long, whatever happened to the machine meanwhile."""
STOP = 1.0
"""How long processes may take to stop before they are killed."""
CROWD = 14
"""The most processes at once."""
NAMED = (ActorError, ActorTimeout, MailboxFull, SpawnError, SupervisionError, Undeliverable)


class Violation(Exception):
    """A promise was broken."""


@dataclass(eq=False)
class Site:
    """A mesh of processes, with actors on it."""

    name: str
    size: int
    procs: Any
    workers: Any
    quick: Any
    harmed: bool = False
    stopping: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 60)))
    paused: set[int] = field(default_factory=set)


class World:
    """What all the threads share."""

    def __init__(self, seed: int, log: collections.deque[str]) -> None:
        self.seed = seed
        self.sites: list[Site] = []
        self.lock = threading.Lock()
        self.violations: list[str] = []
        self.over = threading.Event()
        self.history = log
        self.done: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()
        self.pending = 0
        """Processes that are being spawned."""
        self.spawned = 0

    def note(self, text: str) -> None:
        self.history.append(
            f"{time.monotonic() - self.started:9.3f} {threading.current_thread().name}: {text}"
        )

    def violate(self, text: str) -> None:
        self.violations.append(text)
        self.note(f"VIOLATION: {text}")
        self.over.set()
