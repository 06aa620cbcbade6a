"""Meshes of actors."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mesh_core._actors.actor import GIVING_WAY
from mesh_core._common.codes import Request
from mesh_core._common.context import current_instance
from mesh_core._common.current import current
from mesh_core._common.errors import MeshError
from mesh_core._common.suggestions import did_you_mean
from mesh_core._futures.future import Future
from mesh_core._geometry.mesh import Kind, Mesh, describe
from mesh_core._meshes.adverbs import Endpoint, ItemsEndpoint, addressee
from mesh_core._meshes.handle import MeshHandle
from mesh_core._meshes.outcomes import Addressee, value_of
from mesh_core._native import Point, Region, Slice, known_moves, learn_moves

if TYPE_CHECKING:
    from mesh_core._actors.endpoint import Arity, Interface
    from mesh_core._actors.reducers import Reducer
    from mesh_core._failures.owned_meshes import Making
    from mesh_core._geometry.location import Location
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._meshes.repair import Moves, Ranks
    from mesh_core._native import Call
    from mesh_core._process.process import Process

T = TypeVar("T")


class ActorMesh(Mesh, Generic[T]):
    """References to actors, one on each process of a mesh; returned by :meth:`ProcMesh.spawn`.

    Its attributes are the actors' endpoints, and what :class:`MeshHandle` has unless an endpoint has the same name. Sent to another process, it arrives as the same references, which own nothing.
    """

    _kind = Kind.ACTORS
    _process: Process
    _interface: Interface
    _name: str
    _location: Location
    _procs_id: int
    _actor_id: int
    _root: Region
    _ready: Future[None] | None
    _making: Making | None
    _owner: tuple[int, int, int] | None

    def __init__(
        self,
        process: Process,
        interface: Interface,
        *,
        name: str,
        location: Location,
        procs_id: int,
        actor_id: int,
        root: Region,
        view: Region,
        ready: Future[None] | None = None,
        making: Making | None = None,
        owner: tuple[int, int, int] | None = None,
    ) -> None:
        # Bypasses __setattr__, which is for users.
        self.__dict__.update(
            _process=process,
            _interface=interface,
            _name=name,
            _location=location,
            _procs_id=procs_id,
            _actor_id=actor_id,
            _root=root,
            _view=view,
            _ready=ready,
            _making=making,
            _owner=owner,
        )

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            if not name.startswith("_"):
                raise AttributeError(
                    f"cannot set {name!r} on {self!r}: it is a reference, and an actor's fields can be "
                    f"set only by the actor; give {self._interface.class_name} an endpoint that sets it",
                    name=name,
                    obj=self,
                )
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Endpoint[..., Any]:
        interface = self.__dict__.get("_interface")
        if interface is None:
            raise AttributeError(name)
        arity = interface.endpoints.get(name)
        if arity is None and name in GIVING_WAY:
            handle: Any = self._itself
            return handle if name == "mesh" else getattr(handle, name)  # type: ignore[no-any-return]
        if arity is None and name in interface.plain:
            from mesh_core._meshes.send import NotAnEndpoint

            return NotAnEndpoint(self, name)  # type: ignore[return-value]  # using it raises, with advice
        if arity is None:
            known = sorted(interface.endpoints)
            raise AttributeError(
                f"actor {self._name!r} ({interface.class_name}) has no endpoint {name!r}"
                f"{did_you_mean(name, known) or '.'} Its endpoints (methods marked @endpoint): {', '.join(known) or 'none'}",
                name=name,
                obj=self,
            )
        endpoint = self._endpoint(name, arity)
        # Cached, so that the next look-up does not get here.
        self.__dict__[name] = endpoint
        return endpoint

    def _endpoint(self, name: str, arity: Arity) -> Endpoint[..., Any]:
        """Return an endpoint of these actors."""
        if arity.on_restart != "fail" and self._owner is not None:
            from mesh_core._meshes.lasting import LastingEndpoint

            return LastingEndpoint(self, name, arity)
        return (ItemsEndpoint if arity.streams else Endpoint)(self, name, arity)

    def _combining(self, *args: Any, reduce: Reducer) -> Any:
        """Return an endpoint whose replies are combined."""
        from mesh_core._meshes.reduce import ReducedEndpoint

        return ReducedEndpoint(self, *args, reduce=reduce)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *GIVING_WAY, *self._interface.endpoints})

    @property
    def _itself(self) -> MeshHandle:
        return MeshHandle(self)

    def _with_region(self, region: Region) -> ActorMesh[T]:
        told = self._told(region)
        return ActorMesh(self._process, self._interface, **told, ready=self._ready, making=self._making)

    def _told(self, view: Region) -> dict[str, Any]:
        """Return what a reference consists of, except for the process that holds it."""
        told = {
            "name": self._name,
            "location": self._location,
            "procs_id": self._procs_id,
            "actor_id": self._actor_id,
            "root": self._root,
            "view": view,
        }
        if self._owner is not None:
            # The process that knows whether the actors are respawned; few references need it.
            told["owner"] = self._owner
        return told

    def _addressee(self) -> Addressee:
        return addressee(self)

    def _at(self, index: int) -> ActorMesh[T]:
        return self._with_region(Region([], Slice(self._view.rank_at(index), [], [])))

    def __iter__(self) -> Iterator[tuple[Point, ActorMesh[T]]]:
        extent = self._view.extent
        for index in range(len(self._view)):
            yield Point(index, extent), self._at(index)

    @property
    def initialized(self) -> Future[None]:
        """Done when every actor's constructor has returned; raises what a constructor raised."""
        if self._ready is None:
            # Not an AttributeError: Python would then look up an endpoint of that name.
            raise MeshError(
                f"this is a reference to {self._name!r} that came from another process; only the process "
                "that spawned the actors is notified of their construction"
            )
        return self._ready

    def __await__(self) -> Generator[Any, None, ActorMesh[T]]:
        yield from self.initialized.__await__()
        return self

    def _places(self, ranks: Ranks) -> list[int]:
        """Resolve ``ranks`` to places; ``None`` means all failed ones."""
        from mesh_core._meshes.repair import places_of

        return places_of(self, ranks)

    def _ended(self) -> list[int]:
        """Return the places whose processes ended, as far as this process knows."""
        from mesh_core._meshes.repair import lost_places

        return lost_places(self)

    def _lost(self) -> list[int]:
        from mesh_core._meshes.repair import other_lives

        lost = set(self._ended())
        if self._making is not None:
            gone = other_lives(self, self._making)
            if (holding := self._making.holding) is not None:
                gone = gone | holding.lost | holding.failed
            if gone:
                lost.update(place for place, rank in enumerate(self._view) if rank in gone)
        return sorted(lost)

    def stop(self, reason: str = "") -> Future[None]:
        """Stop the actors, after they have handled earlier messages. Their processes keep running."""
        if len(self._view) == len(self._root):
            if self._making is not None:
                self._making.end()
            self._process.owners.drop(self._actor_id, self._procs_id)
        elif (making := self._making) is not None and making.holding is not None and making.holding.returns:
            making.holding.returns.stopped(self._root.position(rank) or 0 for rank in self._view)
        return self._stop(reason)

    def _stop(self, reason: str = "") -> Future[None]:
        """Stop the actors, which may be respawned later."""
        target = self._location.target(self._procs_id, self._view)
        call = self._process.runtime.sender(target, self._actor_id, "", Request.STOP_ACTOR).call(reason)
        who = self._addressee()

        def finish(call: Call) -> None:
            for index, outcome in enumerate(call.outcomes()):
                # An actor that has already ended counts as stopped.
                if getattr(outcome, "is_error", False):
                    value_of(outcome, index, who)

        return Future(self._process, call, finish, lambda: f"the stop of {self._name}")

    def __reduce__(self) -> Any:
        moves = known_moves(self._process.runtime, self._procs_id)
        return _revive, (self._interface, self._told(self._view), moves)

    def __repr__(self) -> str:
        return f"<ActorMesh {self._name!r} of {self._interface.class_name}: {describe(self._view)}>"

    def _repr_html_(self) -> str:
        from mesh_core._common.display import Table, listed

        known = sorted(self._interface.endpoints.items())
        table = listed(
            Table(["endpoint", ""]), len(known), lambda index: (known[index][0], known[index][1].text)
        )
        return table.html(f"{self!r} on {self._location.called(self._view)}")


