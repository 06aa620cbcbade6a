"""Whatever programs send to a job's inspection socket and to a debugger, in whatever order, the job goes on."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import Script

from mesh_core import inspect
from mesh_core._features.debug import places
from mesh_core._features.debug.wire import Wire

pytestmark = pytest.mark.slow

SOON = 30.0
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**80,
    1e300,
    float("nan"),
    "",
    "\ud800\0",
    "x" * 100_000,
    [],
    [[]],
    [7] * 1000,
    {},
    {"do": {}},
)
GARBLED = (
    b"\n",
    b"null\n",
    b"[]\n",
    b'"describe"\n',
    b"{\n",
    b"\xff\xfe\n",
    b"[" * 200_000 + b"\n",
    b'{"do": ' + b"9" * 10_000 + b"}\n",
    b"x" * (9 << 20),
)
"""What is no request at all: it ends its connection, and that alone."""
LOOKED_INTO = """
from mesh_core import this_host
if __name__ == "__main__":
    with this_host().spawn_procs(name="workers") as procs:
        procs.initialized.get(60)
        print("up")
        print(input())
"""
STOPS = """
from mesh_core import Actor, endpoint, this_host
class Trainer(Actor):
    @endpoint
    def step(self, n):
        breakpoint()
        return n + 1
if __name__ == "__main__":
    with this_host().spawn_procs() as procs:
        step = procs.spawn("trainer", Trainer).step.call_one(5)
        print("called")
        print(step.get(60))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


def garbage(words: tuple[str, ...], keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield requests that make no sense."""
    for do in (*words, "", "__class__", *STRANGE):
        for each in STRANGE:
            for some in (*([key] for key in keys), keys):
                yield {"do": do, **dict.fromkeys(some, each)}


def is_dropped(connect: Callable[[], socket.socket], sent: bytes) -> bool:
    """Send what is no request, and see that the connection is ended, with an error."""
    wire = Wire(connect())
    try:
        wire.peer.sendall(sent)
        told = wire.hear(SOON)
        return told is None or ("error" in told[0] and wire.hear(SOON) is None)
    except (ConnectionResetError, BrokenPipeError):
        return True
    finally:
        wire.close()


def test_garbage_at_the_inspection_socket(script: Callable[..., Script]) -> None:
    """INS-1."""
    run = script(LOOKED_INTO, fresh=True)  # found by the variables that it was started with
    assert run.line() == "up"
    job = run.process.pid

    def connect() -> socket.socket:
        ((_, _, peer),) = places.find_inspected(job)
        assert peer is not None
        return peer

    for sent in GARBLED:
        assert is_dropped(connect, sent), sent[:50]
    wire = Wire(connect())
    # Those that are followed answer once and more.
    for question in garbage(("describe", "snapshot", "waits", "stacks"), ("timeout", "mesh", "pss")):
        if question.get("timeout") is True:
            continue
        assert wire.tell(**question)
        told = wire.hear(SOON)
        assert told is not None and len(told) == 1 and ("ok" in told[0]) != ("error" in told[0]), question
    wire.close()
    for do in ("events", "logs"):
        for each in STRANGE:
            wire = Wire(connect())
            assert wire.tell(do=do, past=each, timeout=each)
            told = wire.hear(SOON)
            assert told is not None and "ok" in told[0]
            wire.close()
    assert [each.name for each in inspect.connect(job).snapshot().procs] == [
        "controller",
        "workers[0]",
    ]
    run.say("over")
    assert run.line() == "over"
    assert run.finish() == ("", "")


def described(wire: Wire) -> dict[str, Any]:
    """Return what is said of the only stop, and pass over other answers."""
    assert wire.tell(do="describe")
    while (told := wire.hear(SOON)) is not None:
        if "stops" in told[-1]:
            (stop,) = told[-1]["stops"]
            assert stop["state"] == "stopped"
            return dict(stop)
    raise AssertionError("the connection was ended")


def test_garbage_at_a_debugger(script: Callable[..., Script]) -> None:
    """The thread stays stopped, and whoever comes next can resume it."""
    run = script(STOPS)
    assert run.line() == "called"
    assert run.process.stderr is not None
    assert re.search(" stopped at ", run.process.stderr.readline())

    def connect() -> socket.socket:
        ((_, peer),) = places.find(run.process.pid)
        assert peer is not None
        return peer

    for sent in GARBLED:
        assert is_dropped(connect, sent), sent[:50]
    requests = [
        each
        for each in garbage(("attach", "answer", "interrupt"), ("stop", "line", "quiet"))
        # Its number would be right.
        if each["do"] != "attach" or each.get("stop") is not True
    ]
    wire = Wire(connect())
    for request in requests:
        # Unattached, nothing of it reaches the thread.
        assert wire.tell(**request)
        assert described(wire)["attached"] is False
    wire.close()
    # Attached, all but the answers do nothing either.
    wire = Wire(connect())
    stop = described(wire)["id"]
    assert wire.tell(do="attach", stop=stop, quiet=[])
    for request in requests:
        if request["do"] not in ("answer", "interrupt"):
            assert wire.tell(**request)
            assert described(wire)["attached"] is True
    # Gone without a word.
    wire.close()
    wire = Wire(connect())
    while described(wire)["attached"]:
        pass
    assert wire.tell(do="attach", stop=stop)
    assert wire.tell(do="answer", line="c")
    assert run.line() == "6"
    wire.close()
    assert run.finish()[0] == ""
