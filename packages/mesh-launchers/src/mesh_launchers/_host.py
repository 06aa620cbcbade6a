"""A host's program (`_program.py`) as launchers start it and follow it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mesh_core import python_command
from mesh_launchers import _host_facts, _program
from mesh_launchers._contract import HostSpec, Place

LAST_LINES = 12
_AFTER = "from __future__ import annotations\n"
_IMPORT = "from mesh_launchers._host_facts import code, environment\n"
_STOP_S = 10.0
_UNSPOKEN_S = 1.0
_LOOKS, _LOOK_S = 100, 0.01
_TIMES = 6
"""How many messages are sent within the time after which silence is an end."""


def command(python: str, name: str) -> list[str]:
    """Return the arguments that run a host's program; listings of processes show the last ones."""
    return python_command(program(), "mesh-host", name, python=python)


def program() -> str:
    """Return the text of a host's program: one file, as it is sent."""
    facts = Path(_host_facts.__file__).read_text().partition(_AFTER)[2]
    return Path(_program.__file__).read_text().replace(_IMPORT, facts)


def shell(python: str | None, name: str) -> str:
    """Return the same as one line for a shell; without an interpreter, this one if the host has it, and else ``python3``."""
    if python is not None:
        return f"exec {shlex.join(command(python, name))}"
    # By sh, whatever the user's own shell is.
    choose = f'p={shlex.quote(sys.executable)}; [ -x "$p" ] || p=python3; exec "$p" "$@"'
    return f"exec {shlex.join(['sh', '-c', choose, 'sh', *command('python3', name)[1:]])}"


def told(
    place: Place,
    hosts: Sequence[HostSpec],
    *,
    variable: str | None = None,
    logs: Mapping[int, Path] | None = None,
    beat: str | None = None,
    grace: float = 0.0,
    lingers: bool = False,
    **options: Any,
) -> bytes:
    """Return the line that the program reads first.

    Args:
        place: the launcher's place.
        hosts: the hosts that read this line.
        variable: if several programs read this line, the environment variable that says which host each is; otherwise one program has all.
        logs: the log of each host's agent, if it is not the output of the program.
        beat: a file that changes while the launcher is alive, for hosts without a standard input.
        grace: seconds between the SIGTERM that announces the end of a host, and that end; without it, SIGTERM ends it.
        lingers: whether the host outlives the connection that starts it, and can be taken up again (HST-7).
        options: of ``run_worker_loop_forever``.
    """
    files = {
        each.name: base64.b64encode(each.read_bytes()).decode()
        for each in place.credentials.iterdir()
        if each.is_file()
    }
    what = {
        "credentials": files,
        "silence": place.silence,
        "code": dict(place.code) or {"modules": [], "path": []},
        "place": variable,
        "beat": beat,
        "grace": grace,
        "lingers": lingers,
        "hosts": [
            {
                "number": each.number,
                "name": each.name,
                "labels": dict(each.labels),
                **({} if logs is None else {"log": str(logs[each.number])}),
            }
            for each in hosts
        ],
        "options": options,
    }
    return json.dumps(what).encode() + b"\n"


def resumed(door: str, number: int) -> bytes:
    """Return the line by which the program takes up a host again that it has started before, elsewhere."""
    return json.dumps({"resume": door, "number": number}).encode() + b"\n"


class HostProcess:
    """The program of one host, or a command that runs it elsewhere, as a process of this machine."""

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
        """Start it; its messages go to `heard`, and its other output into the log."""
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
            asyncio.create_task(_end_group(self._process.pid)),
        ]

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        parts: dict[int, bytes] = {}
        while line := await process.stdout.readline():
            # Other output of a command is not a message.
            with suppress(ValueError):
                number, _, rest = line.partition(b":")
                if rest[:1] not in (b"+", b"="):
                    continue
                parts[int(number)] = parts.get(int(number), b"") + rest[1:].rstrip(b"\n")
                if rest[:1] == b"=":
                    what = json.loads(parts.pop(int(number)))
                    if not isinstance(what, dict):
                        continue
                    self._has_spoken = True
                    self._heard({"host": int(number), **what})
        self._heard({"ended": await process.wait()})

    async def say(self, line: str) -> None:
        """Send the hosts a message, which is a line."""
        if "\n" in line:
            raise ValueError(f"a message to a host is one line, got {line[:80]!r}")
        if self._process is not None and self._process.stdin is not None:
            with suppress(ConnectionError):
                self._process.stdin.write(f"{line}\n".encode())
                await self._process.stdin.drain()

    async def _be_heard(self, process: asyncio.subprocess.Process) -> None:
        """Say that this end is alive (HST-2)."""
        assert process.stdin is not None
        with suppress(ConnectionError):
            while process.returncode is None:
                await asyncio.sleep(self._silence / _TIMES)
                process.stdin.write(b"\n")
                await process.stdin.drain()

    @property
    def pid(self) -> int | None:
        """Its process, once started."""
        return None if self._process is None else self._process.pid

    async def drop(self) -> None:
        """End the command alone, and not the host behind it."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self.stop()

    async def stop(self, last: str = "") -> None:
        """End it, in order if possible; `last` is said before its input ends."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        if last:
            await self.say(last)
        process.stdin.close()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                if not self._has_spoken:
                    # It is not a host yet, and may never read a message; nor may what it has started.
                    os.killpg(process.pid, signal.SIGTERM)
            try:
                # If nothing of a host exists yet, nothing has to end in order.
                await asyncio.wait_for(process.wait(), _STOP_S if self._has_spoken else _UNSPOKEN_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # Do not wait either for processes that have left the group, and hold its output.
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _STOP_S)
        hears, is_heard, ends = self._tasks
        await ends
        is_heard.cancel()
        # It only takes longer if a stray process holds its output.
        await asyncio.wait([hears, is_heard], timeout=_STOP_S)
        hears.cancel()

    def last_lines(self, lines: int = LAST_LINES) -> str:
        """Return the last lines of its output."""
        try:
            with self.log.open("rb") as file:
                return tail(file, lines)
        except FileNotFoundError:
            return ""


async def _end_group(leader: int) -> None:
    """Wait for a command's end, and end what it has started beside the host: nothing of it outlives the host (HST-8)."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    # By the kernel's word, and not by the end of its output, which a helper may have too.
    with suppress(ProcessLookupError):
        process = os.pidfd_open(leader)
        loop.add_reader(process, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process)
            os.close(process)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
        for _ in range(_LOOKS):
            if not _has_living(leader):
                return
            await asyncio.sleep(_LOOK_S)


def _has_living(group: int) -> bool:
    """Whether a process group has a member that has not ended; one that nobody reaps has."""
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found = each.read_text(errors="replace").rpartition(") ")[2].split()
            # The first thread may have ended, and others go on.
            if int(found[2]) == group and (found[0] not in "ZX" or int(found[17]) > 1):
                return True
    return False


def tail(file: IO[bytes], lines: int) -> str:
    """Return the last lines of a file."""
    end = file.seek(0, os.SEEK_END)
    size = min(end, 256 * lines + 4096)
    file.seek(end - size)
    return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
