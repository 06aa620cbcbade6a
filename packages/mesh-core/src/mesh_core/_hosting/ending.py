"""How an actor ends: what runs is cancelled, then what it owns ends, then it cleans up.

Each of the three has ``stop_timeout``, as has a constructor that a stop finds unfinished; what takes longer is left to
itself and reported to whoever stopped the actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from mesh_core._common import context
from mesh_core._common.codes import MessageKind
from mesh_core._common.context import Context
from mesh_core._common.errors import MeshError, Undeliverable
from mesh_core._failures.returns import NOT_BEGUN

if TYPE_CHECKING:
    import concurrent.futures

    from mesh_core._hosting.actor_cell import Hosted
    from mesh_core._native import Message

_ALL = 1_000_000


# A stop, on the loop.


async def stop_on_loop(hosted: Hosted, message: Message, behind: list[Message]) -> None:
    """End an actor without a thread."""
    error: BaseException | None = None
    try:
        hosted.ending = True
        if hosted.downfall is not None:
            await asyncio.wrap_future(hosted.downfall)
        error = await _end_endpoints(hosted)
        await _close_estate(hosted)
        cleanup = _cleanup(hosted, None)
        if cleanup is not None:
            await _in_time(hosted, cleanup)
    except BaseException as failed:  # noqa: BLE001 - it is the stopper's to hear
        error = failed
    _ended(hosted, message, behind, error)


async def _end_endpoints(hosted: Hosted) -> MeshError | None:
    """Cancel the endpoints that run beside the end; their callers hear that they will not return."""
    if await hosted.on_loop.interrupt(hosted.stage.stop_limit):
        return None
    stuck = [message for _, message in hosted.on_loop.running.values()]
    for message in stuck:
        if message.call:
            hosted.stopped(message)
    names = ", ".join(sorted({message.name for message in stuck})) or "an endpoint"
    return MeshError(f"{names} of {hosted.describe()} was cancelled and did not end within {_limit(hosted)}")


async def _close_estate(hosted: Hosted) -> None:
    estate = hosted.stage.process.estates.leave(hosted.instance.actor_id)
    if estate is not None:
        await estate.close_async(hosted.stage.stop_limit)


def _cleanup(hosted: Hosted, error: BaseException | None) -> Coroutine[Any, Any, object] | None:
    """Run ``__cleanup__`` if there is one; a coroutine is returned to be awaited."""
    cleanup = getattr(hosted.object, "__cleanup__", None)
    if cleanup is None:
        return None
    context.enter(Context(hosted.instance, None))
    done = cleanup(error)
    return done if asyncio.iscoroutine(done) else None


async def _in_time(hosted: Hosted, cleanup: Coroutine[Any, Any, object]) -> None:
    limit = asyncio.timeout(hosted.stage.stop_limit)
    try:
        async with limit:
            await cleanup
    except TimeoutError:
        if limit.expired():
            raise _overdue(hosted) from None
        raise


def _limit(hosted: Hosted) -> str:
    return f"{hosted.stage.stop_limit:g} s; it is left to itself (stop_timeout in the settings is the limit)"


def _overdue(hosted: Hosted, what: str = "__cleanup__") -> MeshError:
    return MeshError(f"the {what} of {hosted.describe()} has not come to an end within {_limit(hosted)}")


# A stop, on the actor's thread.


def stop_on_thread(hosted: Hosted, message: Message, behind: list[Message]) -> None:
    """End an actor that has a thread, on which this runs."""
    error: BaseException | None = None
    loop = hosted.stage.loop
    overdue = asyncio.Event()
    try:
        hosted.ending = True
        if hosted.downfall is not None:
            with hosted.stage.failing:
                # From here on errands run on the loop: this thread waits.
                hosted.threadless = True
            hosted.run_errands()
            _await_here(hosted, hosted.downfall)
        if hosted.on_loop.busy:
            # The loop keeps to the limit.
            error = asyncio.run_coroutine_threadsafe(_end_endpoints(hosted), loop).result()
        watch = _watch(hosted, message, behind, overdue)
        loop.call_soon_threadsafe(lambda: hosted.stage.keep(loop.create_task(watch)))
        estate = hosted.stage.process.estates.leave(hosted.instance.actor_id)
        if estate is not None:
            estate.close(hosted.stage.stop_limit)
        cleanup = _cleanup(hosted, None)
        if cleanup is not None:
            failed = _await_here(hosted, asyncio.run_coroutine_threadsafe(_guarded(cleanup), loop))
            if failed is not None:
                raise failed
    except BaseException as failed:  # noqa: BLE001 - it is the stopper's to hear
        error = failed
    loop.call_soon_threadsafe(overdue.set)
    _ended(hosted, message, behind, error)


async def _watch(hosted: Hosted, message: Message, behind: list[Message], ended: asyncio.Event) -> None:
    """Answer the stopper if the actor's thread does not come to an end."""
    try:
        await asyncio.wait_for(ended.wait(), 2 * hosted.stage.stop_limit)
    except TimeoutError:
        _ended(hosted, message, behind, _overdue(hosted))


