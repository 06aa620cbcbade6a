"""How long others wait for a policy that was asked about a failure (POL-4)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core._failures.ledger import Consult
    from mesh_core._failures.policy_run import Decision

WARN_S = 5.0
LIMIT_S = 60.0


class Turn:
    """A question to a policy on the thread that takes the controller's notices, where all other meshes of the script wait meanwhile."""

    def __init__(self, asked: Consult, pass_over: Callable[[Decision], object]) -> None:
        self._asked = asked
        self._pass_over = pass_over
        """Goes on without the policy, whose thread is lost to it; called on a thread of this object."""
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._over = False

    def take(self, wait: Callable[[Any], object]) -> Decision | None:
        """Ask the policy; return the decision, or ``None`` if it was passed over meanwhile."""
        asked, run = self._asked, self._asked.run
        if run.overdue:
            return run.pass_over(asked.event)
        watch = threading.Thread(target=self._watch, name="mesh-policy-watch", daemon=True)
        try:
            watch.start()
        except RuntimeError:
            # The interpreter is ending, and starts no more threads.
            return run.decide(asked.event, time.monotonic(), wait)
        settle = run.answer(asked.event, time.monotonic(), wait)
        is_wanted = self._claim()
        self._answered.set()
        watch.join()
        # Now it may be asked again.
        run.overdue = ""
        return settle() if is_wanted else None

    def _claim(self) -> bool:
        """Return whether this is the first to decide."""
        with self._lock:
            first, self._over = not self._over, True
        return first

    def _watch(self) -> None:
        log, name = logging.getLogger("mesh"), self._asked.holding.mesh._name
        if self._answered.wait(WARN_S):
            return
        log.warning(
            "the policy of %r has not returned for %g s: failures of all other meshes of this script wait for it, until it is passed over "
            "after %g s; a policy must return at once, and use Later() to wait",
            name,
            WARN_S,
            LIMIT_S,
        )
        if self._answered.wait(LIMIT_S - WARN_S) or not self._claim():
            return
        run = self._asked.run
        run.overdue = f"it had not returned after {LIMIT_S:g} s"
        log.error(
            "the policy of %r has not returned for %g s: it is passed over until it returns", name, LIMIT_S
        )
        self._pass_over(run.pass_over(self._asked.event))
