"""A sender that is faster than its receiver waits, and memory stays within the budgets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import suspend
from core_processes import Script
from flow_samples import Producer, Slow, Valve, fill

from mesh_core import ActorTimeout, MailboxFull, ProcMesh, SupervisionError, configured, shutdown, this_host

MIB = 2**20
BUDGET = 4 * MIB
INITIAL = MIB
"""What a sender may have in transit before it has heard from the receiver's process."""
SLACK = 24 * MIB
"""Objects, allocators and socket buffers: small compared with what would accumulate without a budget."""


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Two processes with a small budget."""
    shutdown()
    with configured(mailbox_budget=BUDGET), this_host().spawn_procs({"gpus": 2}, name="flow") as procs:
        procs.initialized.get(timeout=60)
        yield procs
    shutdown()


@pytest.fixture
def slow(procs: ProcMesh) -> Iterator[Any]:
    """An actor on rank 0 that is blocked, and `slow.valve` that unblocks it."""
    one = procs.slice(gpus=0)
    valve = one.spawn("valve", Valve)
    valve.shut.call_one().get(timeout=30)
    slow = one.spawn("slow", Slow)
    slow.initialized.get(timeout=30)
    slow.__dict__["valve"] = valve
    yield slow
    valve.open.call_one().get(timeout=30)
    slow.stop().get(timeout=60)
    valve.stop().get(timeout=30)


def pss(*pids: int) -> int:
    """The memory of processes in bytes; shared memory counts once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def fill_to_the_brim(slow: Any) -> None:
    """Fill the whole budget: the small window that every sender begins with, and what it grows to."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        fill(slow, bytes(100_000))
        try:
            slow.note.with_options(block=False).broadcast(bytes(100_000))
        except MailboxFull as error:
            if error.budget == BUDGET:
                return
    raise AssertionError("the window has not grown to the budget")


def pids(procs: ProcMesh) -> list[int]:
    echo = procs.spawn("pids", Producer)
    found = echo.pid.call().get(timeout=30).values()
    echo.stop().get(timeout=30)
    return list(found)


@pytest.mark.parametrize("size", [100, 10_000, MIB // 2])
def test_an_unread_mailbox_holds_its_budget(procs: ProcMesh, slow: Any, size: int) -> None:
    everybody = [os.getpid(), *pids(procs)]
    before = pss(*everybody)
    sent, said = fill(slow, bytearray(size))
    grown = pss(*everybody) - before
    assert sent * size <= BUDGET + INITIAL
    assert sent * (size + 400) >= INITIAL / 2
    assert grown <= 2 * BUDGET + SLACK
    assert "actor 'slow' on rank 0 lags behind" in said
    assert "block=False" in said
    slow.valve.open.call_one().get(timeout=30)
    assert slow.seen.call_one().get(timeout=60) == sent


def test_the_error_has_fields(slow: Any) -> None:
    fill_to_the_brim(slow)
    with pytest.raises(MailboxFull) as caught:
        slow.note.with_options(block=False).call_one(bytes(MIB))
    assert (caught.value.actor, caught.value.rank) == ("slow", 0)
    assert caught.value.host == this_host()._name
    assert caught.value.budget == BUDGET


def test_block_false_is_kept_when_a_deadline_is_added(slow: Any) -> None:
    fill_to_the_brim(slow)
    for note in (
        slow.note.with_options(block=False).with_options(timeout=30.0),
        slow.note.with_options(timeout=30.0).with_options(block=False),
    ):
        with pytest.raises(MailboxFull):
            note.call_one(bytes(MIB))


def test_a_gigabyte_of_broadcasts_is_held_back(procs: ProcMesh, slow: Any) -> None:
    everybody = [os.getpid(), *pids(procs)]
    before = pss(*everybody)
    value, count = bytearray(MIB), 1024
    most = [0]
    sent = [0]

    def produce() -> None:
        for _ in range(count):
            slow.note.broadcast(value)
            sent[0] += 1

    producer = threading.Thread(target=produce)
    producer.start()
    for _ in range(20):
        most[0] = max(most[0], pss(*everybody) - before)
    assert sent[0] < 20
    slow.valve.open.call_one().get(timeout=30)
    while producer.is_alive():
        most[0] = max(most[0], pss(*everybody) - before)
        producer.join(0.05)
    assert slow.seen.call_one().get(timeout=60) == count
    # A quarter of it would be far above this.
    assert most[0] <= 4 * BUDGET + SLACK


def test_a_message_larger_than_the_budget_is_sent_alone(slow: Any) -> None:
    sent, _ = fill(slow, bytearray(3 * BUDGET))
    assert sent == 1
    slow.valve.open.call_one().get(timeout=30)
    for _ in range(5):
        slow.note.call_one(bytearray(3 * BUDGET)).get(timeout=60)


def test_a_stopped_process_costs_little_memory(procs: ProcMesh, slow: Any) -> None:
    everybody = [os.getpid(), *pids(procs)]
    before = pss(*everybody)
    producer = procs.slice(gpus=1).spawn("producer", Producer)
    producer.initialized.get(timeout=30)
    suspend(everybody[1])
    try:
        here, _ = fill(slow, bytes(10_000))
        # Messages from another worker are held by neither of the two: they pass through this process.
        there, _ = producer.fill.call_one(slow, 10_000).get(timeout=30)
        for sent in (here, there):
            assert sent * 10_000 <= INITIAL
        assert pss(*everybody) - before <= 2 * INITIAL + SLACK
    finally:
        os.kill(everybody[1], signal.SIGCONT)
    slow.valve.open.call_one().get(timeout=30)
    flood = producer.flood.call_one(slow, 10, 1)
    assert flood.get(timeout=30) == 1
    producer.stop().get(timeout=30)
    until = time.monotonic() + 30
    while slow.seen.call_one().get(timeout=60) < here + there + 1:
        assert time.monotonic() < until


def test_a_worker_that_sends_to_a_worker_waits(procs: ProcMesh, slow: Any) -> None:
    everybody = [os.getpid(), *pids(procs)]
    producer = procs.slice(gpus=1).spawn("producer", Producer)
    before = pss(*everybody)
    for size in (10_000, 300_000):
        sent, said = producer.fill.call_one(slow, size).get(timeout=60)
        assert sent * size <= BUDGET + INITIAL
        assert "actor 'slow' on rank 0" in said
    assert pss(*everybody) - before <= 2 * BUDGET + SLACK
    flood = producer.flood.call_one(slow, 10_000, 5_000)
    slow.valve.open.call_one().get(timeout=30)
    assert flood.get(timeout=60) == 5_000
    producer.stop().get(timeout=30)


@pytest.mark.usefixtures("fault_tolerant")
def test_messages_whose_endpoint_raises_count_as_handled(slow: Any) -> None:
    for _ in range(100):
        slow.fail.call_one(bytes(MIB))
    assert slow.seen.call_one().get(timeout=60) == 0
    # Messages for an actor that has failed count as handled, too.
    for _ in range(100):
        slow.fail.broadcast(bytes(MIB))
    with pytest.raises(SupervisionError):
        slow.seen.call_one().get(timeout=60)


def test_a_cast_waits_for_the_slowest(procs: ProcMesh, slow: Any) -> None:
    del slow
    everywhere = procs.spawn("everywhere", Slow)
    procs.slice(gpus=1).spawn("other", Valve).open.call_one().get(timeout=30)
    sent, said = 0, ""
    # Rank 1 takes everything, though not always at once.
    while "on rank 0" not in said:
        count, said = fill(everywhere, bytes(100_000))
        sent += count
    assert sent * 100_000 <= BUDGET + INITIAL
    # It was sent to both or to neither.
    assert everywhere.slice(gpus=1).seen.call_one().get(timeout=60) == sent
    procs.slice(gpus=0).spawn("another", Valve).open.call_one().get(timeout=30)
    assert everywhere.slice(gpus=0).seen.call_one().get(timeout=60) == sent


def test_a_stopped_actor_blocks_no_sender(slow: Any) -> None:
    fill(slow, bytes(50_000))
    stopping = slow.stop()
    blocked = threading.Thread(target=lambda: [slow.note.broadcast(bytes(50_000)) for _ in range(200)])
    blocked.start()
    slow.valve.open.call_one().get(timeout=30)
    stopping.get(timeout=60)
    blocked.join(30)
    assert not blocked.is_alive()
    for _ in range(200):
        slow.note.broadcast(bytes(MIB))


@pytest.mark.usefixtures("procs", "fault_tolerant")
def test_a_dead_process_blocks_no_sender() -> None:
    with configured(mailbox_budget=BUDGET), this_host().spawn_procs({"gpus": 2}) as mortal:
        slow = mortal.slice(gpus=0).spawn("slow", Slow)
        pid = pids(mortal)[0]
        fill(slow, bytes(50_000))
        producer = mortal.slice(gpus=1).spawn("producer", Producer)
        producer.fill.call_one(slow, 50_000).get(timeout=60)
        flood = producer.flood.call_one(slow, 50_000, 300)
        entered = threading.Event()

        def produce() -> None:
            entered.set()
            for _ in range(200):
                slow.note.broadcast(bytes(50_000))

        blocked = threading.Thread(target=produce)
        blocked.start()
        entered.wait()
        os.kill(pid, signal.SIGKILL)
        blocked.join(30)
        assert not blocked.is_alive()
        assert flood.get(timeout=30) == 300
        with pytest.raises(SupervisionError):
            slow.seen.call_one().get(timeout=30)


def test_a_deadline_ends_the_wait_for_room(slow: Any) -> None:
    fill_to_the_brim(slow)
    with pytest.raises(
        TimeoutError, match=r"'slow' on rank 0 lags behind.*not sent within its deadline"
    ) as caught:
        slow.note.with_options(timeout=0.05).call_one(bytes(2 * MIB))
    assert isinstance(caught.value, ActorTimeout)
    assert (caught.value.rank, caught.value.host) == (0, this_host()._name)


def test_an_actor_does_not_wait_for_itself(procs: ProcMesh) -> None:
    one = procs.slice(gpus=1)
    sync = one.spawn("sync", Producer)
    with pytest.raises(MailboxFull, match="waits for itself"):
        sync.flood.call_one(sync, 100_000, 1_000).get(timeout=30)
    sync.stop().get(timeout=30)


def test_answers_are_never_held_back(procs: ProcMesh) -> None:
    echo = procs.spawn("echo", Producer)
    futures = [echo.pid.call() for _ in range(3_000)]
    assert all(len(future.get(timeout=60)) == 2 for future in futures)
    echo.stop().get(timeout=30)


def test_ctrl_c_ends_the_wait(script: Callable[..., Script]) -> None:
    run = script(
        """
        from mesh_core import configure, this_host
        from flow_samples import Slow, fill

        if __name__ == "__main__":
            configure(mailbox_budget=4 * 2**20)
            with this_host().spawn_procs() as procs:
                slow = procs.spawn("slow", Slow)
                fill(slow, bytes(50_000))
                try:
                    print("full")
                    while True:
                        slow.note.broadcast(bytes(50_000))
                except KeyboardInterrupt:
                    print("interrupted")
                configure(stop_timeout=0.2)
        """
    )
    assert run.line() == "full"
    run.process.send_signal(signal.SIGINT)
    assert run.line() == "interrupted"
    run.finish()
    assert run.process.returncode == 0
