"""Follow a job's events as they happen."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from mesh_core._common.closing import Closing
from mesh_core._common.codes import Question
from mesh_core._common.current import current
from mesh_core._common.errors import MeshError
from mesh_core._native import Journal
from mesh_core.inspect._ask import ROOT, Addr, ask, proc_name, split_title
from mesh_core.inspect._event import Event
from mesh_core.inspect._journal import Journal as Recorded

if TYPE_CHECKING:
    from mesh_core._native import Call
    from mesh_core._process.process import Process

_BURST = 256
_TREE_S = 2.0


class Names:
    """Names of process meshes, learned from events and from the controller."""

    def __init__(self, process: Process, known: dict[int, str] | None = None) -> None:
        self._process = process
        self._known = dict(known or {})

    def learn(self, mesh: int, name: str) -> None:
        """Remember a mesh's name."""
        self._known[mesh] = name

    def of(self, addr: Addr) -> str:
        """Return a process's display name."""
        if addr != ROOT and addr[0] not in self._known:
            self._ask(addr[2])
            # Ask only once: the name of a mesh that has ended is no longer known.
            self._known.setdefault(addr[0], f"mesh {addr[0]:x}")
        return proc_name(self._process, addr, self._known)

    def host(self, number: int) -> str:
        """Return a host's display name."""
        me = self._process.identity
        return me.host if number == me.host_no else self._process.name_of_host(number)

    def _ask(self, host: int) -> None:
        whom: dict[Addr, int | None] = {ROOT: None, (0, host, host): None}
        for tree in ask(self._process, Question.TREE, whom, time.monotonic() + _TREE_S).values():
            for mesh, title in tree.get("titles", ()):
                self._known.setdefault(mesh, split_title(title)[0])


def read_event(process: Process, text: str, names: Names) -> Event | None:
    """Read an entry of the runtime's journal; ``None`` if it cannot be read."""
    try:
        entry: dict[str, Any] = json.loads(text)
        return _recorded(process, entry) if not isinstance(entry.get("proc"), list) else _told(entry, names)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # written by a process of another version


def _recorded(process: Process, entry: dict[str, Any]) -> Event:
    """Read an event recorded in Python, which has the event's field names."""
    kept = Recorded.of(process).find(entry.get("token", -1))
    if kept is not None:
        return kept
    known = {one.name for one in fields(Event)} - {"failure"}
    told = {key: value for key, value in entry.items() if key in known}
    return Event(**{**told, "text": entry.get("failure") or entry.get("text", "")})


def _told(entry: dict[str, Any], names: Names) -> Event:
    """Read an event recorded by a runtime."""
    mesh, rank, host = entry["proc"]
    if entry.get("title"):
        names.learn(mesh, split_title(entry["title"])[0])
    actor = split_title(entry.get("actor_title", ""))[0]
    if entry["kind"] in ("host_attached", "host_leaving", "host_died", "host_stopped"):
        grace = entry.get("grace_ms")
        return Event(
            kind=entry["kind"],
            time=entry["time"],
            host=entry.get("host", ""),
            grace=None if grace is None else grace / 1000,
            text=entry.get("text", ""),
        )
    proc = names.of((mesh, rank, host))
    if entry["kind"] == "procs_spawned":
        proc = proc.rpartition("[")[0]
    return Event(
        kind=entry["kind"],
        time=entry["time"],
        proc=proc,
        pid=entry.get("pid"),
        actor=actor,
        class_name=entry.get("class", ""),
        rank=entry.get("rank", None if entry["kind"] == "procs_spawned" else rank),
        count=entry.get("count"),
        host=names.host(host),
        exitcode=entry.get("exitcode"),
        signal=entry.get("signal"),
        # An exit status says more than the text, which is only that the connection closed.
        text="" if {"exitcode", "signal"} & entry.keys() else entry.get("text", ""),
    )


class Events(Closing):
    """An iterator over events, for ``for`` or ``async for``; returned by :func:`events`.

    The latest 2,048 events are kept for a slow reader; :attr:`missed` counts those that it missed beyond that.
    Iteration ends when the runtime is shut down, or after :meth:`close`.
    """

    def __init__(self, process: Process, *, past: bool, actors: bool) -> None:
        self._process = process
        self._journal: Journal | None = Journal(process.runtime, actors)
        self._seen = 0 if past else self._journal.next()
        self._ready: deque[Event] = deque()
        self._names = Names(process)
        self.missed = 0
        """How many events were overwritten before this reader got to them."""

    def _pull(self) -> bool:
        """Fetch new events; return false once there will be no more."""
        journal = self._journal
        if journal is None:
            return False
        entries, after, missed = journal.read(self._seen, _BURST)
        self.missed += missed
        self._seen = after
        for entry in entries:
            event = read_event(self._process, entry, self._names)
            if event is not None:
                self._ready.append(event)
        return bool(entries) or not journal.over()

    def get(self, timeout: float | None = None) -> Event | None:
        """Return the next event; ``None`` if there is none within ``timeout`` seconds, or there will be no more."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            if not self._pull():
                return None
            journal = self._journal
            if self._ready or journal is None:
                continue
            if not journal.wait(None if until is None else max(0.0, until - time.monotonic()), self._seen):
                return None
        return self._ready.popleft()

    def __iter__(self) -> Iterator[Event]:
        while (event := self.get()) is not None:
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while not self._ready:
                if not self._pull():
                    return
                journal = self._journal
                if not self._ready and journal is not None:
                    # The journal can be waited for like a call: both can be polled and notify a waker.
                    await self._process.bridge().wait(cast("Call", journal), self._seen)
            yield self._ready.popleft()

    @property
    def over(self) -> bool:
        """Whether there will be no more events: the runtime was shut down, or this was closed."""
        return not self._ready and (self._journal is None or (self._journal.over() and not self._pull()))

    def close(self) -> None:
        """Stop following."""
        self._journal = None


def events(*, past: bool = False, actors: bool = True) -> Events:
    """Follow events: hosts, processes and actors that start, stop or fail.

    Works only in the script (the controller). The job does not wait for readers: a slow reader misses events, which are
    counted.

    Args:
        past: begin with the events that are still kept, instead of with the next one. Actors report events only while
            somebody follows them.
        actors: whether actors report their creation and end, which costs one message each.

    >>> from mesh_core import inspect, this_host
    >>> with inspect.events() as happening:
    ...     with this_host().spawn_procs(name="workers"):
    ...         pass
    ...     for event in happening:
    ...         print(event.kind, event.proc)
    ...         if event.kind == "proc_stopped":
    ...             break
    procs_spawned workers
    proc_up workers[0]
    proc_stopped workers[0]
    """
    process = current()
    if process.identity.mesh_id != 0:
        raise MeshError(
            "events() works only in the script, where all events arrive, but was called in the worker "
            f"{process.identity.proc_id}. Call it in the script, or call snapshot() here"
        )
    return Events(process, past=past, actors=actors)
