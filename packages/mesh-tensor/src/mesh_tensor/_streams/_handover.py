"""What goes from one stream to another within a process.

HND-1: a stream that waits for another one gets what that one has handed over, or learns that it does not come: the process was restarted in between,
or ends. Handovers of one stream come in the order of their numbers, so a later one shows that an earlier one is lost.

Imported in every process of a job, and therefore without PyTorch.
"""

from __future__ import annotations

import threading
from typing import Any

Giver = tuple[Any, int]
"""A controller, and which of its streams hands over."""


class Handover:
    """What streams of this process have handed over, until it is taken."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: dict[tuple[Giver, int], Any] = {}
        self._last: dict[Giver, int] = {}
        self._over = False

    def put(self, giver: Giver, number: int, value: Any) -> None:
        """Hand something over."""
        with self._changed:
            self._there[giver, number] = value
            self._last[giver] = max(number, self._last.get(giver, 0))
            self._changed.notify_all()

    def pass_by(self, giver: Giver, number: int) -> None:
        """A stream has got to this number: what was not handed over before is lost."""
        with self._changed:
            self._last[giver] = max(number, self._last.get(giver, 0))
            self._changed.notify_all()

    def take(self, giver: Giver, number: int, missing: Any) -> Any:
        """Wait for something, and take it; return `missing` if it does not come."""
        key = giver, number
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._there or self._last.get(giver, 0) > number or self._over
            )
            return self._there.pop(key, missing)

    def close(self) -> None:
        """Release all waiters."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
