"""Debugging with very large data: printed values, exceptions, lines of source."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh_core._features.debug.wire import Garbled, Wire

HUGE = 3_000_000

SCRIPT = f"""
from mesh_core import Actor, endpoint, this_host

class One(Actor):
    @endpoint
    def go(self):
        raise ValueError("y" * {HUGE})

with this_host().spawn_procs() as procs:
    one = procs.spawn("one", One)
    print(type(one.go.call_one().exception(timeout=50)).__name__)
"""


def mesh_debug(run: Any, *arguments: str) -> str:
    command = [sys.executable, "-m", "mesh_core.cli", "debug", "--job", str(run.process.pid), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False).stdout


@pytest.mark.slow
def test_a_huge_error_and_a_huge_value_are_shown(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("MESH_POST_MORTEM", "1")
    run = script(SCRIPT)
    line = ""
    while " stopped at " not in line:
        line = run.process.stderr.readline()
        assert line, "it has ended"
    assert len(line) < 5000
    listed = mesh_debug(run, "list", "--json")
    assert "yyyy..." in listed and len(listed) < 10_000
    assert f"  '{'x' * HUGE}'\n" in mesh_debug(run, "cast", "all", f"p 'x' * {HUGE}")
    mesh_debug(run, "continue")
    out, _ = run.finish()
    assert out == "ActorError[ValueError]\n"


def test_a_long_line_arrives_whole_and_an_endless_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_core._features.debug.wire._LINE_LIMIT", 100_000)
    here, there = socket.socketpair()
    wire = Wire(here)
    there.sendall(b'{"a": "' + b"b" * 50_000)
    assert wire.take() == []
    there.sendall(b'"}\n{"c": 1}\n{"d"')
    assert wire.take() == [{"a": "b" * 50_000}, {"c": 1}]
    there.sendall(b": 2}\n")
    assert wire.take() == [{"d": 2}]
    there.sendall(b"e" * 60_000)
    assert wire.take() == []
    there.sendall(b"e" * 60_000)
    with pytest.raises(Garbled, match="too long"):
        wire.take()
    wire.close()
    there.close()


def test_a_line_may_be_as_long_as_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_core._features.debug.wire._LINE_LIMIT", 100)
    here, there = socket.socketpair()
    wire = Wire(here)
    there.sendall(b"e" * 99)
    assert wire.take() == []
    there.sendall(b"e")
    assert wire.take() == []
    there.sendall(b"e")
    with pytest.raises(Garbled, match="too long"):
        wire.take()
    wire.close()
    there.close()
