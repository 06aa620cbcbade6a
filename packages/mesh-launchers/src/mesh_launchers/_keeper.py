"""The process that keeps a job: it has the launcher, and ends the hosts when nobody has them any more.

KPR-1: hosts end with the script that has them, or, where they are kept, when none has come for them in time and nobody visits them (VST-1); and
with this process in any case.
KPR-2: at most one script has a job's hosts.
KPR-3: when it has ended, its folder is gone, and so is all that its launcher has made.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_core import Credentials
from mesh_core.plugins import PluginManager
from mesh_launchers._authority import Use
from mesh_launchers._comparing import compare
from mesh_launchers._contract import (
    LAUNCHERS,
    HostSpec,
    Launcher,
    LauncherPlugin,
    Phase,
    Place,
    Report,
    options_of,
)
from mesh_launchers._door import peer_of
from mesh_launchers._errors import JobExists, LaunchError
from mesh_launchers._folder import JobFolder
from mesh_launchers._state import HostState, JobState

_LINE = 1 << 24
_SILENCE_S = 600.0


class Keeper:
    """Keeps one job."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        job = folder.read()
        self._launcher_name: str = job["launcher"]
        self._keep: float | None = job["keep"]
        self._use = Use(Path(job["credentials"]))
        self._given: dict[str, dict[str, Any]] = {
            name: mesh["options"] for name, mesh in job["meshes"].items()
        }
        self._dial: str | None = job["dial"]
        self._first: dict[str, list[str | None]] = {
            name: mesh["targets"] for name, mesh in job["meshes"].items()
        }
        self._environment: Mapping[str, Any] = job["environment"]
        self._code = {"modules": list(self._environment["code"]), "path": job["path"]}
        self._hosts: dict[int, HostState] = {}
        self._clients: set[_Client] = set()
        self._holder: _Client | None = None
        self._offers: _Client | None = None
        """Who has the job for others, and takes it back from them (``mesh run``)."""
        self._left_at: float | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_late = False
        """Whether a kept job is over, but for those who visit it."""
        self._over = asyncio.Event()
        self._told = False
        self._ending: list[asyncio.Future[None]] = []
        """Hosts that are refused, on their way out."""
        self._launcher: Launcher
        self._plugin: LauncherPlugin

    async def run(self, first: socket.socket) -> None:
        """Keep it until it is stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        door = self._folder.listen()
        server = await asyncio.start_unix_server(self._accept, sock=door, limit=_LINE)
        reader, writer = await asyncio.open_unix_connection(sock=first, limit=_LINE)
        client = asyncio.create_task(self._accept(reader, writer, is_first=True))
        try:
            await self._begin()
            await self._over.wait()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for hosts
            if not isinstance(error, LaunchError):
                traceback.print_exc()
            self._fail(str(error) or type(error).__name__)
            await self._over.wait()
        finally:
            server.close()
            await self._end()
            for each in list(self._clients):
                await each.close()
            client.cancel()
            with suppress(asyncio.CancelledError):
                await client

    async def _begin(self) -> None:
        plugin = PluginManager().get(LAUNCHERS, self._launcher_name)
        assert isinstance(plugin, LauncherPlugin)
        self._plugin = plugin
        folder = self._folder.path / "launcher"
        folder.mkdir(mode=0o700)
        # Kept hosts are to be there still when a machine that slept has woken.
        silence = max(_SILENCE_S, self._keep or 0.0)
        place = Place(
            self._folder.name,
            folder,
            Credentials.load(self._use.path).host_path,
            silence,
            self._report,
            self._code,
        )
        self._launcher = plugin.create(place)
        # All are known before any is started: who has the job hears of all of them at once.
        meshes = {mesh: self._known(mesh, targets) for mesh, targets in self._first.items()}
        for mesh, specs in meshes.items():
            await self._start(mesh, specs)

    def _known(self, mesh: str, targets: list[str | None]) -> list[HostSpec]:
        """Have hosts of a mesh that are to be started."""
        specs = []
        for target in targets:
            number = len(self._hosts)
            name = target or f"{self._folder.name}-{number}"
            specs.append(HostSpec(number, name, target, labels={"mesh": mesh}))
            self._hosts[number] = HostState(number, name, mesh, Phase.STARTING)
        self._changed()
        return specs

    async def _start(self, mesh: str, specs: list[HostSpec]) -> list[int]:
        """Start them; returns their numbers."""
        try:
            await self._launcher.start(options_of(self._plugin, self._given[mesh]), specs)
        except Exception as error:
            for each in specs:
                self._report(Report(each.number, Phase.FAILED, why=str(error)))
            if not isinstance(error, LaunchError):
                raise
        return [each.number for each in specs]

    def _report(self, report: Report) -> None:
        """A launcher's word of a host."""
        before = self._hosts[report.number]
        if before.phase in (Phase.ENDED, Phase.FAILED) and report.phase is not Phase.ENDED:
            # What has ended stays so, whatever is on its way still.
            return
        phase, why, differs = report.phase, report.why, before.differs
        if report.environment is not None:
            refused, differs = compare(report.environment, self._environment)
            if refused and phase is Phase.RUNNING:
                phase, why = Phase.FAILED, refused
                # It has come, and is of no use.
                self._ending.append(asyncio.ensure_future(self._launcher.stop([report.number])))
        self._hosts[report.number] = HostState(
            before.number,
            before.name,
            before.mesh,
            phase,
            why,
            report.address if phase is Phase.RUNNING else None,
            differs,
        )
        self._changed()

    def _fail(self, why: str) -> None:
        if not self._hosts:
            number = 0
            for mesh, targets in self._first.items():
                for target in targets:
                    self._hosts[number] = HostState(number, target or f"host {number}", mesh, Phase.STARTING)
                    number += 1
        for each in list(self._hosts):
            self._report(Report(each, Phase.FAILED, why=why))

    def _changed(self) -> None:
        """Tell those who watch, once for all that happens in a turn of the loop."""
        if not self._told:
            self._told = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._told = False
        state = {"state": self.state().as_dict()}
        for each in self._clients:
            if each.watches:
                each.say(state)

    def state(self) -> JobState:
        """Return what is known."""
        left = None
        if self._left_at is not None and self._keep is not None:
            left = max(0.0, self._keep - (time.monotonic() - self._left_at))
        used_by = None if self._holder is None else self._holder.pid
        hosts = tuple(self._hosts.values())
        return JobState(self._folder.name, self._launcher_name, hosts, used_by, self._keep, left, self._dial)

    # Those who ask.

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_first: bool = False
    ) -> None:
        pid, uid = peer_of(writer.get_extra_info("socket"))
        if uid not in {os.getuid(), 0}:
            writer.close()
            return
        # Who has launched the job may end before it has said that it has the hosts.
        client = _Client(writer, pid, counts=is_first)
        self._clients.add(client)
        try:
            while line := await reader.readline():
                question = json.loads(line)
                try:
                    answer = {"is": await self._do(client, question)}
                except (LaunchError, ValueError, TypeError) as error:
                    answer = {"error": type(error).__name__, "why": str(error)}
                client.say({"to": question["number"], **answer})
        except (ConnectionError, ValueError, KeyError, TypeError, AttributeError):
            pass  # it has ended, or is none of ours
        finally:
            self._clients.discard(client)
            await client.close()
            if self._offers is client:
                self._offers = None
            if self._holder is client:
                self._holder = None
            if client.counts and self._holder is None and self._offers is None:
                self._leave()
            elif self._is_late and client.visits:
                self._expire()

    async def _do(self, client: _Client, question: dict[str, Any]) -> Any:
        match question:
            case {"do": "watch" | "state" | "visit" as do}:
                client.watches = client.watches or do != "state"
                client.visits = client.visits or do == "visit"
                return self.state().as_dict()
            case {"do": "hold"}:
                return self._hold(client)
            case {"do": "offer"}:
                self._offers, client.counts, client.watches = client, True, True
                client.watch_process()
                return self.state().as_dict()
            case {"do": "start" | "end"} if self._holder is not None and self._holder is not client:
                raise JobExists(
                    f"the hosts of job {self._folder.name!r} are used by process {self._holder.pid}, which alone can have more of them or fewer: "
                    "use job.scale() there"
                )
            case {"do": "start", "mesh": str(mesh), "targets": list(targets)}:
                if mesh not in self._given:
                    raise LaunchError(
                        f"job {self._folder.name!r} has no mesh {mesh!r}; it has {', '.join(self._given)}"
                    )
                return await self._start(mesh, self._known(mesh, targets))
            case {"do": "end", "hosts": list(numbers)}:
                await self._launcher.stop(numbers)
                for each in numbers:
                    self._report(Report(each, Phase.ENDED))
                return None
            case {"do": "log", "host": int(number), "lines": int(lines)}:
                return await self._launcher.log(number, lines)
            case {"do": "stop"}:
                self._over.set()
                return None
        raise LaunchError(f"job {self._folder.name!r} cannot do {question.get('do')!r}")

    def _hold(self, client: _Client) -> dict[str, Any]:
        if self._holder is not None and self._holder is not client:
            raise JobExists(
                f"the hosts of job {self._folder.name!r} are used by process {self._holder.pid}: a job has one script at a time"
            )
        self._holder, self._left_at, client.counts = client, None, True
        client.watch_process()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry, self._is_late = None, False
        client.watches = True
        self._changed()
        return self.state().as_dict()

    def _leave(self) -> None:
        """The script has ended, or has let go (KPR-1)."""
        if self._keep is None:
            self._over.set()
            return
        self._left_at = time.monotonic()
        self._expiry = asyncio.get_running_loop().call_later(self._keep, self._expire)
        self._changed()

    def _expire(self) -> None:
        """End the job, as nobody has come for it in time; not before those have gone who visit it."""
        self._is_late = True
        if not any(each.visits for each in self._clients):
            self._over.set()

    async def _end(self) -> None:
        """End all hosts (KPR-3)."""
        if hasattr(self, "_launcher"):
            try:
                await self._launcher.close()
            except Exception:  # noqa: BLE001 - there is nobody to tell, and the rest has to be ended
                traceback.print_exc()
        self._folder.remove()
        self._use.end()


