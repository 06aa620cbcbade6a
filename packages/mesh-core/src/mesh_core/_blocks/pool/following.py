"""Follows many futures: runs what a process's pools have to do when each of them is done, and decides on which thread.

FOL-1: one thread at a time does this work: a thread that waits for results of a pool, or otherwise a dedicated thread.
Handing every outcome from one thread to another would cost more than the rest of a short task.
FOL-2: when a waiting thread leaves the loop, the dedicated thread takes over within some milliseconds. It ends when no work
is left.
FOL-3: Ctrl-C and SIGTERM never interrupt the work between two steps, so they cause no lost task or turn.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import weakref
from _thread import get_ident
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mesh_core._common.current import holder
from mesh_core._common.errors import MeshError
from mesh_core._common.interrupts import Interrupts
from mesh_core._futures.promise import Promise
from mesh_core._native import serve_to_the_end

if TYPE_CHECKING:
    from mesh_core._blocks.pool.items import Arrivals
    from mesh_core._native import Completion
    from mesh_core._process.process import Process

_BUSY_S = 0.001
_IDLE_S = 0.02
"""How long the dedicated thread leaves the work to waiting threads before it checks again; the second once they are gone for that long."""
_SETTLES_S = 0.002
"""How long what may come later is put off while there is other work."""
_HANDOVER_S = 0.005
"""How long a waiting thread waits for the dedicated thread to hand over the work."""
_LINGER_S = 0.05
"""How long the dedicated thread stays when there is no work."""
_LONGEST = 50_000
"""How many tokens a list may receive before it is replaced: it keeps all of them."""
_WAKE = 0
"""The token of what the working thread itself is waiting for."""


class Steps(Interrupts):
    """A ``with`` block that is executed as a whole. Ctrl-C and SIGTERM end its :meth:`wait`, or are raised after the block."""

    def __init__(self) -> None:
        self.thread = get_ident()
        """The thread that is in the block; it may enter it again."""
        is_main = self.thread == threading.main_thread().ident
        super().__init__(holder().sigterm if is_main else None)

    def wait(self, wait: Callable[[], object]) -> None:
        """Wait, and let Ctrl-C interrupt the wait."""
        # As `raised` does, which takes longer.
        self._raises = True
        try:
            if self._kept:
                self._raise()
            if self._sigterm is None:
                wait()
            else:
                with self._sigterm.raised():
                    wait()
        finally:
            self._raises = False


class Followed(Protocol):
    """What can be followed: a future, or something that acts as one."""

    @property
    def _deadline(self) -> float | None: ...

    def _listen(self, listener: Completion, token: int) -> None: ...

    def _forget(self, listener: Completion) -> None: ...

    def _progress(self) -> bool: ...

    def _expire(self) -> None: ...


class User(Protocol):
    """Something that is notified when futures are no longer followed."""

    def end(self) -> None:
        """This process's part in the mesh ends."""
        ...


class Followers:
    """Futures with tokens, and a list of the tokens of those that are done. The list is replaced before it grows too long."""

    def __init__(self, process: Process) -> None:
        self._process = process
        # Reentrant: a garbage collection may give up tasks at any point.
        self._lock = threading.RLock()
        self.futures: dict[int, Followed] = {}
        """By token. Those that are done are removed; a token that was in two lists arrives again, and is ignored."""
        self.list: Completion = process.runtime.completion()
        self.taken = 0
        # Already done: it puts a token into a list whenever it is asked to.
        self._done = process.runtime.completion()
        self._done.set(None, False, 0)

    def add(self, token: int, future: Followed) -> None:
        """Put the token into the list when the future is done, or has progressed."""
        with self._lock:
            self.futures[token] = future
            future._listen(self.list, token)

    def wake(self) -> None:
        """Wake the thread that waits for the list, so that it looks again."""
        with self._lock:
            self._done.note(self.list, _WAKE)

    def again(self, token: int) -> None:
        """Put the token into the list once more, after the future has progressed."""
        with self._lock:
            future = self.futures.get(token)
            if future is not None:
                future._listen(self.list, token)

    def take(self) -> int | None:
        """Return the next token. Only one thread at a time calls this."""
        token = self.list.token(self.taken)
        if token is not None:
            self.taken += 1
        elif self.taken > _LONGEST:
            self._renew()
        return token

    def _renew(self) -> None:
        with self._lock:
            old, self.list, self.taken = self.list, self._process.runtime.completion(), 0
            # A future that is done already goes into the new list at once, even if it is in the old one.
            for token, future in self.futures.items():
                future._forget(old)
                future._listen(self.list, token)

    def __len__(self) -> int:
        return len(self.futures)


