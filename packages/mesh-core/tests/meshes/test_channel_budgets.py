"""A channel that nobody reads holds its budget (PRT-4): its senders wait, in coroutines by awaiting."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flow_samples import Speaker

from mesh_core import (
    Channel,
    MailboxFull,
    PortReceiver,
    ProcMesh,
    Undeliverable,
    configured,
    send,
    shutdown,
    this_host,
)
from mesh_core._common.current import current

MIB = 2**20
BUDGET = 4 * MIB
INITIAL = MIB
SIZE = 100_000
PIECE = bytes(SIZE)
SOON = 30.0


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Two processes; channels have small budgets."""
    shutdown()
    with (
        configured(mailbox_budget=BUDGET, link_budget=16 * MIB),
        this_host().spawn_procs({"gpus": 2}, name="channels") as procs,
    ):
        procs.initialized.get(timeout=60)
        yield procs
    shutdown()


@pytest.fixture
def speaker(procs: ProcMesh) -> Iterator[Any]:
    speaker = procs.slice(gpus=0).spawn("speaker", Speaker)
    yield speaker
    speaker.stop().get(timeout=SOON)


def full(receiver: PortReceiver[Any], senders: int = 1) -> int:
    """Wait until a channel takes no more; return how many values it has."""
    least = (BUDGET - INITIAL) // (SIZE + 1_000) // 2
    while len(receiver) < least:
        pass
    # The receiver will give no more credits: everything that was sent has arrived or waits there.
    count = len(receiver)
    assert count * SIZE <= BUDGET + INITIAL * (senders + 1)
    return count


def test_a_thread_that_outruns_the_receiver_waits(speaker: Any) -> None:
    port, receiver = Channel[int].open()
    speaking = speaker.speak.call_one(port, SIZE, 500)
    full(receiver)
    assert not speaking.done()
    for number in range(500):
        assert receiver.recv().get(timeout=SOON)[0] == number
    assert speaking.get(timeout=SOON) == 500
    receiver.close()


def test_a_coroutine_that_outruns_the_receiver_awaits(speaker: Any) -> None:
    port, receiver = Channel[int].open()
    speaking = speaker.speak_async.call_one(port, SIZE, 500)
    full(receiver)
    # Its loop is running.
    assert speaker.ping.call_one().get(timeout=SOON) == "pong"
    for number in range(500):
        assert receiver.recv().get(timeout=SOON)[0] == number
    assert speaking.get(timeout=SOON) == 500
    receiver.close()


def test_a_coroutine_that_does_not_await_is_refused_in_the_end(speaker: Any) -> None:
    port, receiver = Channel[int].open()
    sent, said = speaker.speak_carelessly.call_one(port, SIZE, 1_000).get(timeout=SOON)
    assert sent * SIZE <= BUDGET + INITIAL + 16 * MIB
    assert "the receiver of a channel lags behind" in said
    assert "Await" in said
    # Nothing that was taken is lost.
    assert [receiver.recv().get(timeout=SOON)[0] for _ in range(sent)] == list(range(sent))
    receiver.close()


def test_several_senders_share_the_budget(procs: ProcMesh) -> None:
    port, receiver = Channel[int].open()
    speakers = procs.spawn("speakers", Speaker)
    speaking = speakers.speak.call(port, SIZE, 200)
    full(receiver, senders=2)
    got = [receiver.recv().get(timeout=SOON)[0] for _ in range(400)]
    assert sorted(got) == sorted([*range(200), *range(200)])
    speaking.get(timeout=SOON)
    speakers.stop().get(timeout=SOON)


def test_receives_that_were_asked_for_take_values_whoever_looks(speaker: Any) -> None:
    port, receiver = Channel[int].open()
    # More than the budget, and the last is waited for first: nothing may hold it up.
    futures = [receiver.recv() for _ in range(300)]
    speaking = speaker.speak.call_one(port, SIZE, 300)
    assert futures[-1].get(timeout=SOON)[0] == 299
    assert speaking.get(timeout=SOON) == 300
    assert [future.get()[0] for future in futures] == list(range(300))


