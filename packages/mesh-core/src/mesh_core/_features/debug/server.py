"""The thread that answers ``mesh debug`` while other threads of its process are stopped."""

from __future__ import annotations

import errno
import itertools
import linecache
import os
import selectors
import socket
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from mesh_core._common.context import current_instance
from mesh_core._common.peers import require_same_namespaces
from mesh_core._features.debug import places
from mesh_core._features.debug.session import Session
from mesh_core._features.debug.wire import Garbled, Told, Wire

if TYPE_CHECKING:
    from mesh_core._process.process import Process

_END_S = 1.0
_NO_ROOM_S = 0.1
_LONGEST = 2000


class Debugger:
    """A process's stopped threads, and the socket by which they are listed and resumed."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._sessions: list[Session] = []
        self._server: Server | None = None

    def next_number(self) -> int:
        """Return the number of the next stop."""
        return next(self._numbers)

    def find(self, number: object) -> Session | None:
        """Return the session of a stop, unless it is over."""
        return next((each for each in self._sessions if each.number == number and each.state != "over"), None)

    def about(self) -> Told:
        """Describe this process and its stops."""
        pid, script = self._process.job
        stops = [
            {**each.about, "state": each.state, "attached": each.client is not None}
            for each in self._sessions
            if each.state != "over"
        ]
        return {"job": pid, "script": script, "pid": os.getpid(), "stops": stops}

    def open(self, session: Session) -> bool:
        """Make a stopped thread reachable; on failure, print why and return false."""
        self._sessions = [each for each in self._sessions if each.state != "over" and each is not session]
        self._sessions.append(session)
        if self._server is None:
            try:
                self._server = Server(self, *places.listen(self._process.job[0]))
            except OSError as error:
                self._sessions.remove(session)
                _say(f"mesh: breakpoint skipped, because nobody could attach to it: {error}")
                return False
            self._server.start()
        return True

    def tidy_up(self) -> None:
        """Close the socket once nothing is stopped and nobody is attached (DBG-3)."""
        with self.lock:
            self._sessions = [each for each in self._sessions if each.state != "over"]
            server = self._server
            if server is None or any(each.state == "stopped" or each.client for each in self._sessions):
                return
            self._server = None
            server.end()
        if threading.current_thread() is not server:
            server.join(_END_S)

    def describe(self, frame: FrameType, line: int, why: str, *, after: bool) -> dict[str, Any]:
        """Describe the calling thread, stopped at this line, for listings."""
        me = self._process.identity
        actor = current_instance()
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        source = _short(linecache.getline(file, line, frame.f_globals).strip())
        why = _short(why)
        banner = f"> {file}({line}){function}()\n" + (f"-> {source}\n" if source else "")
        return {
            "mesh": me.mesh_name if actor is None else actor.name,
            "class": "" if actor is None else actor.class_name,
            "coordinates": dict(me.region.point_of(me.rank)) if actor is None else dict(actor.rank),
            "rank": me.rank if actor is None else actor.rank.rank,
            "proc": me.proc_id,
            "host": me.host,
            "thread": threading.current_thread().name,
            "file": file,
            "line": line,
            "function": function,
            "source": source,
            "why": why,
            "banner": f"{why}\n{banner}" if after else banner,
        }

    def announce(self, about: dict[str, Any]) -> None:
        """Tell the user, on the process's stderr."""
        place = ",".join(f"{label}={index}" for label, index in about["coordinates"].items())
        where = ",".join(filter(None, (about["mesh"], place)))
        # The socket can be reached only from the process's machine.
        there = f", on host {about['host']}," if self._process.identity.host_no != 0 else ""
        _say(
            f"mesh: {where} stopped at {about['file']}:{about['line']} in {about['function']} ({about['why']}); "
            f"attach{there} with: mesh debug attach {where}"
        )


def _short(text: str) -> str:
    """Shorten a text for listings: errors and lines of code may be very long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _say(line: str) -> None:
    from mesh_core._system.streams import notice

    notice(line)


class _Guest:
    """A connection, and what it is attached to."""

    __slots__ = ("session", "wire")

    def __init__(self, peer: socket.socket) -> None:
        self.wire = Wire(peer)
        self.session: Session | None = None


class Server(threading.Thread):
    """Reads every connection; stopped threads wait for what it passes on."""

    def __init__(self, debugger: Debugger, listener: socket.socket, path: str) -> None:
        super().__init__(name="mesh-debug", daemon=True)
        self._debugger = debugger
        self._listener = listener
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._guests: set[_Guest] = set()

    def end(self) -> None:
        """Close the socket; from any thread."""
        places.unlink(self._path)
        self._wake.close()

    def run(self) -> None:
        """Answer until told to end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._close()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._guests:
                    self._serve(key.data)

    def _close(self) -> None:
        for guest in self._guests:
            guest.wire.close()
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # The connection is still pending: without a pause, this would use a whole core until descriptors are free.
                time.sleep(_NO_ROOM_S)
            return
        try:
            require_same_namespaces(peer)
        except OSError as error:
            _say(f"mesh: refused a connection to a stopped actor: {error}")
            peer.close()
            return
        guest = _Guest(peer)
        self._guests.add(guest)
        self._selector.register(peer, selectors.EVENT_READ, guest)

    def _serve(self, guest: _Guest) -> None:
        try:
            told = guest.wire.take()
            if told is not None:
                with self._debugger.lock:
                    for each in told:
                        self._do(guest, each)
                return
        except Garbled as error:
            guest.wire.tell(error=f"invalid request: {error}")
        except Exception as error:  # noqa: BLE001 - without this thread, nothing could resume the stopped ones
            guest.wire.tell(error=f"mesh failed to answer: {error!r}")
        self._part(guest)

    def _part(self, guest: _Guest) -> None:
        self._selector.unregister(guest.wire.peer)
        self._guests.discard(guest)
        with self._debugger.lock:
            session = guest.session
            if session is not None and session.client is guest.wire:
                session.client = None
        guest.wire.close()
        self._debugger.tidy_up()

    def _do(self, guest: _Guest, told: Told) -> None:
        do = told.get("do")
        session = guest.session
        if do == "describe":
            guest.wire.tell(**self._debugger.about())
        elif do == "attach":
            self._attach(guest, told)
        elif session is None or session.client is not guest.wire:
            if do is not None:
                guest.wire.tell(error="not attached")
        elif do == "answer":
            line = told.get("line")
            session.answer(line if isinstance(line, str) else None)
        elif do == "interrupt":
            session.interrupt()
        else:
            guest.wire.tell(error=f"unknown request {do!r}")

    def _attach(self, guest: _Guest, told: Told) -> None:
        session = self._debugger.find(told.get("stop"))
        if session is None:
            guest.wire.tell(error="it is running again")
        elif session.client is not None:
            guest.wire.tell(error="somebody else is attached to it")
        else:
            guest.session = session
            session.attach(guest.wire, quiet=bool(told.get("quiet")))
