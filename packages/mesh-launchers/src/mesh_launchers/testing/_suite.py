"""What holds for every launcher."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import inspect
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mesh_core import Actor, Credentials, attach_to_workers, endpoint, shutdown
from mesh_core.testing import PluginConformance
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
from mesh_launchers._errors import LaunchError

__all__ = ["LauncherConformance"]

_SOON = 5.0
"""Seconds that a process may take to notice by itself that the other end of its connection has gone, as sshd does."""


class _Greeter(Actor):
    @endpoint
    def greet(self, name: str) -> str:
        return f"hello {name}"


class _Site:
    """A launcher, with its reports and what it is given."""

    def __init__(self, plugin: LauncherPlugin, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder = folder
        self.credentials = Credentials.new(folder / "credentials")
        self.reports: list[Report] = []
        self._changed = asyncio.Event()
        (folder / "launcher").mkdir()
        place = Place("conformance", folder / "launcher", self.credentials.host_path, 60.0, self._report)
        self.launcher: Launcher = plugin.create(place)
        self.options = options_of(plugin, options)

    def _report(self, report: Report) -> None:
        self.reports.append(report)
        self._changed.set()

    def phase(self, number: int) -> Phase | None:
        """Return the last report about a host."""
        return next((each.phase for each in reversed(self.reports) if each.number == number), None)

    def address(self, number: int) -> str:
        """Return where it listens."""
        found = next(each.address for each in self.reports if each.number == number and each.address)
        assert found is not None
        return found

    async def until(self, *phases: Phase, of: Sequence[int], limit: float) -> None:
        """Wait until hosts are in one of these phases."""
        end = time.monotonic() + limit
        while not all(self.phase(each) in phases for each in of):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), end - time.monotonic())
            except TimeoutError:
                said = [f"{each.number} {each.phase}: {each.why}" for each in self.reports]
                raise AssertionError(
                    f"hosts {[*of]} are not {' or '.join(phases)} after {limit:g} s: {said}"
                ) from None


class LauncherConformance(PluginConformance):
    """The rules for a :class:`LauncherPlugin`: hosts start, are reported, can be used, and leave nothing behind."""

    kind = LAUNCHERS
    options: ClassVar[Mapping[str, Any]] = {}
    """What a user would pass to ``launch``. An author sets this if the defaults are not enough."""
    targets: ClassVar[Sequence[str | None]] = (None, None)
    """Two hosts; their names, for a launcher that needs names."""
    limit: ClassVar[float] = 60.0
    """The seconds that two hosts may take to start or end."""

    def kill(self, host: HostSpec) -> bool:
        """Kill what runs as a host, without notice to the launcher. Returns whether that can be done here."""
        return False

    def _plugin(self) -> LauncherPlugin:
        assert isinstance(self.plugin, LauncherPlugin), f"a LauncherPlugin, not {type(self.plugin).__name__}"
        return self.plugin

    def _run(self, work: Callable[[_Site], Awaitable[None]]) -> None:
        async def main(folder: Path) -> None:
            site = _Site(self._plugin(), folder, self.options)
            try:
                await work(site)
            finally:
                await asyncio.wait_for(site.launcher.close(), self.limit)

        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(Path(folder)))

    def _specs(self, first: int = 0) -> list[HostSpec]:
        assert len(self.targets) == 2, "targets names two hosts"
        return [
            HostSpec(first + at, target or f"host{first + at}", target, labels={"mesh": "hosts"})
            for at, target in enumerate(self.targets)
        ]

    async def _started(self, site: _Site, specs: Sequence[HostSpec]) -> None:
        begun = time.monotonic()
        await asyncio.wait_for(site.launcher.start(site.options, specs), self.limit)
        numbers = [each.number for each in specs]
        await site.until(Phase.RUNNING, of=numbers, limit=self.limit - (time.monotonic() - begun))

    def test_options_are_a_frozen_dataclass_with_types(self) -> None:
        """Each has a type, so that users and their editors know what it accepts."""
        options = self._plugin().options
        assert dataclasses.is_dataclass(options), "options must be a dataclass"
        assert options.__dataclass_params__.frozen, "options must be frozen"  # type: ignore[attr-defined]
        untyped = [
            each.name
            for each in dataclasses.fields(options)
            if each.name not in inspect.get_annotations(options)
        ]
        assert not untyped, f"no type for {untyped}"

    def test_unknown_options_are_refused(self) -> None:
        """With a suggestion of the nearest option."""
        name = next((each.name for each in dataclasses.fields(self._plugin().options)), None)
        why = ""
        try:
            options_of(self._plugin(), {f"{name or 'option'}x": 1})
        except TypeError as error:
            why = str(error)
        assert why, "an unknown option was taken"
        assert name is None or name in why, f"the error does not name {name!r}: {why}"

    def test_creates_a_launcher(self) -> None:
        """It has ``start``, ``stop``, ``log`` and ``close``, all coroutines; it starts nothing yet."""

        async def work(site: _Site) -> None:
            assert isinstance(site.launcher, Launcher), (
                f"create() gave {type(site.launcher).__name__}, which lacks a method"
            )
            for name in ("start", "stop", "log", "close"):
                assert inspect.iscoroutinefunction(getattr(site.launcher, name)), (
                    f"{name}() must be a coroutine function"
                )
            assert not site.reports, "create() has started something"

        self._run(work)

    def test_hosts_come_and_can_be_used(self) -> None:
        """They have the names and labels that they were given, and report their Python."""

        def use(
            credentials: Credentials, addresses: list[str]
        ) -> tuple[list[str], list[dict[str, str]], list[str]]:
            hosts = attach_to_workers(addresses, credentials=credentials)
            try:
                greeters = hosts.spawn_procs(per_host={"gpus": 1}).spawn("greeters", _Greeter)
                said = greeters.greet.call("you").get(timeout=self.limit).values()
                return hosts.names, hosts.labels, list(said)
            finally:
                shutdown()

        async def work(site: _Site) -> None:
            specs = self._specs()
            await self._started(site, specs)
            running = [each for each in site.reports if each.phase is Phase.RUNNING]
            assert all(each.environment and "python" in each.environment for each in running), (
                "a host that runs has not said which Python it has: Report.environment"
            )
            addresses = [site.address(each.number) for each in specs]
            names, labels, said = await asyncio.to_thread(use, site.credentials, addresses)
            assert names == [each.name for each in specs], f"the hosts are called {names}"
            assert [each.get("mesh") for each in labels] == ["hosts", "hosts"], (
                f"the hosts have the labels {labels}"
            )
            assert said == ["hello you", "hello you"]
            text = await site.launcher.log(0, 20)
            assert isinstance(text, str) and len(text.splitlines()) <= 20, (
                "log() must give at most so many lines"
            )

        self._run(work)

    def test_one_ends_and_the_other_goes_on(self) -> None:
        """``stop`` returns when nothing of the host is left; stopping twice does no harm."""

        async def work(site: _Site) -> None:
            await self._started(site, self._specs())
            for _ in range(2):
                await asyncio.wait_for(site.launcher.stop([0]), self.limit)
                assert _refused(site.address(0)), "a host listens that was stopped"
            assert site.phase(0) in (Phase.ENDED, Phase.RUNNING), (
                f"a host that was stopped is said to be {site.phase(0)}"
            )
            assert not _refused(site.address(1)), "another host than the one that was stopped has ended"
            assert site.phase(1) is Phase.RUNNING

        self._run(work)

    def test_more_come_later(self) -> None:
        """Under new numbers, while others run."""
        if self._plugin().is_named:
            return

        async def work(site: _Site) -> None:
            await self._started(site, self._specs()[:1])
            await self._started(site, self._specs(first=1))
            assert len({site.address(each) for each in range(3)}) == 3, "two hosts have one address"

        self._run(work)

    def test_close_leaves_nothing(self) -> None:
        """Including one that has just begun to start."""

        async def work(site: _Site) -> None:
            before = {session for _, session in _processes().values()}
            await self._started(site, self._specs()[:1])
            sessions = _begun_here() - before
            await site.launcher.start(site.options, self._specs()[1:])
            await asyncio.wait_for(site.launcher.close(), self.limit)
            assert _refused(site.address(0)), "a host listens after close()"
            later = [each for each in site.reports if each.number == 1 and each.address is not None]
            assert all(_refused(str(each.address)) for each in later), (
                "a host that was starting listens after close()"
            )
            end = time.monotonic() + _SOON
            while left := _living(sessions):
                assert time.monotonic() < end, (
                    f"what a host's command has started goes on after close(): {left}"
                )
                await asyncio.sleep(0.05)

        self._run(work)

    def test_stopped_before_it_has_started(self) -> None:
        """And never reported as running afterwards."""

        async def work(site: _Site) -> None:
            await site.launcher.start(site.options, self._specs())
            await asyncio.wait_for(site.launcher.stop([0, 1]), self.limit)
            count = len(site.reports)
            await asyncio.sleep(0)
            assert all(each.phase is not Phase.RUNNING for each in site.reports[count:])

        self._run(work)

    def test_the_death_of_one_is_reported(self) -> None:
        """With a reason; if the author says how to kill one."""

        async def work(site: _Site) -> None:
            await self._started(site, self._specs())
            if self.kill(self._specs()[0]):
                await site.until(Phase.FAILED, of=[0], limit=self.limit)
                assert next(each.why for each in reversed(site.reports) if each.number == 0), (
                    "no reason was given"
                )
                assert site.phase(1) is Phase.RUNNING

        self._run(work)

    def test_credentials_are_in_no_argument_environment_or_log(self) -> None:
        """Others can read those."""

        async def work(site: _Site) -> None:
            await self._started(site, self._specs())
            secrets = _secrets(site.credentials.host_path)
            for where, text in _visible():
                assert not any(each in text for each in secrets), f"the hosts' key can be read in {where}"
            logs = [await site.launcher.log(each, 1000) for each in (0, 1)]
            assert not any(each in log.encode() for each in secrets for log in logs), (
                "the hosts' key is in a log"
            )

        self._run(work)

    def test_what_cannot_be_done_is_a_launch_error(self) -> None:
        """Hosts that cannot come are reported, or refused with :class:`LaunchError`; nothing else is raised."""
        if not self._plugin().is_named:
            return

        async def work(site: _Site) -> None:
            name = "no-such-host.invalid"
            try:
                await site.launcher.start(site.options, [HostSpec(0, name, name)])
                await site.until(Phase.FAILED, of=[0], limit=self.limit)
            except LaunchError:
                return
            assert site.reports[-1].why

        self._run(work)


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the session of each process that runs."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                state, parent, _, session, *_ = (process / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue  # it has ended
            if state not in "ZX":
                found[int(process.name)] = int(parent), int(session)
    return found


def _begun_here() -> set[int]:
    """Return the sessions of this process's descendants."""
    processes = _processes()
    ours, before = {os.getpid()}, 0
    while len(ours) > before:
        before = len(ours)
        ours |= {pid for pid, (parent, _) in processes.items() if parent in ours}
    return {processes[each][1] for each in ours - {os.getpid()} if each in processes}