class _Client:
    """Somebody who asks."""

    def __init__(self, writer: asyncio.StreamWriter, pid: int, *, counts: bool) -> None:
        self._writer = writer
        self.pid = pid
        self.watches = False
        self.visits = False
        """Whether it runs something on the hosts, beside the script that has them."""
        self.counts = counts
        """Whether it has, or has had, the hosts."""
        self._process: int | None = None
        """A descriptor of the process, once it has the hosts."""

    def say(self, what: dict[str, Any]) -> None:
        """Tell it something; one that does not read is told nothing more."""
        if self._writer.transport.get_write_buffer_size() > _LINE:
            self._writer.transport.abort()
        else:
            self._writer.write(json.dumps(what).encode() + b"\n")

    def watch_process(self) -> None:
        """Take it for gone when its process is, though a child of that may have the connection still."""
        self._forget_process()
        with suppress(OSError):
            self._process = os.pidfd_open(self.pid)
            asyncio.get_running_loop().add_reader(self._process, self._ended)

    def _ended(self) -> None:
        self._forget_process()
        self._writer.transport.abort()

    def _forget_process(self) -> None:
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process)
            os.close(self._process)
            self._process = None

    async def close(self) -> None:
        self._forget_process()
        with suppress(ConnectionError):
            if not self._writer.is_closing():
                await self._writer.drain()
            self._writer.close()


def main(path: str, door: int) -> None:
    """Keep the job of a folder, whose lock this process has got; `door` is its first client's socket."""
    folder = JobFolder(Path(path))
    asyncio.run(Keeper(folder).run(socket.socket(fileno=door)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
