"""Who begins a broadcast leads it: makes the tree, hears from all ranks, and gives orphans other parents."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh_rdma._buffer import RDMABuffer, handle_of
from mesh_rdma._errors import InvalidTransfer, PartsFailed, RDMAError, RDMATimeout
from mesh_rdma._here import engine
from mesh_rdma._trees._plan import SOURCE, Tree
from mesh_rdma._trees._relay import CHUNK, reason
from mesh_rdma._trees._waiting import arrival
from mesh_rdma._trees._words import Lost, Orphan, Parent, Run, Who

if TYPE_CHECKING:
    from mesh_core.extensions import Extension, Proc

_NAMED = 4
"""So many failures are told in an error's text."""


@dataclass
class Broadcast:
    """What was asked for."""

    name: str
    source: RDMABuffer
    actors: Any
    targets: Sequence[RDMABuffer]
    timeout: float | None
    transport: str | None
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """Name it for people."""
        return f"the broadcast of {self.source.size():,} bytes to {len(self.targets)} ranks"

    def error(self) -> PartsFailed:
        """Make the error of what has failed."""
        named = [f"rank {rank}: {why}" for rank, why in sorted(self.failures.items())]
        more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        others = len(self.targets) - len(self.failures)
        done = f"the other {others} have all bytes" if others else "no rank has all bytes"
        text = f"{self.what} has failed for {len(named)} of them, {done}: {'; '.join(named[:_NAMED])}{more}"
        return PartsFailed(text, failures=self.failures)


class Leader:
    """A broadcast under way, in the process that has begun it."""

    def __init__(self, asked: Broadcast, extension: Extension) -> None:
        self._asked = asked
        self._extension = extension
        self._procs: list[Proc] = []
        self._tree = Tree([], chunks=1)
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._dry = ""
        """Why nobody can be read from any more."""
        self.over = asyncio.Event()

    async def lead(self) -> None:
        """Carry it out, and return when all ranks have all bytes; raise what is wrong."""
        try:
            async with asyncio.timeout(self._asked.timeout):
                await self._lead()
        except TimeoutError:
            late = [rank for rank in range(len(self._asked.targets)) if not self._tree.has_all(rank)]
            text = f"{self._asked.what} did not finish within {self._asked.timeout} s; {len(late)} have not got all bytes"
            raise RDMATimeout(f"{text}: {', '.join(map(self._name, late[:_NAMED]))}") from None
        finally:
            for run in self._runs.values():
                run.cancel()
            self.over.set()
        for rank in range(len(self._asked.targets)):
            if not self._tree.has_all(rank):
                self._asked.failures.setdefault(rank, "it has given up")
        if self._asked.failures:
            raise self._asked.error()

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._asked.targets[rank].owner})"

    async def _lead(self) -> None:
        asked = self._asked
        places = await self._places()
        realms = [handle_of(each).realm for each in asked.targets]
        missing = [n for n, realm in enumerate(realms) if realm not in places and n not in asked.failures]
        if missing:
            owner = asked.targets[missing[0]].owner
            raise InvalidTransfer(
                f"buffer {missing[0]} is memory of {owner}, which is none of the processes of {asked.actors!r}. Give "
                "buffers that these processes have made, of their own memory."
            )
        # A dead rank's place does not matter.
        self._procs = [places.get(realm, self._extension.proc) for realm in realms]
        source = handle_of(asked.source).realm
        here = self._extension.proc if source == engine().realm() else places.get(source)
        chunks = max(1, -(-asked.source.size() // CHUNK))
        first: Hashable = None if here is None else here.address[2]
        self._tree = Tree([each.address[2] for each in self._procs], chunks=chunks, first=first)
        for rank in asked.failures:
            self._tree.bar(rank)
        for rank in self._tree.order():
            if rank not in asked.failures:
                if self._tree.parent(rank) in asked.failures:
                    # There is always the source.
                    self._tree.adopt(rank)
                self._runs[rank] = asyncio.create_task(self._run(rank))
        if self._runs:
            await asyncio.wait(self._runs.values())

    async def _places(self) -> dict[bytes, Proc]:
        """Find the processes by the realms of their engines."""
        asking: Any = self._extension.call(self._asked.actors, Who())
        try:
            answers = await arrival(asking)
        except Exception:  # noqa: BLE001 - it is each rank's own
            # Of a dead rank it is told before the living have answered, who get the bytes all the same.
            answers = await asyncio.to_thread(asking.get, self._asked.timeout, return_exceptions=True)
        places = {}
        for rank, answer in enumerate(answers.values()):
            if isinstance(answer, BaseException):
                self._asked.failures[rank] = reason(answer)
            else:
                realm, proc = answer
                places[realm] = proc
        return places

    async def _run(self, rank: int) -> None:
        """Have one rank filled."""
        asked, proc = self._asked, self._procs[rank]
        told = Run((asked.name, rank), asked.targets[rank], asked.source, self._offer(rank), asked.transport)
        try:
            said = await arrival(self._extension.call(proc, told))
            lost: Lost | None = said.item()
        except Exception as error:  # noqa: BLE001 - it is the rank's own
            lost = Lost(reason(error))
        if lost is None:
            self._tree.complete(rank)
        else:
            asked.failures.setdefault(rank, f"{asked.targets[rank].owner}: {lost.why}")
            self._tree.bar(rank)

    def _offer(self, rank: int) -> Parent:
        parent = self._tree.parent(rank)
        if parent == SOURCE:
            return Parent(SOURCE, self._asked.source, None)
        proc = None if self._tree.has_all(parent) else self._procs[parent]
        return Parent(parent, self._asked.targets[parent], proc)

    def adopt(self, orphan: Orphan) -> Parent | Lost:
        """Find another parent for a rank."""
        _, rank = orphan.key
        if self._tree.parent(rank) == orphan.parent and orphan.lost.is_gone:
            self._tree.bar(orphan.parent)
        if orphan.parent == SOURCE:
            self._dry = self._dry or f"the source, {self._asked.source.owner}: {orphan.lost.why}"
        if self._tree.adopt(rank) is None:
            return Lost(self._dry or orphan.lost.why)
        return self._offer(rank)


def outcome_of(error: BaseException) -> RDMAError:
    """Make an error of this package of what a broadcast has failed with."""
    if isinstance(error, RDMAError):
        return error
    made = PartsFailed(reason(error))
    made.__cause__ = error
    return made
