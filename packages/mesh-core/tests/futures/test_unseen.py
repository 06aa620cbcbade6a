"""Failed calls that nobody looks at: one line in the log each, and none for those that somebody has looked at (UNS-1)."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_processes import Script
from core_samples import Coroutines, Echo

from mesh_core import Accumulator, Channel, ProcMesh

pytestmark = pytest.mark.usefixtures("runtime")

SOON = 30.0


class Lines:
    """What is logged about calls that nobody has looked at."""

    def __init__(self, caplog: pytest.LogCaptureFixture, sentinel: Any) -> None:
        self._caplog = caplog
        self._sentinel = sentinel
        self._count = 0

    def so_far(self) -> list[str]:
        """All lines since the last time. Notices come in order, so the last one is triggered here, as a marker."""
        self._count += 1
        mark = f"sentinel {self._count}"
        self._sentinel.fail.call_one(LookupError(mark))
        until = time.monotonic() + SOON
        while not (told := self._told()) or mark not in told[-1]:
            assert time.monotonic() < until, told
            os.sched_yield()
        self._caplog.clear()
        return told[:-1]

    def _told(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name == "mesh"]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, procs: ProcMesh) -> Iterator[Lines]:
    caplog.set_level(logging.ERROR, "mesh")
    sentinel = procs.slice(hosts=0, gpus=0).spawn("sentinel", Echo)
    yield Lines(caplog, sentinel)
    sentinel.stop().get()


@pytest.fixture
def one(echo: Any) -> Any:
    return echo.slice(hosts=0, gpus=1)


def settle(mesh: Any) -> None:
    """Wait until everything that was sent before has been answered."""
    mesh.echo.call(0).get(SOON)


def test_a_failure_is_reported_if_its_future_was_dropped_before(one: Any, lines: Lines) -> None:
    one.fail.call_one(ValueError("no such batch\nand more"))
    settle(one)
    (line,) = lines.so_far()
    assert "fail of actor 'echo' on rank 1, host " in line
    assert line.endswith(": ValueError: no such batch")


def test_a_failure_is_reported_if_its_future_is_dropped_after(one: Any, lines: Lines) -> None:
    future = one.fail.call_one(ValueError("no"))
    settle(one)
    assert future.done()
    assert lines.so_far() == []
    del future
    assert len(lines.so_far()) == 1


def test_failures_of_many_ranks_are_one_line(echo: Any, lines: Lines) -> None:
    echo.fail.call(ValueError("no"))
    settle(echo)
    (line,) = lines.so_far()
    assert "fail of actor 'echo' on rank 0, " in line
    assert "(and 3 more ranks)" in line


def test_failures_of_some_ranks_are_one_line(echo: Any, lines: Lines) -> None:
    echo.call.call(fail_on_odd)
    settle(echo)
    (line,) = lines.so_far()
    assert "on rank 1, " in line
    assert "(and 1 more rank)" in line


def fail_on_odd() -> None:
    from mesh_core import current_rank

    if current_rank().rank % 2:
        raise ValueError("odd")


def test_observed_errors_are_not_reported(echo: Any, one: Any, lines: Lines) -> None:
    error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        one.fail.call_one(error).get(SOON)
    assert isinstance(one.fail.call_one(error).exception(SOON), ValueError)
    echo.fail.call(error).get(SOON, return_exceptions=True)
    with pytest.raises(ValueError, match="no"):
        one.fail.call_one(error).then(str).get(SOON)

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await one.fail.call_one(error)
        with pytest.raises(ValueError, match="no"):
            await echo.fail.call(error)
        with pytest.raises(ValueError, match="no"):
            await one.fail.call_one(error).as_asyncio()

    asyncio.run(main())
    with pytest.raises(ValueError, match="no"):
        Accumulator(echo.fail, 0, max).accumulate(error).get(SOON)
    for future in echo.fail.stream(error):
        assert isinstance(future.exception(SOON), ValueError)
    for future in echo.fail.stream(error):
        # After reading a part of a stream, the reader knows about its failures.
        assert isinstance(future.exception(SOON), ValueError)
        break
    settle(echo)
    assert lines.so_far() == []


def test_cancelled_calls_are_not_reported(procs: ProcMesh, lines: Lines) -> None:
    held = procs.slice(hosts=1, gpus=1).spawn("held", Coroutines)
    future = held.hold.call_one()
    held.holding.call_one().get(SOON)
    assert future.cancel()
    held.cancelled.call_one().get(SOON)
    del future
    held.stop().get(SOON)
    assert lines.so_far() == []


def test_successes_and_broadcasts_are_not_reported(one: Any, lines: Lines) -> None:
    one.echo.call_one(1)
    one.echo.call(1)
    one.echo.broadcast(1)
    settle(one)
    assert lines.so_far() == []


def test_a_result_may_be_looked_at_late(one: Any, lines: Lines) -> None:
    future = one.fail.call_one(ValueError("no"))
    settle(one)
    assert isinstance(future.exception(), ValueError)
    del future
    assert lines.so_far() == []


def test_an_unseen_deadline_is_reported(procs: ProcMesh, lines: Lines) -> None:
    held = procs.slice(hosts=1, gpus=1).spawn("held", Coroutines)
    held.hold.with_options(timeout=0.01).call_one()
    held.cancelled.call_one().get(SOON)
    held.notes.call_one().get(SOON)
    (line,) = lines.so_far()
    assert "hold of actor 'held'" in line and "ActorTimeout: the deadline" in line
    held.stop().get(SOON)


def test_undelivered_calls_are_reported(procs: ProcMesh, lines: Lines) -> None:
    gone = procs.slice(hosts=1, gpus=1).spawn("gone", Echo)
    gone.stop().get(SOON)
    future = gone.echo.call_one(1)
    while not future.done():
        os.sched_yield()
    del future
    (line,) = lines.so_far()
    assert "echo of actor 'gone' on rank 3: the message came back: the actor has stopped" in line


def test_failures_of_combined_calls_are_reported(echo: Any, lines: Lines) -> None:
    echo.fail.with_options(reduce="sum").call(ValueError("no"))
    settle(echo)
    (line,) = lines.so_far()
    assert "fail of actor 'echo'" in line and "ValueError: no" in line


def test_a_dropped_port_reports_nothing(lines: Lines) -> None:
    port, receiver = Channel[int].open()
    port.exception(ValueError("no"))
    receiver.recv()
    receiver.close()
    assert lines.so_far() == []


SCRIPT = """
from mesh_core import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def fail(self, text):
        raise ValueError(text)
    @endpoint
    def ask(self, other):
        other.fail.call_one("of a worker")
        other.fail.call_one("seen").exception()

