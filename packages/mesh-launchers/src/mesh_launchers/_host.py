"""A host's agent as it is started by launchers: a program that wants nothing there but mesh-core.

HST-1: the credentials come on its standard input and go into memory; they are in no argument, no environment and no log.
HST-2: it ends when its standard input does, or is silent for too long, and with it all that runs on the host: nothing outlives whoever has
started it, also where the network between them has gone without a word.
HST-3: whoever of the two processes that a host has is left when the other was killed removes the credentials.
HST-4: what it has to say is a JSON object a line on its standard output, and nothing else is written there.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_LAST_LINES = 12
_STOP_S = 10.0
_TIMES = 6
"""So often something is said in the time after which silence is an end."""


def environment() -> dict[str, Any]:
    """Return which Python this is, and which packages it has. Sent to hosts as source: it wants nothing but this."""
    import sys
    from importlib.metadata import distributions

    packages: dict[str, str] = {}
    for each in distributions():
        # Of two of a name the first is the one that is imported.
        packages.setdefault((each.metadata["Name"] or "").lower().replace("_", "-"), each.version)
    return {"python": sys.version.split()[0], "executable": sys.executable, "packages": packages}


_PROGRAM = r"""
import base64, ctypes, json, os, select, shutil, signal, sys, tempfile
from typing import Any

ENVIRONMENT

def ended(number, frame):
    sys.exit(128 + number)

ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
for each in ENDS:
    signal.signal(each, ended)
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def say(**what):
    out.write(json.dumps(what) + "\n")
    out.flush()

def serve(told):
    for each in ENDS:
        signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    # It ends with whoever cleans up behind it.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != told.pop("starter"):
        return
    from mesh_core import run_worker_loop_forever
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    run_worker_loop_forever(ready=lambda address: say(address=f"tcp://{address}"), **told)

def watch(agent, silence):
    # Whoever has started this says something now and then, and its end is that of the input.
    end = os.pidfd_open(agent)
    while True:
        ready = select.select([0, end], [], [], silence)[0]
        if end in ready:
            break
        if not ready or not os.read(0, 4096):
            os.kill(agent, signal.SIGTERM)
            if not select.select([end], [], [], 8)[0]:
                os.kill(agent, signal.SIGKILL)
            break
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    if status < 0 and ready:
        say(failed=f"its agent was ended by signal {-status} ({signal.Signals(-status).name})")
    return abs(status)

told = json.loads(sys.stdin.buffer.raw.readline())
say(environment=environment())
where = tempfile.mkdtemp(prefix="mesh-host-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
agent = 0
try:
    for name, data in told.pop("credentials").items():
        with open(os.open(os.path.join(where, name), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(base64.b64decode(data))
    silence = told.pop("silence")
    told.update(credentials=where, starter=os.getpid())
    # One that came while Python forks would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    agent = os.fork()
    if not agent:
        serve(told)
        status = 0
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        status = watch(agent, silence)
except ImportError as error:
    say(failed=f"{sys.executable} has no mesh-core ({error}): install it there, or name an interpreter that has it with python=")
    status = 1
except Exception as error:
    say(failed=f"{type(error).__name__}: {error}")
    status = 1
finally:
    shutil.rmtree(where, ignore_errors=True)
sys.exit(status)
"""


def command(python: str, name: str) -> list[str]:
    """Return the arguments that run the program; listings of processes show the last ones."""
    return [python, "-c", _PROGRAM.replace("ENVIRONMENT", inspect.getsource(environment)), "mesh-host", name]


def shell(python: str, name: str) -> str:
    """Return the same as one line for a shell."""
    return f"exec {shlex.join(command(python, name))}"


def told(credentials: Path, silence: float, **what: Any) -> bytes:
    """Return the line that the program reads first: the host's credentials, and what `run_worker_loop_forever` takes."""
    files = {
        each.name: base64.b64encode(each.read_bytes()).decode()
        for each in credentials.iterdir()
        if each.is_file()
    }
    return json.dumps({"credentials": files, "silence": silence, **what}).encode() + b"\n"


class HostProcess:
    """The program of one host, or what has it run elsewhere, as a process of this machine."""

    def __init__(self, heard: Callable[[Mapping[str, Any]], None], log: Path, silence: float) -> None:
        self._heard = heard
        self._silence = silence
        self._has_spoken = False
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, arguments: Sequence[str], line: bytes, env: Mapping[str, str] | None = None
    ) -> None:
        """Start it; what it says goes to `heard`, and what it writes besides into the log."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=None if env is None else dict(env),
                start_new_session=True,
                limit=1 << 24,
            )
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        self._tasks = [
            asyncio.create_task(self._hear(self._process)),
            asyncio.create_task(self._be_heard(self._process)),
        ]

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            with suppress(ValueError):
                what = json.loads(line)
                if isinstance(what, dict):
                    self._has_spoken = True
                    self._heard(what)
        self._heard({"ended": await process.wait()})

    async def _be_heard(self, process: asyncio.subprocess.Process) -> None:
        """Say that this end is there (HST-2)."""
        assert process.stdin is not None
        with suppress(ConnectionError):
            while process.returncode is None:
                await asyncio.sleep(self._silence / _TIMES)
                process.stdin.write(b"\n")
                await process.stdin.drain()

    @property
    def pid(self) -> int | None:
        """Its process, once it was started."""
        return None if self._process is None else self._process.pid

    async def stop(self) -> None:
        """End it, in order if it can."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                if not self._has_spoken:
                    # It is no host yet, and may never look at what it is told; nor may what it has begun.
                    os.killpg(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # Nor is something waited for that has left the group, and has its output.
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _STOP_S)
        hears, is_heard = self._tasks
        is_heard.cancel()
        # Longer only where something strange has its output.
        await asyncio.wait([hears, is_heard], timeout=_STOP_S)
        hears.cancel()

    def last_lines(self, lines: int = _LAST_LINES) -> str:
        """Return the last lines of what it has written."""
        try:
            with self.log.open("rb") as file:
                return tail(file, lines)
        except FileNotFoundError:
            return ""


def tail(file: IO[bytes], lines: int) -> str:
    """Return the last lines of a file."""
    end = file.seek(0, os.SEEK_END)
    size = min(end, 256 * lines + 4096)
    file.seek(end - size)
    return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