@pytest.mark.parametrize("how", ["speak", "speak_async"])
def test_closing_a_channel_releases_its_senders(speaker: Any, how: str) -> None:
    port, receiver = Channel[int].open()
    # More than can be on its way before the news of the end comes back: what is sent until then is lost without a word.
    speaking = getattr(speaker, how).call_one(port, SIZE, 100_000)
    full(receiver)
    receiver.close()
    with pytest.raises(Undeliverable):
        speaking.get(timeout=SOON)


@pytest.mark.usefixtures("fault_tolerant")
def test_the_death_of_a_receiver_releases_its_senders(speaker: Any) -> None:
    with this_host().spawn_procs(name="mortal") as mortal:
        listener = mortal.spawn("listener", Speaker)
        port = listener.open.call_one().get(timeout=SOON)
        speaking = speaker.speak.call_one(port, SIZE, 500)
        while listener.waiting.call_one().get(timeout=SOON) < 20:
            pass
        os.kill(listener.pid.call_one().get(timeout=SOON), signal.SIGKILL)
        with pytest.raises(Undeliverable):
            speaking.get(timeout=SOON)


def test_answers_for_a_port_wait_too(speaker: Any) -> None:
    port, receiver = Channel[bytes].open()
    for _ in range(200):
        send(speaker.blob, (SIZE,), port=port)
        send(speaker.blob_async, (SIZE,), port=port)
    full(receiver)
    for _ in range(400):
        assert len(receiver.recv().get(timeout=SOON)) == SIZE
    receiver.close()


@pytest.mark.usefixtures("procs")
def test_in_one_process_a_thread_is_refused() -> None:
    with configured(mailbox_budget=BUDGET):
        port, receiver = Channel[bytes].open()
        for _ in range(10):
            port.send(PIECE)

        def flood() -> None:
            for _ in range(10_000):
                port.send(PIECE)

        with pytest.raises(MailboxFull, match="Receive what has come"):
            flood()
        count = len(receiver)
        assert count * SIZE <= BUDGET + INITIAL
        for _ in range(count):
            receiver.recv().get(timeout=SOON)
        port.send(PIECE)
        receiver.close()


def test_in_one_process_a_coroutine_waits(procs: ProcMesh) -> None:
    del procs
    port, receiver = Channel[bytes].open()

    async def produce() -> None:
        for _ in range(500):
            await port.send(PIECE)

    async def both() -> int:
        producing = asyncio.create_task(produce())
        got = 0
        for _ in range(500):
            got += len(await receiver.recv())
        await producing
        return got

    assert asyncio.run(both()) == 500 * SIZE
    receiver.close()


def test_a_value_that_was_given_up_is_not_sent(procs: ProcMesh) -> None:
    del procs
    port, receiver = Channel[bytes].open()

    async def flood() -> int:
        count = 0
        while True:
            sent = port.send(PIECE)
            if not sent.done():
                break
            count += 1
        assert sent.cancel()
        return count

    count = asyncio.run(flood())
    assert len(receiver) == count
    for _ in range(count):
        receiver.recv().get(timeout=SOON)
    assert not receiver.recv().done()
    receiver.close()


def test_a_small_channel_costs_no_credits(speaker: Any) -> None:
    port, receiver = Channel[int].open()
    speaker.speak.call_one(port, 10, 1_000).get(timeout=SOON)
    assert len(receiver) == 1_000
    assert [receiver.recv().get(timeout=SOON)[0] for _ in range(1_000)] == list(range(1_000))
    assert current().runtime.counts()["deferred"] == 0


@pytest.mark.usefixtures("procs")
def test_a_thread_of_the_receivers_process_behind_a_coroutine() -> None:
    # What a coroutine sent first comes first; a thread of this process does not wait for it.
    with configured(mailbox_budget=BUDGET):
        port, receiver = Channel[bytes].open()

        async def flood() -> None:
            while port.send(PIECE).done():
                pass

        asyncio.run(flood())
        refused: list[BaseException] = []

        def try_it() -> None:
            try:
                port.send(b"")
            except MailboxFull as error:
                refused.append(error)

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join(SOON)
        assert refused
        receiver.close()
