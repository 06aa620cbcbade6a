"""How long others wait for a policy or fault handler of the script that was asked about a failure (POL-4)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from mesh_core._futures.promise import Promise
    from mesh_core._process.process import Process

T = TypeVar("T")
WARN_S = 5.0
LIMIT_S = 60.0
_LOOK_S = 0.1
"""How often others are served while a question is open."""


class Question(Generic[T]):
    """A question to code of the user, on the thread that takes the controller's notices."""

    def __init__(
        self,
        whom: str,
        ask: Callable[[], T],
        late: Callable[[str], object],
        pass_over: Callable[[str], object],
        advice: str,
    ) -> None:
        self.whom = whom
        self.ask = ask
        self.late = late
        """Records why it is not asked for now, and with an empty text that it may be asked again."""
        self.pass_over = pass_over
        """Goes on without the answer, for this reason; called on the thread that watches."""
        self.advice = advice
        self.since = time.monotonic()
        self._lock = threading.Lock()
        self._is_hidden = False
        self._shown: Promise[None] | None = None

    def show(self, process: Process) -> None:
        """Have somebody wait for the answer, as for a promise: those see it who look for the reason of a hang."""
        from mesh_core._futures.promise import Promise

        shown = Promise[None](f"{self.whom} to return")
        future = shown.future

        async def wait() -> None:
            await future

        with self._lock:
            if self._is_hidden:
                shown.set_result(None)
                return
            self._shown = shown
        process.supervision.start_on_loop(wait)

    def hide(self) -> None:
        """End :meth:`show`: it was answered."""
        with self._lock:
            self._is_hidden, shown, self._shown = True, self._shown, None
        if shown is not None:
            shown.set_result(None)


class Patience:
    """Watches the questions, of which one is open at a time, on a thread of its own."""

    def __init__(self, process: Process, meanwhile: Callable[[], Callable[[], object]]) -> None:
        self._process = process
        self._meanwhile = meanwhile
        """Called again and again while a question is open, with the lock; returns what to do then without it."""
        self._news = threading.Condition()
        self._asked: Question[Any] | None = None
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from now on."""
        self._thread = threading.Thread(target=self._watch, name="mesh-policy-watch", daemon=True)
        self._thread.start()

    def end(self, limit: float) -> None:
        """Stop watching."""
        with self._news:
            self._is_over = True
            asked = self._asked
            self._news.notify()
        if asked is not None:
            asked.hide()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit)

    def answer(self, question: Question[T]) -> tuple[T] | None:
        """Ask; return the answer, or ``None`` if the question was passed over meanwhile."""
        with self._news:
            self._asked = question
            self._news.notify()
        try:
            answer = question.ask()
        finally:
            with self._news:
                was_passed_over = self._asked is not question
                if was_passed_over:
                    question.late("")
                else:
                    self._asked = None
            question.hide()
        return None if was_passed_over else (answer,)

    def _watch(self) -> None:
        from mesh_core._native import serve_to_the_end

        serve_to_the_end()
        while (asked := self._next()) is not None:
            if not self._lasts(asked, WARN_S):
                continue
            import logging

            logging.getLogger("mesh").warning(
                "%s has not returned for %g s: failures of all other meshes of this script wait for it, until it is passed over after %g s; %s",
                asked.whom,
                WARN_S,
                LIMIT_S,
                asked.advice,
            )
            if not self._process.closed:
                asked.show(self._process)
            if self._lasts(asked, LIMIT_S):
                self._pass_over(asked)

    def _next(self) -> Question[Any] | None:
        """Wait for a question; return ``None`` at the end."""
        with self._news:
            while self._asked is None and not self._is_over:
                self._news.wait()
            return None if self._is_over else self._asked

    def _lasts(self, asked: Question[Any], seconds: float) -> bool:
        """Return whether a question stays open for so long."""
        while (left := asked.since + seconds - time.monotonic()) > 0.0:
            with self._news:
                if self._asked is asked and not self._is_over:
                    self._news.wait(min(left, _LOOK_S))
                if self._asked is not asked or self._is_over:
                    return False
                work = self._meanwhile()
            work()
        return True

    def _pass_over(self, asked: Question[Any]) -> None:
        import logging

        log, why = logging.getLogger("mesh"), f"it had not returned after {LIMIT_S:g} s"
        with self._news:
            if self._asked is not asked:
                return
            self._asked = None
            asked.late(why)
        log.error("%s has not returned for %g s: it is passed over until it returns", asked.whom, LIMIT_S)
        try:
            asked.pass_over(why)
        except Exception:
            log.exception("%s could not be passed over", asked.whom)
