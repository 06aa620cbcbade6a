"""Scripts that come and go in a job that outlives them.

The job's controller is a process that runs no script of a user's: it lets scripts in, one at a time, as processes of its host that
connect by themselves (``mesh-runtime/src/runtime/guests.rs``). A script spawns, calls and hears of failures as ever; what it has
spawned stays when it ends. For that it records each spawn with the controller, before it, by a message on the same link.

GST-3: a script that comes finds all that others have spawned outside of actors and not stopped. It is told of each death once that
happened while there was no script, and not again of those that an earlier one was told of.
GST-4: what actors in a script's own process have spawned ends with that process.
GST-5: a script that comes can respawn, grow and shrink what it finds: the record of a spawn has what that takes, as bytes that the
controller does not read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import Request
from mesh_core._common.control import Control
from mesh_core._common.current import current, holder
from mesh_core._common.errors import MeshError, SpawnError
from mesh_core._failures.owned_meshes import Holding
from mesh_core._failures.owned_meshes import Making as ActorMaking
from mesh_core._futures.promise import Promise
from mesh_core._geometry.location import ListedLocation, Location, is_guest_mesh
from mesh_core._meshes.host_traits import introduced
from mesh_core._native import (
    GUEST_MESHES,
    Extent,
    Placement,
    Region,
    Target,
    dismiss,
    has_lost_job,
    known_moves,
    let_in,
    locate,
)
from mesh_core._process.process import Identity, become_guest
from mesh_core._serialize import dumps, loads

if TYPE_CHECKING:
    import concurrent.futures
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from mesh_core._failures.failure import MeshFailure
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._native import Message
    from mesh_core._process.process import Process

Making = tuple[bytes, list[bytes]]
"""An object and its buffers, which only scripts read."""
_LONGEST = 64 << 20
"""Constructors' arguments of more bytes than this are not kept for later scripts."""
_MISSED = 1000
"""How many failures of actors are kept for the next script."""


@dataclass
class _Thing:
    """A mesh that a script has spawned, as the controller knows it. It reads nothing that is the user's own."""

    name: str
    procs_id: int
    actor_id: int
    """0 for a mesh of processes."""
    owner: int
    """Which actor of the script's process has spawned it; 0 for the script itself."""
    location: Location
    root: Region
    reference: bytes
    making: Making | str
    """What it takes to make its processes or actors again, or why that is not known."""
    dead: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    """Processes that were in it and have ended, of which a script was told."""
    untold: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    """Processes that ended while there was no script."""

    def target(self) -> Target:
        """Where it is."""
        return self.location.target(self.procs_id, self.root)


