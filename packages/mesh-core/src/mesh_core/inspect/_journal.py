"""Record this process's events, for :func:`mesh_core.inspect.events`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._native import Runtime
    from mesh_core._process.process import Process
    from mesh_core.inspect._event import Event

_KEPT = 2048


class Journal:
    """Records events; the runtime's journal orders them and wakes readers.

    Recording never waits for a reader. The controller keeps its latest events as objects; a worker sends its events as
    JSON.
    """

    __slots__ = ("_at_root", "_kept", "_lock", "_next", "_runtime")

    def __init__(self, runtime: Runtime, *, at_root: bool) -> None:
        self._runtime = runtime
        self._at_root = at_root
        self._lock = threading.Lock()
        self._kept: dict[int, Event] = {}
        self._next = 0

    @classmethod
    def of(cls, process: Process) -> Journal:
        """Return a process's journal."""
        return process.slots.of(cls, lambda: cls(process.runtime, at_root=process.identity.mesh_id == 0))

    def record(self, event: Event) -> None:
        """Record an event."""
        import json

        told = event.as_dict()
        if self._at_root:
            with self._lock:
                told["token"] = token = self._next
                self._next += 1
                self._kept[token] = event
                self._kept.pop(token - _KEPT, None)
        self._runtime.note_text(json.dumps(told), event.failure is not None)

    def failed(self, failure: MeshFailure, *, handled: bool, by: str = "") -> None:
        """Record that ``by`` handled a failure, or was the last to pass it on."""
        from mesh_core.inspect._event import Event

        self.record(Event.of_failure(failure, handled=handled, by=by))

    def find(self, token: int) -> Event | None:
        """Return the event recorded here as number ``token``, if it is still kept."""
        with self._lock:
            return self._kept.get(token)
