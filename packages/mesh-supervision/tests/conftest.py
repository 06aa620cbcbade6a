"""Actors and helpers for tests with real processes; workers import the actors from here."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh_core import MeshFailure, ProcMesh, set_fault_handler, shutdown

# Workers have the same path, and import the tests' actors from there.
sys.path.insert(0, str(Path(__file__).parent))

WITHIN = 30.0


class Told:
    """The failures that came to the script."""

    def __init__(self) -> None:
        self._failures: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()

    def __call__(self, failure: MeshFailure) -> None:
        self._failures.put(failure)

    def next(self) -> MeshFailure:
        return self._failures.get(timeout=WITHIN)

    def empty(self) -> bool:
        return self._failures.empty()


@pytest.fixture
def told() -> Iterator[Told]:
    """Takes what nobody has handled."""
    handler = Told()
    before = set_fault_handler(handler)
    yield handler
    set_fault_handler(before)


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[None]:
    """Everything is ended before pytest looks for what was left."""
    yield
    shutdown()


@pytest.fixture
def slay() -> Callable[[ProcMesh, int], int]:
    """Kills the process of a rank; returns its pid."""

    def kill(procs: ProcMesh, rank: int) -> int:
        pid = procs.pids[rank]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    return kill

    """A policy around another one that hands what that was asked, and answered, to the test."""
    from supervised import Heard

    return Heard
