"""Turn outcomes of calls into values and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mesh_core._common.codes import MessageKind, Undelivered
from mesh_core._common.errors import (
    AuthenticationError,
    MeshError,
    NotBegun,
    ReplyDropped,
    SpawnError,
    Stopped,
    SupervisionError,
    Undeliverable,
)
from mesh_core._futures.future import Future, not_here
from mesh_core._native import Lost, Message, Point, locate, seat
from mesh_core._serialize import explain_load_failure

if TYPE_CHECKING:
    from mesh_core._geometry.location import Location
    from mesh_core._native import Call, Region
    from mesh_core._process.process import Process

# Constants, because they are compared for each answer and looking up an enum member takes time.
_UNDELIVERABLE: Final = MessageKind.UNDELIVERABLE


class Addressee:
    """Who was asked, for error messages: an actor mesh (or a mesh of processes), and the part of it that was meant."""

    __slots__ = ("location", "mesh", "name", "root", "view")

    def __init__(self, name: str, location: Location, root: Region, view: Region, mesh: Any) -> None:
        self.name = name
        self.location = location
        self.root = root
        self.view = view
        self.mesh = mesh

    def host(self, index: int) -> str:
        """Return the name of an addressee's host."""
        rank = self.view.rank_at(index)
        if self.mesh is None:
            return self.location.name_of(rank)
        return self.location.name_now(self.mesh._process.runtime, self.mesh._procs_id, rank)

    def point(self, index: int) -> Point:
        """Return the place of an addressee in the whole mesh."""
        return self.root.point_of(self.view.rank_at(index))


def stopping(process: Process, call: Call, what: str) -> Future[None]:
    """Return the future of a stop. When it is done, everything that was printed has been shown too."""
    return Future(process, call, lambda _: process.flush_console(), lambda: what)


def load(message: Message) -> Any:
    """Return what a successful reply carries."""
    try:
        return message.load()
    except (MemoryError, MeshError):
        raise
    except Exception as error:
        raise explain_load_failure(error) from error


def error_of(outcome: Message | Lost | None, index: int, who: Addressee) -> BaseException | None:
    """Return the error that an outcome stands for; ``None`` if it carries a value."""
    if outcome is None:
        return not_here()
    if isinstance(outcome, Lost):
        return _lost(outcome, index, who)
    if outcome.kind is _UNDELIVERABLE:
        return _undelivered(outcome, index, who)
    if outcome.is_error:
        from mesh_core._serialize.exceptions import ActorError, decode_exception

        data, buffers = outcome.raw()
        error = decode_exception(data, buffers, point=who.point(index))
        if isinstance(error, Undeliverable) and (stopped := _stopped_by_policy(who)) is not None:
            return stopped
        if outcome.is_dead and isinstance(error, ActorError) and hasattr(who.mesh, "_actor_id"):
            # This call reports it, as does the spawn; not by setattr(), which the original's type may define.
            error.__dict__["_deaths"] = ((*outcome.src[:2], who.mesh._actor_id),)
            if who.mesh._ready is not None:
                who.mesh._ready.unseen()
        return error
    return None


def value_of(outcome: Message | Lost | None, index: int, who: Addressee) -> Any:
    """Return the value that an outcome carries, or raise the error it stands for."""
    error = error_of(outcome, index, who)
    if error is not None:
        raise error
    return load(outcome)  # type: ignore[arg-type]  # an outcome without an error is a message


def _undelivered(outcome: Message, index: int, who: Addressee) -> MeshError:
    why, said = outcome.undelivered() or (Undelivered.UNKNOWN, "its report cannot be read")
    if why in (Undelivered.PORT_DROPPED, Undelivered.PORT_HANDED_ON):
        return _unanswered(index, who, handed_on=why is Undelivered.PORT_HANDED_ON)
    rank = who.point(index).rank
    if why is Undelivered.NO_ROOM:
        return _dropped(outcome, index, rank, who)
    if (stopped := _stopped_by_policy(who)) is not None:
        return stopped
    return _CAME_BACK_AS.get(why, Undeliverable)(
        f"the message to actor {who.name!r} on rank {rank} came back: {said}; {_remedy(who, index)}",
        actor=who.name,
        rank=rank,
        host=who.host(index),
        reason=said,
    )


_CAME_BACK_AS: Final[dict[Undelivered, type[Undeliverable]]] = {
    Undelivered.NOT_BEGUN: NotBegun,
    Undelivered.NO_ACTOR: Stopped,
    Undelivered.ACTOR_STOPPED: Stopped,
}


def _dropped(outcome: Message, index: int, rank: int, who: Addressee) -> ReplyDropped:
    from mesh_core._common.current import current

    size = outcome.dropped_bytes()
    budget = current().settings.reply_bytes
    return ReplyDropped(
        f"the reply of actor {who.name!r} on rank {rank} was dropped: it has {size:,} bytes, and together with other unread "
        f"replies it would exceed the {budget:,} bytes that this process may hold. Read results before calling again, "
        "send large ones in parts (a stream, a channel), or raise reply_budget",
        actor=who.name,
        rank=rank,
        host=who.host(index),
        size=size,
    )


def _stopped_by_policy(who: Addressee) -> SupervisionError | None:
    """Return the failure for which a policy stopped the mesh, if one did: every call says why, not only the first."""
    if who.mesh is None:
        return None
    failure = who.mesh._process.supervision.stopped_for(who.mesh)
    return None if failure is None else SupervisionError(failure=failure)


