"""Ports: typed return addresses that can be sent anywhere, and the channels they lead to.

A port is only an address: it keeps nothing alive. Values of one sender arrive in the order sent;
those of several senders in order of arrival. The runtime completes a ``recv()``; no Python thread listens.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mesh_core._common.closing import Closing
from mesh_core._common.context import current_place, parse_shape
from mesh_core._common.current import current
from mesh_core._common.errors import ChannelClosed, MeshError
from mesh_core._futures.future import Future
from mesh_core._futures.sending import SENT, Sending
from mesh_core._meshes.outcomes import load
from mesh_core._native import Lost, Point

if TYPE_CHECKING:
    from typing import Self

    from mesh_core._native import Call, Deferral, Mailbox, Message, Outlet

R = TypeVar("R")


class Port(Generic[R]):
    """An address to which values can be sent: that of a :class:`Channel`, or of the caller of an endpoint.

    Ports are small, picklable and own nothing; pass them as arguments, keep them, send from any thread. Values of
    one sender arrive in the order sent, once each. If the receiver is closed or dropped, or its process has
    ended, ``send`` raises :class:`Undeliverable`: at once if this process knows; otherwise the
    first value sent after the end is lost, its refusal comes back, and later sends raise.

    Values that nobody has asked for with ``recv()`` are limited by ``mailbox_budget``, like an actor's messages: beyond
    that, a thread waits in ``send``, and a coroutine when it awaits the result of ``send``. A thread of the receiver's own
    process gets :class:`MailboxFull` instead, because it may be the one that has to receive.
    """

    __slots__ = ("__weakref__", "_outlet", "_ranked")

    def __init__(self, outlet: Outlet, ranked: bool = False) -> None:
        self._outlet = outlet
        self._ranked = ranked

    def send(self, value: R) -> Sending:
        """Send a value to the receiver. The result can be awaited until the value is on its way, or ignored.

        >>> from mesh_core import Channel
        >>> port, receiver = Channel[int].open()
        >>> sent = port.send(7)
        >>> receiver.recv().get(timeout=30)
        7
        """
        return _sending(self._outlet.send(value, current_place() if self._ranked else None))

    def exception(self, error: BaseException) -> Sending:
        """Send an exception: the receiver raises it as an :class:`ActorError` that is also a ``type(error)``."""
        return self._fail(error, self._ranked)

    def close(self) -> None:
        """End this rank's part of a ``stream``; only for the port of a call.

        A port that was given to an endpoint, and to nobody else, is closed when the last reference to it is gone.
        The port of a channel may have other senders, and only its receiver can close it.
        """
        if not self._outlet.is_response:
            raise TypeError(
                "cannot close the port of a channel: it is closed at the other end, by PortReceiver.close()"
            )
        self._outlet.end()

    def _answer(self, value: R) -> Sending:
        # A response carries the place of its sender. A sender on an event loop awaits it.
        return _sending(self._outlet.send(value, current_place(), True))

    def _item(self, value: R) -> Sending:
        # One of many responses; the sender awaits each.
        return _sending(self._outlet.send(value, None, True))

    def _fail(self, error: BaseException, ranked: bool) -> Sending:
        from mesh_core._common.context import current_instance
        from mesh_core._serialize.exceptions import encode_exception

        me = current_instance()
        identity = current().identity
        data, buffers = encode_exception(
            error,
            actor=me.name if me is not None else "",
            rank=me.rank.rank if me is not None else None,
            point=me.rank if me is not None else None,
            host=identity.host,
            pid=os.getpid(),
        )
        return _sending(self._outlet.send_error(data, buffers, current_place() if ranked else None))

    def __copy__(self) -> Self:
        # It is immutable.
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return _revive, (self._outlet.hand_on(), self._ranked)

    def __repr__(self) -> str:
        what = "a call" if self._outlet.is_response else "a channel"
        return f"<Port of {what}{'' if self._outlet.is_open else ', closed'}>"


def _sending(deferral: Deferral | None) -> Sending:
    return SENT if deferral is None else Sending(current(), deferral, "a value for a port")


def _revive(address: tuple[Any, ...], ranked: bool) -> Port[Any]:
    return Port(current().runtime.outlet(address), ranked)


class _Next(Future[R]):
    """The next value of a channel."""

    __slots__ = ()

    _not_yet_done = "has not arrived"
    _goes_on = "the channel stays open"


class PortReceiver(Closing, Generic[R]):
    """The end at which values sent to a :class:`Port` arrive. It belongs to the process that opened it.

    Iterate over it (``for`` or ``async for``) until it is closed, or take one value at a time with :meth:`recv`. It is
    closed by :meth:`close`, at the end of its ``with`` block, and when nothing refers to it.
    """

    __slots__ = ("__weakref__", "_mailbox", "_ranked")

    def __init__(self, mailbox: Mailbox, ranked: bool = False) -> None:
        self._mailbox = mailbox
        self._ranked = ranked

    def recv(self) -> Future[R]:
        """Return a future of the next value; it raises :class:`ChannelClosed` once the channel is closed.

        Futures are served in the order in which they were made. If a future is given up, for example by a timeout, and
        dropped, its value goes to the next one: nothing is lost.
        """
        process = current()
        return _Next(process, self._mailbox.receive(), self._finish, lambda: "the next value of a channel")

    def _finish(self, call: Call) -> R:
        outcome = call.outcomes()[0]
        if outcome is None:
            raise ChannelClosed("the channel is closed; nothing more can be received from it")
        if isinstance(outcome, Lost):
            raise MeshError(f"nothing more can be received: {outcome.reason}")
        if outcome.is_error:
            from mesh_core._serialize.exceptions import decode_exception

            raise decode_exception(*outcome.raw())
        value: Any = load(outcome)
        return (_place(outcome), value) if self._ranked else value  # type: ignore[return-value]

    def ranked(self) -> PortReceiver[tuple[Point | None, R]]:
        """Return the same channel, giving ``(point, value)``: the place of the actor that sent each value.

        Places arrive with values sent to a port of :meth:`Channel.open_ranked`, and with what endpoints answer to the
        port of a :func:`send`. Otherwise, or if the sender is not an actor, the place is ``None``.
        """
        return PortReceiver(self._mailbox, True)

    def close(self) -> None:
        """Close the channel: waiting ``recv()`` calls end, and senders are notified that nobody receives."""
        self._mailbox.close()

    def __len__(self) -> int:
        """Return how many values have arrived and were not received."""
        return len(self._mailbox)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[R]:
        while True:
            try:
                value = self.recv().get()
            except ChannelClosed:
                if self._mailbox.is_over:
                    return
                raise
            yield value

    async def __aiter__(self) -> AsyncIterator[R]:
        while True:
            try:
                value = await self.recv()
            except ChannelClosed:
                if self._mailbox.is_over:
                    return
                raise
            yield value

    def __reduce__(self) -> Any:
        raise TypeError("a PortReceiver stays in the process that opened it; send the Port, and receive here")

    def __repr__(self) -> str:
        state = "closed" if self._mailbox.is_over else f"{len(self)} waiting"
        return f"<PortReceiver: {state}>"


def _place(message: Message) -> Point | None:
    return Point(message.index, parse_shape(message.shape)) if message.name else None


class Channel(Generic[R]):
    """A channel into this process: a :class:`Port` to give away, and a :class:`PortReceiver` to keep.

    >>> from mesh_core import Channel
    >>> port, receiver = Channel[str].open()
    >>> sent = port.send("one"), port.send("two")
    >>> receiver.recv().get(timeout=30), receiver.recv().get(timeout=30)
    ('one', 'two')
    """

    @staticmethod
    def open(once: bool = False) -> tuple[Port[R], PortReceiver[R]]:
        """Open a channel. With ``once``, the first value closes it; sending a second one raises at the sender."""
        mailbox = current().runtime.open_port(once)
        return Port(mailbox.outlet(once)), PortReceiver(mailbox)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[R], PortReceiver[tuple[Point | None, R]]]:
        """Open a channel whose receiver gets, with each value, the place of the actor that sent it.

        This is the place in the slice that was called, ``current_rank()``; ``None`` outside actors.

        >>> from mesh_core import Channel
        >>> port, receiver = Channel[str].open_ranked(once=True)
        >>> sent = port.send("from a script")
        >>> receiver.recv().get(timeout=30)
        (None, 'from a script')
        """
        mailbox = current().runtime.open_port(once)
        return Port(mailbox.outlet(once), True), PortReceiver(mailbox, True)
