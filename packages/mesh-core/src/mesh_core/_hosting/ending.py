"""How an actor ends: its running endpoints are cancelled, then what it owns ends, then it cleans up.

Each of the three may take ``stop_timeout``, as may a constructor that is unfinished when the actor is stopped. What takes longer is
abandoned and reported to whoever stopped the actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from mesh_core._common import context
from mesh_core._common.codes import MessageKind
from mesh_core._common.errors import MeshError, Stopped
from mesh_core._failures.returns import NOT_BEGUN
from mesh_core._hosting.cell_state import ENDING, OVER

if TYPE_CHECKING:
    import concurrent.futures

    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._native import Message

_ALL = 1_000_000


# A stop, on the loop.


async def stop_on_loop(cell: ActorCell, message: Message, behind: list[Message]) -> None:
    """End an actor without a thread."""
    error: BaseException | None = None
    try:
        cell.advance(ENDING)
        if cell.downfall is not None:
            await asyncio.wrap_future(cell.downfall)
        error = await _end_endpoints(cell)
        await _close_owned_meshes(cell)
        cleanup = _cleanup(cell, None)
        if cleanup is not None:
            await _in_time(cell, cleanup)
    except BaseException as failed:  # noqa: BLE001 - reported to the stopper
        error = failed
    _ended(cell, message, behind, error)


async def _end_endpoints(cell: ActorCell) -> MeshError | None:
    """Cancel the endpoints that are running; their callers are told that they will not return."""
    if await cell.on_loop.interrupt(cell.actor_host.stop_limit):
        return None
    stuck = [message for _, message in cell.on_loop.running.values()]
    for message in stuck:
        if message.call:
            cell.stopped(message)
    names = ", ".join(sorted({message.name for message in stuck})) or "an endpoint"
    return MeshError(f"{names} of {cell.describe()} was cancelled and did not end within {_limit(cell)}")


async def _close_owned_meshes(cell: ActorCell) -> None:
    owned_meshes = cell.actor_host.process.owners.leave(cell.instance.actor_id)
    if owned_meshes is not None:
        await owned_meshes.close_async(cell.actor_host.stop_limit)


def _cleanup(cell: ActorCell, error: BaseException | None) -> Coroutine[Any, Any, object] | None:
    """Run ``__cleanup__`` if there is one; return its coroutine, if it is one, for the caller to await."""
    cleanup = getattr(cell.object, "__cleanup__", None)
    if cleanup is None:
        return None
    context.enter((cell.instance, None))
    done = cleanup(error)
    return done if asyncio.iscoroutine(done) else None


async def _in_time(cell: ActorCell, cleanup: Coroutine[Any, Any, object]) -> None:
    limit = asyncio.timeout(cell.actor_host.stop_limit)
    try:
        async with limit:
            await cleanup
    except TimeoutError:
        if limit.expired():
            raise _overdue(cell) from None
        raise


def _limit(cell: ActorCell) -> str:
    return f"{cell.actor_host.stop_limit:g} s; it was abandoned (the limit is the setting stop_timeout)"


def _overdue(cell: ActorCell, what: str = "__cleanup__") -> MeshError:
    return MeshError(f"the {what} of {cell.describe()} did not end within {_limit(cell)}")


# A stop, on the actor's thread.


def stop_on_thread(cell: ActorCell, message: Message, behind: list[Message]) -> None:
    """End an actor that has a thread; runs on that thread."""
    error: BaseException | None = None
    loop = cell.loop
    overdue = asyncio.Event()
    try:
        cell.advance(ENDING)
        if cell.downfall is not None:
            with cell.actor_host.failing:
                cell.leave_errands()
            cell.run_errands()
            _await_here(cell, cell.downfall)
        if cell.on_loop.busy:
            # The loop keeps the limit.
            error = asyncio.run_coroutine_threadsafe(_end_endpoints(cell), loop).result()
        watch = _watch(cell, message, behind, overdue)
        loop.call_soon_threadsafe(lambda: loop.keep(loop.create_task(watch)))
        owned_meshes = cell.actor_host.process.owners.leave(cell.instance.actor_id)
        if owned_meshes is not None:
            owned_meshes.close(cell.actor_host.stop_limit)
        cleanup = _cleanup(cell, None)
        if cleanup is not None:
            failed = _await_here(cell, asyncio.run_coroutine_threadsafe(_guarded(cleanup), loop))
            if failed is not None:
                raise failed
    except BaseException as failed:  # noqa: BLE001 - reported to the stopper
        error = failed
    loop.call_soon_threadsafe(overdue.set)
    _ended(cell, message, behind, error)


async def _watch(cell: ActorCell, message: Message, behind: list[Message], ended: asyncio.Event) -> None:
    """Answer the stopper if the actor's thread does not end."""
    try:
        await asyncio.wait_for(ended.wait(), 2 * cell.actor_host.stop_limit)
    except TimeoutError:
        _ended(cell, message, behind, _overdue(cell))


