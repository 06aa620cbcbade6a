"""What a job does as a timeline for Perfetto and Chrome, put together from successive snapshots."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mesh_core import MeshError, inspect
from mesh_core.extensions import naming
from mesh_core.inspect import ActorState, Event, HostState, ProcState, Running, Snapshot

_LIMIT = 1_000_000
"""The most entries of one timeline: about 150 MB in a file."""
_PATIENCE = 3
"""After so many successive looks without an answer, the job is taken to have ended."""
_SLACK_S = 0.001
"""How much two looks may differ about when a message was begun, besides the duration of the looks."""
_TELLING = ("running", "stopping")
"""States in which a process reports its actors."""

Entry = dict[str, Any]


@dataclass
class _Span:
    """A span that has not ended, as far as it was seen."""

    name: str
    kind: str
    begun: float
    seen: float
    more: Entry = field(default_factory=dict)


@dataclass
class _Lane:
    """A row of the timeline, with one span after the other (TRL-1)."""

    tid: int
    ended: float = 0.0
    span: _Span | None = None


@dataclass
class _Actor:
    """One actor, with a lane for each of the messages that it handles at the same time."""

    state: ActorState
    lanes: list[_Lane] = field(default_factory=list)


@dataclass
class _Track:
    """A host or a process: a group of rows."""

    pid: int
    lane: _Lane
    state: ProcState | None = None
    actors: dict[tuple[int, int], _Actor] = field(default_factory=dict)
    rows: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """The rows of each actor, in all lives of the process."""
    count: int = 1
    life: int | None = None
    """The life of its rank that the process was in when it was last seen."""


class Timeline:
    """The timeline of a job. It has no clock: it takes the time from the snapshots.

    TRL-1: spans of one row never overlap, and each lies within what was recorded.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.left_out = 0
        self._limit = limit
        self._entries: list[Entry] = []
        self._tracks: dict[str, _Track] = {}
        self._values: dict[tuple[int, str], float] = {}
        self._failures: set[tuple[Any, ...]] = set()
        self._begun: float | None = None
        self._now = 0.0
        self._before = 0.0

    def add(self, snap: Snapshot, took: float = 0.0) -> None:
        """Add a snapshot, which took so many seconds."""
        if self._begun is None:
            self._begun = self._before = self._now = snap.time
            self._failures = {_key(event) for event in snap.failures}
            self._name(0, "process_name", "job")
        # A clock that is set back must not make spans end before they begin.
        self._before, self._now = self._now, max(snap.time, self._now)
        slack = took + _SLACK_S
        here: set[str] = set()
        for host in snap.hosts:
            self._host(host)
            for proc in host.procs:
                # Two meshes may have the same name.
                key, count = proc.name, 1
                while key in here:
                    count += 1
                    key = f"{proc.name} ({count})"
                here.add(key)
                self._proc(key, proc, slack)
        for name, track in self._tracks.items():
            if track.state is not None and name not in here:
                self._over(track, "ended")
        for event in snap.failures:
            if (what := _key(event)) not in self._failures:
                self._failures.add(what)
                self._failure(event)

    def entries(self) -> Iterator[Entry]:
        """Return everything as objects of Chrome's trace format; spans that have not ended end where they were last seen."""
        yield from self._entries
        for track in self._tracks.values():
            for lane in [track.lane, *(lane for actor in track.actors.values() for lane in actor.lanes)]:
                if lane.span is not None:
                    yield self._entry_of(track, lane, lane.span)

    def _host(self, host: HostState) -> None:
        key = f"host {host.number}"
        if host.state == "stopped" and key not in self._tracks:
            # A host that the script had released before the recording.
            return
        track = self._track(key, f"host {host.name}", "agent")
        self._state(track, host.state, {"why": host.why} if host.why else {})
        if host.state in ("running", "suspect"):
            self._value(track, "load", host.load)

    def _proc(self, key: str, proc: ProcState, slack: float) -> None:
        track = self._track(key, f"{key} on {proc.host}", "process")
        before = track.state
        if before is not None and (before.pid, before.incarnation) != (proc.pid, proc.incarnation):
            self._over(track, None)
            before = None
        if track.life not in (None, proc.incarnation):
            self._instant(track, track.lane.tid, f"restarted, life {proc.incarnation + 1}", "restart")
        track.state, track.life = proc, proc.incarnation
        self._state(track, proc.state, {"pid": proc.pid} if proc.pid else {})
        passed = self._now - self._before
        if proc.cpu is not None and before is not None and before.cpu is not None and passed > 0:
            self._value(track, "cpu %", round(max(0.0, proc.cpu - before.cpu) / passed * 100))
        if proc.rss is not None:
            self._value(track, "memory MB", round(proc.rss / 1e6, 1))
        if proc.state not in _TELLING:
            return
        self._value(track, "calls that wait for replies", proc.calls)
        here = {(actor.actor_id, actor.rank) for actor in proc.actors}
        for gone in [each for each in track.actors if each not in here]:
            self._instant(track, track.rows[gone][0], "stopped", "actor")
            self._drop(track, gone)
        for actor in proc.actors:
            self._actor(track, actor, slack, passed)

    def _actor(self, track: _Track, actor: ActorState, slack: float, passed: float) -> None:
        key = (actor.actor_id, actor.rank)
        name = f"{actor.name}[{actor.rank}]"
        if (known := track.actors.get(key)) is None:
            known = track.actors[key] = _Actor(actor)
            self._lane(track, known, key)
        before, known.state = known.state, actor
        messages = list(actor.running)
        if actor.state == "starting":
            messages.append(Running("constructor", actor.age, actor.owner))
        self._messages(track, known, messages, slack)
        self._value(track, f"{name} waiting", actor.queue)
        self._value(track, f"{name} mean ms", round(actor.mean * 1e3, 3))
        if passed > 0:
            self._value(track, f"{name} handled/s", round((actor.handled - before.handled) / passed, 1))
        if (raised := actor.failed - before.failed) > 0:
            self._instant(
                track, known.lanes[0].tid, "raised" if raised == 1 else f"raised {raised} times", "error"
            )

    def _messages(self, track: _Track, actor: _Actor, messages: list[Running], slack: float) -> None:
        """Continue the spans of messages that were seen before, end those that are gone, and begin new ones."""
        new = []
        open_lanes = [lane for lane in actor.lanes if lane.span is not None]
        for message in sorted(messages, key=lambda each: -each.seconds):
            begun = self._now - message.seconds
            same = [
                (abs(lane.span.more["begun"] - begun), number)
                for number, lane in enumerate(open_lanes)
                if lane.span is not None
                and (lane.span.name, lane.span.more["caller"]) == (message.endpoint, message.caller)
            ]
            if same and min(same)[0] <= max(slack, _lane_slack(open_lanes[min(same)[1]])):
                span = open_lanes.pop(min(same)[1]).span
                if span is not None:
                    span.seen = self._now
                    span.more["slack"] = slack
            else:
                new.append((message, begun))
        for lane in open_lanes:
            self._end(track, lane)
        for message, begun in new:
            free = [lane for lane in actor.lanes if lane.span is None and lane.ended <= begun + slack]
            key = (actor.state.actor_id, actor.state.rank)
            lane = free[0] if free else self._lane(track, actor, key)
            more = {"caller": message.caller, "begun": begun, "slack": slack}
            kind = "constructor" if message.endpoint == "constructor" else "call"
            lane.span = _Span(
                message.endpoint, kind, max(lane.ended, begun, self._begun or 0.0), self._now, more
            )

    def _lane(self, track: _Track, actor: _Actor, key: tuple[int, int]) -> _Lane:
        rows = track.rows.setdefault(key, [])
        place = len(actor.lanes)
        if place == len(rows):
            rows.append(track.count)
            track.count += 1
            title = f"{actor.state.name}[{actor.state.rank}]" + (f" ({place + 1})" if place else "")
            self._name(track.pid, "thread_name", title, rows[place])
        lane = _Lane(rows[place])
        # An earlier life of the actor may have used this row.
        lane.ended = self._values.get((track.pid, f"row {lane.tid}"), 0.0)
        actor.lanes.append(lane)
        return lane

    def _state(self, track: _Track, state: str, more: Entry) -> None:
        span = track.lane.span
        if span is not None and span.name == state:
            span.seen = self._now
            return
        if span is not None:
            span.seen = self._now
            self._end(track, track.lane)
        track.lane.span = _Span(state, "state", self._now, self._now, more)

    def _over(self, track: _Track, why: str | None) -> None:
        """A process is gone, or another one is in its place."""
        for key in list(track.actors):
            self._drop(track, key)
        if why:
            self._instant(track, track.lane.tid, why, "state")
        self._end(track, track.lane)
        track.state = None

    def _drop(self, track: _Track, key: tuple[int, int]) -> None:
        for lane in track.actors.pop(key).lanes:
            self._end(track, lane)
            self._values[track.pid, f"row {lane.tid}"] = lane.ended

    def _end(self, track: _Track, lane: _Lane) -> None:
        if lane.span is not None:
            if lane.span.kind != "state":
                lane.span.more["at_most_ms"] = (self._now - lane.span.more["begun"]) * 1e3
            self._put(self._entry_of(track, lane, lane.span))
            lane.ended = max(lane.ended, lane.span.seen)
            lane.span = None

    def _entry_of(self, track: _Track, lane: _Lane, span: _Span) -> Entry:
        more = {name: value for name, value in span.more.items() if name not in ("begun", "slack")}
        if span.kind != "state":
            more["at_least_ms"] = max(0.0, span.seen - span.more["begun"]) * 1e3
        entry = self._at("X", span.name, track.pid, lane.tid, span.begun)
        return {**entry, "cat": span.kind, "dur": max(0.0, span.seen - span.begun) * 1e6, "args": more}

    def _at(self, ph: str, name: str, pid: int, tid: int, when: float) -> Entry:
        at = max(0.0, when - (self._begun or 0.0)) * 1e6
        return {"ph": ph, "name": name, "pid": pid, "tid": tid, "ts": at}

    def _failure(self, event: Event) -> None:
        told = event.as_dict()
        who = f"{event.actor}[{event.rank}]" if event.actor and event.rank is not None else event.actor
        title = f"{event.kind} {who or event.proc}".rstrip()
        entry = self._at("i", title, 0, 0, min(event.time, self._now))
        self._put({**entry, "cat": "failure", "s": "g", "args": told})

    def _instant(self, track: _Track, tid: int, name: str, kind: str) -> None:
        self._put({**self._at("i", name, track.pid, tid, self._now), "cat": kind, "s": "t"})

    def _value(self, track: _Track, name: str, value: float) -> None:
        if self._values.get((track.pid, name)) != value:
            self._values[track.pid, name] = value
            self._put({**self._at("C", name, track.pid, 0, self._now), "args": {"value": value}})

    def _track(self, key: str, title: str, row: str) -> _Track:
        if (track := self._tracks.get(key)) is None:
            track = self._tracks[key] = _Track(len(self._tracks) + 1, _Lane(0))
            self._name(track.pid, "process_name", title)
            self._entries.append(
                {
                    "ph": "M",
                    "name": "process_sort_index",
                    "pid": track.pid,
                    "tid": 0,
                    "ts": 0,
                    "args": {"sort_index": track.pid},
                }
            )
            self._name(track.pid, "thread_name", row)
        return track

    def _name(self, pid: int, what: str, name: str, tid: int = 0) -> None:
        self._entries.append(
            {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
        )

    def _put(self, entry: Entry) -> None:
        if len(self._entries) < self._limit:
            self._entries.append(entry)
        else:
            self.left_out += 1


def _lane_slack(lane: _Lane) -> float:
    """Return by how much the look that showed a lane's message may have been wrong about its beginning."""
    return 0.0 if lane.span is None else float(lane.span.more["slack"])


def _key(event: Event) -> tuple[Any, ...]:
    return event.kind, event.time, event.proc, event.actor, event.rank, event.pid


class JobTrace:
    """Records what a job does until the end of the block; `save` writes a file for a trace viewer (https://ui.perfetto.dev).

    It takes a snapshot every ``interval`` seconds. Anything longer appears as a span from its true beginning; anything shorter only
    counts in the numbers of messages handled and waiting. Nothing is recorded outside the block.

    >>> import json, tempfile
    >>> from pathlib import Path
    >>> from mesh_core import this_host
    >>> from mesh_supervision import JobTrace
    >>> with this_host().spawn_procs({"gpus": 2}, name="workers") as procs:
    ...     procs.initialized.get(timeout=30)
    ...     with JobTrace() as trace:
    ...         pass
    >>> path = Path(tempfile.mkdtemp()) / "job.json"
    >>> trace.save(path)
    >>> entries = json.loads(path.read_text())["traceEvents"]
    >>> [each["args"]["name"].split()[0] for each in entries if each["name"] == "process_name"]
    ['job', 'host', 'controller', 'workers[0]', 'workers[1]']

    Args:
        interval: the number of seconds between two looks. Each takes the script some milliseconds.
        snapshot: takes a snapshot; by default of the job of this process.
    """

    def __init__(
        self, interval: float = 1.0, *, snapshot: Callable[..., Snapshot] = inspect.snapshot
    ) -> None:
        if isinstance(interval, bool) or not interval > 0:
            raise ValueError(f"interval must be a positive number of seconds, got {interval!r}")
        self.missed = 0
        """The number of looks without an answer."""
        self.why = ""
        """Why it ended before it was closed: the job has ended, or does not answer."""
        self.over = threading.Event()
        """Set when nothing more is recorded."""
        self._interval = interval
        self._snapshot = snapshot
        self._timeline = Timeline()
        self._thread: threading.Thread | None = None

    @property
    def left_out(self) -> int:
        """The number of entries for which there was no room."""
        return self._timeline.left_out

    def save(self, path: str | Path) -> None:
        """Write it, once the block has ended."""
        if self._thread is None or not self.over.is_set():
            raise MeshError("a trace is saved when it has been recorded: call save() behind the with block")
        told = {"traceEvents": list(self._timeline.entries()), "displayTimeUnit": "ms"}
        with naming(path):
            Path(path).write_text(json.dumps(told), encoding="utf-8")

    def close(self) -> None:
        """Stop recording, after a last snapshot so that the end is included."""
        self.over.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise MeshError("a JobTrace records once: make another one")
        # The first look is taken here, so that the caller gets its errors.
        self._look()
        self._thread = threading.Thread(target=self._run, name="mesh-trace", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look(self) -> None:
        begun = time.monotonic()
        snap = self._snapshot(pss=False)
        self._timeline.add(snap, time.monotonic() - begun)

    def _run(self) -> None:
        silent = 0
        last = False
        while not last:
            last = self.over.wait(self._interval)
            try:
                self._look()
            except MeshError as error:
                self.missed += 1
                silent += 1
                if silent == _PATIENCE:
                    self.why = str(error)
                    self.over.set()
                    return
            else:
                silent = 0
