"""An event in a job."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core._failures.failure import MeshFailure


@dataclass(frozen=True)
class Event:
    """Something that happened. Fields that do not apply are empty or ``None``.

    ==================== =============================================================================
    ``host_attached``    a host answered for the first time
    ``host_leaving``     a host will be taken away in ``grace`` seconds; ``text`` says why
    ``host_died``        a host is no longer part of the job; ``text`` says why
    ``host_stopped``     a host was released by :meth:`HostMesh.stop` or ``detach``
    ``procs_spawned``    ``count`` processes of a mesh are being spawned on this ``host``
    ``proc_up``          a process can be reached
    ``proc_stopped``     a process ended because it was asked to
    ``proc_died``        a process ended otherwise; ``exitcode`` or ``signal`` says how
    ``actor_created``    an actor's constructor returned
    ``actor_failed``     an actor's constructor raised
    ``actor_stopped``    an actor stopped
    ``failure_handled``  ``failure`` was handled; ``text`` says by whom
    ``failure``          nobody handled ``failure``
    ==================== =============================================================================
    """

    kind: str
    time: float
    """When, in seconds since the epoch."""
    proc: str = ""
    """The process, as :attr:`ProcState.name`."""
    pid: int | None = None
    actor: str = ""
    class_name: str = ""
    rank: int | None = None
    """The actor's place in its mesh, or the process's in its own."""
    count: int | None = None
    exitcode: int | None = None
    signal: int | None = None
    text: str = ""
    host: str = ""
    """The host that this is about, or on which it happened; empty for events recorded by the script's process."""
    grace: float | None = None
    """How many seconds after :attr:`time` a leaving host will be gone."""
    failure: MeshFailure | None = None
    """Set only in the controller, for events recorded there; elsewhere, ``text`` is the failure's report."""

    @classmethod
    def of_failure(cls, failure: MeshFailure, *, handled: bool, by: str = "") -> Event:
        """Make the event for a failure that was handled, or that nobody handled."""
        return cls(
            kind="failure_handled" if handled else "failure",
            time=time.time(),
            actor=failure.mesh_name,
            rank=failure.rank,
            pid=failure.pid,
            exitcode=failure.exitcode,
            signal=failure.signal,
            text=f"by {by}" if by else "",
            host=failure.host,
            failure=failure,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are set, ready for JSON; a failure becomes its report."""
        told = {
            one.name: value
            for one in fields(self)
            if one.name != "failure" and (value := getattr(self, one.name)) not in (None, "")
        }
        if self.failure is not None:
            told["failure"] = self.failure.report()
        return told

    def as_json(self) -> str:
        """Return :meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time))
        parts = [when, self.kind, self.proc or (self.host if self.kind.startswith("host_") else "")]
        if self.actor:
            parts.append(f"{self.actor}[{self.rank}]" if self.rank is not None else self.actor)
        if self.count is not None:
            parts.append(f"{self.count}")
        if self.pid is not None:
            parts.append(f"pid {self.pid}")
        if self.signal is not None:
            parts.append(f"signal {self.signal}")
        if self.exitcode is not None and self.kind != "proc_stopped":
            parts.append(f"status {self.exitcode}")
        if self.grace is not None:
            parts.append(f"in {self.grace:g} s")
        if self.text:
            parts.append(self.text)
        return " ".join(part for part in parts if part)
