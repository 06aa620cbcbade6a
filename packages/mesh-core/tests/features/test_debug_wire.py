"""The debugger's socket with peers that break the protocol."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core._features.debug import client, places
from mesh_core._features.debug import server as _server
from mesh_core._features.debug.server import Debugger, Server
from mesh_core._features.debug.wire import Wire

STOP = {
    "id": 1,
    "rank": 0,
    "since": 1.0,
    "state": "stopped",
    "attached": False,
    "file": "train.py",
    "line": 3,
    "function": "step",
    "why": "breakpoint",
    "mesh": "trainers",
    "coordinates": {"gpus": 0},
}
JOB = 7


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(client, "_ANSWER_S", 0.3)


@pytest.fixture
def answering() -> Iterator[Callable[[Callable[[socket.socket], object]], None]]:
    """A process with a stopped thread, whose server is played by the test."""
    listener, path = places.listen(JOB)
    threads: list[threading.Thread] = []

    def serve(answer: Callable[[socket.socket], object]) -> None:
        def run() -> None:
            peer, _ = listener.accept()
            with peer:
                answer(peer)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield serve
    for thread in threads:
        thread.join()
    listener.close()
    places.unlink(path)


def described(**changes: Any) -> bytes:
    told = {"job": JOB, "script": "train.py", "pid": 1, "stops": [{**STOP, **changes}]}
    return json.dumps(told).encode() + b"\n"


def test_a_process_that_answers_is_listed(answering: Any) -> None:
    answering(lambda peer: peer.sendall(described()))
    found = client.find(JOB)
    assert [stop.name for stop in found.stops] == ["trainers gpus=0"] and found.silent == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\n",
        b"{}\n",
        b'{"stops": 7}\n',
        b'{"stops": [7]}\n',
        described(coordinates=[1]),
        described(coordinates={"gpus": "x"}),
        described(rank="0"),
        described(since=None),
        described(mesh=7),
        described(line=None),
    ],
)
def test_a_process_that_sends_garbage_is_only_named(answering: Any, answer: bytes) -> None:
    answering(lambda peer: peer.sendall(answer))
    found = client.find(JOB)
    assert found.stops == []
    # A peer that closed without a message has ended.
    assert len(found.silent) == (1 if answer else 0)


def test_slow_answers_do_not_extend_the_wait_with_each_byte(answering: Any) -> None:
    over = threading.Event()

    def drip(peer: socket.socket) -> None:
        while not over.wait(0.01):
            try:
                peer.sendall(b" ")
            except OSError:
                break

    answering(drip)
    found = client.find(JOB)
    over.set()
    assert found.stops == [] and len(found.silent) == 1


def test_a_peer_that_does_not_read_is_waited_for_once() -> None:
    here, there = map(Wire, socket.socketpair())
    try:
        here.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 10_000))
        assert not here.tell(out="x" * (1 << 22))
        # The limit is long now, and must not be waited for.
        here.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 3600, 0))
        assert not here.tell(out="more")
        # The server sees the end of the connection.
        assert here.take() is None
    finally:
        here.close()
        there.close()


class _Stopped(Debugger):
    """A debugger without stopped threads, which fails where a test wants it to."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def about(self) -> Any:
        raise RuntimeError("made up")

    def tidy_up(self) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """Run a server and yield its path."""
    listener, path = places.listen(JOB)
    server = Server(_Stopped(), listener, path)
    server.start()
    yield path
    server.end()
    server.join()


def test_a_server_that_fails_one_request_answers_the_next(server: str) -> None:
    for _ in range(2):
        wire = Wire(places.connect(server))
        wire.tell(do="describe")
        assert wire.hear() == [{"error": "mesh failed to answer: RuntimeError('made up')"}]
        assert wire.hear() is None
        wire.close()


def test_a_server_without_free_descriptors_waits_for_them(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = threading.Event()
    monkeypatch.setattr(_server.time, "sleep", lambda _: waited.set())
    accept = socket.socket.accept

    def full(listener: socket.socket) -> Any:
        if not waited.is_set():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", full)
    wire = Wire(places.connect(server))
    wire.tell(do="nonsense")
    assert wire.hear() == [{"error": "not attached"}]
    assert waited.is_set()
    wire.close()
