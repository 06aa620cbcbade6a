"""Replays that follow each other quickly travel together (STM-5)."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import capture, fetch, share, slice_mesh, usage  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]


class Held:
    """A counter on a mesh, a captured step that adds to it, and replays of it that wait."""

    def __init__(self, procs: ProcMesh, monkeypatch: pytest.MonkeyPatch, replays: int) -> None:
        self.count = share(torch.zeros(1), procs)
        self.stream = self.count.descriptor.stream

        @capture
        def step(by: Any) -> None:
            self.count.add_(by)

        self.step = step
        self.one = share(torch.ones(1), procs)
        for _ in range(3):
            step(self.one)
        before = fetch(self.count).item(gpus=0).item()
        self.messages: list[int] = []
        self.sent = threading.Event()
        send = self.stream.send

        def told(messages: list[Any]) -> None:
            self.messages.append(len(messages))
            send(messages)
            self.sent.set()

        monkeypatch.setattr(self.stream, "send", told)
        self.stream.told = math.inf  # as if something had been sent just now
        for _ in range(replays):
            step(self.one)
        self.want = before + replays


def quiet(monkeypatch: pytest.MonkeyPatch, procs: ProcMesh) -> None:
    """Have nothing be sent by itself."""
    stream = share(torch.zeros(1), procs).descriptor.stream
    monkeypatch.setattr(stream.tensors.flusher, "wake", lambda _: None)


def test_what_is_asked_next_finds_them_done(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, procs)
    held = Held(procs, monkeypatch, 5)
    assert held.messages == []
    assert [each.item() for each in fetch(held.count).values()] == [held.want] * 2
    assert held.messages == [5]


def test_an_operator_comes_behind_them(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, procs)
    held = Held(procs, monkeypatch, 5)
    twice = held.count * 2
    assert [each.item() for each in fetch(twice).values()] == [held.want * 2] * 2


def test_a_part_of_the_mesh_comes_behind_them(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, procs)
    held = Held(procs, monkeypatch, 0)
    part = slice_mesh(held.count, gpus=slice(1, 2))
    held.stream.told = math.inf
    for _ in range(5):
        held.step(held.one)
    assert fetch(part * 2).values()[0].item() == (held.want + 5) * 2


def test_no_more_than_so_many_wait(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, procs)
    held = Held(procs, monkeypatch, 0)
    for _ in range(260):
        held.stream.told = math.inf
        held.step(held.one)
    assert held.messages == [128, 128]
    assert [each.item() for each in fetch(held.count).values()] == [held.want + 260] * 2


def test_they_are_sent_though_nothing_follows(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(procs, monkeypatch, 1)
    assert held.sent.wait(30)
    assert sum(held.messages) == 1


def test_one_that_raises_does_not_keep_those_behind_it(procs: ProcMesh) -> None:
    x = share(torch.zeros(1), procs)
    stream = x.descriptor.stream
    before = [each.tensors for each in usage(procs).values()]
    stream.send([("unknown",), ("free", [x.ref.number])])
    assert [each.tensors for each in usage(procs).values()] == [each - 1 for each in before]