def _remedy(who: Addressee, index: int) -> str:
    if not _was_respawned(who, index):
        return "spawn the actor again"
    making = getattr(who.mesh, "_making", None)
    if making is not None and making.holding is not None and making.holding.policy is not None:
        return "its process was respawned, and the actors' policy is about to restart it: call again"
    return "its process was respawned; call respawn() on the actors' mesh in the process that spawned it, or give the actors a policy"


def _was_respawned(who: Addressee, index: int) -> bool:
    mesh = who.mesh
    if mesh is None:
        return False
    runtime = mesh._process.runtime
    at = locate(runtime, *who.location.addr(mesh._procs_id, who.view.rank_at(index)))
    return seat(runtime, *at)[2] > 0


def _unanswered(index: int, who: Addressee, *, handed_on: bool) -> MeshError:
    from mesh_core._serialize.exceptions import ActorError

    point = who.point(index)
    who_let_go = "everyone who was passed it dropped" if handed_on else "the endpoint dropped"
    return ActorError(
        f"{who_let_go} the port of this call without an answer; send one, or an exception",
        actor=who.name,
        rank=point.rank,
        point=point,
        host=who.host(index),
    )


def _deserted(lost: Lost, holder: tuple[int, int, int, str], point: Point, who: Addressee) -> MeshError:
    from mesh_core._failures.failure import of_loss

    procs_id, rank, host, name = holder
    _, rank, _ = seat(who.mesh._process.runtime, procs_id, rank, host)
    asked = f"actor {who.name!r} on rank {point.rank} passed the port of this call"
    called = _host_name(host, who)
    if lost.orderly:
        actor = f"actor {name!r}" if name else "an actor"
        return Undeliverable(
            f"{asked} to {actor} on rank {rank}, host {called}, whose process was stopped before it answered; "
            "nobody else has the port, so call again",
            actor=who.name,
            rank=point.rank,
            reason=lost.reason,
        )
    failure = of_loss(lost, None, name=name, host=called, point=None, rank=rank)
    return SupervisionError(
        f"{asked} to a process that died before answering: {failure.report()}\nnobody else has the port, "
        "so call again",
        failure=failure,
    )


def _host_name(host: int, who: Addressee) -> str:
    from mesh_core._common.current import current
    from mesh_core._native import host_name

    process = current()
    if host == process.runtime.me[2]:
        return process.identity.host
    return who.location.names.get(host) or host_name(process.runtime, host) or f"host {host}"


def _lost(lost: Lost, index: int, who: Addressee) -> MeshError:
    point = who.point(index)
    if lost.holder is not None:
        return _deserted(lost, lost.holder, point, who)
    if lost.never_ran:
        return SpawnError(
            f"the process of rank {point.rank} of {who.name!r} could not be started: {lost.reason}",
            stderr_tail="\n".join(lost.stderr_tail),
        )
    from mesh_core._failures.failure import OF_HOSTS

    if lost.orderly:
        if (stopped := _stopped_by_policy(who)) is not None:
            return stopped
        # A process that was asked to stop closes its connection, which is not the reason. The processes
        # of a released host were stopped for that host's reason.
        telling = lost.pid is None or lost.kind in OF_HOSTS
        why = (lost.reason if telling else "") or "its process was stopped"
        return Stopped(
            f"{who.name!r} on rank {point.rank} cannot be reached: {why}; spawn it again",
            actor=who.name,
            rank=point.rank,
            host=who.host(index),
            reason=why,
        )
    from mesh_core._common.codes import FailureKind
    from mesh_core._failures.failure import error_of as raised_for
    from mesh_core._failures.failure import of_loss

    if who.mesh is not None:
        who.mesh._process.supervision.explained.wait(lost)
    failure = of_loss(lost, who.mesh, name=who.name, host=who.host(index), point=point, rank=point.rank)
    if who.mesh is not None:
        failure = who.mesh._process.supervision.with_reasons(failure, who.mesh)
    died = raised_for(failure)
    if failure.kind is FailureKind.BOOTSTRAP_FAILED:
        died.__cause__ = _bootstrap_error(who.mesh)
    return died


def _bootstrap_error(mesh: Any) -> BaseException | None:
    """Return what the bootstrap of a mesh's processes raised, if they were spawned here."""
    ready = mesh._process.boots.get(mesh._procs_id)
    return ready.exception() if ready is not None and ready.done() else None


def all_up(call: Call, who: Addressee) -> None:
    """Raise the error of the first process that did not start."""
    outcomes = call.outcomes()
    for index, outcome in enumerate(outcomes):
        error = error_of(outcome, index, who)
        if isinstance(outcome, Lost) and not outcome.orderly:
            if not isinstance(error, SpawnError | AuthenticationError):
                said = SpawnError(
                    f"a process of {who.name!r} died while it started: {error}",
                    host=who.host(index),
                    pid=outcome.pid,
                    exitcode=outcome.exitcode,
                    signal=outcome.signal,
                    stderr_tail="\n".join(outcome.stderr_tail),
                )
                said.__cause__ = error
                error = said
            # Whoever gets this error has been notified of all processes that died then (SUP-1).
            assert isinstance(error, MeshError)  # a loss is one of those
            error._deaths = tuple((*other.process, 0) for other in outcomes if isinstance(other, Lost))
        if error is not None:
            raise error
