"""The owner's side of a template: a thread that keeps boxes in stock, hands them out and waits for their end."""

from __future__ import annotations

import atexit
import json
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mesh_core._blocks.sandboxes import wire
from mesh_core._blocks.sandboxes.isolation import Isolation
from mesh_core._blocks.sandboxes.outcome import SandboxError
from mesh_core._common.private_folders import jobs_folders, runtime_folders
from mesh_core._system import process_marks
from mesh_core._system.interpreter import code_words, interpreter_words
from mesh_core._system.process_marks import Hunt

_START = """\
import json, sys
with open(int(sys.argv[3]), "rb") as file: sys.path[:] = json.load(file)
from mesh_core._blocks.sandboxes.template import start
start(int(sys.argv[1]), int(sys.argv[2]))
"""
_LEAVE_S = 10.0
# The template's messages are read after this many requests, so that the two sides cannot block each other.
_BATCH = 32


@dataclass(eq=False)
class Box:
    """The owner's ends of a box."""

    number: int
    connection: socket.socket
    told: socket.socket
    isolation: Isolation = Isolation.NONE
    folder: str = ""

    def is_well(self) -> bool:
        """Whether it waits for requests. An idle box sends nothing, except at its end."""
        poll = select.poll()
        poll.register(self.told, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close its descriptors."""
        self.connection.close()
        self.told.close()


class Stock:
    """The boxes of one kind. Public methods may be called by any thread."""

    def __init__(
        self, name: str, plan: dict[str, Any], env: Mapping[str, str], most: int, ready: int
    ) -> None:
        self.name = name
        self._plan = plan
        self.watched = plan["limits"]["memory"] is not None or plan["limits"]["pids"] is not None
        """Whether keepers have to check the limits of their boxes."""
        self._env = dict(env)
        self._most = most
        self._ready_wanted = ready
        self._hands = max(2, len(os.sched_getaffinity(0)))
        self._lock = threading.RLock()  # a collection while it is held may end a box
        self._ready: deque[Box] = deque()
        self._making: dict[int, Box] = {}
        self._out: dict[int, Box] = {}  # taken, and not ended yet
        self._waiting: deque[Future[Box]] = deque()
        self._due: deque[dict[str, Any]] = deque()
        self._numbers = 0
        self._closed = False
        self._up = False
        self._error: str | None = None
        self.started: Future[Isolation] = Future()
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="mesh-sandboxes", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # --- for users of boxes

    def ask(self) -> Future[Box]:
        """Request a box. To withdraw the request, cancel the future, or give back the box if it has arrived."""
        self.check()
        future: Future[Box] = Future()
        with self._lock:
            if self._error is not None:
                raise SandboxError(self._error, sandboxes=self.name)
            self._waiting.append(future)
            self._hand_out()
            alarm = self._wanted() > 0 or not self._up
        if alarm:
            self._alarm()
        return future

    def check(self) -> None:
        """Raise if the stock cannot be used."""
        if self._closed:
            raise SandboxError(f"sandboxes {self.name!r} are closed; make others", sandboxes=self.name)
        if os.getpid() != self._pid:
            raise SandboxError(
                f"sandboxes {self.name!r} were made before this process was forked, and belong to its parent; make some "
                "after the fork",
                sandboxes=self.name,
            )

    def end(self, box: Box) -> None:
        """End a box; the caller closes its descriptors."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if box.number in self._out and self._up:
                self._due.append({"end": box.number})
        self._alarm()

    def abandon(self) -> None:
        """End all boxes, without waiting."""
        if os.getpid() == self._pid:
            self._closed = True
            self._alarm()

    def close(self) -> None:
        """End all boxes and the template, and wait for that."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        self.abandon()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def counts(self) -> tuple[int, int]:
        """How many boxes are out, and how many are ready."""
        with self._lock:
            return len(self._out), len(self._ready)

    def _alarm(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- with the lock held

    def _hand_out(self) -> None:
        while self._waiting and self._ready:
            box = self._ready.popleft()
            self._out[box.number] = box
            if not box.is_well():
                box.close()
                continue
            future = self._waiting.popleft()
            try:
                future.set_result(box)
            except InvalidStateError:  # cancelled
                del self._out[box.number]
                self._ready.appendleft(box)

    def _wanted(self) -> int:
        """How many boxes to order now."""
        self._waiting = deque(each for each in self._waiting if not each.cancelled())
        there = len(self._ready) + len(self._making)
        room = self._most - len(self._out) - there
        # Making more at once would finish none of them earlier, and delay the first.
        hands = self._hands - len(self._making)
        return max(0, min(len(self._waiting) + self._ready_wanted - there, room, hands))

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._closed and self._error is None:
                self._one_template()
                self._await_need()
        except BaseException as error:
            self._fail(f"sandboxes {self.name!r} have failed: {error!r}")
            raise
        finally:
            if self._closed:
                self._fail(f"sandboxes {self.name!r} are closed; make others")
                atexit.unregister(self.close)

    def _await_need(self) -> None:
        """After a healthy template has ended, wait until somebody wants a box."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not (self._closed or self._waiting or self._error is not None):
            poll.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)

    def _one_template(self) -> None:
        """Start a template, and serve it until its end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = os.memfd_create("mesh-sandboxes-log")
        process: subprocess.Popen[bytes] | None = None
        mark = 0
        try:
            with theirs:
                try:
                    process = self._start(theirs, log)
                except OSError as error:
                    self._fail(
                        f"sandboxes {self.name!r} cannot be made: {sys.executable} cannot be started: {error}"
                    )
                    return
            mark = self._serve(ours, process, log)
        finally:
            with suppress(OSError):
                wire.send_packet(ours, {"stop": True})
            ours.close()
            os.close(log)
            self._bury(process, mark)

    def _start(self, theirs: socket.socket, log: int) -> subprocess.Popen[bytes]:
        plan = os.memfd_create("mesh-sandboxes-plan")
        path = os.memfd_create("mesh-sandboxes-path")
        try:
            for file, text in ((plan, json.dumps(self._plan)), (path, json.dumps(self._plan["path"]))):
                os.write(file, text.encode())
                os.lseek(file, 0, os.SEEK_SET)
            fds = (theirs.fileno(), plan, path)
            return subprocess.Popen(
                [*interpreter_words(None), *code_words(_START, *map(str, fds))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            os.close(plan)
            os.close(path)

    def _serve(self, ours: socket.socket, process: subprocess.Popen[bytes], log: int) -> int:
        """Talk to the template until it or this ends. Returns the mark of its boxes."""
        mark = 0
        scratch = ""
        isolation = Isolation.NONE
        with selectors.EpollSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(ours, selectors.EVENT_READ)
            while not self._closed:
                self._order(ours, selector, isolation, scratch)
                for key, _ in selector.select():
                    if key.fileobj == self._wake:
                        with suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                    elif isinstance(key.data, Box):
                        selector.unregister(key.data.told)
                        self._made(key.data)
                    else:
                        while (told := wire.next_packet(ours)) is not None:
                            if not told or "unfit" in told:
                                self._lost(told, process, log)
                                return mark
                            if "isolation" in told:
                                isolation, mark = Isolation(told["isolation"]), told["mark"]
                                scratch = told["scratch"]
                                self._up = True
                                if not self.started.done():
                                    self.started.set_result(isolation)
                            else:
                                self._hear(told, selector)
        return mark

    def _order(
        self, ours: socket.socket, selector: selectors.BaseSelector, isolation: Isolation, scratch: str
    ) -> None:
        if not self._up:
            return
        with self._lock:
            due = [self._due.popleft() for _ in range(min(_BATCH, len(self._due)))]
            more = bool(self._due)
            wanted = self._wanted()
        with suppress(OSError):  # it has ended, which is read next
            for each in due:
                wire.send_packet(ours, each)
            for _ in range(wanted):
                self._order_one(ours, selector, isolation, scratch)
        if more:
            self._alarm()

    def _order_one(
        self, ours: socket.socket, selector: selectors.BaseSelector, isolation: Isolation, scratch: str
    ) -> None:
        self._numbers += 1
        connection, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        told, inner_told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with inner, inner_told:
            connection.setblocking(False)
            box = Box(self._numbers, connection, told, isolation, f"{scratch}/{self._numbers}")
            with self._lock:
                self._making[box.number] = box
            selector.register(told, selectors.EVENT_READ, box)
            wire.send_packet(ours, {"make": box.number}, [inner.fileno(), inner_told.fileno()])

    def _made(self, box: Box) -> None:
        """A box is ready, or has failed to start."""
        told, _ = wire.receive_packet(box.told)
        with self._lock:
            if self._making.pop(box.number, None) is None:
                return
            if told is not None and "ready" in told:
                self._ready.append(box)
                self._hand_out()
                return
            # It counts as taken until it is gone.
            self._out[box.number] = box
            waiting = self._waiting.popleft() if self._waiting else None
        box.close()
        told = told or {}
        said = str(
            told.get("failed", f"its process has ended while it was made\n{told.get('output', '')}".strip())
        )
        self._refuse(waiting, said)

    def _refuse(self, waiting: Future[Box] | None, said: str) -> None:
        if waiting is not None:
            with suppress(InvalidStateError):
                waiting.set_exception(SandboxError(f"sandboxes {self.name!r}: {said}", sandboxes=self.name))

    def _hear(self, told: dict[str, Any], selector: selectors.BaseSelector) -> None:
        with self._lock:
            number: int = told["gone"] if "gone" in told else told["failed"]
            making = self._making.pop(number, None)
            box = self._out.pop(number, None)
            waiting = self._waiting.popleft() if making is not None and self._waiting else None
            if making is None and box is None:
                # It was in stock, and has ended by itself or was killed.
                box = next((each for each in self._ready if each.number == number), None)
                if box is not None:
                    self._ready.remove(box)
                    box.close()
        if making is not None:
            selector.unregister(making.told)
            making.close()
            self._refuse(waiting, str(told.get("text", "its process has ended while it was made")))

    def _lost(self, told: dict[str, Any], process: subprocess.Popen[bytes], log: int) -> None:
        """The template has ended, or cannot serve."""
        if self._up and not told:
            return  # another one is started
        said = str(told.get("unfit", ""))
        if not said:
            # The guard has sent no message: only its exit status tells what happened.
            status = process.wait()
            said = f"the process that forks them has ended while it started, with status {status}"
        tail = os.pread(log, 4096, max(0, os.fstat(log).st_size - 4096)).decode(errors="replace").strip()
        self._fail(
            f"sandboxes {self.name!r} cannot be made: {said}"
            + (f"\nIts output ends with:\n{tail}" if tail else "")
        )

    def _fail(self, said: str) -> None:
        error = SandboxError(said, sandboxes=self.name)
        with self._lock:
            self._error = self._error or said
            waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            with suppress(InvalidStateError):
                each.set_exception(error)
        if not self.started.done():
            self.started.set_exception(error)

    def _bury(self, process: subprocess.Popen[bytes] | None, mark: int) -> None:
        """Wait for the end of the template, and end everything that is left of it and its boxes."""
        self._up = False
        if process is not None:
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if mark:
            Hunt(lambda: process_marks.find(lambda each: each.owner == mark), grace=0.0).run()
        with self._lock:
            stock = [*self._ready, *self._making.values()]
            self._ready.clear()
            self._making.clear()
            self._out.clear()
            self._due.clear()
        for box in stock:
            box.close()


def plain_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a box, without those of the owner's variables that may be secret."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(("LC_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_"))
    }
    for name, given in changes.items():
        if given is None:
            env.pop(name, None)
        else:
            env[name] = given
    return env


_KEPT = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "TERM", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
)


def folders_to_keep(path: list[str]) -> list[str]:
    """Return the folders that code in boxes is imported from, even if they are among temporary files."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return sorted({os.path.abspath(each) for each in [*path, *prefixes] if os.path.isdir(each)})  # noqa: PTH100, PTH112


def folders_to_hide() -> list[str]:
    """Return the folders in which other processes of this user listen, or keep keys: boxes see empty ones instead.

    The folder of jobs is made if it does not exist: a box must not see one that is made later.
    """
    jobs = jobs_folders()
    with suppress(OSError):  # such as a home that cannot be written to, in which there will be no jobs either
        os.makedirs(jobs[0], 0o700, exist_ok=True)  # noqa: PTH103 - pathlib takes long to import
    return list(dict.fromkeys(os.path.realpath(each) for each in (*jobs, *runtime_folders())))
