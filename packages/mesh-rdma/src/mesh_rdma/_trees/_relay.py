"""A rank of a broadcast: reads from its parent, and tells those that read from it how far it has come.

TRE-3: a rank says that it has bytes after they are in its memory, and reports success after all are. While they come the memory is
filled by one broadcast only, and until the last read into it has ended.
TRE-4: each waits for an answer of the process that it depends on: a child for its parent's, a rank for its leader's, the
leader for the ranks'. The runtime ends these waits when that process ends, so that no death is waited for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mesh_rdma._buffer import handle_of
from mesh_rdma._errors import BufferGone, RDMAError
from mesh_rdma._here import own
from mesh_rdma._native import Memory
from mesh_rdma._trees._waiting import arrival, read
from mesh_rdma._trees._words import Linger, Lost, More, Orphan, Parent, Run

if TYPE_CHECKING:
    from mesh_core.extensions import Extension, Proc

CHUNK = 4 << 20
"""So many bytes are read at once, at most: those behind a rank begin when it has the first."""


class Relay:
    """One rank of a broadcast, in its process."""

    def __init__(self) -> None:
        self._have = 0
        self._over: Lost | None = None
        self._moved = asyncio.Event()

    async def beyond(self, than: int) -> int | Lost:
        """Wait for more bytes than ``than``; return how many there are, or why there will not be more."""
        while self._have <= than and self._over is None:
            await self._moved.wait()
        return self._have if self._have > than else self._over or self._have

    def _move(self, have: int, over: Lost | None = None) -> None:
        self._have, self._over = have, over
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def fill(self, told: Run, extension: Extension, leader: Proc, memory: Memory) -> Lost | None:
        """Get all bytes; return why not."""
        parent, size = told.parent, memory.nbytes
        while self._have < size:
            lost = await self._follow(parent, told, extension, memory)
            if lost is None:
                break
            said = await arrival(extension.call(leader, Orphan(told.key, parent.rank, lost)))
            answer: Parent | Lost = said.item()
            if isinstance(answer, Lost):
                return answer
            parent = answer
        return None

    async def _follow(self, parent: Parent, told: Run, extension: Extension, memory: Memory) -> Lost | None:
        """Read what a parent has, until all is here; or return why it cannot go on."""
        handle, size = handle_of(parent.buffer), memory.nbytes
        there = size if parent.proc is None else 0
        asking: asyncio.Task[int | Lost] | None = None
        try:
            while self._have < size:
                if there < size and asking is None:
                    asking = asyncio.create_task(_ask(extension, parent, told.key[0], max(there, self._have)))
                if there <= self._have:
                    assert asking is not None
                    answer = await asking
                    asking = None
                    if isinstance(answer, Lost):
                        return answer
                    there = answer
                    continue
                count = min(there - self._have, CHUNK)
                try:
                    await read(
                        handle.slice(self._have, count), memory.part(self._have, count), told.transport
                    )
                except RDMAError as error:
                    return Lost(str(error), isinstance(error, BufferGone))
                self._move(self._have + count)
                if asking is not None and asking.done() and isinstance(found := asking.result(), int):
                    there, asking = found, None
        finally:
            if asking is not None:
                asking.cancel()
        return None

    def have_all(self, memory: Memory) -> None:
        """All bytes are here: they were before."""
        self._move(memory.nbytes)

    def fail(self, lost: Lost) -> None:
        """There will not be more bytes than there are."""
        self._move(self._have, lost)


async def _ask(extension: Extension, parent: Parent, broadcast: str, than: int) -> int | Lost:
    assert parent.proc is not None
    try:
        said = await arrival(extension.call(parent.proc, More((broadcast, parent.rank), than)))
    except Exception as error:  # noqa: BLE001 - it is the parent's own
        return Lost(reason(error))
    answer: int | Lost = said.item()
    return answer


def reason(error: BaseException) -> str:
    """Say in one line what has happened."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class Relays:
    """All ranks of broadcasts that this process has just now."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self._relays: dict[tuple[str, int], Relay] = {}
        self._begun = asyncio.Event()
        """Set when another rank has begun: children may ask before the leader has told this process of it."""
        self._filling: list[Memory] = []
        self._lingering: set[asyncio.Task[None]] = set()

    async def more(self, asked: More) -> int | Lost:
        """Answer a child."""
        while (relay := self._relays.get(asked.key)) is None:
            await self._begun.wait()
        return await relay.beyond(asked.than)

    async def run(self, told: Run, leader: Proc) -> Lost | None:
        """Be a rank."""
        relay = self._relays[told.key] = Relay()
        begun, self._begun = self._begun, asyncio.Event()
        begun.set()
        working = asyncio.current_task()
        assert working is not None
        lingering = asyncio.create_task(self._linger(told, leader, working))
        self._lingering.add(lingering)
        lingering.add_done_callback(self._lingering.discard)
        lost: Lost | None = Lost("the broadcast was given up")
        try:
            lost = await self._fill(relay, told, leader)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the leader hears of it
            lost = Lost(reason(error))
        finally:
            if lost is not None:
                relay.fail(lost)
        return lost

    async def _fill(self, relay: Relay, told: Run, leader: Proc) -> Lost | None:
        target, source = handle_of(told.target), handle_of(told.source)
        memory = own(target)
        if source.realm == target.realm:
            if source.encode() == target.encode():
                relay.have_all(memory)
                return None
            if memory.overlaps(own(source)):
                return Lost("its memory and the source's overlap")
        if any(memory.overlaps(other) for other in self._filling):
            return Lost("its memory is being filled by another broadcast, or twice by this one")
        self._filling.append(memory)
        try:
            return await relay.fill(told, self._extension, leader, memory)
        finally:
            self._filling = [each for each in self._filling if each is not memory]

    async def _linger(self, told: Run, leader: Proc, working: asyncio.Task[object]) -> None:
        """Keep the rank for its children until the broadcast is over; if the leader has ended, it is over now."""
        try:
            await arrival(self._extension.call(leader, Linger(told.key[0])))
        except Exception:  # noqa: BLE001 - it has ended, however
            working.cancel()
        finally:
            relay = self._relays.pop(told.key, None)
            if relay is not None:
                relay.fail(Lost("the broadcast is over"))
