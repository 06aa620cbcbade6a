"""Which words of a launcher are passed on to the failures of a script."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_launchers import _explained
from mesh_launchers._contract import Phase
from mesh_launchers._explained import Explained
from mesh_launchers._state import HostState, JobState

Said = list[tuple[str, int, str]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What meshes are told: which, of which place, and what."""
    words: Said = []

    class Reasons:
        def __init__(self, hosts: Any) -> None:
            self._hosts = hosts

        def tell(self, place: int, why: str) -> None:
            words.append((self._hosts, place, why))

    monkeypatch.setattr(_explained, "HostReasons", Reasons)
    return words


def state(*hosts: tuple[int, Phase, str], explains: bool = True) -> JobState:
    return JobState(
        "lab",
        "slurm",
        tuple(HostState(number, f"lab-{number}", "hosts", phase, why) for number, phase, why in hosts),
        explains=explains,
    )


def test_words_of_running_and_failed_hosts_are_told_once(said: Said) -> None:
    explained: Any = Explained()
    explained.add("first", [0, 1])
    explained.add("second", [5])
    explained.hear(
        state((0, Phase.WAITING, "PENDING: Resources"), (1, Phase.RUNNING, ""), (5, Phase.RUNNING, ""))
    )
    assert said == []
    for _ in range(2):
        explained.hear(
            state((1, Phase.RUNNING, "Slurm says CANCELLED"), (5, Phase.FAILED, "it has ended\nof its log"))
        )
    assert said == [("first", 1, "Slurm says CANCELLED"), ("second", 0, "it has ended")]
    # A host of which this script knows nothing, and one that comes later.
    explained.hear(state((7, Phase.FAILED, "gone")))
    explained.add("third", [8])
    explained.hear(state((8, Phase.FAILED, "gone")))
    assert said[2:] == [("third", 0, "gone")]


def test_what_the_mesh_has_said_itself_is_not_told_to_it(said: Said) -> None:
    explained: Any = Explained()
    explained.add("hosts", [0])
    explained.knows(0, "its host (lab-0) is dead: silent")
    explained.hear(state((0, Phase.FAILED, "its host (lab-0) is dead: silent")))
    assert said == []
    explained.hear(state((0, Phase.FAILED, "Slurm says NODE_FAIL")))
    assert said == [("hosts", 0, "Slurm says NODE_FAIL")]


def test_nobody_waits_for_a_launcher_that_does_not_explain(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_explained, "HostReasons", None)
    explained: Any = Explained()
    explained.add("hosts", [0])
    explained.hear(state((0, Phase.FAILED, "gone"), explains=False))
    assert said == []
