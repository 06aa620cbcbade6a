"""Process groups of torch.distributed over the processes of a mesh, which survivors leave when one of them dies.

GRP-1: when a process of a group has died, the others are ordered to leave it at once; nobody waits for a timeout.
GRP-2: a group has a number; an order to leave is for that one and those before, never for the next.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from mesh_core import MeshError, ProcMesh, wait
from mesh_core.extensions import Extension, Proc, ProcEnd, Watch, current_proc, find, install, procs_of, watch
from mesh_supervision._collectives import Collectives, Watched, has_hooks
from mesh_supervision._snapshots import result_of
from mesh_supervision._torch_group import TorchGroup, in_collective

_JOIN_S = 30.0
"""How long members wait for each other while a group is formed."""
_TIMEOUT_S = 1800.0
_STUCK_S = 3.0
"""How long members of a group that was given up have to answer before it is checked whether they can."""


@dataclass(frozen=True)
class _Who:
    """A message: which process are you?"""


@dataclass(frozen=True)
class _Join:
    """A message: be part of a group."""

    generation: int
    members: tuple[tuple[int, int, int], ...]
    names: tuple[str, ...]
    """The names of the members."""
    owner: Proc
    """The process that forms it."""
    seconds: float
    is_local: bool


@dataclass(frozen=True)
class _Ask:
    """A message: a request of a member to the store."""

    generation: int
    operation: str
    key: str
    value: bytes


@dataclass(frozen=True)
class _Open:
    """A message: expect requests of a group's members."""

    generation: int


@dataclass(frozen=True)
class _Abort:
    """A message: leave the group with this number."""

    generation: int


@dataclass(frozen=True)
class _GiveUp(_Abort):
    """The same, some time later: end the process if it has not left."""


class Groups(Extension):
    """Lets a process serve and join; one message after the other."""

    name = "supervision.groups"

    def start(self) -> None:
        """Begin without a group."""
        self.group = TorchGroup()
        self.watched: Watched | None = None
        """Counts the collectives of that group."""
        self.formed: dict[ProcMesh, Group] = {}
        """The groups that this process has formed."""
        self.lock = threading.Lock()
        self._generations = itertools.count(1)

    def next_generation(self) -> int:
        """Return a number that no group of this process has had."""
        return next(self._generations)

    def receive(self, message: Any, sender: Proc) -> Any:
        """Carry out a request of the process that forms groups."""
        match message:
            case _Who():
                return self.proc
            case _Join(generation, members, names, owner, seconds, is_local):
                meeting, collectives = find(Meeting), find(Collectives)
                assert meeting is not None  # it comes with the message
                rank = members.index(self.proc.address)
                if self.watched is not None:
                    self.watched.close()
                try:
                    made = self.group.join(
                        generation,
                        rank,
                        len(members),
                        partial(meeting.ask, owner, generation),
                        seconds=seconds,
                        is_local=is_local,
                    )
                    if collectives is not None and has_hooks(made):
                        self.watched = collectives.watch(made, names, rank)
                    return None
                except BaseException:
                    # The others must not wait for an answer that will never come.
                    meeting.tell(owner, _Abort(generation))
                    raise
        raise TypeError(f"not a message of groups: {message!r}")


class Meeting(Extension):
    """Keeps what members exchange while they join, in the process that forms the group."""

    name = "supervision.meeting"

    def start(self) -> None:
        """Begin without a group."""
        self._keys: dict[int, dict[str, bytes]] = {}
        self._waiting: dict[int, dict[str, asyncio.Future[None]]] = {}

    def ask(self, owner: Proc, generation: int, operation: str, key: str, value: bytes) -> bytes:
        """Ask the process that forms the group; from any thread."""
        asked = self.call(owner, _Ask(generation, operation, key, value), timeout=_JOIN_S)
        return result_of(asked).item()  # type: ignore[no-any-return]

    async def receive(self, message: Any, sender: Proc) -> bytes | None:
        """Answer a member, or, for this very process, begin and end."""
        match message:
            case _Ask(generation, operation, key, value):
                if generation not in self._keys:
                    raise MeshError(
                        "the group was given up while it was joined: one of its processes has died"
                    )
                if operation == "get":
                    await self._wait(generation, key)
                return self._do(generation, operation, key, value)
            case _Open(generation):
                self._keys[generation], self._waiting[generation] = {}, {}
                return None
            case _Abort(generation):
                self._keys.pop(generation, None)
                for each in self._waiting.pop(generation, {}).values():
                    if not each.done():
                        each.set_exception(MeshError("the group was given up while it was joined"))
                        each.exception()
                return None
        raise TypeError(f"not a message of a meeting: {message!r}")

    async def _wait(self, generation: int, key: str) -> None:
        if key not in self._keys[generation]:
            waiting = self._waiting[generation]
            if key not in waiting:
                waiting[key] = asyncio.get_running_loop().create_future()
            await asyncio.shield(waiting[key])

    def _do(self, generation: int, operation: str, key: str, value: bytes) -> bytes:
        keys = self._keys[generation]
        if operation == "check":
            return b"1" if key in keys else b""
        if operation == "delete":
            return b"1" if keys.pop(key, None) is not None else b""
        if operation == "get":
            return keys[key]
        if operation == "add":
            value = str(int(keys.get(key, b"0")) + int(value)).encode()
        elif operation == "compare":
            expected, _, wanted = value.partition(b"\0")
            if keys.get(key, b"") != expected:
                return keys.get(key, expected)
            value = wanted
        keys[key] = value
        waiting = self._waiting[generation].pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        return value


