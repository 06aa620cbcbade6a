"""Runs one container of the tests' kubelet: a command with processes, mounts and a name of its own, on the machine's network.

    python container.py NAME MOUNTS COMMAND [ARGUMENT ...]

MOUNTS is JSON: what to find where. The command is the first process of its namespace, as in a container, and dies with this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import namespaces

OWN = namespaces.NEWNS | namespaces.NEWPID | namespaces.NEWUTS | namespaces.NEWIPC


def main() -> int:
    """Run it; the exit status, as a shell has it."""
    name, mounts, *command = sys.argv[1:]
    namespaces.die_with_parent()
    namespaces.unshare(OWN)
    namespaces.keep_mounts_to_ourselves()
    child = os.fork()
    if child == 0:
        begin(name, json.loads(mounts), command)
    signal.signal(signal.SIGTERM, lambda number, frame: kill(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill(child: int, number: int) -> None:
    """Hand a signal on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def begin(name: str, mounts: dict[str, str], command: list[str]) -> None:
    """Become the command."""
    try:
        namespaces.die_with_parent()
        socket.sethostname(name)
        namespaces.mount("proc", "/proc", "proc")
        for folder in ("/run", "/dev/shm"):
            namespaces.mount("tmpfs", folder, "tmpfs")
        for where, what in mounts.items():
            if Path(what).is_dir():
                Path(where).mkdir(parents=True, exist_ok=True)
            namespaces.bind(what, where)
        os.chdir("/")
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
    os._exit(127)


if __name__ == "__main__":
    sys.exit(main())
