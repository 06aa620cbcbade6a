"""Scripts that come and go in a job that outlives them.

The job's controller is a process that runs no user script: it admits scripts, one at a time, as processes of its host that
connect by themselves (``mesh-runtime/src/runtime/guests.rs``). A script spawns, calls and is notified of failures as usual; what
it spawned stays when it ends. It therefore records each spawn with the controller beforehand, by a message on the same link.

GST-3: a new script finds everything that others spawned outside of actors and did not stop. It is told once of each death that
happened while there was no script, and not again of those that an earlier script was told of.
GST-4: what actors in a script's own process spawned ends with that process.
GST-5: a new script can respawn, grow and shrink what it finds: the record of a spawn contains what that takes, as bytes that the
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
    from mesh_core._native import Completion, Message
    from mesh_core._process.process import Process

Making = tuple[bytes, list[bytes]]
"""A pickled object and its buffers; only scripts unpickle them."""
_LONGEST = 64 << 20
"""Constructor arguments of more bytes than this are not kept for later scripts."""
_MISSED = 1000
"""How many failures of actors are kept for the next script."""


@dataclass
class _Thing:
    """A mesh that a script spawned, as the controller knows it. The controller unpickles nothing of the user's."""

    name: str
    procs_id: int
    actor_id: int
    """0 for a mesh of processes."""
    owner: int
    """The actor in the script's process that spawned it; 0 for the script itself."""
    location: Location
    root: Region
    reference: bytes
    making: Making | str
    """What is needed to respawn its processes or actors, or why that is not known."""
    dead: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    """Processes of the mesh that ended, and of which a script was told."""
    untold: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    """Processes that ended while there was no script."""

    def target(self) -> Target:
        """Return the mesh as the target of messages."""
        return self.location.target(self.procs_id, self.root)


class Guests:
    """At the controller: which script is there, and what scripts have spawned."""

    def __init__(self, job: str) -> None:
        process = self._process = current()
        if process.identity.mesh_id != 0:
            raise MeshError("only the controller of a job can admit scripts")
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
        """Admit a script: the process ``pid``, which connected ``link``. Return what it has to be told.

        An earlier script has no part in the job from then on. ``hosts`` are meshes of hosts, with the name of each host.
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
        """Pickle a mesh of hosts for a script, with these names even if the hosts have not reported their names yet."""
        numbers = hosts._numbers
        known = dict(zip(numbers, names, strict=True))
        location = hosts._location
        if isinstance(location, ListedLocation):
            named: Location = ListedLocation(numbers, known)
        else:
            named = Location(location.placement, known)
        return dumps(type(hosts)(self._process, hosts._view, hosts._name, named))[0]

    def traits(self, hosts: Sequence[int]) -> bytes:
        """Return what these hosts, given by number, reported about themselves, pickled for a script."""
        return dumps(introduced(self._process, hosts))[0]

    def flush(self) -> None:
        """Show everything that processes have printed so far."""
        self._process.flush_console()

    async def shown(self, procs: list[tuple[int, int, int]], limit: float) -> None:
        """Wait until what these processes have printed so far is shown, at most ``limit`` seconds."""
        waiting = self._process.runtime.catch_up(procs, limit)
        if waiting is not None:
            await self._process.bridge().wait(waiting, heed=False)

    def dismiss(self) -> None:
        """End the current script's part in the job, if there is a script."""
        with self._lock:
            if self._is_there:
                self._left()
                dismiss(self._process.runtime, self._number)

    def _left(self) -> None:
        """Note that the script left, and end what actors in its process spawned (GST-4)."""
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
        """Record that a script is about to spawn something, or has stopped it."""
        what = message.load()
        with self._lock:
            if isinstance(what, _Thing):
                key = what.procs_id, what.actor_id
                if (before := self._things.get(key)) is not None:
                    # It was repaired or resized.
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
        """Record that a process has ended."""
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
        """Forget a mesh once nothing is left of it and a script was told."""
        runtime = self._process.runtime
        lost = {gone[:2] for gone in thing.dead if locate(runtime, gone[0], gone[1], 0)[:2] == gone[2]}
        if len(lost) >= len(thing.root):
            del self._things[key]

    def _fails(self, failure: MeshFailure) -> None:
        """Handle a failure for which only a script is responsible."""
        with self._lock:
            if not self._is_there:
                self._missed.append(failure)
                return
        self._process.supervision.pass_on(_SCRIPT, failure)


_SCRIPT = ((GUEST_MESHES, 0, 0), 0)


