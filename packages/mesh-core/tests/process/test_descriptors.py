"""What programs that actors start inherit from their processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from mesh_core import Actor, endpoint, this_host
from mesh_core._system.descriptors import receive_descriptors

CODE = """
import os
for fd in range(3, 1024):
    try:
        print(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass
"""


class Starter(Actor):
    @endpoint
    def inherited(self) -> list[str]:
        words = [sys.executable, "-S", "-c", CODE]
        return subprocess.run(
            words, close_fds=False, capture_output=True, text=True, check=True
        ).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_no_program_inherits_the_connection_of_its_actor(
    start: Literal["fork", "exec"], runtime: None
) -> None:
    """With it, a program could send what its actor's process may, and would keep it open after the process has ended."""
    with this_host().spawn_procs({"gpus": 2}, start=start) as procs:
        actors: Any = procs.spawn("starters", Starter)
        for found in actors.inherited.call().get(timeout=50).values():
            assert not [each for each in found if each.startswith(("socket:", "/memfd:", "anon_inode:"))]


def test_received_descriptors_are_not_inherited() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Path(os.devnull).open("rb") as null:
        socket.send_fds(ours, [b"two"], [null.fileno(), null.fileno()])
        ours.send(b"none")
        data, fds = receive_descriptors(theirs, 16, 4)
        assert (data, len(fds), [os.get_inheritable(fd) for fd in fds]) == (b"two", 2, [False, False])
        for fd in fds:
            os.close(fd)
        assert receive_descriptors(theirs, 16, 4) == (b"none", [])
