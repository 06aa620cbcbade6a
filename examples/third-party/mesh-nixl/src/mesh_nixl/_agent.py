"""This process's agent of NIXL."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Span = tuple[int, int]
"""An address, and a length."""

# UCX's module for InfiniBand crashes the process at its end, in the libnl that nixl-cu12 1.5 ships, and is of no use on one host.
_SETTINGS = {"UCX_MODULES": "^ib", "NIXL_LOG_LEVEL": "FATAL"}


@contextmanager
def _settings() -> Iterator[None]:
    """What libraries read from the environment while they start, where the user has set nothing."""
    ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def span_of(memory: memoryview) -> Span:
    """Where it is, which must be one piece; also of read-only memory."""
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data), memory.nbytes


class Agent:
    """An agent with memory of its own, which takes a second to make. Used by several threads at once."""

    def __init__(self) -> None:
        with _settings():
            import nixl_cu12

            self._name = f"mesh-{os.getpid()}-{secrets.token_hex(8)}"
            self._nixl: Any = nixl_cu12.nixl_agent(
                self._name,
                nixl_cu12.nixl_agent_config(
                    # It would take a fifth of a core all the time.
                    enable_prog_thread=False,
                    backends=["UCX"],
                    sync_mode=nixl_cu12.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                ),
            )
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}

    def register(self, span: Span) -> Any:
        """Have memory ready for transfers."""
        with self._lock:
            return self._nixl.register_memory([(*span, 0, "")], "DRAM")

    def deregister(self, registered: Any) -> None:
        """Forget it."""
        with self._lock:
            self._nixl.deregister_memory(registered)

    def metadata(self, registered: Any) -> bytes:
        """Return what another agent needs to reach this memory, and no other."""
        with self._lock:
            return bytes(self._nixl.get_partial_agent_metadata(registered, inc_conn_info=True))

    def meet(self, metadata: bytes) -> str:
        """Return the name of the agent that has sent this; `part` once for each time."""
        if self._name.encode() in metadata:
            return self._name  # its own: it knows itself
        with self._lock:
            name: str = self._nixl.add_remote_agent(metadata).decode()
            self._known[name] = self._known.get(name, 0) + 1
            return name

    def part(self, name: str) -> None:
        """Forget it, at the last of several times."""
        if name == self._name:
            return
        with self._lock:
            self._known[name] -= 1
            if not self._known[name]:
                del self._known[name]
                self._nixl.remove_remote_agent(name)

    def progress(self) -> None:
        """Answer what other agents have asked, such as for a connection."""
        self._nixl.get_new_notifs()

    def move(
        self, write: bool, here: Sequence[Span], there: Sequence[Span], name: str, check: Callable[[], None]
    ) -> None:
        """Move bytes to memory of that agent, or from it. ``check`` raises if there is no use in waiting any longer."""
        nixl = self._nixl
        ours = nixl.get_xfer_descs([(*span, 0) for span in here], "DRAM")
        theirs = nixl.get_xfer_descs([(*span, 0) for span in there], "DRAM")
        transfer = nixl.initialize_xfer("WRITE" if write else "READ", ours, theirs, name)
        try:
            state, pause = nixl.transfer(transfer), 0.0
            while state == "PROC":
                check()
                time.sleep(pause)
                pause = min(pause + 1e-5, 1e-3)
                state = nixl.check_xfer_state(transfer)
        finally:
            nixl.release_xfer_handle(transfer)
        if state != "DONE":
            raise RuntimeError(f"NIXL has failed to transfer: {state}")
