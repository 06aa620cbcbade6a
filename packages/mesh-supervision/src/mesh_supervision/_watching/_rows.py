"""What `mesh top` shows of a snapshot: rows of text, in the requested order. No terminal here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from mesh_core.inspect import ActorState, HostState, ProcState, Snapshot

HEAD = ("", "pid", "does", "queue", "handled", "failed", "rate", "mean", "cpu", "memory")


class Order(Enum):
    """The order of rows; all but the tree show only actors, the largest first."""

    TREE = "tree"
    QUEUE = "queue"
    RATE = "rate"
    MEAN = "mean"
    BUSY = "busy"

    @property
    def next(self) -> Order:
        """The next order."""
        every = list(Order)
        return every[(every.index(self) + 1) % len(every)]


@dataclass(frozen=True)
class Row:
    """One line."""

    key: str
    """Identifies it in the next snapshot."""
    cells: tuple[str, ...]
    is_bad: bool
    proc: str
    """The process that it is about, or in; empty for a host."""


_BY: dict[Order, Callable[[ActorState], float]] = {
    Order.QUEUE: lambda actor: actor.queue,
    Order.RATE: lambda actor: actor.rate,
    Order.MEAN: lambda actor: actor.mean,
    Order.BUSY: lambda actor: max((each.seconds for each in actor.running), default=0.0),
}


def rows(
    snap: Snapshot, before: Snapshot | None = None, order: Order = Order.TREE, wanted: str = ""
) -> list[Row]:
    """Return the rows of a snapshot; with a filter, only those that contain its text, and in a tree those above them.

    The previous snapshot says how much processor time was used since.
    """
    used = {(proc.name, proc.pid): proc.cpu for proc in before.procs} if before is not None else {}
    passed = snap.time - before.time if before is not None else 0.0
    if order is not Order.TREE:
        found = sorted(snap.actors, key=_BY[order], reverse=True)
        return [row for row in map(_actor, found) if wanted in _text(row)]
    tree: list[Row] = []
    for host in snap.hosts:
        below: list[Row] = []
        for proc in (*host.procs, *host.dead):
            own = _proc(proc, used.get((proc.name, proc.pid)), passed)
            actors = [row for row in map(_actor, proc.actors) if wanted in _text(row)]
            if actors or wanted in _text(own):
                below += [own, *(_indented(row) for row in actors)]
        if below or wanted in host.name:
            tree += [_host(host), *below]
    return tree


def summary(snap: Snapshot) -> str:
    """Return a summary in one line."""
    counts = [(len(snap.hosts), "host"), (len(snap.procs), "process"), (len(snap.actors), "actor")]
    if snap.dead:
        counts.append((len(snap.dead), "dead rank"))
    said = [f"{count:,} {word if count == 1 else _many(word)}" for count, word in counts]
    waiting = sum(actor.queue for actor in snap.actors)
    rate = sum(actor.rate for actor in snap.actors)
    said += [f"{waiting:,} waiting", f"{rate:,.0f} handled/s"]
    if snap.failures:
        said.append(f"{len(snap.failures)} recent {'failure' if len(snap.failures) == 1 else 'failures'}")
    return ", ".join(said)


def news(snap: Snapshot) -> Iterator[str]:
    """Return the latest failures, the newest first."""
    for event in reversed(snap.failures):
        yield str(event).splitlines()[0]


def _many(word: str) -> str:
    return word + ("es" if word.endswith("s") else "s")


def _text(row: Row) -> str:
    return " ".join(row.cells)


def _indented(row: Row) -> Row:
    return Row(row.key, ("    " + row.cells[0], *row.cells[1:]), row.is_bad, row.proc)


def _host(host: HostState) -> Row:
    # Short, as these are the last columns: both fit on a terminal of 130 characters.
    memory = (
        f"{(host.memory - host.memory_free) / host.memory:.0%} of {_size(host.memory)}" if host.memory else ""
    )
    cells = [f"host {host.name}", "", host.state, *[""] * 5, f"load {host.load:.1f}/{host.cpus}", memory]
    return Row(f"host {host.number}", tuple(cells), host.state != "running", "")


def _proc(proc: ProcState, used: float | None, passed: float) -> Row:
    cpu = ""
    if proc.cpu is not None:
        cpu = f"{proc.cpu:,.1f} s"
        if used is not None and passed > 0:
            cpu = f"{max(0.0, proc.cpu - used) / passed:.0%}"
    restarted = f", life {proc.incarnation + 1}" if proc.incarnation else ""
    place = f" ({', '.join(f'{dim}={at}' for dim, at in proc.point.items())})" if proc.point else ""
    cells = [
        f"  {proc.name}{place}{restarted}",
        str(proc.pid or "-"),
        proc.state,
        *[""] * 5,
        cpu,
        _size(proc.rss),
    ]
    return Row(f"proc {proc.name}", tuple(cells), proc.state in ("silent", "stopped", "dead"), proc.name)


def _actor(actor: ActorState) -> Row:
    does = actor.state
    if actor.running:
        longest = max(actor.running, key=lambda each: each.seconds)
        does = f"{longest.endpoint} for {_duration(longest.seconds)}"
    cells = (
        f"{actor.name}[{actor.rank}] {actor.class_name}",
        "",
        does,
        f"{actor.queue:,}" if actor.queue else "",
        f"{actor.handled:,}" if actor.handled else "",
        f"{actor.failed:,}" if actor.failed else "",
        f"{actor.rate:,.0f}/s" if actor.rate else "",
        _duration(actor.mean) if actor.handled else "",
        "",
        "",
    )
    return Row(f"actor {actor.proc} {actor.actor_id}", cells, bool(actor.failed), actor.proc)


def _duration(seconds: float) -> str:
    for least, size, unit in ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "µs")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return ""


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
