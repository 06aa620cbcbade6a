"""Whether this process learns how its children end."""

from __future__ import annotations

import signal

from mesh_core._common.errors import MeshError


def require_child_status(what: str) -> None:
    """Raise if SIGCHLD is ignored: the kernel then forgets how children end, and their pids may be used again at once.

    >>> require_child_status("a tool")
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise MeshError(
            f"cannot start {what}: this process ignores SIGCHLD, so it would not learn how what it starts ends. Call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) before"
        )
