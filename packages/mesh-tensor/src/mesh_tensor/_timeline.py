"""When everything ran: in the script, and in each process of a mesh."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import MeshError, Point
from mesh_core.extensions import naming
from mesh_tensor._errors import line_of
from mesh_tensor._stream import caller
from mesh_tensor._tensor import issuer_of

if TYPE_CHECKING:
    from mesh_core import ProcMesh
    from mesh_tensor._global._mesh import Mesh
    from mesh_tensor._groups import Address
    from mesh_tensor._stream import Stream

KINDS = ("compute", "collective", "other", "move")
"""As the processes count them."""
_TOP = 10
_LEAVING = 5.0
"""How long a block that ends by an exception waits for the recording, in seconds."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in a timeline: one operator, collective, move or wait."""

    name: str
    kind: str
    """`compute`, `collective`, `move` or `other` on a process; `issue` or `wait` in the script."""
    begun: float
    """In seconds since 1970, by the clock of the machine."""
    ended: float
    line: str | None = None
    """The line of the script that it comes from."""
    queued: float | None = None
    """For how many seconds it was in transit, or waited for what was before it."""


class Timeline:
    """A recording of the work on a mesh. Printed, it is a summary; `save` writes a file for a trace viewer."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.begun = time.time()
        self.ended = self.begun
        self.script: list[Span] = []
        """What the script has issued, and where it has waited."""
        self.processes: list[tuple[Point, list[Span]]] = []
        """What each process has done."""
        self.left_out = 0
        """The spans for which there was no room, in the process that has most of them."""
        self._firsts: dict[Stream, float] = {}
        self._sent: list[tuple[Stream, int, int, float]] = []
        self._streams: list[Stream] = []
        """The recorded meshes: this one, and others with which it shares processes, such as its slices."""
        self._places: set[Address] = set()

    def begin(self) -> None:
        """Start recording all streams to processes of the mesh."""
        stream = self._stream
        self._places = set(stream.groups.ranks())
        # A broken one raises when it is used next.
        others = [each for each in stream.tensors.streams if each is not stream and not each.broken]
        shared = [each for each in others if not self._places.isdisjoint(each.groups.ranks())]
        for each in [stream, *shared]:
            running = each.timeline
            if running is not None and not self._places.isdisjoint(running._places):  # noqa: SLF001 - of this class
                raise RuntimeError(
                    f"{stream.procs} is being recorded already, or shares processes with {each.procs}, which is: there can be one "
                    "timeline of a mesh at a time"
                )
        with stream.lock, _disable_current_modes():
            for each in [stream, *shared]:
                each.flush()
                if each.timeline is None:
                    self._add(each)
            stream._tell("time")  # noqa: SLF001 - one of the words that all processes know

    def join(self, stream: Stream) -> None:
        """Record a new stream, if it is to processes of the mesh."""
        if stream.timeline is None and not self._places.isdisjoint(stream.groups.ranks()):
            self._add(stream)

    @property
    def streams(self) -> list[Stream]:
        """The recorded streams."""
        return list(self._streams)

    def end(self) -> None:
        """Stop recording."""
        for each in self._streams:
            each.timeline = None
        self._streams.clear()

    def _add(self, stream: Stream) -> None:
        stream.timeline = self
        self._streams.append(stream)

    def issuing(self, stream: Stream) -> None:
        """Note that the first of a batch of instructions is issued now."""
        self._firsts[stream] = time.time()

    def sent(self, stream: Stream, first: int, count: int) -> None:
        """Note that these instructions are sent now."""
        if count:
            now = time.time()
            self._sent.append((stream, first, count, now))
            begun = self._firsts.get(stream, now)
            self.script.append(Span(f"issue {count:,}", "issue", begun, now, _line(stream, first)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the script waits meanwhile."""
        frame = caller()
        line = line_of((frame.f_code, frame.f_lasti))
        begun = time.time()
        try:
            yield
        finally:
            self.script.append(Span("wait", "wait", begun, time.time(), line))

    def save(self, path: str | Path) -> None:
        """Write a trace for Perfetto (https://ui.perfetto.dev) or Chrome."""
        events: list[dict[str, Any]] = []
        rows = [("script", self.script), *((_named(point), spans) for point, spans in self.processes)]
        for number, (name, spans) in enumerate(rows):
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
            events.append(
                {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
            )
            events.extend(self._event(span, number) for span in spans)
        with naming(path):
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _event(self, span: Span, number: int) -> dict[str, Any]:
        more = {"line": span.line, "queued_ms": None if span.queued is None else span.queued * 1e3}
        return {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": number,
            "tid": 0,
            "ts": (span.begun - self.begun) * 1e6,
            "dur": (span.ended - span.begun) * 1e6,
            "args": {name: value for name, value in more.items() if value is not None},
        }

    def __str__(self) -> str:
        whole = self.ended - self.begun
        waits = sum(span.ended - span.begun for span in self.script if span.kind == "wait")
        lines = [f"{whole * 1e3:.1f} ms, of which the script has waited {waits * 1e3:.1f} ms"]
        lines.append(
            f"{'process':24}{'compute ms':>12}{'collective ms':>15}{'move ms':>10}{'idle ms':>10}{'instructions':>14}"
        )
        operators: Counter[str] = Counter()
        times: Counter[str] = Counter()
        for point, spans in self.processes:
            spent = dict.fromkeys(KINDS, 0.0)
            count = 0
            for span in spans:
                # A collective within an operator does not count as computing.
                spent[span.kind] += span.ended - span.begun
                if span.queued is not None:
                    count += 1
                    operators[span.name] += 1
                    times[span.name] += round((span.ended - span.begun) * 1e9)
                elif span.kind == "collective":
                    spent["compute"] -= span.ended - span.begun
            idle = max(0.0, whole - sum(spent.values()))
            numbers = (
                f"{spent['compute'] * 1e3:12.1f}",
                f"{spent['collective'] * 1e3:15.1f}",
                f"{spent['move'] * 1e3:10.1f}",
                f"{idle * 1e3:10.1f}",
            )
            lines.append(f"{_named(point):24}{''.join(numbers)}{count:14,}")
        if times:
            lines.append("what took longest, in all processes:")
        for name, spent_on in times.most_common(_TOP):
            lines.append(f"  {name:40}{spent_on / 1e6:10.1f} ms{operators[name]:10,} times")
        if self.left_out:
            lines.append(f"{self.left_out:,} later spans of a process are left out")
        return "\n".join(lines)

    def fill(self, answers: list[tuple[Point, Any]]) -> None:
        """Take what the processes have recorded."""
        self.ended = time.time()
        sent_at: dict[int, float] = {}
        lines: dict[int, str | None] = {}
        for stream, first, count, when in self._sent:
            numbers = range(first, first + count)
            sent_at.update(dict.fromkeys(numbers, when))
            lines.update((number, _line(stream, number)) for number in numbers)
        self._sent.clear()
        self._firsts.clear()
        for point, (spans, left_out) in answers:
            self.left_out = max(self.left_out, left_out)
            made = [
                Span(
                    name,
                    KINDS[kind],
                    begun / 1e9,
                    ended / 1e9,
                    lines.get(number),
                    max(0.0, begun / 1e9 - sent_at[number]) if number in sent_at else None,
                )
                for number, name, kind, begun, ended in spans
            ]
            self.processes.append((point, made))


def _line(stream: Stream, instruction: int) -> str | None:
    place = stream.source(instruction)
    return None if place is None else line_of(place)


@contextmanager
def timeline(procs: ProcMesh | Mesh) -> Iterator[Timeline]:
    """Record the work on a mesh, in the script and in each process, until the end of the block.

    At the end of the block it waits until everything that was issued is done.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import activate, reduce, timeline
    >>> with this_host().spawn_procs({"gpus": 2}) as procs, activate(procs):
    ...     with timeline(procs) as recorded:
    ...         x = reduce(torch.ones(64, 64) @ torch.ones(64, 64))
    ...     [span.name for span in recorded.processes[0][1] if span.kind != "other"]
    ['aten.ones.default', 'aten.ones.default', 'aten.mm.default', 'mesh_tensor.reduce']
    """
    stream = issuer_of(procs).stream
    stream.check()
    recorded = Timeline(stream)
    recorded.begin()
    try:
        yield recorded
    except BaseException:
        # The problem is raised by this exception.
        with suppress(MeshError, TimeoutError):
            recorded.fill(_end(recorded, stream, _LEAVING))
        raise
    recorded.fill(_end(recorded, stream))


def _end(recorded: Timeline, stream: Stream, timeout: float | None = None) -> list[tuple[Point, Any]]:
    with stream.lock, _disable_current_modes():
        try:
            for each in recorded.streams:
                # What was issued in slices is done first.
                with suppress(MeshError):
                    each.flush()
            asked = stream.ask("timed")
        finally:
            recorded.end()
        return [(point, stream.value(point, answer)) for point, answer in stream.wait(asked, timeout)]


def _named(point: Point) -> str:
    return ", ".join(f"{dim}={at}" for dim, at in point.items()) or "the only process"
