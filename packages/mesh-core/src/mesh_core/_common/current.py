"""The one pointer to this process's :class:`Process`, through which everything else finds it.

It does not know what a process consists of, so every module may import it; ``_bundle`` tells it how to make one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mesh_core._common.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core._common.interrupts import Termination
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._process.process import Process


class Holder:
    """State that outlives a :class:`Process`."""

    __slots__ = (
        "_slots",
        "equip_script",
        "equip_worker",
        "fault_handler",
        "leaves",
        "lock",
        "make",
        "process",
        "sigterm",
        "standby",
        "wanted",
    )

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.process: Process | None = None
        self.make: Callable[[], Process] = _unequipped
        """Creates and installs a script's process object, under the lock. ``_bundle`` sets this and the next two."""
        self.equip_script: Callable[[Process], object] = _unequipped
        """Adds features to a script's process."""
        self.equip_worker: Callable[[Process], object] = _unequipped
        self.fault_handler: Callable[[MeshFailure], object] | None = None
        self.leaves = False
        """Whether the shutdown at interpreter exit is registered."""
        self._slots: Slots | None = None
        self.wanted: list[Callable[[Process], object]] = []
        """Called with each process object that is made; see :meth:`for_each`."""
        self.standby: tuple[int, int] | None = None
        """The pid and the socket of what can be this script's first fork server."""
        self.sigterm: Termination | None = None
        """Handles SIGTERM for this script, if Mesh does."""

    @property
    def slots(self) -> Slots:
        """State that parts of Mesh keep for as long as the interpreter runs."""
        if self._slots is None:
            with self.lock:
                if self._slots is None:
                    self._slots = Slots()
        return self._slots

    def for_each(self, join: Callable[[Process], object]) -> None:
        """Call ``join`` with the current :class:`Process`, if there is one, and with each that is made later.

        It may be called twice with the same one.
        """
        with self.lock:
            self.wanted.append(join)
            process = self.process
        if process is not None and process.in_charge:
            join(process)

    def shutdown(self) -> None:
        """Stop everything that this process spawned; log the failures that nobody was notified of."""
        process = self.process
        if process is not None:
            process.shutdown()
            import logging

            for failure in process.supervision.unheard():
                logging.getLogger("mesh").error("nobody handled this failure:\n%s", failure.report())


def _unequipped(*_: object) -> Process:
    raise RuntimeError("cannot make a process: mesh_core is not fully imported")


_HOLDER = Holder()


def holder() -> Holder:
    """Return the state that outlives a :class:`Process`."""
    return _HOLDER


def current() -> Process:
    """Return this process's :class:`Process`; a script's is made on first use."""
    process = _HOLDER.process
    if process is not None and not process.closed:
        return process
    with _HOLDER.lock:
        process = _HOLDER.process
        if process is None or process.closed:
            process = _HOLDER.make()
        return process
