"""Ports: typed return addresses that can be sent anywhere, and the channels that they lead to.

A port is only an address: it keeps nothing alive. Values arrive in the order in which one sender sent
them, and in the order of arrival between senders. The runtime completes a ``recv()``; no Python thread listens.
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
    """Where a value can be sent: to a :class:`Channel`, or to the caller of an endpoint.

    Ports are small, picklable and own nothing; pass them on as arguments, keep them, send from any thread. What
    :meth:`send` promises: values of one sender arrive in the order sent, once each. A receiver that is closed, dropped,
    or whose process has ended makes ``send`` raise :class:`Undeliverable`: at once where this process knows; else the
    first value sent after the end is lost, its refusal comes back, and later sends raise.

    Values that nobody has asked for with ``recv()`` are bounded as an actor's messages are, by ``mailbox_budget``: beyond
    that a thread waits in ``send``, and a coroutine in awaiting what ``send`` returns. A thread of the receiver's own
    process gets :class:`MailboxFull` instead, as it may be the one that has to receive.
    """

    __slots__ = ("__weakref__", "_outlet", "_ranked")

    def __init__(self, outlet: Outlet, ranked: bool = False) -> None:
        self._outlet = outlet
        self._ranked = ranked

    def send(self, value: R) -> Sending:
        """Send a value to the receiver. What is returned may be awaited, until the value is on its way, or ignored.

        >>> from mesh_core import Channel
        >>> port, receiver = Channel[int].open()
        >>> sent = port.send(7)
        >>> receiver.recv().get(timeout=30)
        7
        """
        return _sending(self._outlet.send(value, current_place() if self._ranked else None))

    def exception(self, error: BaseException) -> Sending:
        """Send an exception: the receiver raises it as an :class:`ActorError` that is a ``type(error)`` as well."""
        return self._fail(error, self._ranked)

    def close(self) -> None:
        """End this rank's part of a ``stream``; only for the port of a call.

        A port that was given to an endpoint, and to nobody else, is closed when the last reference to it is gone.
        The port of a channel has other senders perhaps, and is closed by its receiver alone.
        """
        if not self._outlet.is_response:
            raise TypeError(
                "cannot close the port of a channel: it is closed at the other end, by PortReceiver.close()"
            )
        self._outlet.end()

    def _answer(self, value: R) -> Sending:
        # As a response: the place of who answers goes along. Who answers on a loop awaits it.
        return _sending(self._outlet.send(value, current_place(), True))

    def _item(self, value: R) -> Sending:
        # One of many, by who awaits each.
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
        # It does not change.
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


class PortReceiver(Closing, Generic[R]):
    """Where the values sent to a :class:`Port` arrive. It belongs to the process that opened it.

    Iterate over it (``for`` or ``async for``) until it is closed, or take one value at a time with :meth:`recv`. It is
    closed by :meth:`close`, by leaving its ``with`` block, and when nothing refers to it.
    """

    __slots__ = ("__weakref__", "_mailbox", "_ranked")

    def __init__(self, mailbox: Mailbox, ranked: bool = False) -> None:
        self._mailbox = mailbox
        self._ranked = ranked

    def recv(self) -> Future[R]:
        """Return a future of the next value; it raises :class:`ChannelClosed` once the channel is closed.

        Futures are served in the order in which they were made. A value whose future was given up, by a timeout, say,
        and is referred to no more, is the next one again: nothing is lost.
        """
        process = current()
        return Future(process, self._mailbox.receive(), self._finish, lambda: "a value from a channel")

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
        """The same channel, giving ``(point, value)``: the place of the actor that sent each value.

        Places come with what was sent to a port of :meth:`Channel.open_ranked`, and with what endpoints answer to the
        port of a :func:`send`; elsewhere, and where the sender is no actor, the place is ``None``.
        """
        return PortReceiver(self._mailbox, True)

    def close(self) -> None:
        """Close the channel: waiting ``recv()`` calls end, and senders are told that nobody receives."""
        self._mailbox.close()

    def __len__(self) -> int:
        """How many values have arrived and were not received."""
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
    """A way for values into this process: a :class:`Port` to give away, and a :class:`PortReceiver` to keep.

    >>> from mesh_core import Channel
    >>> port, receiver = Channel[str].open()
    >>> sent = port.send("one"), port.send("two")
    >>> receiver.recv().get(timeout=30), receiver.recv().get(timeout=30)
    ('one', 'two')
    """

    @staticmethod
    def open(once: bool = False) -> tuple[Port[R], PortReceiver[R]]:
        """Open a channel. With ``once`` the first value closes it; sending a second is an error at the sender."""
        mailbox = current().runtime.open_port(once)
        return Port(mailbox.outlet(once)), PortReceiver(mailbox)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[R], PortReceiver[tuple[Point | None, R]]]:
        """Open a channel whose receiver is told, with each value, the place of the actor that sent it.

        It is the place in the slice that the actor was messaged in, ``current_rank()``; ``None`` outside actors.

        >>> from mesh_core import Channel
        >>> port, receiver = Channel[str].open_ranked(once=True)
        >>> sent = port.send("from a script")
        >>> receiver.recv().get(timeout=30)
        (None, 'from a script')
        """
        mailbox = current().runtime.open_port(once)
        return Port(mailbox.outlet(once), True), PortReceiver(mailbox, True)
