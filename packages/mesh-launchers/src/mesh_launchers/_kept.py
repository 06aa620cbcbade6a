"""The hosts of a kept job, at its keeper: attached there, so that what runs on them outlives scripts.

KPT-1: what a script has spawned on the hosts stays when the script ends, however it ends, until the job does; the next script
has it.
KPT-2: one script at a time is admitted: the process that has the job's hosts, by its own connection (KPR-2).
KPT-3: what processes print while there is no script is shown to the next one, up to a limit; a script that reads slowly gets everything up to a larger
one. What is beyond is said to be missing.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from mesh_core import HostMesh, MeshError, attach_to_workers, configure, shutdown
from mesh_core.extensions import Guests, peer_of
from mesh_launchers._contract import Phase
from mesh_launchers._deaths import follow_deaths
from mesh_launchers._dialing import listening
from mesh_launchers._errors import LaunchError
from mesh_launchers._state import HostState

_KEPT_BYTES = 1 << 18
_BEHIND_BYTES = 1 << 26
"""How far a script may be behind with what it shows."""
_AGAIN_S = 0.02
_COME_S = 60.0
_JOIN_S = 30.0
_LAST_S = 1.0


class Kept:
    """The part of a keeper for a job whose processes and actors outlive scripts."""

    def __init__(
        self,
        name: str,
        credentials: str,
        say: Callable[[dict[str, Any]], bool],
        *,
        hold: float,
        dial: str | None,
        settings: Mapping[str, Any],
    ) -> None:
        configure(**settings)
        self._credentials = credentials
        self._hold = hold
        self._dial = dial
        self._say = say
        """Sends the script a message; returns whether there is a script."""
        self._loop = asyncio.get_running_loop()
        self._unheard: deque[tuple[bool, str]] = deque()
        self._size = 0
        self._missing = 0
        """How many characters are not kept any more."""
        self._is_joined = False
        self._told = asyncio.Event()
        """Whether a script has been told everything."""
        self._told.set()
        self._joins = 0
        self._addresses: dict[int, Future[str]] = {}
        self._attached: list[tuple[list[int], HostMesh]] = []
        """Hosts as they were attached, by their numbers in the job."""
        self._streams = sys.stdout, sys.stderr
        # Output of processes is shown where a script would show it.
        sys.stdout, sys.stderr = _Told(self._show_soon, False), _Told(self._show_soon, True)
        self._guests = Guests(name)

    # Hosts.

    def follow_deaths(self, tell: Callable[[str, str], object]) -> None:
        """Tell the keeper of hosts that have died, by their names."""
        follow_deaths(lambda host, why: self._soon(tell, host, why))

    def _soon(self, do: Callable[..., object], *what: object) -> None:
        """Have the loop do something; called on any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(do, *what)

    def attach(self, mesh: str, states: Sequence[HostState]) -> None:
        """Add the hosts of a mesh, which are being started."""
        numbers = [each.number for each in states]
        if self._dial is None:
            futures = [self._addresses.setdefault(each, Future()) for each in numbers]
            whole = attach_to_workers(futures, credentials=self._credentials, name=mesh, hold=self._hold)
        else:
            whole = attach_to_workers(
                listen=listening(self._dial),
                expect=len(numbers),
                credentials=self._credentials,
                name=mesh,
                hold=self._hold,
            )
        self._attached.append((numbers, whole))

    def heard(self, host: HostState) -> None:
        """The state of a host has changed."""
        address = self._addresses.get(host.number)
        if address is None or address.done():
            return
        if host.phase is Phase.RUNNING and host.address is not None:
            address.set_result(host.address)
        elif not host.is_there:
            address.set_exception(LaunchError(host.why or str(host.phase)))

    async def come(self, names: Mapping[int, str]) -> None:
        """Wait until the hosts that connect to this machine have done so: only then is it known which is which."""
        if self._dial is None:
            return
        for at, (_, whole) in enumerate(self._attached):
            await asyncio.wait_for(whole.initialized, _COME_S)
            by_name = {names[each]: each for each in names}
            self._attached[at] = ([by_name[each] for each in whole.names], whole)

    async def attached(self, numbers: Sequence[int]) -> None:
        """Wait until these hosts are attached; raise if one cannot be."""
        for mine, whole in self._attached:
            if not set(mine).isdisjoint(numbers):
                try:
                    await whole.initialized
                except MeshError as error:
                    raise LaunchError(str(error)) from None

    def mesh(self, hosts: Sequence[HostState]) -> HostMesh | None:
        """Return some hosts as a mesh, in this order."""
        numbers = [each.number for each in hosts]
        for mine, whole in self._attached:
            if mine == numbers:
                return whole
        found = {
            number: whole.slice(hosts=slice(at, at + 1))
            for mine, whole in self._attached
            for at, number in enumerate(mine)
        }
        return functools.reduce(HostMesh.join, [found[each] for each in numbers]) if numbers else None

    async def end(self, numbers: Sequence[int]) -> None:
        """Release hosts, with everything that runs on them."""
        for mine, whole in self._attached:
            for at, number in enumerate(mine):
                if number in numbers:
                    # A dead host has nothing to end.
                    with suppress(MeshError):
                        await whole.detach(whole.slice(hosts=slice(at, at + 1)))

    # Scripts.

    async def join(
        self, links: socket.socket, pid: int, meshes: Mapping[str, Sequence[HostState]]
    ) -> dict[str, Any]:
        """Admit the script that has the job (KPT-2)."""
        async with asyncio.timeout(_JOIN_S):
            while True:
                link, _ = await self._loop.sock_accept(links)
                if peer_of(link)[0] == pid:
                    break
                link.close()
        self._joins += 1
        told = self._guests.let_in(link, pid, self._packed(meshes))
        return {"told": base64.b64encode(told).decode()}

    def _packed(self, meshes: Mapping[str, Sequence[HostState]]) -> dict[str, tuple[HostMesh, list[str]]]:
        packed = {}
        for name, hosts in meshes.items():
            mesh = self.mesh(hosts)
            if mesh is not None:
                packed[name] = (mesh, [each.name for each in hosts])
        return packed

    def pack(self, hosts: Sequence[HostState]) -> str:
        """Some hosts, for the script."""
        mesh = self.mesh(hosts)
        assert mesh is not None
        return base64.b64encode(self._guests.pack(mesh, [each.name for each in hosts])).decode()

    def dismiss(self) -> None:
        """The script that had the job no longer has it, from this moment on."""
        self._has_left()
        self._guests.dismiss()

    def has_gone(self) -> None:
        """The script that had the job has ended. Its messages are taken first: the end of its link comes after them."""
        joins = self._joins
        self._has_left()

        def late() -> None:
            # A child that it has forked may still have the link.
            if joins == self._joins:
                self._guests.dismiss()

        self._loop.call_later(_LAST_S, late)

    def traits(self, hosts: Sequence[int]) -> str:
        """Labels and resources of hosts, by Mesh's numbers, for the script."""
        return base64.b64encode(self._guests.traits(hosts)).decode()

    async def shown(self, procs: list[tuple[int, int, int]], limit: float) -> None:
        """Let what these processes have printed so far be shown."""
        await self._guests.shown(procs, limit)
        await self._has_told()

    async def flush(self) -> None:
        """Let everything be shown that processes have printed so far."""
        await self._loop.run_in_executor(None, self._guests.flush)
        await self._has_told()

    async def _has_told(self) -> None:
        # What has been shown comes by the loop, too.
        await asyncio.sleep(0)
        if self._is_joined:
            await self._told.wait()

    def tell(self) -> None:
        """Show a script what was printed before it came (KPT-3)."""
        self._is_joined = True
        if self._missing and self._say(
            {"out": (True, f"... {self._missing:,} characters of the job's output are missing here\n")}
        ):
            self._missing = 0
        while self._unheard and self._say({"out": self._unheard[0]}):
            self._size -= len(self._unheard.popleft()[1])
        if self._unheard:
            self._told.clear()
            self._loop.call_later(_AGAIN_S, self._tell_more)
        else:
            self._told.set()

    def _tell_more(self) -> None:
        if self._is_joined:
            self.tell()

    def _has_left(self) -> None:
        self._is_joined = False
        self._told.set()
        self._shorten()

    def _shorten(self) -> None:
        limit = _BEHIND_BYTES if self._is_joined else _KEPT_BYTES
        while self._size > limit:
            gone = len(self._unheard.popleft()[1])
            self._size -= gone
            self._missing += gone

    def _show_soon(self, is_error: bool, text: str) -> None:
        self._soon(self._show, is_error, text)

    def _show(self, is_error: bool, text: str) -> None:
        if not self._unheard and self._say({"out": (is_error, text)}):
            return
        self._unheard.append((is_error, text))
        self._size += len(text)
        self._shorten()
        if self._is_joined and self._told.is_set():
            self._told.clear()
            self._loop.call_later(_AGAIN_S, self._tell_more)

    # The end.

    async def close(self) -> None:
        """End what runs on the hosts, in order."""
        for address in self._addresses.values():
            if not address.done():
                address.set_exception(LaunchError("the job has ended"))
        ends: list[Awaitable[None]] = []
        for _, whole in self._attached:
            with suppress(MeshError):
                ends.append(whole.stop())
        for each in ends:
            with suppress(MeshError, TimeoutError):
                await each
        await self._loop.run_in_executor(None, shutdown)
        sys.stdout, sys.stderr = self._streams


class _Told:
    """Takes the place of a stream."""

    def __init__(self, tell: Callable[[bool, str], None], is_error: bool) -> None:
        self._tell = tell
        self._is_error = is_error

    def write(self, text: str) -> int:
        """Pass it on."""
        self._tell(self._is_error, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is buffered here."""

    def isatty(self) -> bool:
        """Return false."""
        return False
