"""Where a host is taken up again after a lost connection: who may do so, and who is taken for the host (HST-7)."""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from launched import LIMIT
from test_trusted_folders import STRANGER, as_stranger, needs_root

from mesh_core import Isolation, Sandboxes
from mesh_launchers import _program

KNOCK = """
import socket
with socket.socket(socket.AF_UNIX) as end:
    end.connect("door")
    try:
        end.sendall(b"end 0\\n")
        said = end.recv(1000)
    except ConnectionError:
        said = b""
open("said", "wb").write(said)
"""


def listening(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / _program.DOOR))
    (folder / _program.DOOR).chmod(0o777)
    listener.listen()
    return listener


def test_code_in_a_sandbox_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the host's folder is one that it sees."""
    ours, theirs = socket.socketpair()
    kept = [os.dup(each) for each in (1, 2)]
    with Sandboxes(network=None, ready=1) as boxes, boxes.take(LIMIT) as box, ours:
        if Isolation.PROCESSES not in box.isolation:
            pytest.skip("this system cannot isolate processes")
        door = _program.Door(theirs)
        try:
            door.open(str(box.folder))
            knocking = threading.Thread(target=box.call, args=(exec, KNOCK, {}), kwargs={"timeout": LIMIT})
            knocking.start()
            assert door.read(_ready(door)) is None
            knocking.join()
            ours.sendall(b"hello\n")
            assert door.read(_ready(door)) == b"hello\n"
        finally:
            for number, fd in zip((1, 2), kept, strict=True):
                os.dup2(fd, number)
                os.close(fd)
            door.leave().close()
        assert (box.folder / "said").read_bytes() == b""
    written = capsys.readouterr().err
    assert "refused a connection to this host" in written
    assert "such as a sandbox's" in written


def _ready(door: _program.Door) -> list[int]:
    return select.select(door.inputs, [], [], LIMIT)[0]


@needs_root
def test_another_user_is_not_taken_for_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Anybody can make a folder of the same name in a shared place, once that of the host has been removed."""
    with tempfile.TemporaryDirectory(prefix="mesh-host-removed-", dir="/dev/shm") as folder:
        os.chown(folder, STRANGER, STRANGER)
        with as_stranger():
            listener = listening(Path(folder))
        with listener:
            assert _program.resume(f"{folder}/{_program.DOOR}", 3) == 1
    said = capsys.readouterr().out
    assert json.loads(said.partition("=")[2])["failed"].endswith(f"belongs to uid {STRANGER}, not 0")