class Guests:
    """At the controller: who of the scripts is there, and what they have spawned."""

    def __init__(self, job: str) -> None:
        process = self._process = current()
        if process.identity.mesh_id != 0:
            raise MeshError("scripts are let into a job by its controller")
        self._job = job
        self._lock = threading.RLock()
        self._number = -1
        self._is_there = False
        self._things: dict[tuple[int, int], _Thing] = {}
        self._missed: deque[MeshFailure] = deque(maxlen=_MISSED)
        holder().fault_handler = self._fails
        process.hooks.recorded = self._record
        process.hooks.downs.append(self._down)
        for begin in process.hooks.spawning:
            begin()  # what processes print is shown here
        process.notices.start()

    def let_in(
        self, link: socket.socket, pid: int, hosts: Mapping[str, tuple[HostMesh, Sequence[str]]]
    ) -> bytes:
        """Take a script in: the process ``pid``, which has connected ``link``. Returns what it has to be told.

        One that was there before has no part in the job from here on. ``hosts`` are meshes of hosts, and what each is called.
        """
        process = self._process
        with self._lock:
            self.dismiss()
            number = self._number + 1
            seat, board = let_in(process.runtime, link.detach(), number, pid)
            self._number, self._is_there = number, True
            told = {
                "number": number,
                "seat": seat,
                "board": board,
                "job": (process.pid, self._job),
                "host": process.identity.host,
                "credentials": process.credentials,
                "addresses": process.addresses(),
                "hosts": {name: self.pack(*each) for name, each in hosts.items()},
                "things": [
                    (each.reference, each.actor_id, each.dead, each.making) for each in self._things.values()
                ],
            }
            missed = list(self._missed)
            self._missed.clear()
            for key, each in list(self._things.items()):
                # This script is told of all of these, so the next one is not.
                each.dead = each.dead + each.untold
                each.untold = []
                self._forget_dead(key, each)
        for failure in missed:
            process.supervision.pass_on(_SCRIPT, failure)
        return dumps(told)[0]

    def pack(self, hosts: HostMesh, names: Sequence[str]) -> bytes:
        """A mesh of hosts, for a script. They are called so also if they have not said that yet themselves."""
        numbers = hosts._numbers
        known = dict(zip(numbers, names, strict=True))
        location = hosts._location
        if isinstance(location, ListedLocation):
            named: Location = ListedLocation(numbers, known)
        else:
            named = Location(location.placement, known)
        return dumps(type(hosts)(self._process, hosts._view, hosts._name, named))[0]

    def traits(self, hosts: Sequence[int]) -> bytes:
        """What these hosts, by their numbers, have said of themselves, for a script."""
        return dumps(introduced(self._process, hosts))[0]

    def flush(self) -> None:
        """Show all that processes have printed so far."""
        self._process.flush_console()

    def dismiss(self) -> None:
        """End the part in the job of the script that is there, if one is."""
        with self._lock:
            if self._is_there:
                self._left()
                dismiss(self._process.runtime, self._number)

    def _left(self) -> None:
        """The script has gone; so do the things of actors in its process (GST-4)."""
        self._is_there = False
        runtime = self._process.runtime
        for key, each in list(self._things.items()):
            if each.owner == 0:
                continue
            del self._things[key]
            with contextlib.suppress(MeshError):
                if each.actor_id:
                    sender = runtime.sender(each.target(), each.actor_id, "", Request.STOP_ACTOR)
                    sender.call("")
                else:
                    runtime.stop_procs(each.target(), self._process.settings.stop_timeout)

    def _record(self, message: Message) -> None:
        """A script is about to spawn something, or has stopped it."""
        what = message.load()
        with self._lock:
            if isinstance(what, _Thing):
                key = what.procs_id, what.actor_id
                if (before := self._things.get(key)) is not None:
                    # It was repaired, or has another size.
                    what.dead, what.untold = before.dead, before.untold
                self._things[key] = what
                return
            thing, among = what
            for key, each in list(self._things.items()):
                if thing in (each.actor_id or each.procs_id, each.procs_id) and among in (
                    None,
                    each.procs_id,
                ):
                    del self._things[key]

    def _down(self, message: Message) -> None:
        """A process has ended."""
        down = message.down()
        if down is None:
            return
        procs_id, rank, lost, _ = down
        with self._lock:
            if lost.process == (GUEST_MESHES + self._number, 0) and self._is_there:
                self._left()
                return
            for key, each in list(self._things.items()):
                here = each.location.rank_of(each.procs_id, procs_id, rank)
                if here is None or here not in each.root:
                    continue
                told = self._is_there or lost.orderly
                (each.dead if told else each.untold).append((procs_id, rank, lost.process))
                self._forget_dead(key, each)

    def _forget_dead(self, key: tuple[int, int], thing: _Thing) -> None:
        """Forget a mesh of which nothing is left, once a script has been told."""
        runtime = self._process.runtime
        lost = {gone[:2] for gone in thing.dead if locate(runtime, gone[0], gone[1], 0)[:2] == gone[2]}
        if len(lost) >= len(thing.root):
            del self._things[key]

    def _fails(self, failure: MeshFailure) -> None:
        """A failure that only the script can answer for."""
        with self._lock:
            if not self._is_there:
                self._missed.append(failure)
                return
        self._process.supervision.pass_on(_SCRIPT, failure)


_SCRIPT = ((GUEST_MESHES, 0, 0), 0)


