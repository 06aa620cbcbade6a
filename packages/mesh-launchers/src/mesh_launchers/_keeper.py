"""The process that keeps a job: it runs the launcher, and ends the hosts when they are no longer in use.

KPR-1: hosts end with the script that has them or, if they are kept, when no script has attached them in time and nobody visits them (VST-1); and
always with this process.
KPR-2: at most one script has a job's hosts.
KPR-3: when it has ended, its folder is gone, and so is everything that its launcher has made.
KPR-4: no request ends a job but the one to stop it. Whatever else a client asks, and however, it gets an answer or an error, and the job goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_core import Credentials
from mesh_core.extensions import peer_of, printable, require_same_namespaces
from mesh_core.plugins import PluginManager
from mesh_launchers._authority import Use
from mesh_launchers._comparing import compare
from mesh_launchers._contract import (
    LAUNCHERS,
    DialingLauncher,
    HostSpec,
    Launcher,
    LauncherPlugin,
    Phase,
    Place,
    RenewingLauncher,
    Report,
    options_of,
)
from mesh_launchers._dialing import check_dial
from mesh_launchers._errors import JobExists, LaunchError
from mesh_launchers._folder import LINK, JobFolder
from mesh_launchers._kept import Kept
from mesh_launchers._records import audit, cut
from mesh_launchers._renewal import Renewal
from mesh_launchers._state import HostState, JobState

_LINE = 1 << 24
_SHOWN = 1 << 22
_SILENCE_S = 600.0
_LONG = ("attached", "dial", "flush", "shown")
_OWN_REASON_S = 0.5
"""How long the mesh's news of a host's death wait for the launcher's, which says more about the reason."""
_GIVE_UP_S = 60.0
"""How long a launcher may look for the reason of a death, or for a host that the mesh has given up, until it is to end it."""
_TOLD = 200
"""How much of a strange request an error repeats."""


