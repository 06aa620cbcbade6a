"""Errors for senders whose receiver lags behind: they name the receiver and say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mesh_core._common.context import current_instance
from mesh_core._common.errors import ActorTimeout, MailboxFull

if TYPE_CHECKING:
    from mesh_core._meshes.outcomes import Addressee

Place = tuple[int, int, int]
"""Bytes that were sent and not handled, how many are allowed, and the size of the message that has no room."""


def _said(
    who: Addressee | Literal["channel", "stream"] | None, index: int, place: Place
) -> tuple[str, dict[str, object]]:
    queued, window, size = place
    where: dict[str, object] = {}
    name = "an actor"
    if who == "channel":
        name = "the receiver of a channel"
    elif who == "stream":
        name = "the caller that reads this stream"
    elif who is not None:
        rank = who.point(index).rank
        name = f"actor {who.name!r} on rank {rank}"
        where = {"actor": who.name, "rank": rank, "host": who.host(index)}
    return (
        f"{name} lags behind: {queued:,} bytes that were sent to it are not handled, {window:,} are allowed, "
        f"and the message has {size:,}"
    ), where


def refusal(
    who: Addressee | Literal["channel", "stream"] | None, actor: int, index: int, place: Place, how: str
) -> MailboxFull | None:
    """Return the error of a message that must be refused; ``None`` if its sender may wait.

    ``how`` is ``"refuse"`` if the sender asked for that. Otherwise it says where the sender would wait: on the thread of the
    ``"loop"`` that the receiver needs, on another ``"thread"`` of the receiver's process, or there for a ``"port"``. A wait is
    refused if it could keep the receiver from working: on that loop, if an actor would wait for itself, or on a thread that may
    itself be the one that receives.
    """
    if how == "thread":
        me = current_instance()
        if me is None or me.actor_id != actor:
            return None
    said, where = _said(who, index, place)
    if how == "refuse":
        said += "; it was not sent, because of block=False. Try again later, or send less at a time"
    elif how == "loop":
        said += (
            "; it was not sent, because waiting here would block the event loop that this process's actors run on, including "
            "the receiver. Await the calls in progress before sending more"
        )
    elif how == "port":
        said += (
            "; it was not sent, because this process also receives there, perhaps in this very thread. Receive what has come "
            "before sending more, or send in a coroutine and await it"
        )
    else:
        said += "; it was not sent, because an actor that waits for itself waits forever. Send less at a time"
    return MailboxFull(said, budget=place[1], **where)  # type: ignore[arg-type]  # by name


def unsent(who: Addressee | Literal["channel", "stream"] | None, index: int, place: Place) -> ActorTimeout:
    """Return the error of a call whose deadline passed before there was room for its message."""
    said, where = _said(who, index, place)
    return ActorTimeout(f"{said}; it was not sent within its deadline", **where)  # type: ignore[arg-type]  # by name


def crowded(
    who: Addressee | Literal["channel", "stream"] | None, index: int, place: Place, waiting: int, budget: int
) -> MailboxFull:
    """Return the error of a coroutine that has sent more than may wait in this process."""
    said, where = _said(who, index, place)
    said += (
        f"; {waiting:,} bytes wait in this process to be sent, and link_budget allows {budget:,}. It was not sent, because "
        "nothing may block the event loop. Await the call or the broadcast before sending more"
    )
    return MailboxFull(said, budget=budget, **where)  # type: ignore[arg-type]  # by name


def not_spawned(waiting: int, budget: int) -> MailboxFull:
    """Return the error of a coroutine that spawns faster than the processes read the arguments."""
    return MailboxFull(
        f"cannot spawn: {waiting:,} bytes of arguments wait in this process for processes that do not read them, and "
        f"link_budget allows {budget:,}. Nothing may block the event loop; await the `initialized` of what was spawned "
        "before spawning more",
        budget=budget,
    )