class Joined:
    """A script's part in a job that outlives it: the job's hosts, and what other scripts have left there."""

    def __init__(self, process: Process, hosts: Mapping[str, HostMesh]) -> None:
        self._process = process
        self.hosts = dict(hosts)
        self.procs: dict[str, ProcMesh] = {}
        """Meshes of processes by their names; of several of a name the last that was spawned."""
        self.actors: dict[str, ActorMesh[Any]] = {}
        """The same of actors."""

    @property
    def is_lost(self) -> bool:
        """Whether another script has taken the job over, or it has ended."""
        return has_lost_job(self._process.runtime)

    def read(self, hosts: bytes) -> HostMesh:
        """A mesh of hosts that the controller has sent."""
        mesh: HostMesh = loads(hosts)
        self.hosts[f"{mesh.name}+{len(self.hosts)}"] = mesh
        return mesh

    def follow(self, hosts: HostMesh, attached: concurrent.futures.Future[Any]) -> None:
        """Have ``hosts.initialized`` come out as that does."""
        promise: Promise[None] = Promise()
        hosts._ready = promise.future

        def done(_: object) -> None:
            error = attached.exception()
            # Nobody may be left who could be told.
            with contextlib.suppress(MeshError):
                if error is None:
                    promise.set_result(None)
                else:
                    promise.set_exception(SpawnError(str(error)))

        attached.add_done_callback(done)

    def place(self, host: str, address: str) -> None:
        """Note where a host is reached, by what it is called."""
        for mesh in self.hosts.values():
            for number, name in zip(mesh._numbers, mesh.names, strict=True):
                if name == host:
                    self._process.told_addresses = {**self._process.told_addresses, number: address}

    def on_traits(self, ask: Callable[[Sequence[int]], bytes]) -> None:
        """Have ``ask`` called for what :meth:`Guests.traits` says at the controller."""
        self._process.ask_traits = lambda numbers: loads(ask(numbers))

    def on_flush(self, flush: Callable[[], object]) -> None:
        """Have ``flush`` called to show what processes have printed: when some have stopped, and before this script leaves."""
        self._process.hooks.flush.append(flush)

    def leave(self) -> None:
        """Leave the job. What was spawned stays; actors of this process end. Mesh can be used again here afterwards."""
        if self._process.in_charge:
            self._process.shutdown()

    # What is spawned, for the controller to know.

    def _record(self, owner: int, mesh: Any, actor_id: int) -> None:
        if is_guest_mesh(mesh._procs_id):
            # It lives in this very process, and ends with it.
            return
        thing = _Thing(
            mesh.name,
            mesh._procs_id,
            actor_id,
            owner,
            mesh._location,
            mesh._root,
            dumps(mesh)[0] if owner == 0 else b"",
            _saved(mesh, actor_id) if owner == 0 else "",
        )
        self._tell(thing)
        if owner == 0:
            self._know(mesh, actor_id)

    def _dropped(self, thing: int, among: int | None) -> None:
        for name, procs in list(self.procs.items()):
            if thing == procs._procs_id and among in (None, procs._procs_id):
                del self.procs[name]
        for name, actors in list(self.actors.items()):
            if thing in (actors._actor_id, actors._procs_id) and among in (None, actors._procs_id):
                del self.actors[name]
        with contextlib.suppress(MeshError):
            self._tell((thing, among))

    def _know(self, mesh: Any, actor_id: int) -> None:
        (self.actors if actor_id else self.procs)[mesh.name] = mesh

    def _tell(self, what: object) -> None:
        target = Target.one(0, 0, Placement.on(0))
        self._process.runtime.sender(target, 0, Control.RECORD, Request.EXTENSION, False).tell(what)

    def _take_over(
        self, things: list[tuple[bytes, int, list[tuple[int, int, tuple[int, int]]], Making | str]]
    ) -> None:
        """Own what other scripts have left (GST-3), and be able to make it again (GST-5)."""
        process = self._process
        owned = process.owners.of(0)
        watched: list[Target] = []
        recipes: dict[int, ProcMesh] = {}
        for reference, actor_id, dead, making in things:
            mesh = loads(reference)
            holding = Holding(mesh, actor_id, None)
            for procs_id, rank, ended in dead:
                if (here := holding.place(procs_id, rank)) is not None:
                    holding.loses(ended, here, locate(process.runtime, procs_id, rank, 0)[:2] != ended)
            owned.add(holding)
            try:
                _restore(mesh, holding, making, recipes)
            except MeshError as error:
                process.cannot_make = {**process.cannot_make, (mesh._procs_id, actor_id): str(error)}
            self._know(mesh, actor_id)
            if actor_id == 0:
                watched += _now(process, mesh)
        process.notices.start()
        for target in watched:
            process.runtime.watch_procs(target)


