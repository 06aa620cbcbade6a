"""The engine of this process, made when the first buffer is made or used; and what a forked copy must not keep."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import Protocol

from mesh_core.extensions import Membership, membership
from mesh_rdma._cuda import library
from mesh_rdma._errors import BufferGone
from mesh_rdma._lasting import Lasting
from mesh_rdma._native import Engine, Handle, Memory
from mesh_rdma._outside import installed
from mesh_rdma._ucx import places
from mesh_rdma._verbs import library as libibverbs


def _tell(owner: str, candidates: list[str], passed: list[tuple[str, str]]) -> None:
    """Log which transport is used: once for each owner, and once more for each change."""
    logging = sys.modules.get("logging")
    # Not imported: then nobody has asked for records of this level.
    if logging is not None:
        from mesh_rdma._explanation import Explanation

        chosen = Explanation(tuple(candidates), dict(passed))
        logging.getLogger("mesh_rdma").info("memory of %s is reached by %s", owner, chosen)


class Closable(Protocol):
    """A socket, or what is like one."""

    def close(self) -> None:
        """Close this process's descriptor."""


class _Here:
    """The one engine of a process, which handles refer to."""

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[Closable] = weakref.WeakSet()
        """What is closed in forked copies."""
        self._heeds_forks = False
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._pid = 0
        self._member: Membership | None = None
        self.lasting = Lasting()

    def engine(self) -> Engine:
        # In a forked copy it refuses everything by itself, and says why.
        return self._engine or self._make()

    def joined(self) -> Engine:
        """Return the engine, as a member of the job that this process belongs to by now."""
        engine = self.engine()
        self.look()
        return engine

    def look(self) -> None:
        """Let it join the job that this process belongs to by now, if it exists."""
        engine, member = self._engine, membership()
        if member is not self._member and member is not None and engine is not None:
            self._join(engine, member)

    def own(self, handle: Handle) -> Memory:
        """Return the memory of this process that a handle names. It stays in place while the result lives."""
        engine = self.engine()
        if handle.realm != engine.realm():
            return engine.own(handle, None)
        is_left, owner = self.lasting.owner(handle.key)
        if is_left and owner is None:
            raise BufferGone("the memory is just being freed")
        return engine.own(handle, owner)

    def drop(self, handle: Handle) -> bool:
        """Stop offering memory, if it is this process's. Return whether it is."""
        engine = self.engine()
        if handle.realm != engine.realm():
            return False
        # Its owner lives until this returns: its end would wait for this thread.
        _is_left, owner = self.lasting.owner(handle.key)
        engine.drop_own(handle)
        self.lasting.forget(handle.key)
        del owner
        return True

    def _make(self) -> Engine:
        with self._lock:
            if self._engine is None:
                others = installed()
                self.lasting.may_wait = all(each.reason is not None for each in others)
                self._engine = Engine(others, _tell, places(), library(), libibverbs())
                self._pid = os.getpid()
                # The offered memory belongs to Python objects, which the interpreter's end may free.
                atexit.register(self._close)
                os.register_at_fork(after_in_child=self._engine.forked)
            engine = self._engine
        self.look()
        return engine

    def _join(self, engine: Engine, member: Membership) -> None:
        """Let it reach other hosts, and be reached by them."""
        from datetime import timedelta
        from ipaddress import ip_address

        with self._lock:
            if member is not self._member:
                addresses = [ip_address(each) for each in member.addresses]
                silence = timedelta(seconds=member.silence)
                engine.join(member.credentials, member.revocations, addresses, silence)
                self._member = member

    def close_in_forks(self, closable: Closable) -> None:
        """Let a connection end with this process: a forked copy that also had it would keep it open, and a lease with it."""
        # Without the lock, which a forked copy may find locked forever. Handling a fork twice does no harm.
        if not self._heeds_forks:
            self._heeds_forks = True
            os.register_at_fork(after_in_child=self._forked)
        self._kept.add(closable)

    def _forked(self) -> None:
        for each in list(self._kept):
            each.close()

    def _close(self) -> None:
        if self._engine is not None and self._pid == os.getpid():
            self._engine.close_all(self.lasting.end())


_HERE = _Here()
engine = _HERE.engine
joined = _HERE.joined
look = _HERE.look
own = _HERE.own
drop = _HERE.drop
lasting = _HERE.lasting
close_in_forks = _HERE.close_in_forks