def _await_here(hosted: Hosted, ending: concurrent.futures.Future[Any]) -> Any:
    """Wait on the actor's thread for what the loop does for its end, within the limit."""
    try:
        return ending.result(hosted.stage.stop_limit)
    except TimeoutError:
        if ending.done():
            raise
        ending.cancel()
        raise _overdue(hosted) from None


async def _guarded(cleanup: Coroutine[Any, Any, object]) -> BaseException | None:
    """Await it; what it raises, even what would end the loop, is returned."""
    try:
        await cleanup
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        return error
    return None


# A failure.


async def tear_down(hosted: Hosted, error: BaseException) -> None:
    """What follows a failure: what the actor owns ends, then ``__cleanup__`` runs."""
    try:
        overdue = await _end_endpoints(hosted)
        await _close_estate(hosted)
        cleanup = await _cleanup_apart(hosted, error)
        if cleanup is not None:
            await _in_time(hosted, cleanup)
        if overdue is not None:
            logging.getLogger("mesh").error("%s", overdue)
    except BaseException:
        logging.getLogger("mesh").exception("the __cleanup__ of %s raised", hosted.describe())
    hosted.object = None
    hosted.stage.process.actor_ended(hosted)


async def _cleanup_apart(hosted: Hosted, error: BaseException) -> Coroutine[Any, Any, object] | None:
    """Run ``__cleanup__`` after a failure; should the actor's thread not come back, the loop answers in its place."""

    def clean_up() -> Any:
        try:
            return _cleanup(hosted, error)
        except BaseException as raised:  # noqa: BLE001 - some would end the loop, if a task raised them
            return raised

    done = hosted.stage.loop.create_task(hosted.between_messages(clean_up))
    hosted.stage.keep(done)
    finished, _ = await asyncio.wait([done], timeout=hosted.stage.stop_limit)
    if finished:
        cleanup: Coroutine[Any, Any, object] | BaseException | None = done.result()
        if isinstance(cleanup, BaseException):
            raise cleanup
        return cleanup
    if hosted.on_thread is not None and not hosted.threadless:
        hosted.on_loop.take_over()
    raise _overdue(hosted)


# A constructor that does not return.


def hurry(hosted: Hosted) -> None:
    """A stop has come for an actor that is not constructed yet: it has ``stop_timeout`` for that from now on."""
    stage = hosted.stage

    def give_up() -> None:
        stage.keep(stage.loop.create_task(_give_up(hosted)))

    stage.loop.call_later(stage.stop_limit, give_up)


async def _give_up(hosted: Hosted) -> None:
    with hosted.stage.failing:
        if hosted.made or hosted.over:
            return
        hosted.over = hosted.ending = True
    error = _overdue(hosted, "constructor")
    spawned = hosted.take_spawn()
    if spawned is not None:
        never = Undeliverable(f"{hosted.describe()} was stopped before its constructor had returned")
        hosted.stage.reply_error(spawned, never, hosted.instance.name, dead=True)
    _leave(hosted, hosted.inbox.take_nowait(_ALL), error)
    await _close_estate(hosted)


def clean_up_late(hosted: Hosted, made: Any) -> None:
    """A constructor has returned after its actor was given up: what it has made is cleaned up all the same."""
    hosted.object = made
    try:
        cleanup = _cleanup(hosted, None)
        if cleanup is not None:
            asyncio.run_coroutine_threadsafe(_guarded(cleanup), hosted.stage.loop)
    except BaseException:
        logging.getLogger("mesh").exception("the __cleanup__ of %s raised", hosted.describe())
    hosted.object = None


# The last step.


def _ended(hosted: Hosted, stop: Message, behind: list[Message], error: BaseException | None) -> None:
    with hosted.stage.failing:
        if hosted.over:
            return
        hosted.over = True
    hosted.object = None
    if error is not None:
        hosted.tell_raised("__cleanup__", error)
    _leave(hosted, [stop, *behind], error)


def _leave(hosted: Hosted, waiting: list[Message], error: BaseException | None) -> None:
    """Answer what the actor has taken and will not come to; those who stopped it hear the error, if there is one."""
    from mesh_core._futures.loop import settle

    stage = hosted.stage
    for _, answer in hosted.errands:
        stage.loop.call_soon_threadsafe(settle, answer, None, None)
    hosted.inbox.close()
    if hosted.made and hosted.downfall is None:
        # Before the answers: who has stopped it may ask an extension next. Of a failure it was told by the tear-down.
        try:
            stage.process.actor_ended(hosted)
        except RuntimeError:
            # No thread can be started for one of them. The stop is answered all the same.
            logging.getLogger("mesh").exception(
                "extensions were not told of the end of %s", hosted.describe()
            )
    for message in waiting:
        if message.kind is not MessageKind.STOP_ACTOR:
            if message.call:
                behind = f"{hosted.describe()} stopped before it came to this message"
                hosted.refuse(message, Undeliverable(behind, reason=NOT_BEGUN))
        elif error is not None:
            hosted.refuse(message, error)
        elif message.call:
            message.reply(None)
    stage.loop.call_soon_threadsafe(stage.forget, hosted)