def _await_here(cell: ActorCell, ending: concurrent.futures.Future[Any]) -> Any:
    """Wait, on the actor's thread and within the limit, for what the loop does at the actor's end."""
    try:
        return ending.result(cell.actor_host.stop_limit)
    except TimeoutError:
        if ending.done():
            raise
        ending.cancel()
        raise _overdue(cell) from None


async def _guarded(cleanup: Coroutine[Any, Any, object]) -> BaseException | None:
    """Await a clean-up; return what it raises, even what would end the loop."""
    try:
        await cleanup
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        return error
    return None


# A failure.


async def tear_down(cell: ActorCell, error: BaseException) -> None:
    """Finish a failed actor: what it owns ends, then ``__cleanup__`` runs."""
    try:
        overdue = await _end_endpoints(cell)
        await _close_owned_meshes(cell)
        cleanup = await _cleanup_apart(cell, error)
        if cleanup is not None:
            await _in_time(cell, cleanup)
        if overdue is not None:
            logging.getLogger("mesh").error("%s", overdue)
    except BaseException:
        logging.getLogger("mesh").exception("the __cleanup__ of %s raised", cell.describe())
    cell.object = None
    cell.actor_host.process.actor_ended(cell)


async def _cleanup_apart(cell: ActorCell, error: BaseException) -> Coroutine[Any, Any, object] | None:
    """Run ``__cleanup__`` after a failure; if the actor's thread does not come back, the loop takes its place."""

    def clean_up() -> Any:
        try:
            return _cleanup(cell, error)
        except BaseException as raised:  # noqa: BLE001 - some would end the loop, if a task raised them
            return raised

    done = cell.loop.create_task(cell.between_messages(clean_up))
    cell.loop.keep(done)
    finished, _ = await asyncio.wait([done], timeout=cell.actor_host.stop_limit)
    if finished:
        cleanup: Coroutine[Any, Any, object] | BaseException | None = done.result()
        if isinstance(cleanup, BaseException):
            raise cleanup
        return cleanup
    if cell.on_thread is not None and not cell.threadless:
        cell.on_loop.take_over()
    raise _overdue(cell)


# A constructor that does not return.


def hurry(cell: ActorCell) -> None:
    """Give the constructor of a stopped actor ``stop_timeout`` from now on."""
    actor_host = cell.actor_host

    def give_up() -> None:
        actor_host.loop.keep(actor_host.loop.create_task(_give_up(cell)))

    actor_host.loop.call_later(actor_host.stop_limit, give_up)


async def _give_up(cell: ActorCell) -> None:
    with cell.actor_host.failing:
        if not cell.give_up():
            return
    error = _overdue(cell, "constructor")
    spawned = cell.take_spawn()
    if spawned is not None:
        never = Stopped(f"{cell.describe()} was stopped before its constructor had returned")
        cell.actor_host.reply_error(spawned, never, cell.instance.name, dead=True)
    cell.inbox.leave_to_loop()
    _leave(cell, cell.inbox.take_nowait(_ALL), error, made=False)
    await _close_owned_meshes(cell)


def clean_up_late(cell: ActorCell, made: Any) -> None:
    """Clean up an object whose constructor returned after its actor was given up."""
    cell.object = made
    try:
        cleanup = _cleanup(cell, None)
        if cleanup is not None:
            asyncio.run_coroutine_threadsafe(_guarded(cleanup), cell.loop)
    except BaseException:
        logging.getLogger("mesh").exception("the __cleanup__ of %s raised", cell.describe())
    cell.object = None


# The last step.


def _ended(cell: ActorCell, stop: Message, behind: list[Message], error: BaseException | None) -> None:
    with cell.actor_host.failing:
        if not cell.advance(OVER):
            return
    cell.object = None
    if error is not None:
        cell.tell_raised("__cleanup__", error)
    _leave(cell, [stop, *behind], error)


def _leave(
    cell: ActorCell, waiting: list[Message], error: BaseException | None, *, made: bool = True
) -> None:
    """Answer what the actor has taken and will not handle; whoever stopped it gets the error, if there is one."""
    from mesh_core._futures.loop import settle

    actor_host = cell.actor_host
    for _, answer in cell.errands:
        answer.get_loop().call_soon_threadsafe(settle, answer, None, None)
    cell.inbox.close()
    if made and cell.downfall is None:
        # Before the answers: whoever stopped it may ask an extension next. After a failure, the tear-down has told them.
        try:
            actor_host.process.actor_ended(cell)
        except RuntimeError:
            # No thread can be started for an extension. The stop is answered all the same.
            logging.getLogger("mesh").exception("extensions were not told of the end of %s", cell.describe())
    for message in waiting:
        if message.kind is not MessageKind.STOP_ACTOR:
            if message.call:
                behind = f"{cell.describe()} stopped before it came to this message"
                cell.refuse(message, Stopped(behind, reason=NOT_BEGUN))
        elif error is not None:
            cell.refuse(message, error)
        elif message.call:
            message.reply(None)
    actor_host.loop.call_soon_threadsafe(actor_host.forget, cell)
