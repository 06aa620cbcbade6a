"""LOG-8: what an endpoint prints and logs is shown before the script sees its result."""

# ruff: noqa: T201 - printing is what is tested

from __future__ import annotations

import asyncio
import ctypes
import io
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import pytest
from core_samples import Echo

from mesh_core import (
    Actor,
    Channel,
    Future,
    Pool,
    Port,
    ProcMesh,
    SupervisionError,
    configured,
    endpoint,
    gather,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime", "patient")


class Kept(logging.Handler):
    """Keeps messages; it can be made to block, or to call an actor."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.asked: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        assert self.go.wait(60)
        if self.asked is not None:
            self.asked.call.call_one(say, "asked by the handler").get(timeout=60)
        self.messages.append(record.getMessage())


class Screen(io.StringIO):
    """Takes the place of stdout, and loses nothing that is written while it is read.

    pytest's own captures read a file and then empty it: what another thread writes in between is gone.
    """

    _seen = 0

    @classmethod
    def of(cls, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Put one there; in the test itself, since pytest puts its own there before."""
        screen = cls()
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    def lines(self) -> list[str]:
        """Return what was shown since the last call, without the labels."""
        text = self.getvalue()[self._seen :]
        self._seen += len(text)
        return [line.partition("] ")[2] for line in text.splitlines()]


class Loud(Actor):
    """Prints in many ways."""

    @endpoint
    def say(self, text: str) -> str:
        say(text)
        return text

    @endpoint
    async def say_async(self, text: str) -> str:
        say(text)
        return text

    @endpoint
    def count(self, upto: int) -> Iterator[int]:
        for n in range(upto):
            print(f"value {n}")
            yield n

    @endpoint
    def send(self, port: Port[str], text: str) -> None:
        print(text)
        port.send(text)

    @endpoint(on_restart="wait")
    def lasting(self, text: str) -> None:
        say(text)

    @endpoint
    def nothing(self) -> None:
        pass

    @endpoint
    def log(self, text: str) -> None:
        self.logger.warning("%s", text)

    @endpoint
    def die(self, text: str) -> None:
        print(text)
        os._exit(1)


def say(text: str) -> None:
    print(text)


def until_done(future: Future[Any]) -> None:
    end = time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < end
        time.sleep(0.001)


def say_by_all_means() -> None:
    print("python")
    os.write(1, b"descriptor\n")
    libc = ctypes.CDLL(None)
    libc.puts(b"library")
    subprocess.run(["echo", "child"], check=True)
    sys.stderr.write("complaint\n")


@pytest.fixture
def patient() -> Iterator[None]:
    """However busy the machine is, results wait for the output."""
    with configured(log_wait=60):
        yield


@pytest.fixture
def procs(runtime: None, patient: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="procs") as procs:
        yield procs


@pytest.fixture
def loud(procs: ProcMesh) -> Any:
    return procs.spawn("loud", Loud)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    logging.root.addHandler(handler)
    yield handler
    handler.go.set()
    logging.root.removeHandler(handler)


def test_records_and_lines_are_there_when_the_result_is(
    loud: Any, kept: Kept, capfd: pytest.CaptureFixture[str]
) -> None:
    first = loud.slice(gpus=0)
    for n in range(20):
        first.log.call_one(f"record {n}").get(timeout=60)
        assert kept.messages[n:] == [f"record {n}"]
        assert first.say.call_one(f"line {n}").get(timeout=60) == f"line {n}"
        assert capfd.readouterr().out == f"[loud gpus=0] line {n}\n"


def test_whatever_wrote_it(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    echo = procs.slice(gpus=1).spawn("echo", Echo)
    echo.call.call_one(say_by_all_means).get(timeout=60)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "[echo] python",
        "[procs gpus=1] child",
        "[procs gpus=1] descriptor",
        "[procs gpus=1] library",
    ]
    assert err == "[echo] complaint\n"


def test_every_kind_of_wait(loud: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen.of(monkeypatch)
    one, other = loud.slice(gpus=0), loud.slice(gpus=1)

    def shown() -> list[str]:
        return sorted(screen.lines())

    assert one.say.call_one("got").then(str.upper).get(timeout=60) == "GOT"
    assert shown() == ["got"]
    assert one.say.call_one("looked at").exception(timeout=60) is None
    assert shown() == ["looked at"]
    gather(one.say.call_one("a"), other.say_async.call_one("b")).get(timeout=60)
    assert shown() == ["a", "b"]
    seen = []
    for n, future in enumerate(one.count.stream(3)):
        assert future.get(timeout=60) == n
        # The generator may be ahead.
        seen += shown()
        assert f"value {n}" in seen
    port, receiver = Channel[str].open()
    other.send.broadcast(port, "through a port")
    assert receiver.recv().get(timeout=60) == "through a port"
    assert shown() == ["through a port"]

    async def awaited() -> None:
        await one.say.call_one("awaited")
        assert shown() == ["awaited"]
        done = one.say_async.call_one("already there")
        until_done(done)
        await done
        assert shown() == ["already there"]
        await gather(one.say.call_one("c"), other.say.call_one("d"))
        assert shown() == ["c", "d"]

    asyncio.run(awaited())


def test_calls_that_survive_restarts_and_tasks_of_a_pool(
    loud: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert loud.slice(gpus=0).lasting.call_one("lasts").get(timeout=60) is None
    assert capfd.readouterr().out == "[loud gpus=0] lasts\n"
    with Pool(loud) as pool:
        for n in range(5):
            assert pool.submit(loud.say, f"task {n}").get(timeout=60) == f"task {n}"
            assert capfd.readouterr().out.endswith(f"] task {n}\n")
    until_idle()


@pytest.mark.parametrize("method", ["map", "map_unordered"])
def test_results_of_many_tasks(loud: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    screen = Screen.of(monkeypatch)
    texts = [f"task {n}" for n in range(40)]
    shown: list[str] = []

    def came(text: str) -> None:
        shown.extend(screen.lines())
        assert text in shown

    async def awaited(pool: Pool[Any]) -> None:
        async for text in getattr(pool, method)(loud.say_async, [f"async {text}" for text in texts]):
            came(text)

    with Pool(loud) as pool:
        for text in getattr(pool, method)(loud.say, texts):
            came(text)
        assert sorted(shown) == sorted(texts)
        shown.clear()
        asyncio.run(awaited(pool))
    assert len(shown) == len(texts)
    until_idle()


def until_idle() -> None:
    """The thread of pools ends a moment after the last task."""
    end = time.monotonic() + 60
    while any(thread.name == "mesh-pool" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_thread_waits_too(loud: Any, capfd: pytest.CaptureFixture[str]) -> None:
    shown = []

    def wait() -> None:
        loud.slice(gpus=0).say.call_one("by a thread").get(timeout=60)
        shown.append(capfd.readouterr().out)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert shown == ["[loud gpus=0] by a thread\n"]


def test_of_a_process_that_dies(loud: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SupervisionError):
        loud.slice(gpus=1).die.call_one("last words").get(timeout=60)
    assert "[loud gpus=1] last words\n" in capfd.readouterr().out


def test_those_who_print_nothing_do_not_wait(loud: Any, kept: Kept) -> None:
    one, other = loud.slice(gpus=0), loud.slice(gpus=1)
    kept.go.clear()
    noisy = one.log.call_one("held up")
    with configured(log_wait=0):
        noisy.get(timeout=60)
    assert kept.messages == []
    # The handler still has the record of the other process.
    for _ in range(10):
        assert other.nothing.call_one().get(timeout=30) is None
    kept.go.set()
    one.log.call_one("after it").get(timeout=60)
    assert kept.messages == ["held up", "after it"]


def test_a_console_that_is_stuck_holds_up_one_result_alone(
    loud: Any, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = loud.slice(gpus=0)
    kept.go.clear()
    with configured(log_wait=0.01):
        one.log.call_one("1").get(timeout=60)
    # One more may wait, if something of before was shown after the first had given up.
    began = time.monotonic()
    for n in range(2, 5):
        one.log.call_one(f"{n}").get(timeout=10)
    assert time.monotonic() - began < 20
    assert kept.messages == []
    kept.go.set()
    one.log.call_one("5").get(timeout=60)
    # Nothing is lost. Results wait again once something has been shown.
    end = time.monotonic() + 60
    while kept.messages != ["1", "2", "3", "4", "5"]:
        assert time.monotonic() < end, kept.messages
        time.sleep(0.001)


def test_a_handler_may_call_actors(loud: Any, procs: ProcMesh, kept: Kept) -> None:
    kept.asked = procs.slice(gpus=1).spawn("asked", Echo)
    loud.slice(gpus=0).log.call_one("handled").get(timeout=60)
    assert kept.messages == ["handled"]


def test_a_time_limit_holds_for_the_output_too(loud: Any, kept: Kept) -> None:
    kept.go.clear()
    future = loud.slice(gpus=0).log.call_one("late")
    until_done(future)
    # A limit of 0 looks, and does not wait.
    future.get(timeout=0)
    assert kept.messages == []
