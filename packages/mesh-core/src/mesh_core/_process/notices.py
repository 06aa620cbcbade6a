"""The thread that takes the controller's notices: failures, and everything else that is not the result of a call.

It waits in the runtime without reading connections, so it holds up nobody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mesh_core._common.bypass import find_bypass
from mesh_core._common.codes import MessageKind, Request
from mesh_core._common.control import Control
from mesh_core._failures.patience import Patience
from mesh_core._native import Placement, Target, serve_to_the_end

if TYPE_CHECKING:
    from mesh_core._native import Message
    from mesh_core._process.process import Process


class Notices:
    """The controller's notices. In workers, the event loop of the actors takes them, and this does nothing."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._began = threading.Event()
        self._barriers: deque[Callable[[], object]] = deque()
        self.patience = Patience(process, self._sift)
        """Asks policies and handlers on the thread."""
        self._due: deque[Message] = deque()
        """Notices that have been taken and not handled: a successor of the thread goes on with them."""

    def start(self) -> None:
        """Take notices from now on."""
        if self._thread is None and self._process.identity.is_script:
            # Imported while the processes start that were just ordered, and before the end of the script needs it.
            _ = self._process.supervision
            threading.Thread(target=self._run, name="mesh-notices", daemon=True).start()
            self._began.wait()

    def _run(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            # Ctrl-C may end `start` at any moment: only the thread itself knows whether it runs.
            self._thread = threading.current_thread()
        self._began.set()
        self.patience.start()
        # Also before its first wait: it takes locks that the end needs (EXIT-1).
        serve_to_the_end()
        for begin in self._process.hooks.noticing:
            begin()
        self._take()

    def _try(self, message: Message) -> None:
        try:
            self._on_notice(message)
        except BaseException:
            # Later notices are still handled.
            import logging

            logging.getLogger("mesh").exception("a notice of a failure could not be handled")

    def succeed(self) -> None:
        """Have another thread go on: the present one is in a policy that does not return (POL-4)."""
        thread = threading.Thread(target=self._go_on, name="mesh-notices", daemon=True)
        self._thread = thread
        thread.start()

    def _go_on(self) -> None:
        serve_to_the_end()
        self._take()

    def _take(self) -> None:
        """Take notices until the runtime ends, or this thread has a successor."""
        runtime = self._process.runtime
        inbox = runtime.notices()
        while True:
            while self._due:
                self._try(self._due.popleft())
                if not self.is_current():
                    return
            runtime.wait_notices()
            self._due.extend(batch := inbox.take_nowait(1_000))
            if not batch:
                return
            del batch

    def _sift(self) -> Callable[[], object]:
        """Take what has arrived while a policy is asked: failures wait for their turn, and the returned function handles the rest."""
        batch = [*self._due, *self._process.runtime.notices().take_nowait(1_000)]
        self._due = deque(each for each in batch if each.kind in (MessageKind.FAILURE, MessageKind.DOWN))
        rest = [each for each in batch if each.kind not in (MessageKind.FAILURE, MessageKind.DOWN)]

        def handle() -> None:
            for message in rest:
                self._try(message)

        return handle

    def barrier(self, then: Callable[[], object]) -> None:
        """Call ``then`` on the thread once every notice that has already arrived was passed to its owner."""
        self._barriers.append(then)
        mesh, rank, host = self._process.runtime.me
        target = Target.one(mesh, rank, Placement.on(host))
        self._process.runtime.sender(target, 0, "", Request.FAILURE).tell(None)

    def pass_barrier(self) -> None:
        """Handle the arrival of a barrier's marker."""
        self._barriers.popleft()()

    def catch_up(self, limit: float) -> None:
        """Wait until the notices that have arrived are handled.

        This waits only briefly: policies and handlers may take long, or wait for this thread.
        """
        if self._thread is not None and not self.is_current():
            passed = threading.Event()
            self.barrier(passed.set)
            passed.wait(limit)

    def is_current(self) -> bool:
        """Whether the current thread is the one that takes notices."""
        return self._thread is threading.current_thread()

    def end(self, limit: float) -> None:
        """Wait for the thread, once the runtime is closed: its last notices may be failures."""
        thread = self._thread
        if thread is not None and not self.is_current():
            thread.join(limit)
        self.patience.end(limit)

    def _on_notice(self, message: Message) -> None:
        match message.kind:
            case MessageKind.EXTENSION:
                self._on_extension(message)
            case MessageKind.FAILURE | MessageKind.DOWN:
                self._process.supervision.on_notice(message)
            case MessageKind.TELL:
                self._process.host_registry()
            case MessageKind.UNSEEN:
                from mesh_core._futures import unseen

                unseen.report(message)

    def _on_extension(self, message: Message) -> None:
        match message.name:
            case Control.INSPECT:
                self._process.hooks.knocked()
            case Control.BYPASS:
                find_bypass(self._process)
            case Control.HOSTS:
                hosts, carried, tell = message.load()
                self._process.host_procs.make(hosts, carried, tell=tell)
            case Control.RECORD:
                self._process.hooks.recorded(message)
            case Control.LOGS:
                meshes, flags, window, level = message.load()
                for mesh in meshes:
                    self._process.runtime.logs().set(mesh, flags, window, level)
            case Control.RETURNS:
                from mesh_core._failures.returns import on_question

                on_question(message, self._process)
            case _:
                self._process.extensions.on_message(message)