class Keeper:
    """Keeps one job."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        job = folder.read()
        self._launcher_name: str = job["launcher"]
        self._keep: float | None = job["keep"]
        self._use = Use(Path(job["credentials"]))
        self._renewal = Renewal(self._use.path, job["lifetime"] if self._use.is_ours else None)
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
        """The client that has the job on behalf of others, and takes it back from them (``mesh run``)."""
        self._left_at: float | None = None
        self._kept: Kept | None = None
        """Keeps processes and actors, if they outlive the script."""
        self._settings: dict[str, Any] = job["settings"]
        self._links: socket.socket | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._is_late = False
        """Whether a kept job is over except for its visitors."""
        self._over = asyncio.Event()
        self._is_attached = asyncio.Event()
        self._told = False
        self._ending: list[asyncio.Future[None]] = []
        """Hosts that cannot be used, and are being ended."""
        self._given_up: set[int] = set()
        """Hosts that have failed for another reason than the launcher's."""
        self._launcher: Launcher
        self._explains = False
        self._uncut: set[Path] = set()
        """Logs that could not be cut the last time."""
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
            if self._keep is not None:
                self._links = self._folder.listen(LINK)
                self._links.setblocking(False)
                credentials = str(self._use.path)
                self._kept = Kept(
                    self._folder.name,
                    credentials,
                    self._show,
                    hold=self._keep,
                    dial=self._dial,
                    settings=self._settings,
                )
            await self._begin()
            if self._kept is not None:
                self._kept.follow_deaths(self._has_died)
            await self._stay()
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

    async def _stay(self) -> None:
        """Wait for the end of the job, and keep its certificates valid until then (CRT-1)."""
        while not self._over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._renewal.pause)
            await asyncio.to_thread(self._cut_logs)
            before = self._renewal.state
            if order := await asyncio.to_thread(self._renewal.look):
                self._renewal.reached(await self._pass_on(order))
            if self._renewal.state != before:
                self._changed()

    def _cut_logs(self) -> None:
        """Keep logs of a long job from filling the disk (AUD-1)."""
        for each in self._folder.path.rglob("*.log"):
            try:
                cut(each)
                self._uncut.discard(each)
            except FileNotFoundError:
                pass  # it has been removed
            except OSError as error:
                if each not in self._uncut:
                    self._uncut.add(each)
                    sys.stderr.write(f"the log {each.name} is too long and cannot be cut: {error}\n")

    def _audit(self, client: _Client, did: str) -> None:
        try:
            audit(self._folder.name, client.pid, client.uid, did)
        except (OSError, LaunchError) as error:
            sys.stderr.write(f"the audit log cannot be written: {error}\n")

    async def _pass_on(self, order: str) -> str:
        """Give the hosts new certificates; return why they do not have them, if so."""
        if not isinstance(self._launcher, RenewingLauncher):
            return f"the launcher {self._launcher_name!r} cannot give them to hosts that run: launch the job anew before the old ones expire"
        try:
            await self._launcher.renew(order)
        except Exception as error:  # noqa: BLE001 - tried again
            return f"the hosts have not got the new ones: {type(error).__name__}: {error}"
        return ""

    async def _begin(self) -> None:
        plugin = PluginManager().get(LAUNCHERS, self._launcher_name)
        assert isinstance(plugin, LauncherPlugin)
        self._plugin, self._explains = plugin, plugin.explains
        folder = self._folder.make_inner("launcher")
        # Kept hosts must still be there when a machine that slept has woken.
        silence = max(_SILENCE_S, self._keep or 0.0)
        place = Place(
            self._folder.name,
            folder,
            Credentials.load(self._use.path).host_path,
            silence,
            self._report,
            is_kept=self._keep is not None,
            code=self._code,
        )
        self._launcher = plugin.create(place)
        # All are known before any is started, so the client is notified of all of them at once.
        meshes = {mesh: self._known(mesh, targets) for mesh, targets in self._first.items()}
        self._attach(list(self._hosts.values()))
        for mesh, specs in meshes.items():
            await self._start(mesh, specs)

    def _attach(self, hosts: list[HostState]) -> None:
        """Attach hosts of a job that outlives its script."""
        if self._kept is None:
            return
        # For hosts that connect to this machine, nobody knows which one connects first.
        for mesh in dict.fromkeys(each.mesh for each in hosts) if self._dial is None else ("hosts",):
            self._kept.attach(mesh, [each for each in hosts if each.mesh == mesh or self._dial is not None])
        self._is_attached.set()

    def _meshes(self) -> dict[str, list[HostState]]:
        """Return the present hosts of each mesh."""
        found: dict[str, list[HostState]] = {}
        for each in self._hosts.values():
            if each.is_there:
                found.setdefault(each.mesh, []).append(each)
        return found

    def _show(self, what: dict[str, Any]) -> bool:
        """Send the script a message to show; return whether there is a script."""
        return self._holder is not None and self._holder.joined and self._holder.show(what)

    def _known(self, mesh: str, targets: list[str | None]) -> list[HostSpec]:
        """Add hosts to a mesh, to be started."""
        specs = []
        for target in targets:
            number = len(self._hosts)
            name = target or f"{self._folder.name}-{number}"
            specs.append(HostSpec(number, name, target, labels={"mesh": mesh}))
            self._hosts[number] = HostState(number, name, mesh, Phase.STARTING)
        self._changed()
        return specs

    async def _start(self, mesh: str, specs: list[HostSpec]) -> list[int]:
        """Start them; return their numbers."""
        try:
            await self._launcher.start(options_of(self._plugin, self._given[mesh]), specs)
        except Exception as error:
            self._have_failed(specs, error)
            if not isinstance(error, LaunchError):
                raise
        return [each.number for each in specs]

    def _have_failed(self, specs: list[HostSpec], error: Exception) -> None:
        for each in specs:
            self._report(Report(each.number, Phase.FAILED, why=str(error) or type(error).__name__))

    def _report(self, report: Report) -> None:
        """A launcher's report about a host."""
        before = self._hosts[report.number]
        if not self._is_news(before, report):
            return
        phase, why, differs = report.phase, report.why, before.differs
        if report.environment is not None:
            refused, differs = compare(report.environment, self._environment)
            if refused and phase is Phase.RUNNING:
                phase, why = Phase.FAILED, refused
                # It has connected, and cannot be used.
                self._give_up(report.number)
        self._hosts[report.number] = HostState(
            before.number,
            before.name,
            before.mesh,
            phase,
            # It may be another machine's words, and is shown on terminals.
            printable(why),
            report.address if phase is Phase.RUNNING else None,
            tuple(map(printable, differs)),
        )
        if self._kept is not None:
            self._kept.heard(self._hosts[report.number])
        self._changed()

    def _is_news(self, before: HostState, report: Report) -> bool:
        """Return whether a report changes anything; a host that has ended stays so, whatever reports are still on their way."""
        if before.number in self._given_up:
            # The launcher may know better why; that it ends it now is no news.
            return report.phase is Phase.FAILED and before.phase is Phase.FAILED
        return before.phase not in (Phase.ENDED, Phase.FAILED) or report.phase is Phase.ENDED

    def _give_up(self, number: int) -> None:
        """End a host that has failed, and that the launcher does not know to have."""
        self._given_up.add(number)
        self._ending.append(asyncio.ensure_future(self._launcher.stop([number])))

    def _has_died(self, name: str, why: str) -> None:
        """The mesh has lost a host: so has the job, with the launcher's reason if that comes at once."""
        for each in self._hosts.values():
            if each.name == name and each.phase is Phase.RUNNING:
                asyncio.get_running_loop().call_later(_OWN_REASON_S, self._lose, each.number, why)

    def _lose(self, number: int, why: str) -> None:
        if self._hosts[number].phase is not Phase.RUNNING:
            return
        self._report(Report(number, Phase.FAILED, why=why))
        self._given_up.add(number)
        asyncio.get_running_loop().call_later(_GIVE_UP_S, self._end_lost, number)

    def _end_lost(self, number: int) -> None:
        if self._hosts[number].phase is Phase.FAILED and not self._over.is_set():
            self._give_up(number)

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
        """Notify those who watch, once for everything that happens in a turn of the loop."""
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
        """Return the state of the job."""
        left = None
        if self._left_at is not None and self._keep is not None:
            left = max(0.0, self._keep - (time.monotonic() - self._left_at))
        used_by = None if self._holder is None else self._holder.pid
        hosts = tuple(self._hosts.values())
        return JobState(
            self._folder.name,
            self._launcher_name,
            hosts,
            used_by,
            self._keep,
            left,
            self._dial,
            self._renewal.state,
            explains=self._explains,
        )

    # Clients.

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_first: bool = False
    ) -> None:
        connection = writer.get_extra_info("socket")
        if not is_first:  # its socket was inherited, and it may have ended
            try:
                require_same_namespaces(connection)
            except OSError as error:
                sys.stderr.write(f"refused a connection to job {self._folder.name!r}: {error}\n")
                writer.close()
                return
        pid, uid = peer_of(connection)
        # The client that has launched the job may end before it has confirmed that it has the hosts.
        client = _Client(writer, pid, uid, is_first=is_first)
        self._clients.add(client)
        try:
            while line := await _line(reader):
                question = _question(line)
                answering = self._answer(client, question)
                if isinstance(question, dict) and question.get("do") in _LONG:
                    # Its next request, and its end, need not wait for hosts.
                    client.asks(answering)
                else:
                    await answering
        except ConnectionError:
            pass  # it has ended
        finally:
            self._clients.discard(client)
            await client.close()
            await self._end_visits(client)
            if self._offers is client:
                self._offers = None
            if self._holder is client:
                self._holder = None
                if self._kept is not None:
                    self._kept.has_gone()
            if client.counts and self._holder is None and self._offers is None:
                self._leave()
            elif self._is_late and client.visits:
                self._expire()

    async def _answer(self, client: _Client, question: object) -> None:
        """Answer a request, whatever it is (KPR-4). This is the only guard: what is raised below is for the client."""
        number = question.get("number") if isinstance(question, dict) else None
        if type(number) is not int:
            number = None
        try:
            if isinstance(question, ValueError):
                raise question
            if not isinstance(question, dict):
                raise ValueError(f"a request must be an object, got {_short(question)}")
            client.say({"to": number, "is": await self._do(client, question)})
        except (LaunchError, ValueError, TypeError) as error:
            client.say({"to": number, "error": type(error).__name__, "why": str(error)})
        except Exception as error:  # noqa: BLE001 - the job goes on
            traceback.print_exc()
            why = f"job {self._folder.name!r} could not do this: {type(error).__name__}: {error}"
            client.say({"to": number, "error": "LaunchError", "why": why})

    async def _do(self, client: _Client, question: dict[str, Any]) -> Any:
        match question:
            case {"do": "watch" | "state" | "visit" as do}:
                client.watches = client.watches or do != "state"
                if do == "visit" and not client.visits:
                    client.visits = True
                    self._audit(client, "exec or shell")
                return self.state().as_dict()
            case {"do": "hold"}:
                return self._hold(client, take_over=question.get("take_over") is True)
            case {"do": "offer"} if client.is_first:
                self._offers, client.counts, client.watches = client, True, True
                client.watch_process()
                return self.state().as_dict()
            case {"do": "start" | "end"} if self._holder is not None and self._holder is not client:
                raise JobExists(
                    f"the hosts of job {self._folder.name!r} are used by process {self._holder.pid}, which alone can have more of them or fewer: "
                    "use job.scale() there"
                )
            case {"do": "fits" | "start" as do, "mesh": str(mesh), "targets": list(targets)}:
                self._check_targets(mesh, targets)
                if do == "fits":
                    return None
                self._audit(client, f"scale {mesh}: {len(targets)} more hosts")
                return await self._start_more(mesh, targets)
            case {"do": "join" | "flush" | "shown" | "attached" | "traits"} if (
                self._kept is not None and self._holder is client
            ):
                return await self._do_kept(self._kept, client, question)
            case {"do": "end" | "dial" | "log" | "lost"}:
                return await self._do_hosts(client, question)
            case {"do": "stop"}:
                self._audit(client, "stop")
                self._over.set()
                return None
        raise self._cannot(question)

    async def _do_hosts(self, client: _Client, question: dict[str, Any]) -> Any:
        """Requests about single hosts."""
        match question:
            case {"do": "end", "hosts": list(numbers)}:
                checked = self._checked(numbers)
                if checked:
                    names = ", ".join(self._hosts[each].name for each in checked)
                    self._audit(client, f"scale: end {names}")
                return await self._end_some(checked)
            case {"do": "dial", "hosts": list(numbers), "address": str(address)}:
                return await self._dial_visitor(client, self._checked(numbers), address)
            case {"do": "lost", "host": number, "why": str(why)} if self._holder is client:
                return self._has_died(self._hosts[self._checked([number])[0]].name, why)
            case {"do": "log", "host": number, "lines": int(lines)}:
                return await self._begun().log(self._checked([number])[0], max(lines, 0))
        raise self._cannot(question)

    def _cannot(self, question: dict[str, Any]) -> LaunchError:
        return LaunchError(f"job {self._folder.name!r} cannot do {_short(question)}")

    def _begun(self) -> Launcher:
        if not hasattr(self, "_launcher"):
            raise LaunchError(f"job {self._folder.name!r} is still being started: ask again")
        return self._launcher

    def _checked(self, numbers: list[object]) -> list[int]:
        """Return the numbers of hosts that a client has given."""
        checked = [each for each in numbers if type(each) is int and each in self._hosts]
        if len(checked) < len(numbers):
            raise LaunchError(
                f"job {self._folder.name!r} has the hosts 0 to {len(self._hosts) - 1}, got {_short(numbers)}"
            )
        return checked

    def _check_targets(self, mesh: str, targets: list[object]) -> None:
        """Refuse what the launcher could not start, before anything is changed."""
        self._begun()
        if not targets:
            raise ValueError("scale: no hosts are named that are to be started")
        if mesh not in self._given:
            raise LaunchError(
                f"job {self._folder.name!r} has no mesh {_short(mesh)}; it has {', '.join(self._given)}"
            )
        there = [each.name for each in self._meshes().get(mesh, [])]
        if not self._plugin.is_named:
            if any(each is not None for each in targets):
                raise ValueError(
                    f"scale: the launcher {self._launcher_name!r} wants how many hosts mesh {mesh!r} is to have, such as "
                    f"{len(there) + 1}, and gives them names itself"
                )
            return
        if not all(isinstance(each, str) and each for each in targets):
            raise ValueError(
                f"scale: the launcher {self._launcher_name!r} wants the names of all hosts that mesh {mesh!r} is to have: those that "
                f"it has, {there}, and the new ones"
            )
        taken = [each.name for each in self._hosts.values() if each.is_there]
        twice = sorted({str(each) for each in targets if each in taken or targets.count(each) > 1})
        if twice:
            raise ValueError(
                f"scale: {', '.join(twice)} would be in job {self._folder.name!r} twice: a host is started once"
            )

    async def _do_kept(self, kept: Kept, client: _Client, question: dict[str, Any]) -> Any:
        """Requests of the script of a kept job."""
        match question:
            case {"do": "join"}:
                return await self._join(client, kept)
            case {"do": "attached", "hosts": list(numbers)}:
                return await kept.attached(numbers)
            case {"do": "traits", "hosts": list(numbers)}:
                return kept.traits(numbers)
            case {"do": "flush"}:
                return await kept.flush()
            case {"do": "shown", "procs": list(procs), "limit": int(limit) | float(limit)}:
                return await kept.shown(_procs(procs), limit)
        raise self._cannot(question)

    async def _start_more(self, mesh: str, targets: list[str | None]) -> dict[str, Any]:
        """Start more hosts."""
        specs = self._known(mesh, targets)
        try:
            self._attach([self._hosts[each.number] for each in specs])
        except Exception as error:
            self._have_failed(specs, error)
            raise
        numbers = await self._start(mesh, specs)
        if self._kept is None:
            return {"numbers": numbers}
        await self._kept.come(self._names())
        return {"numbers": numbers, "hosts": self._kept.pack([self._hosts[each] for each in numbers])}

    async def _dial_visitor(self, client: _Client, numbers: list[int], address: str) -> None:
        """Let hosts that connect to the script connect to a visitor too."""
        check_dial(address)
        launcher = self._begun()
        if not isinstance(launcher, DialingLauncher):
            raise LaunchError(
                f"hosts of job {self._folder.name!r} connect to its script (dial=), and the launcher {self._launcher_name!r} cannot have them "
                "connect to another process as well"
            )
        visits = [(each, secrets.token_hex(8)) for each in numbers]
        client.dialed += visits
        coming = [launcher.dial(number, visit, address) for number, visit in visits]
        failed = [each for each in await asyncio.gather(*coming, return_exceptions=True) if each]
        if failed:
            raise LaunchError("; ".join(str(each) for each in failed)) from failed[0]

    async def _end_visits(self, client: _Client) -> None:
        """Let hosts end what they do for a visitor that has left (VST-1)."""
        launcher = self._launcher if client.dialed else None
        if isinstance(launcher, DialingLauncher):
            leaving = [launcher.leave(number, visit) for number, visit in client.dialed]
            # What follows is to be done in any case.
            await asyncio.gather(*leaving, return_exceptions=True)

    async def _end_some(self, numbers: list[int]) -> None:
        """End hosts, and what runs there."""
        if self._kept is not None:
            await self._kept.end(numbers)
        await self._launcher.stop(numbers)
        self._given_up.difference_update(numbers)
        for each in numbers:
            self._report(Report(each, Phase.ENDED))

    async def _join(self, client: _Client, kept: Kept) -> dict[str, Any]:
        """Let the script that has the job join it."""
        await self._is_attached.wait()
        await kept.come(self._names())
        assert self._links is not None
        told = await kept.join(self._links, client.pid, self._meshes())
        client.joined = True
        asyncio.get_running_loop().call_soon(kept.tell)
        return told

    def _names(self) -> dict[int, str]:
        return {each.number: each.name for each in self._hosts.values()}

    def _hold(self, client: _Client, *, take_over: bool = False) -> dict[str, Any]:
        before = self._holder
        if (
            self._kept is not None
            and before is not None
            and before is not client
            and (take_over or before.has_ended())
        ):
            # From here on it can do nothing, whether it is notified or not.
            self._kept.dismiss()
            before.counts, self._holder = False, None
            name = self._folder.name
            before.end(
                f"job {name!r} was taken over by process {client.pid}, and goes on there; attach_job({name!r}, take_over=True) in another "
                "script takes it back"
            )
        if self._holder is not None and self._holder is not client:
            raise JobExists(
                f"the hosts of job {self._folder.name!r} are used by process {self._holder.pid}: a job has one script at a time"
                + (
                    f"; attach_job({self._folder.name!r}, take_over=True) takes a kept one away from it"
                    if self._kept
                    else ""
                )
            )
        self._audit(client, "launch" if client.is_first else "take over" if take_over else "attach")
        self._holder, self._left_at, client.counts = client, None, True
        client.watch_process()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry, self._is_late = None, False
        client.watches = True
        self._changed()
        return self.state().as_dict()

    def _leave(self) -> None:
        """The script has ended, or has detached (KPR-1)."""
        if self._keep is None:
            self._over.set()
            return
        self._left_at = time.monotonic()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(self._keep, self._expire)
        self._changed()

    def _expire(self) -> None:
        """End the job, because no script has attached it in time; not before its visitors have left."""
        self._is_late = True
        if not any(each.visits for each in self._clients):
            self._over.set()

    async def _end(self) -> None:
        """End all hosts (KPR-3)."""
        if self._kept is not None:
            await self._kept.close()
        if hasattr(self, "_launcher"):
            try:
                await self._launcher.close()
            except Exception:  # noqa: BLE001 - there is nobody to tell, and the rest has to be ended
                traceback.print_exc()
        self._folder.remove()
        self._use.end()


