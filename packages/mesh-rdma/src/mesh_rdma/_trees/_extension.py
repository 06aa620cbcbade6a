"""The part of a process in broadcasts: a process extension, which the first broadcast to a process brings there."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from mesh_core import Future, MeshError, Promise
from mesh_core.extensions import NOT_CARRIED, Extension, Proc, Spawning, find, install
from mesh_rdma._errors import RDMAError
from mesh_rdma._here import joined
from mesh_rdma._trees._lead import Broadcast, Leader, outcome_of
from mesh_rdma._trees._relay import Relays
from mesh_rdma._trees._words import Lead, Linger, Lost, More, Orphan, Parent, Run, Who


class Trees(Extension):
    """Leads broadcasts, and is a rank of others'."""

    name = "rdma.trees"

    def start(self) -> None:
        self._giving = threading.local()
        self._relays = Relays(self)
        self._asked: dict[str, tuple[Broadcast, Promise[None]]] = {}
        self._leaders: dict[str, Leader] = {}

    def for_spawn(self, spawning: Spawning) -> Any:
        """Processes get it when they are first broadcast to."""
        return None if getattr(self._giving, "on", False) else NOT_CARRIED

    def begin(self, asked: Broadcast, promise: Promise[None]) -> None:
        """Lead a broadcast, whose outcome the promise is given."""
        self._giving.on = True
        try:
            having = self.install_on(asked.actors)
        finally:
            self._giving.on = False
        # What goes wrong there, the messages that follow tell as well.
        having.add_done_callback(lambda future: future.exception())
        self._asked[asked.name] = asked, promise
        leading = self.call(self.proc, Lead(asked.name))
        leading.add_done_callback(lambda future: self._ended(asked.name, future))

        def given_up(_future: object) -> None:
            leading.cancel()

        promise.future.add_done_callback(given_up)

    def _ended(self, name: str, leading: Future[Any]) -> None:
        """Answer, where the leader has not: as it was never reached, or the process ends."""
        error = leading.exception()
        left = self._asked.pop(name, None)
        if left is not None and error is not None:
            left[1].set_exception(outcome_of(error))

    async def receive(self, message: Any, sender: Proc) -> Any:
        """Answer another process, or this one."""
        match message:
            case Who():
                return joined().realm(), self.proc
            case Run():
                return await self._relays.run(message, sender)
            case More():
                return await self._relays.more(message)
            case Orphan():
                return self._adopt(message)
            case Linger():
                leader = self._leaders.get(message.broadcast)
                if leader is not None:
                    await leader.over.wait()
                return None
            case Lead():
                return await self._lead(message.broadcast)
        raise RDMAError(
            f"a process of another version has sent {type(message).__name__}; install the same mesh-rdma everywhere"
        )

    def _adopt(self, orphan: Orphan) -> Parent | Lost:
        leader = self._leaders.get(orphan.key[0])
        return Lost("the broadcast is over") if leader is None else leader.adopt(orphan)

    async def _lead(self, name: str) -> None:
        asked, promise = self._asked[name]
        leader = self._leaders[name] = Leader(asked, self)
        try:
            await leader.lead()
            error: BaseException | None = None
        except asyncio.CancelledError:
            raise
        except Exception as raised:  # noqa: BLE001 - whoever waits hears of it
            error = raised
        finally:
            del self._leaders[name], self._asked[name]
        if error is None:
            promise.set_result(None)
        else:
            promise.set_exception(outcome_of(error))


def here() -> Trees:
    """Return this process's instance."""
    found = find(Trees)
    if found is None:
        try:
            return install(Trees)
        except MeshError:
            # Another thread was sooner, or the first broadcast to this process has just brought it.
            found = find(Trees)
            if found is None:
                raise
    return found