def _command(pid: int) -> str:
    """Return the command of a process; nothing if it has ended, or is about to."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


def _living(sessions: set[int]) -> list[str]:
    """Return the commands of what lives in these sessions."""
    commands = [_command(each) for each, (_, session) in _processes().items() if session in sessions]
    return [each for each in commands if each]


def _refused(address: str) -> bool:
    """Return whether nobody listens there."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError:
        return True
    return False


def _secrets(folder: Path) -> list[bytes]:
    """Return the secret parts of the hosts' keys, in the forms in which they could be found."""
    found = []
    for path in folder.iterdir():
        text = path.read_bytes()
        if b"PRIVATE KEY" in text:
            # Also without the lines that all keys have.
            body = b"".join(line for line in text.splitlines() if not line.startswith(b"-----"))
            found += [body, base64.b64encode(text)[40:120]]
            found += [line for line in text.splitlines() if len(line) > 40 and not line.startswith(b"-----")]
    assert found, f"{folder} has no key"
    return found


def _visible() -> list[tuple[str, bytes]]:
    """Return the arguments and environments of all processes that can be read."""
    seen = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        for name in ("cmdline", "environ"):
            try:
                seen.append((f"/proc/{process.name}/{name}", (process / name).read_bytes()))
            except OSError:
                continue
    return seen
