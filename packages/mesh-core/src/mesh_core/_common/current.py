"""The one pointer to this process's :class:`Process`, and how everything else finds it.

It knows nothing of what a process is made of, so that every module may import it: ``_bundle`` says here how it is made.
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
    """What stays when a :class:`Process` goes."""

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
        "wanted",
    )

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.process: Process | None = None
        self.make: Callable[[], Process] = _unequipped
        """Makes and installs the process object of a script, under the lock. ``_bundle`` sets this and the next two."""
        self.equip_script: Callable[[Process], object] = _unequipped
        """Gives a script's process its features."""
        self.equip_worker: Callable[[Process], object] = _unequipped
        self.fault_handler: Callable[[MeshFailure], object] | None = None
        self.leaves = False
        """Whether stopping everything at the interpreter's end is registered."""
        self._slots: Slots | None = None
        self.wanted: list[Callable[[Process], object]] = []
        """What is done with each process object that is made; see :meth:`for_each`."""
        self.sigterm: Termination | None = None
        """What SIGTERM does to this script, if Mesh has a say in it."""

    @property
    def slots(self) -> Slots:
        """What parts of Mesh keep of their own, for as long as the interpreter runs."""
        if self._slots is None:
            with self.lock:
                if self._slots is None:
                    self._slots = Slots()
        return self._slots

    def for_each(self, join: Callable[[Process], object]) -> None:
        """Call ``join`` with the :class:`Process` that there is, if there is one, and with each that is made later.

        It may be called twice with one.
        """
        with self.lock:
            self.wanted.append(join)
            process = self.process
        if process is not None and process.in_charge:
            join(process)

    def shutdown(self) -> None:
        """Stop everything that this process has spawned; log the failures that nobody was told of."""
        process = self.process
        if process is not None:
            process.shutdown()
            import logging

            for failure in process.supervision.unheard():
                logging.getLogger("mesh").error("nobody has handled this failure:\n%s", failure.report())


def _unequipped(*_: object) -> Process:
    raise RuntimeError("cannot make a process: mesh_core is not fully imported")


_HOLDER = Holder()


def holder() -> Holder:
    """What stays when a :class:`Process` goes."""
    return _HOLDER


def current() -> Process:
    """This process's :class:`Process`; a script's is made when it is first needed."""
    process = _HOLDER.process
    if process is not None and not process.closed:
        return process
    with _HOLDER.lock:
        process = _HOLDER.process
        if process is None or process.closed:
            process = _HOLDER.make()
        return process