class _Client:
    """A connected client."""

    def __init__(self, writer: asyncio.StreamWriter, pid: int, uid: int, *, is_first: bool) -> None:
        self.uid = uid
        self._writer = writer
        self.is_first = is_first
        """Whether it has launched the job."""
        self.pid = pid
        self.watches = False
        self.joined = False
        """Whether it takes part in the job, whose processes and actors outlive it."""
        self.visits = False
        """Whether it runs something on the hosts beside the script that has them."""
        self.dialed: list[tuple[int, str]] = []
        """Hosts that were told to connect to it, and the names of these visits."""
        self.counts = is_first
        """Whether it has, or has had, the hosts."""
        self._tasks: set[asyncio.Future[None]] = set()
        self._process: int | None = None
        """A descriptor of the process, once it has the hosts."""

    def asks(self, answering: Coroutine[Any, Any, None]) -> None:
        """Answer its requests until it leaves."""
        task = asyncio.ensure_future(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def say(self, what: dict[str, Any]) -> None:
        """Send it a message; one that does not read gets no more."""
        if self._writer.transport.get_write_buffer_size() > _LINE:
            self._writer.transport.abort()
        else:
            self._writer.write(json.dumps(what).encode() + b"\n")

    def show(self, what: dict[str, Any]) -> bool:
        """Send it a message that it may miss if it does not read; return whether it was sent."""
        if self._writer.is_closing() or self._writer.transport.get_write_buffer_size() > _SHOWN:
            return False
        self._writer.write(json.dumps(what).encode() + b"\n")
        return True

    def watch_process(self) -> None:
        """Take it for gone when its process is, even if a child of that process still has the connection."""
        self._forget_process()
        with suppress(OSError):
            self._process = os.pidfd_open(self.pid)
            asyncio.get_running_loop().add_reader(self._process, self._ended)

    def end(self, why: str) -> None:
        """Tell it why, and stop listening to it."""
        self._forget_process()
        self.say({"gone": why})
        self._writer.close()

    def has_ended(self) -> bool:
        """Return whether its process has ended, even if nobody was notified so far."""
        return self._process is not None and bool(select.select([self._process], [], [], 0)[0])

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
        for each in list(self._tasks):
            each.cancel()
        with suppress(ConnectionError):
            if not self._writer.is_closing():
                await self._writer.drain()
            self._writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes | ValueError:
    """Return the next line, empty at the end, or an error instead of one that is too long."""
    skipped = False
    while True:
        try:
            line = await reader.readuntil()
        except asyncio.LimitOverrunError as error:
            await reader.readexactly(error.consumed)
            skipped = True
        except asyncio.IncompleteReadError:
            return b""
        else:
            return ValueError(f"a request is longer than {_LINE} bytes") if skipped else line


def _question(line: bytes | ValueError) -> object:
    """Return a request, or an error where it cannot be read."""
    if isinstance(line, ValueError):
        return line
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"a request must be JSON: {error}")


def _procs(told: list[Any]) -> list[tuple[int, int, int]]:
    """Processes: host, mesh and rank of each."""
    for each in told:
        match each:
            case [int(host), int(mesh), int(rank)] if min(host, mesh, rank) >= 0:
                if max(host, rank) < 2**32 and mesh < 2**64:
                    continue
        raise ValueError(f"a process must be its host, mesh and rank, got {_short(each)}")
    return [tuple(each) for each in told]


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= _TOLD else f"{text[:_TOLD]}..."


def main(path: str, door: int) -> None:
    """Keep the job of a folder, whose lock was passed to this process; `door` is its first client's socket."""
    folder = JobFolder(Path(path))
    # The launcher may be a plugin that only the script's folders have.
    sys.path[:] = folder.read()["path"]
    asyncio.run(Keeper(folder).run(socket.socket(fileno=door)))


def start() -> None:
    """Entry point of the keeper's process."""
    main(sys.argv[1], int(sys.argv[2]))