class Following:
    """The futures that this process's pools wait for."""

    @classmethod
    def of(cls, process: Process) -> Following:
        """Return this process's instance."""
        return process.slots.of(cls, lambda: cls(process))

    def __init__(self, process: Process) -> None:
        self._lock = threading.RLock()
        self._duty = threading.Lock()
        self._followers = Followers(process)
        self._tokens = itertools.count(_WAKE + 1)
        self._then: dict[int, Callable[[], object]] = {}
        self._late: dict[int, Callable[[], object]] = {}
        """What to call when a deadline passes, for futures that do not end by it."""
        self._deadlines: list[tuple[float, int]] = []
        self._helped = 0.0
        self._is_asked = False
        """A waiting thread asks the dedicated one to hand over the work."""
        self._is_serving = False
        """The dedicated thread does the work now."""
        self._worker = 0
        """The thread that does the work now."""
        self._unsettled: dict[Callable[[], object], None] = {}
        """What to call before the thread that does the work waits, but soon; only that thread uses it."""
        self._unsettled_since = 0.0
        done: Promise[None] = Promise()
        done.set_result(None)
        self._done = done.future
        self._thread: threading.Thread | None = None
        self._closed = False
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        process.hooks.closing.append(self._end)

    def join(self, user: User) -> None:
        """Notify ``user`` when the process leaves the mesh."""
        self._users.add(user)

    def follow(
        self,
        future: Followed,
        then: Callable[[], object],
        until: float | None = None,
        late: Callable[[], object] | None = None,
    ) -> None:
        """Call ``then`` on some thread when the future is done, and ``late`` if it is not done at the time ``until``."""
        token = next(self._tokens)
        with self._lock:
            if self._closed:
                raise MeshError(
                    "the runtime of this process has been shut down, and its pools with it; make the "
                    "pool again"
                )
            self._then[token] = then
            if late is not None:
                self._late[token] = late
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="mesh-pool", daemon=True)
                self._thread.start()
        self._followers.add(token, future)
        until = future._deadline if until is None else until
        if until is not None:
            # Only now: the deadline of a future that is not followed counts as passed.
            self._note(until, token)

    def _note(self, until: float, token: int) -> None:
        with self._lock:
            heapq.heappush(self._deadlines, (until, token))
            is_next = self._deadlines[0][1] == token
        if is_next:
            # A thread that is waiting now knows only later deadlines.
            self._followers.wake()

    def soon(self, then: Callable[[], object]) -> None:
        """Call ``then`` on the thread that does the work."""
        self.follow(self._done, then)

    def settle(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the work that is there is done, once for all of it; at once on a thread that does not do the work.

        Where there is always more work, it is called after a while.
        """
        if self._worker != get_ident():
            then()
            return
        now = time.monotonic()
        if not self._unsettled:
            self._unsettled_since = now
        self._unsettled[then] = None
        if now - self._unsettled_since > _SETTLES_S:
            self._settle()

    def _settle(self) -> None:
        """The thread that does the work is about to wait."""
        unsettled = self._unsettled
        while unsettled:
            then, _ = unsettled.popitem()
            try:
                then()
            except Exception:
                logging.getLogger("mesh").exception("a pool could not continue with %r", then)

    def _end(self) -> None:
        """The process leaves the mesh: followed futures are done by now, or will never be."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        self._followers.list.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        for user in list(self._users):
            user.end()

    def _serve(self) -> None:
        # The interpreter waits for this thread at its end, and must not be held up (EXIT-1).
        serve_to_the_end()
        while True:
            since = time.monotonic() - self._helped
            if not self._closed and (since < _BUSY_S or not self._duty.acquire(blocking=False)):
                time.sleep(_BUSY_S if since < _IDLE_S else _IDLE_S)
                continue
            if self._closed:
                return
            self._is_asked = False
            self._is_serving = True
            self._worker = get_ident()
            try:
                is_idle = self._work()
            finally:
                self._worker = 0
                self._is_serving = False
                self._duty.release()
            with self._lock:
                if is_idle and not self._then:
                    self._thread = None
                    return

    def _work(self) -> bool:
        """Work until another thread takes over; true if there was nothing to do for a long time."""
        while True:
            left = self._step()
            if self._closed or self._is_asked or time.monotonic() - self._helped < _BUSY_S:
                return False
            self._settle()
            followers = self._followers
            limit = left if self._then else _LINGER_S
            came = followers.list.wait(limit, followers.taken, False)
            if not came and not self._then:
                return True

    def help(self, coming: Completion, seen: int | None, steps: Steps) -> bool:
        """Do the work on this thread until ``coming`` is done or has progressed; false if another thread does it.

        ``steps`` is the block that this runs in.
        """
        if self._closed or not self._take_duty():
            return False
        self._worker = get_ident()
        try:
            self._work_until(coming, seen, steps)
        finally:
            self._worker = 0
            coming.forget(self._followers.list)
            self._helped = time.monotonic()
            self._duty.release()
        return True

    def _take_duty(self) -> bool:
        if self._duty.acquire(blocking=False):
            return True
        # The dedicated thread is working: ask it to stop. Another waiting thread is not asked.
        self._helped = time.monotonic()
        if not self._is_serving:
            return False
        self._is_asked = True
        self._followers.wake()
        # In a block that Ctrl-C does not interrupt: nothing can happen between taking the duty and giving it back.
        return self._duty.acquire(timeout=_HANDOVER_S)

    def helps_soon(self) -> None:
        """This thread submits tasks, and then helps: there is no need for the dedicated thread meanwhile."""
        self._helped = time.monotonic()

    def help_with(self, arrivals: Arrivals, is_over: Callable[[], bool], steps: Steps) -> bool:
        """Do the work on this thread until the awaited outcomes are there; false if another thread does it."""
        if self._closed or not self._take_duty():
            return False
        arrivals.helper = self._worker = get_ident()
        followers = self._followers
        try:
            while True:
                left = self._step()
                if self._closed or is_over():
                    return True
                self._settle()
                told = followers.list
                arrivals.tell(told, _WAKE)
                # Another thread may have produced an outcome before the bell was set.
                if is_over():
                    return True
                steps.wait(partial(told.wait, left, followers.taken))
        finally:
            arrivals.helper = self._worker = 0
            self._helped = time.monotonic()
            self._duty.release()

    def _work_until(self, coming: Completion, seen: int | None, steps: Steps) -> None:
        followers = self._followers
        told: Completion | None = None
        while True:
            left = self._step()
            if self._closed or coming.done() or (seen is not None and coming.arrived() > seen):
                return
            self._settle()
            if told is not followers.list:
                told = followers.list
                coming.note(told, _WAKE, seen or 0)
            at = followers.taken
            steps.wait(lambda: told.wait(left, at))  # noqa: B023 - it is called at once

    def _step(self) -> float | None:
        """Do all work that is due; returns the seconds until the next deadline."""
        left = self._expire() if self._deadlines else None
        followers = self._followers
        while (token := followers.take()) is not None:
            future = followers.futures.get(token)
            if future is not None:
                self._heed(token, future)
        return left

    def _heed(self, token: int, future: Followed) -> None:
        try:
            if not future._progress():
                self._followers.again(token)
                return
            self._followers.futures.pop(token, None)
            if self._late:
                self._late.pop(token, None)
            self._then.pop(token)()
        except Exception:
            logging.getLogger("mesh").exception("a pool could not continue with %r", future)

    def _expire(self) -> float | None:
        """End tasks of a pool whose deadline has passed; returns the seconds until the next deadline."""
        while True:
            with self._lock:
                if not self._deadlines:
                    return None
                deadline, token = self._deadlines[0]
                future = self._followers.futures.get(token)
                if future is not None and deadline > (now := time.monotonic()):
                    return deadline - now
                heapq.heappop(self._deadlines)
                late = self._late.pop(token, None)
            if future is None:
                continue
            try:
                (late or future._expire)()
            except Exception:
                logging.getLogger("mesh").exception("a pool could not continue with %r", future)
