"""In a coroutine no send blocks the event loop: messages wait in their sender's process, in order (BKL-1), within a
budget (BKL-2), and leave as soon as there is room (BKL-3).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_processes import Script
from flow_samples import Looper, Recorder, Valve, fill

from mesh_core import (
    ActorTimeout,
    Channel,
    MailboxFull,
    MeshError,
    ProcMesh,
    Sending,
    SupervisionError,
    Undeliverable,
    configured,
    send,
    shutdown,
    this_host,
)
from mesh_core._common.current import current

MIB = 2**20
BUDGET = 4 * MIB
WAITING = 16 * MIB
"""What may wait in the sender's process."""
PIECE = bytes(100_000)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Two processes with small budgets."""
    shutdown()
    with (
        configured(mailbox_budget=BUDGET, link_budget=WAITING),
        this_host().spawn_procs({"gpus": 2}, name="sends") as procs,
    ):
        procs.initialized.get(timeout=60)
        yield procs
    shutdown()


@pytest.fixture
def slow(procs: ProcMesh) -> Iterator[Any]:
    """An actor on rank 0 whose gate is shut and whose mailbox is full, and `slow.valve`, which opens it."""
    one = procs.slice(gpus=0)
    valve = one.spawn("valve", Valve)
    valve.shut.call_one().get(timeout=30)
    slow = one.spawn("slow", Recorder)
    slow.initialized.get(timeout=30)
    slow.__dict__["valve"] = valve
    yield slow
    valve.open.call_one().get(timeout=30)
    slow.stop().get(timeout=60)
    valve.stop().get(timeout=30)


def waiting() -> int:
    """Return how many messages wait in this process."""
    return current().runtime.counts()["deferred"]


def fill_until_it_waits(slow: Any, window: int = BUDGET) -> int:
    """Broadcast in a coroutine until one message waits here; return how many were sent, including that one.

    Uses the widest window: only the actor lets anything through.
    """
    refusing = slow.note.with_options(block=False)
    count, until = 1, time.monotonic() + 30
    while time.monotonic() < until:
        try:
            refusing.broadcast(count, PIECE)
            count += 1
        except MailboxFull as error:
            if error.budget == window:
                assert not slow.note.broadcast(count, PIECE).done()
                return count
    raise AssertionError("the window has not grown to the budget")


def test_a_flood_of_calls_leaves_its_loop_running(slow: Any) -> None:
    async def flood() -> None:
        sent = [slow.note.call_one(number, PIECE) for number in range(100)]
        assert waiting() > 0
        # Only a running loop gets here.
        await slow.valve.open.call_one()
        await asyncio.gather(*sent)

    asyncio.run(flood())
    assert slow.seen.call_one().get(timeout=30) == list(range(100))
    assert waiting() == 0


@pytest.mark.parametrize("adverb", ["call", "choose", "stream", "reduce"])
def test_every_adverb_waits_as_an_awaitable(slow: Any, adverb: str) -> None:
    async def flood() -> None:
        count = fill_until_it_waits(slow)
        if adverb == "stream":
            stream = slow.note.stream(count + 1, PIECE)
            await slow.valve.open.call_one()
            assert [await each async for each in stream] == [count + 1]
            return
        future = {
            "call": slow.note.call,
            "choose": slow.note.choose,
            "reduce": slow.note.with_options(reduce=max).call,
        }[adverb](count + 1, PIECE)
        assert not future.done()
        await slow.valve.open.call_one()
        answer = await future
        assert (answer.item() if adverb == "call" else answer) == count + 1

    asyncio.run(flood())


def test_an_awaited_broadcast_keeps_pace_with_its_receiver(slow: Any) -> None:
    async def produce() -> None:
        for number in range(300):
            await slow.note.broadcast(number, PIECE)
            assert waiting() == 0

    async def flood() -> None:
        producing = asyncio.create_task(produce())
        await slow.valve.open.call_one()
        await producing

    asyncio.run(flood())
    assert slow.seen.call_one().get(timeout=30) == list(range(300))


def test_an_ignored_broadcast_is_sent_all_the_same(slow: Any) -> None:
    async def flood() -> int:
        count = fill_until_it_waits(slow)
        send(slow.note, (count + 1, PIECE))
        return count

    count = asyncio.run(flood())
    # The loop has ended; the message is sent although nobody waits for it.
    assert waiting() == 2
    slow.valve.open.call_one().get(timeout=30)
    assert slow.seen.call_one().get(timeout=30) == list(range(1, count + 2))


def test_beyond_the_budget_sending_is_refused_and_says_what_to_do(slow: Any) -> None:
    async def flood() -> None:
        def send_all() -> None:
            for number in range(1_000):
                slow.note.broadcast(number, PIECE)

        with pytest.raises(MailboxFull, match=r"'slow' on rank 0 .*link_budget.*Await the call") as caught:
            send_all()
        assert caught.value.budget == WAITING
        assert caught.value.rank == 0
        bytes_waiting = current().runtime.counts()["deferred_bytes"]
        assert WAITING - 200_000 <= bytes_waiting <= WAITING
        with pytest.raises(MailboxFull):
            slow.note.call_one(-1, PIECE)
        await slow.valve.open.call_one()
        # What waited is on its way, and there is room again.
        await slow.note.call_one(-2, b"")

    asyncio.run(flood())
    assert current().runtime.counts()["deferred_bytes"] == 0


def test_a_message_larger_than_the_budget_waits_alone(slow: Any) -> None:
    async def flood() -> None:
        fill_until_it_waits(slow)
        large = slow.note.broadcast(-1, bytes(2 * WAITING))
        await slow.valve.open.call_one()
        await large

    with pytest.raises(MailboxFull):
        # Another message waits.
        asyncio.run(flood())

    async def alone() -> None:
        fill(slow, bytes(10), endpoint="blob")
        large = slow.note.call_one(-1, bytes(2 * WAITING))
        assert not large.done()
        with pytest.raises(MailboxFull):
            slow.note.call_one(-2, PIECE)
        await slow.valve.open.call_one()
        assert await large == -1

    slow.valve.open.call_one().get(timeout=30)
    slow.seen.call_one().get(timeout=30)
    slow.valve.shut.call_one().get(timeout=30)
    asyncio.run(alone())


def test_refusing_to_wait_is_refusing_in_a_coroutine_too(slow: Any) -> None:
    async def flood() -> None:
        fill_until_it_waits(slow)
        # This one would fit, but it would overtake the one that waits.
        with pytest.raises(MailboxFull, match="block=False"):
            slow.note.with_options(block=False).broadcast(-1, b"")

    asyncio.run(flood())


def test_what_a_thread_sends_later_arrives_later(slow: Any) -> None:
    async def flood() -> int:
        return fill_until_it_waits(slow)

    count = asyncio.run(flood())
    # Small enough to fit, but behind one that does not.
    sent = []
    thread = threading.Thread(target=lambda: sent.append(slow.note.call_one(count + 1, b"")))
    thread.start()
    while waiting() < 2:
        thread.join(0.001)
    assert not sent
    slow.valve.open.call_one().get(timeout=30)
    thread.join(30)
    assert sent[0].get(timeout=30) == count + 1
    assert slow.seen.call_one().get(timeout=30) == list(range(1, count + 2))


def test_casts_and_single_messages_keep_their_order(procs: ProcMesh, slow: Any) -> None:
    del slow
    both = procs.spawn("both", Recorder)
    procs.slice(gpus=1).spawn("other", Valve).open.call_one().get(timeout=30)
    first, second = both.slice(gpus=0), both.slice(gpus=1)

    async def flood() -> None:
        count = fill_until_it_waits(first)
        both.note.broadcast(count + 1, b"cast")
        # Behind the cast, which waits for rank 0, though rank 1 has room.
        last = second.note.call_one(count + 2, b"single")
        first.note.broadcast(count + 2, b"single")
        assert waiting() == 4
        await procs.slice(gpus=0).spawn("another", Valve).open.call_one()
        await last
        assert await second.seen.call_one() == [count + 1, count + 2]
        assert await first.seen.call_one() == list(range(1, count + 3))

    asyncio.run(flood())
    both.stop().get(timeout=30)


def test_a_stop_overtakes_nothing(slow: Any) -> None:
    port, receiver = Channel[int].open()

    async def flood() -> int:
        count = fill_until_it_waits(slow)
        send(slow.note, (count + 1, PIECE), port=port)
        stopped = slow.stop()
        await slow.valve.open.call_one()
        await stopped
        return count

    count = asyncio.run(flood())
    assert receiver.recv().get(timeout=30) == count + 1


def test_a_cancelled_call_is_never_sent(slow: Any) -> None:
    async def flood() -> int:
        count = fill_until_it_waits(slow)
        given_up = slow.note.call_one(-1, PIECE)
        later = slow.note.call_one(count + 1, PIECE)
        assert given_up.cancel()
        assert not given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        task = asyncio.create_task(_await(slow.note.call_one(-2, PIECE)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await slow.valve.open.call_one()
        await later
        return count

    count = asyncio.run(flood())
    assert slow.seen.call_one().get(timeout=30) == list(range(1, count + 2))


def test_a_cancelled_broadcast_is_never_sent(slow: Any) -> None:
    async def flood() -> int:
        count = fill_until_it_waits(slow)
        given_up = slow.note.broadcast(-1, PIECE)
        assert isinstance(given_up, Sending)
        assert "waiting" in repr(given_up)
        assert given_up.cancel()
        assert "given up" in repr(given_up)
        with pytest.raises(asyncio.CancelledError, match=r"broadcast to slow\.note"):
            await given_up
        task = asyncio.create_task(_await(slow.note.broadcast(-2, PIECE)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await slow.valve.open.call_one()
        sent = slow.note.broadcast(count + 1, PIECE)
        await sent
        assert sent.done()
        assert not sent.cancel()
        assert "sent" in repr(sent)
        return count

    count = asyncio.run(flood())
    assert slow.seen.call_one().get(timeout=30) == list(range(1, count + 2))


async def _await(what: Any) -> Any:
    return await what


def test_a_deadline_runs_while_the_call_waits(slow: Any) -> None:
    async def flood() -> int:
        count = fill_until_it_waits(slow)
        with pytest.raises(ActorTimeout, match="not sent, since actor 'slow' on rank 0 lags behind"):
            await slow.note.with_options(timeout=0.05).call_one(-1, PIECE)
        assert waiting() == 1
        await slow.valve.open.call_one()
        return count

    count = asyncio.run(flood())
    assert slow.seen.call_one().get(timeout=30) == list(range(1, count + 1))


@pytest.mark.usefixtures("procs", "fault_tolerant")
def test_the_death_of_the_receiver_notifies_waiters() -> None:
    with configured(mailbox_budget=BUDGET), this_host().spawn_procs({"gpus": 2}, name="mortal") as mortal:
        slow = mortal.slice(gpus=0).spawn("slow", Recorder)
        pid = slow.pid.call_one().get(timeout=30)

        async def flood() -> None:
            fill_until_it_waits(slow)
            call, told = slow.note.call_one(-1, PIECE), slow.note.broadcast(-2, PIECE)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(SupervisionError):
                await call
            await told
            assert told.done()

        asyncio.run(flood())
        assert waiting() == 0


def test_a_stopped_receiver_releases_everything(procs: ProcMesh) -> None:
    one = procs.slice(gpus=0)
    valve = one.spawn("valve", Valve)
    valve.shut.call_one().get(timeout=30)
    slow = one.spawn("slow", Recorder)

    async def flood() -> None:
        slow.note.broadcast(0, b"")
        # Once that is handled, the mailbox takes no more.
        stopped = slow.stop()
        fill_until_it_waits(slow)
        call = slow.note.call_one(-1, PIECE)
        await valve.open.call_one()
        await stopped
        with pytest.raises(Undeliverable):
            await call

    asyncio.run(flood())
    assert waiting() == 0
    valve.stop().get(timeout=30)


def test_ports_travel_with_calls_that_wait(slow: Any) -> None:
    port, receiver = Channel[int].open()

    async def flood() -> None:
        count = fill_until_it_waits(slow)
        send(slow.note, (count + 1, PIECE), port=port)
        await slow.valve.open.call_one()
        assert await receiver.recv() == count + 1

    asyncio.run(flood())


def test_an_actors_coroutine_may_outrun_actors_of_its_own_process(procs: ProcMesh) -> None:
    one = procs.slice(gpus=1)
    looper, recorder = one.spawn("looper", Looper), one.spawn("recorder", Recorder)
    one.spawn("gate", Valve).open.call_one().get(timeout=30)
    # Both directions need that process's only loop; three times the budget in all.
    assert looper.flood_and_wait.call_one(recorder, 100_000, 120).get(timeout=60) == 120
    # It may also flood itself, as long as it does not wait for the result.
    looper.flood.call_one(looper, 100_000, 60).get(timeout=60)
    with pytest.raises(MeshError, match="is waiting for its own endpoint"):
        looper.flood_awaiting.call_one(looper, 100_000, 1_000).get(timeout=60)
    for mesh in (looper, recorder):
        mesh.stop().get(timeout=30)


def test_two_loops_that_flood_each_other_go_on(procs: ProcMesh) -> None:
    pair = procs.spawn("pair", Looper)
    first, second = pair.slice(gpus=0), pair.slice(gpus=1)
    there = first.flood_and_wait.call_one(second, 100_000, 150)
    back = second.flood_and_wait.call_one(first, 100_000, 150)
    assert there.get(timeout=60) == back.get(timeout=60) == 150
    pair.stop().get(timeout=30)


def test_on_a_thread_it_is_sent_when_it_returns(procs: ProcMesh) -> None:
    procs.spawn("valve", Valve).open.call().get(timeout=30)
    recorder = procs.spawn("recorder", Recorder)
    sent = recorder.note.broadcast(1, b"")
    assert isinstance(sent, Sending)
    assert sent.done()
    assert not sent.cancel()
    asyncio.run(_await(sent))
    assert pickle.loads(pickle.dumps(sent)) is None
    recorder.stop().get(timeout=30)


def test_a_shutdown_ends_what_waits(script: Callable[..., Script]) -> None:
    run = script(
        """
        import asyncio
        from mesh_core import MeshError, configure, shutdown, this_host
        from flow_samples import Recorder, Valve

        async def main(slow):
            for number in range(100):
                sent = slow.note.broadcast(number, bytes(100_000))
            call = slow.note.call_one(100, bytes(100_000))
            waiting = asyncio.create_task(wait(sent))
            await asyncio.sleep(0)
            await asyncio.to_thread(shutdown)
            for future in (waiting, wait(call)):
                try:
                    await future
                except MeshError as error:
                    print(type(error).__name__, error)

        async def wait(what):
            await what

        if __name__ == "__main__":
            configure(mailbox_budget=4 * 2**20, stop_timeout=0.2)
            procs = this_host().spawn_procs()
            procs.spawn("valve", Valve).shut.call_one().get(timeout=30)
            asyncio.run(main(procs.spawn("slow", Recorder)))
        """
    )
    # Whether its process was stopped in time or killed.
    assert run.line().startswith(("Stopped 'slow' on rank 0", "SupervisionError"))
    run.finish()


def test_a_process_that_ends_in_order_drops_what_waits(procs: ProcMesh, slow: Any) -> None:
    with this_host().spawn_procs(name="short") as short:
        looper = short.spawn("looper", Looper)
        looper.flood_numbers.call_one(slow, 100_000, 100).get(timeout=30)
    # Its mailbox has what fitted, and nobody waits for the rest.
    slow.valve.open.call_one().get(timeout=30)
    assert procs.slice(gpus=0).spawn("probe", Recorder).seen.call_one().get(timeout=30) == []


def test_a_connection_that_takes_no_more_blocks_no_loop(script: Callable[..., Script]) -> None:
    run = script(
        """
        import asyncio, os, signal
        from mesh_core import configure, this_host
        from core_owners import suspend
        from flow_samples import Recorder, Valve

        async def main(slow, other, pid):
            suspend(pid)
            try:
                count = 0
                # What the socket does not take is queued, and beyond the budget there is something to wait for.
                while (sent := slow.note.broadcast(count, bytes(30_000))).done():
                    count += 1
                behind = slow.note.call_one(count + 1, b"")
                assert not behind.done()
                # Others are not held up.
                print(await other.note.call_one(1, b""))
            finally:
                os.kill(pid, signal.SIGCONT)
            await sent
            assert await behind == count + 1
            assert await slow.seen.call_one() == list(range(count + 2))
            print("in order")

        if __name__ == "__main__":
            configure(link_budget=64 * 1024)
            with this_host().spawn_procs({"gpus": 2}) as procs:
                procs.spawn("valve", Valve).open.call().get(timeout=30)
                slow = procs.slice(gpus=0).spawn("slow", Recorder)
                other = procs.slice(gpus=1).spawn("other", Recorder)
                asyncio.run(main(slow, other, slow.pid.call_one().get(timeout=30)))
        """
    )
    assert run.line() == "1"
    assert run.line() == "in order"
    run.finish()


def test_a_forked_copy_sends_nothing_of_what_waits(script: Callable[..., Script]) -> None:
    run = script(
        """
        import asyncio, os
        from mesh_core import MeshError, configure, this_host
        from flow_samples import Recorder, Valve

        async def main(slow, valve):
            waiting = [slow.note.broadcast(number, bytes(100_000)) for number in range(100)]
            call = slow.note.call_one(100, b"")
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    slow.note.broadcast(-1, b"")
                except MeshError:
                    status = 0
                assert not waiting[-1].cancel()
                del waiting, call
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            await valve.open.call_one()
            assert await call == 100
            assert await slow.seen.call_one() == list(range(101))
            print("all of it, once")

        if __name__ == "__main__":
            configure(mailbox_budget=4 * 2**20)
            with this_host().spawn_procs() as procs:
                valve = procs.spawn("valve", Valve)
                valve.shut.call_one().get(timeout=30)
                asyncio.run(main(procs.spawn("slow", Recorder), valve))
        """
    )
    assert run.line() == "all of it, once"
    run.finish()