def reference_to(process: Process, cell: ActorCell, cls: type) -> ActorMesh[Any]:
    """Return a reference to an actor of this process, for whomever it is sent to."""
    from mesh_core._actors.endpoint import Interface, table_of

    me, instance = process.identity, cell.instance
    single = Region([], Slice(me.rank, [], []))
    # Of the mesh that the actor was spawned on, only the shape is known here.
    root = me.region if me.region.extent == instance.rank.extent else single
    return ActorMesh(
        process,
        Interface(cls.__qualname__, {name: spec.arity for name, spec in table_of(cls).items()}, cls),
        name=instance.name,
        location=me.location,
        procs_id=me.mesh_id,
        actor_id=instance.actor_id,
        root=root,
        view=single,
    )


def reference_of(process: Process, actor: object) -> ActorMesh[Any] | None:
    """Return a reference to the actor whose object this is; ``None`` if it is a plain object."""
    actor_host = process._actor_host
    if actor_host is None:
        return None
    cls, me = type(actor), current_instance()
    for cell in list(actor_host.actors.values()):
        # While an actor is being constructed, its object is not known yet.
        born = cell.object is None and cell.instance is me and cell._cls is cls
        if cell.object is actor or born:
            return reference_to(process, cell, cls)
    return None


def _revive(interface: Interface, told: dict[str, Any], moves: Moves | None) -> ActorMesh[Any]:
    process = current()
    if moves is not None:
        learn_moves(process.runtime, told["procs_id"], *moves)
    return ActorMesh(process, interface, **told)
