"""Budgets of extension messages: a thread that outruns an extension waits, and event loops do not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import Actor, MailboxFull, ProcMesh, concat, configured, endpoint, shutdown, this_host
from mesh_core.extensions import Extension, Proc, find, install

MIB = 2**20
BUDGET = 4 * MIB
PIECE = bytes(100_000)
SOON = 30.0


class Taker(Extension):
    """Takes pieces once it is allowed to."""

    name = "taker"

    def start(self) -> None:
        self.may = threading.Event()
        self.taken = 0

    def receive(self, message: Any, sender: Proc) -> int:
        assert self.may.wait(SOON)
        self.taken += 1
        return self.taken


class Gate(Actor):
    """Lets the extension of its process continue."""

    @endpoint
    def open(self) -> None:
        taker = find(Taker)
        assert taker is not None
        taker.may.set()


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    shutdown()
    with configured(mailbox_budget=BUDGET, link_budget=16 * MIB):
        install(Taker)
        with this_host().spawn_procs({"gpus": 2}) as procs:
            procs.initialized.get(timeout=60)
            yield procs
        shutdown()


def test_a_thread_that_outruns_an_extension_waits(procs: ProcMesh) -> None:
    taker = find(Taker)
    assert taker is not None
    gate: Any = procs.spawn("gate", Gate)
    gate.initialized.get(timeout=SOON)
    sent = [0]

    def flood() -> None:
        for n in range(400):
            taker.tell(procs, PIECE)
            sent[0] = n + 1

    thread = threading.Thread(target=flood)
    thread.start()
    while sent[0] < BUDGET // len(PIECE) // 4:
        os.sched_yield()
    # Nothing is taken while the gate is shut: what is in flight stays below the budgets.
    assert sent[0] * len(PIECE) <= 2 * BUDGET
    gate.open.call().get(timeout=SOON)
    thread.join(SOON)
    assert not thread.is_alive()
    assert sent[0] == 400
    assert taker.call(procs, b"").get(timeout=SOON).values() == [401, 401]


def test_a_coroutine_that_outruns_an_extension_goes_on_or_is_refused(procs: ProcMesh) -> None:
    taker = find(Taker)
    assert taker is not None
    gate: Any = procs.spawn("gate", Gate)

    async def flood() -> int:
        await gate
        sent: list[Any] = []

        def fill() -> None:
            while len(sent) < 1000:
                sent.append(taker.tell(procs, PIECE))

        with pytest.raises(MailboxFull, match="extension taker"):
            fill()
        last = sent[-1]
        assert not last.done()
        await gate.open.call()
        await last
        return len(sent)

    count = asyncio.run(flood())
    assert BUDGET < count * len(PIECE) < 64 * MIB
    assert taker.call(procs, b"").get(timeout=SOON).values() == [count + 1] * 2


def test_parts_of_a_combined_mesh_are_each_reported_once(procs: ProcMesh) -> None:
    taker = find(Taker)
    assert taker is not None
    gate: Any = procs.spawn("gate", Gate)
    gate.open.call().get(timeout=SOON)
    other: Any = procs.spawn("other", Gate)
    both = concat([gate.slice(gpus=0), other.slice(gpus=1)], dim="gpus")
    assert taker.call(both, b"").get(timeout=SOON).values() == [1, 1]
