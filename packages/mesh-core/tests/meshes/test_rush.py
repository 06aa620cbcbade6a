"""What a script sends in a rush of broadcasts arrives in order, soon, and before whatever depends on it (BND-1)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import Actor, ProcMesh, endpoint

SOON = 60.0
RUSH = 300


class Notes(Actor):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    @endpoint
    def note(self, number: int) -> None:
        self.heard.append(number)

    @endpoint
    def take(self) -> list[int]:
        heard, self.heard = self.heard, []
        return heard

    @endpoint
    def write(self, folder: str, number: int) -> None:
        """Say outside of Mesh how many were heard."""
        if len(self.heard) == number:
            Path(folder, str(number)).touch()

    @endpoint
    def ask(self, others: Any) -> list[list[int]]:
        return list(others.take.call().get(timeout=SOON).values())


@pytest.fixture
def notes(procs: ProcMesh) -> Iterator[Any]:
    mesh: Any = procs.spawn("notes", Notes)
    yield mesh
    mesh.stop().get(timeout=SOON)


def test_whoever_hears_of_a_rush_finds_it_done(notes: Any) -> None:
    some, asker = notes.slice(hosts=0), notes.slice(hosts=1, gpus=0)
    for _ in range(8):
        for number in range(RUSH):
            some.note.broadcast(number)
        # By way of a third process, which knows nothing of what the script has sent before.
        assert asker.ask.call_one(some).get(timeout=SOON) == [list(range(RUSH))] * 2


def test_single_messages_and_calls_keep_their_place_in_a_rush(notes: Any) -> None:
    some, one = notes.slice(hosts=0), notes.slice(hosts=0, gpus=0)
    calls = []
    for number in range(RUSH):
        some.note.broadcast(2 * number)
        if number % 7 == 0:
            calls.append(one.note.call_one(2 * number + 1))
        else:
            one.note.broadcast(2 * number + 1)
    first, second = some.take.call().get(timeout=SOON).values()
    assert first == list(range(2 * RUSH))
    assert second == list(range(0, 2 * RUSH, 2))
    assert [call.get(timeout=SOON) for call in calls] == [None] * len(calls)


def test_the_last_of_a_rush_arrive_though_the_script_turns_to_something_else(
    notes: Any, tmp_path: Path
) -> None:
    one = notes.slice(hosts=0, gpus=0)
    for count in range(1, 40, 3):
        one.take.call_one().get(timeout=SOON)
        for number in range(count):
            one.note.broadcast(number)
        one.write.broadcast(str(tmp_path), count)
        # Without Mesh from here on.
        end = time.monotonic() + SOON
        while not (tmp_path / str(count)).exists():
            assert time.monotonic() < end, f"{count} broadcasts and one more were sent"
