"""What a sender hears whose receiver lags behind: errors that name it, and say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mesh_core._common.context import current_instance
from mesh_core._common.errors import ActorTimeout, MailboxFull

if TYPE_CHECKING:
    from mesh_core._meshes.outcomes import Addressee

Place = tuple[int, int, int]
"""Bytes under way, how many may be, and those of the message that has no room."""


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
        f"{name} lags behind: {queued:,} bytes that were sent to it are not handled, {window:,} may be, "
        f"and the message has {size:,}"
    ), where


def refusal(
    who: Addressee | Literal["channel", "stream"] | None, actor: int, index: int, place: Place, how: str
) -> MailboxFull | None:
    """Say why a message has to be refused; ``None`` if its sender may wait.

    ``how`` is ``"refuse"`` if the sender asked for that, and else where it would wait: on the thread of the ``"loop"``
    that the receiver needs, on some other ``"thread"`` of the receiver's process, or there for a ``"port"``. Nobody may
    wait who would keep the receiver from working: that loop, an actor for itself, and a thread that receives itself,
    perhaps.
    """
    if how == "thread":
        me = current_instance()
        if me is None or me.actor_id != actor:
            return None
    said, where = _said(who, index, place)
    if how == "refuse":
        said += "; it was not sent, since block=False. Try again later, or send less at a time"
    elif how == "loop":
        said += (
            "; it was not sent, since waiting here would stop the event loop that this process's actors run on, and with "
            "it the receiver. Await the calls that are under way before sending more"
        )
    elif how == "port":
        said += (
            "; it was not sent, since this process receives there itself, perhaps in this very thread. Receive what has come "
            "before sending more, or send in a coroutine, which can await it"
        )
    else:
        said += "; it was not sent, since an actor that waits for itself waits forever. Send less at a time"
    return MailboxFull(said, budget=place[1], **where)  # type: ignore[arg-type]  # by name


def unsent(who: Addressee | Literal["channel", "stream"] | None, index: int, place: Place) -> ActorTimeout:
    """Say that a call's deadline came before there was room for its message."""
    said, where = _said(who, index, place)
    return ActorTimeout(f"{said}; it was not sent within its deadline", **where)  # type: ignore[arg-type]  # by name


def crowded(
    who: Addressee | Literal["channel", "stream"] | None, index: int, place: Place, waiting: int, budget: int
) -> MailboxFull:
    """Say that a coroutine has sent more than can wait in this process."""
    said, where = _said(who, index, place)
    said += (
        f"; {waiting:,} bytes wait in this process to be sent, and link_budget lets {budget:,} wait. It was not sent, since "
        "nothing may block the event loop. Await the call or the broadcast before sending more"
    )
    return MailboxFull(said, budget=budget, **where)  # type: ignore[arg-type]  # by name


def not_spawned(waiting: int, budget: int) -> MailboxFull:
    """Say that a coroutine spawns faster than processes take what their actors are made of."""
    return MailboxFull(
        f"cannot spawn: {waiting:,} bytes of arguments wait in this process for processes that do not read them, and "
        f"link_budget lets {budget:,} wait. Nothing may block the event loop; await the `initialized` of what was spawned "
        "before spawning more",
        budget=budget,
    )
