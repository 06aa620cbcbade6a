"""What runs on a host. It is sent there as text, and wants nothing there but mesh-core.

HST-1: the credentials come on its standard input, or in a private file, and go into memory; they are in no argument, no environment and no log.
HST-2: it ends when its standard input does, or is silent for too long, and with it all that runs on the host: nothing outlives whoever has
started it, also where the network between them has gone without a word.
HST-3: whoever of the two processes that a host has is left when the other was killed removes the credentials.
HST-4: what it has to say is JSON on its standard output, in short lines that begin with the host's number, and nothing else is written there.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SHORT = 800
"""Where the lines of many hosts come together, longer ones are torn apart."""
GRACE_S = 8.0
DEATH = 1
"""The number of prctl for a signal that comes at the parent's death."""


def environment() -> dict[str, Any]:
    """Return which Python this is, and which packages it has."""
    from importlib.metadata import distributions

    packages: dict[str, str] = {}
    for each in distributions():
        # Of two of a name the first is the one that is imported.
        packages.setdefault((each.metadata["Name"] or "").lower().replace("_", "-"), each.version)
    return {"python": sys.version.split()[0], "executable": sys.executable, "packages": packages}


class Host:
    """The process that starts the agent, and cleans up behind it."""

    def __init__(self, told: dict[str, Any], out: TextIO) -> None:
        # Where many are started by one command, each finds its place by a variable that this has set.
        place = int(os.environ[told["place"]]) if told["place"] else 0
        mine = told["hosts"][place]
        self._out = out
        self._number: int = mine["number"]
        self._options = {"name": mine["name"], "labels": mine["labels"], **told["options"]}
        self._files: dict[str, str] = told["credentials"]
        self._silence: float = told["silence"]
        self._heard = b""

    def say(self, **what: Any) -> None:
        """Tell whoever has started this."""
        text = json.dumps(what)
        pieces = [text[at : at + SHORT] for at in range(0, len(text), SHORT)]
        lines = [f"{self._number}:+{piece}\n" for piece in pieces[:-1]]
        self._out.write("".join([*lines, f"{self._number}:={pieces[-1]}\n"]))
        self._out.flush()

    def run(self) -> int:
        """Have the agent run until it ends, or is to end."""
        self.say(environment=environment(), node=socket.gethostname())
        # In memory, where there is such a folder.
        folders = [os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]
        there = next((each for each in folders if each and os.access(each, os.W_OK)), None)
        where = tempfile.mkdtemp(prefix="mesh-host-", dir=there)
        try:
            for name, data in self._files.items():
                path = os.open(Path(where) / name, os.O_WRONLY | os.O_CREAT, 0o600)
                with os.fdopen(path, "wb") as file:
                    file.write(base64.b64decode(data))
            starter = os.getpid()
            # One that came while Python forks would be lost.
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
            agent = os.fork()
            if not agent:
                self._serve(where, starter)
                return 0
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
            return self._watch(agent)
        except ImportError as error:
            self.say(
                failed=f"{sys.executable} has no mesh-core ({error}): install it there, or name an interpreter that has it "
                "with python="
            )
        except Exception as error:  # noqa: BLE001 - told to whoever waits for this host
            self.say(failed=f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(where, ignore_errors=True)
        return 1

    def _serve(self, credentials: str, starter: int) -> None:
        """Be the agent."""
        for each in ENDS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        # It ends with whoever cleans up behind it.
        ctypes.CDLL(None).prctl(DEATH, signal.SIGTERM)
        if os.getppid() != starter:
            return
        from mesh_core import run_worker_loop_forever

        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run_worker_loop_forever(
            credentials=credentials,
            ready=lambda address: self.say(address=f"tcp://{address}"),
            **self._options,
        )

    def _watch(self, agent: int) -> int:
        """Wait for the agent's end, or end it."""
        end = os.pidfd_open(agent)
        asked = False
        while end not in (ready := select.select([0, end], [], [], self._silence)[0]):
            if not ready or self._is_over():
                asked = True
                os.kill(agent, signal.SIGTERM)
                if not select.select([end], [], [], GRACE_S)[0]:
                    os.kill(agent, signal.SIGKILL)
                break
        status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        if status < 0 and not asked:
            self.say(failed=f"its agent was ended by signal {-status} ({signal.Signals(-status).name})")
        self.say(over=status)
        return abs(status)

    def _is_over(self) -> bool:
        """Whether what was said is that this host is to end. It says something now and then, and its end is that of the input."""
        said = os.read(0, 4096)
        *lines, self._heard = (self._heard + said).split(b"\n")
        numbers = [each for line in lines if line.startswith(b"end ") for each in line.split()[1:]]
        return not said or str(self._number).encode() in numbers


def ended(number: int, _frame: object) -> None:
    """End in order."""
    sys.exit(128 + number)


def main() -> int:
    """Run one host; a second argument names a file with what it is told."""
    for each in ENDS:
        signal.signal(each, ended)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = sys.argv[1:]
    if len(arguments) > 2:
        told = json.loads(Path(arguments[2]).read_bytes())
    else:
        # Without a buffer: what comes later is for the one that watches.
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                return 1
            line += byte
        told = json.loads(line)
    return Host(told, out).run()


if __name__ == "__main__":
    sys.exit(main())