def _saved(mesh: Any, actor_id: int) -> Making | str:
    """What another script needs to make processes or actors again, or why it has none of it."""
    what = (mesh._making.spawned, dict(mesh._making.lives)) if actor_id else mesh._recipe.saved()
    try:
        data, buffers = dumps(what)
    except Exception as error:  # noqa: BLE001 - nothing of the spawn itself fails for that
        return f"what the script has spawned it with cannot be kept for another script: {error}"
    size = len(data) + sum(each.nbytes for each in buffers)
    if size > _LONGEST:
        return f"the script has spawned it with arguments of {size} bytes, of which at most {_LONGEST} are kept for another script"
    return data, [bytes(each) for each in buffers]


def _restore(mesh: Any, holding: Holding, making: Making | str, procs: dict[int, ProcMesh]) -> None:
    """Have a mesh that another script has spawned be repaired by its methods, as this script's own are."""
    from mesh_core._meshes.spawning import Recipe

    process = mesh._process
    if isinstance(making, str):
        raise MeshError(making)
    data, buffers = making
    # Writable, as what is sent is.
    what = loads(data, [bytearray(each) for each in buffers])
    if holding.actor_id == 0:
        mesh._recipe = Recipe.restored(process, what, holding)
        procs[mesh._procs_id] = mesh
        return
    spawned, lives = what
    made = ActorMaking(spawned, 0, procs.get(mesh._procs_id))
    made.lives, made.holding = lives, holding
    mesh.__dict__["_making"] = made


def _now(process: Process, mesh: ProcMesh) -> list[Target]:
    """Where the ranks of a mesh are by now."""
    location, procs_id = mesh._location, mesh._procs_id
    if not location.is_joined and known_moves(process.runtime, procs_id) is None:
        return [location.target(procs_id, mesh._root)]
    places = (locate(process.runtime, *location.addr(procs_id, rank)) for rank in mesh._root)
    return [Target.one(procs, rank, Placement.on(host)) for procs, rank, host in places]


def join_job(link: socket.socket, told: bytes) -> Joined:
    """Make this process the script of a job that outlives it; ``link`` leads to its controller, which has :class:`Guests`."""
    what: dict[str, Any] = loads(told)
    at = holder()
    with at.lock:
        check_free()
        host = what["host"]
        identity = Identity(
            mesh_id=GUEST_MESHES,
            mesh_name="script",
            region=Region.whole(Extent([], [])),
            rank=0,
            host=host,
            host_no=0,
            location=Location.on(0, host),
        )
        board = os.open(what["board"], os.O_RDWR | os.O_CLOEXEC)
        process = become_guest(identity, what["number"], link=link.detach(), board=board, seat=what["seat"])
    process.job, process.credentials = what["job"], what["credentials"]
    process.told_addresses = what["addresses"]
    # Only now: references belong to the process that reads them.
    joined = Joined(process, {name: loads(raw) for name, raw in what["hosts"].items()})
    joined._take_over(what["things"])
    process.hooks.recording.append(joined._record)
    process.owners.dropped = joined._dropped
    return joined


def check_free() -> None:
    """Refuse where this process takes part in a job already."""
    process = holder().process
    if process is not None and not process.closed:
        raise MeshError(
            "this process uses Mesh already, and takes part in one job at a time: join before anything else is done with Mesh, or "
            "call shutdown() first, which ends what this process has spawned"
        )


def has_joined() -> bool:
    """Whether this process is the script of a job that outlives it."""
    process = holder().process
    return process is not None and not process.closed and process.identity.is_guest