class Aborts(Extension):
    """Makes a process leave its group: separate from :class:`Groups`, which may be waiting for others."""

    name = "supervision.aborts"

    def receive(self, message: Any, sender: Proc) -> Any:
        """Leave."""
        groups = find(Groups)
        if groups is None:
            return 0
        count = groups.group.abort(message.generation)
        if isinstance(message, _GiveUp) and in_collective():
            # Its connections are gone, and nothing will ever wake it.
            sys.stderr.write(
                "mesh: this process cannot leave a collective of a group that was given up, and is ended\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return count


class Group:
    """A process group over a mesh, in the process that formed it; see :func:`form_group`."""

    def __init__(self, groups: Groups, aborts: Aborts, meeting: Meeting, seconds: float) -> None:
        self._groups = groups
        self._aborts = aborts
        self._meeting = meeting
        self._seconds = seconds
        self.generation = 0
        """The number by which it was formed last, from 1."""
        self.is_broken = False
        """Whether one of its processes has died since it was formed."""
        self._members: tuple[Proc, ...] = ()
        self._watch: Watch | None = None

    def form(self, procs: ProcMesh) -> None:
        """Form the group with these processes: the same as before, replacements for the dead, or fewer."""
        if self._watch is not None:
            self._watch.cancel()
        groups, here = self._groups, current_proc()
        asked = groups.call(procs, _Who(), timeout=_JOIN_S)
        if self.is_broken and wait([asked], timeout=_STUCK_S)[1]:
            # It may still connect to one that has just died, and gloo has no other way out of that.
            for proc in self._members:
                self.give_up(proc)
        members = tuple(proc for _, proc in result_of(asked).items())
        self._close_meeting()
        self.generation = generation = groups.next_generation()
        result_of(self._meeting.call(here, _Open(generation), timeout=_JOIN_S))
        self._members, self.is_broken = members, False
        self._watch = watch(procs, lambda end: self._on_end(end, generation))
        is_local = len({proc.host for proc in members}) == 1
        addresses = tuple(proc.address for proc in members)
        names = tuple(map(str, members))
        join = _Join(generation, addresses, names, here, self._seconds, is_local)
        result_of(groups.call(procs, join, timeout=2 * _JOIN_S))
        if self.is_broken:
            raise MeshError("a process has died while its group was formed")

    def _close_meeting(self) -> None:
        self._meeting.tell(current_proc(), _Abort(self.generation))

    def _on_end(self, end: ProcEnd, generation: int) -> None:
        if generation == self.generation:
            self.is_broken = True
            if end.failure is not None:
                self.abort(but=end.address)
            else:
                # It was stopped, as all of them may be, and the script as well: nobody is joining.
                self._leave(but=end.address)

    def abort(self, but: tuple[int, int, int] | None = None) -> None:
        """Make all members leave the group: whatever waits in a collective raises (GRP-1). It can be formed again."""
        self.is_broken = True
        self._close_meeting()
        self._leave(but)

    def _leave(self, but: tuple[int, int, int] | None) -> None:
        for proc in self._members:
            if proc.address != but:
                self._aborts.tell(proc, _Abort(self.generation))

    def give_up(self, proc: Proc) -> None:
        """End a process that is still in a collective of it, some time after :meth:`abort`."""
        self._aborts.tell(proc, _GiveUp(self.generation))

    @property
    def members(self) -> tuple[Proc, ...]:
        """The processes of the group, in rank order."""
        return self._members

    def close(self) -> None:
        """Stop watching it."""
        if self._watch is not None:
            self._watch.cancel()


def form_group(mesh: Any, *, timeout: float = _TIMEOUT_S) -> Group:
    """Make the processes of a mesh the default process group of ``torch.distributed`` (gloo), in rank order.

    When one of them dies, the others leave the group at once: whatever waits in a collective raises. :func:`heal_mesh` forms the group
    again. Use it instead of ``init_process_group``. Without PyTorch in the processes it raises ``ImportError``.

    Args:
        mesh: processes, or actors whose processes were spawned here. Form the group before you spawn the actors if their
            constructors use it.
        timeout: the number of seconds that a collective may take.
    """
    procs = mesh if isinstance(mesh, ProcMesh) else procs_of(mesh)
    groups = find(Groups) or install(Groups)
    aborts, meeting = find(Aborts) or install(Aborts), find(Meeting) or install(Meeting)
    collectives = find(Collectives) or install(Collectives)
    for each in (meeting, aborts, collectives, groups):
        result_of(each.install_on(procs))
    with groups.lock:
        before = groups.formed.get(procs)
        group = groups.formed[procs] = Group(groups, aborts, meeting, timeout)
    if before is not None:
        before.close()
    group.form(procs)
    return group


def group_of(procs: ProcMesh) -> Group | None:
    """Return the group that this process has formed of these processes."""
    groups = find(Groups)
    return None if groups is None else groups.formed.get(procs)