class Joined:
    """A script's part in a job that outlives it: the job's hosts, and what other scripts left there."""

    def __init__(self, process: Process, hosts: Mapping[str, HostMesh]) -> None:
        self._process = process
        self.hosts = dict(hosts)
        self.procs: dict[str, ProcMesh] = {}
        """Meshes of processes by name; of several with one name, the last that was spawned."""
        self.actors: dict[str, ActorMesh[Any]] = {}
        """The same for meshes of actors."""

    @property
    def is_lost(self) -> bool:
        """Whether another script has taken over the job, or the job has ended."""
        return has_lost_job(self._process.runtime)

    def read(self, hosts: bytes) -> HostMesh:
        """Read a mesh of hosts that the controller sent."""
        mesh: HostMesh = loads(hosts)
        self.hosts[f"{mesh._name}+{len(self.hosts)}"] = mesh
        return mesh

    def follow(self, hosts: HostMesh, attached: concurrent.futures.Future[Any]) -> None:
        """Complete ``hosts.initialized`` with the outcome of ``attached``."""
        promise: Promise[None] = Promise()
        hosts._ready = promise.future

        def done(_: object) -> None:
            error = attached.exception()
            # There may be nobody left to tell.
            with contextlib.suppress(MeshError):
                if error is None:
                    promise.set_result(None)
                else:
                    promise.set_exception(SpawnError(str(error)))

        attached.add_done_callback(done)

    def place(self, host: str, address: str) -> None:
        """Note the address of a host, given by name."""
        for mesh in self.hosts.values():
            for number, name in zip(mesh._numbers, mesh.names, strict=True):
                if name == host:
                    self._process.told_addresses = {**self._process.told_addresses, number: address}

    def on_traits(self, ask: Callable[[Sequence[int]], bytes]) -> None:
        """Set the function that gets the result of :meth:`Guests.traits` from the controller."""
        self._process.ask_traits = lambda numbers: loads(ask(numbers))

    def on_flush(self, flush: Callable[[], object]) -> None:
        """Set the function that shows what processes have printed: called when some have stopped, and before this script leaves."""
        self._process.hooks.flush.append(flush)

    def on_output(
        self, ask: Callable[[list[tuple[int, int, int]], float], concurrent.futures.Future[Any]]
    ) -> None:
        """Set the function that asks the controller for :meth:`Guests.shown`, whose answer comes after the output itself.

        From then on, what an endpoint has printed appears before its result does.
        """
        process = self._process
        asked: concurrent.futures.Future[Any] | None = None

        def shown(procs: list[tuple[int, int, int]], limit: float) -> Completion | None:
            nonlocal asked
            if asked is not None and not asked.done():
                # Somebody waits already, or has waited in vain: nobody waits again before output is shown.
                return None
            done = process.runtime.completion()
            try:
                asked = ask(procs, limit)
            except MeshError:
                return None
            asked.add_done_callback(lambda _: done.set(None, False, 0))
            return done

        process.ask_shown, process.shows_output = shown, True

    def leave(self) -> None:
        """Leave the job. What was spawned stays; actors of this process end. Mesh can be used here again afterwards."""
        if self._process.in_charge:
            self._process.shutdown()

    # Reports of spawns to the controller.

    def _record(self, owner: int, mesh: Any, actor_id: int) -> None:
        if is_guest_mesh(mesh._procs_id):
            # It lives in this process, and ends with it.
            return
        thing = _Thing(
            mesh._name,
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
        (self.actors if actor_id else self.procs)[mesh._name] = mesh

    def _tell(self, what: object) -> None:
        target = Target.one(0, 0, Placement.on(0))
        self._process.runtime.sender(target, 0, Control.RECORD, Request.EXTENSION, False).tell(what)

    def _take_over(
        self, things: list[tuple[bytes, int, list[tuple[int, int, tuple[int, int]]], Making | str]]
    ) -> None:
        """Own what other scripts left (GST-3), and be able to respawn it (GST-5)."""
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
    """Return what another script needs to respawn processes or actors, or why it cannot be had."""
    what = (mesh._making.spawned, dict(mesh._making.lives)) if actor_id else mesh._recipe.saved()
    try:
        data, buffers = dumps(what)
    except Exception as error:  # noqa: BLE001 - the spawn itself still succeeds
        return f"the arguments that the script spawned it with cannot be kept for another script: {error}"
    size = len(data) + sum(each.nbytes for each in buffers)
    if size > _LONGEST:
        return f"the script spawned it with arguments of {size} bytes; at most {_LONGEST} are kept for another script"
    return data, [bytes(each) for each in buffers]


def _restore(mesh: Any, holding: Holding, making: Making | str, procs: dict[int, ProcMesh]) -> None:
    """Make a mesh that another script spawned repairable by its methods, like this script's own."""
    from mesh_core._meshes.spawning import Recipe

    process = mesh._process
    if isinstance(making, str):
        raise MeshError(making)
    data, buffers = making
    # Writable, like the buffers of messages.
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
    """Return where the ranks of a mesh are now."""
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
    # Only now: references belong to the process that unpickles them.
    joined = Joined(process, {name: loads(raw) for name, raw in what["hosts"].items()})
    joined._take_over(what["things"])
    process.hooks.recording.append(joined._record)
    process.owners.dropped = joined._dropped
    return joined


def check_free() -> None:
    """Refuse if this process already takes part in a job."""
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