if __name__ == "__main__":
    with this_host().spawn_procs({"gpus": 2}) as procs:
        workers = procs.spawn("workers", Worker)
        first, second = (worker for _, worker in workers)
        first.ask.call_one(second).get(timeout=30)
        held = first.fail.call_one("held")
        seen = first.fail.call_one("seen")
        seen.exception(timeout=30)
    more = this_host().spawn_procs().spawn("more", Worker)
    more.fail.call_one("dropped")
    kept = more.fail.call_one("kept")
"""


def test_unseen_failures_are_reported_at_the_end(script: Callable[..., Script]) -> None:
    ended = script(SCRIPT)
    out, err = ended.process.communicate(timeout=60)
    assert ended.process.returncode == 0
    told = [line for line in (out + err).splitlines() if "nobody has looked at its future" in line]
    assert sorted(line.rpartition(": ")[2] for line in told) == ["dropped", "held", "kept", "of a worker"]


INTERRUPTED = '''
from core_samples import Coroutines
from mesh_core import Actor, endpoint, this_host
import os, signal, sys, threading

class Worker(Actor):
    @endpoint
    def wait_and_fail(self, gate):
        gate.enter.call_one("x").get(timeout=30)
        raise ValueError("after Ctrl-C")

def interrupt(main):
    """Once the main thread waits for the call."""
    while not (sys._current_frames()[main].f_code.co_name == "_wait" and asked.is_set()):
        os.sched_yield()
    signal.raise_signal(signal.SIGINT)

if __name__ == "__main__":
    asked = threading.Event()
    with this_host().spawn_procs() as procs:
        gate, worker = procs.spawn("gate", Coroutines), procs.spawn("worker", Worker)
        worker.initialized.get(timeout=30)
        try:
            threading.Thread(target=interrupt, args=(threading.get_ident(),)).start()
            future = worker.wait_and_fail.call_one(gate)
            asked.set()
            future.get(timeout=30)
        except KeyboardInterrupt:
            gate.open.call_one("x").get(timeout=30)
            worker.stop().get(timeout=30)
            del future
            print("interrupted")
'''


def test_a_wait_interrupted_by_ctrl_c_counts_as_looking(script: Callable[..., Script]) -> None:
    ended = script(INTERRUPTED)
    out, err = ended.process.communicate(timeout=60)
    assert (ended.process.returncode, out, err) == (0, "interrupted\n", "")
