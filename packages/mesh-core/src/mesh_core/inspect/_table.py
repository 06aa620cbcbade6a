"""Format a snapshot as a table of bounded size, whatever the size of the job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mesh_core._common.display import Table, counted

if TYPE_CHECKING:
    from mesh_core.inspect._snapshot import ActorState, HostState, ProcState, Snapshot

_MOST_ROWS = 60
_MOST_ACTORS = 8
_MOST_PROMISES = 4
_MOST_FAILURES = 5


def size(count: float | None) -> str:
    """Format a number of bytes."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def span(seconds: float) -> str:
    """Format a time span for a table."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def doing(actor: ActorState) -> str:
    """Describe what an actor is doing."""
    if not actor.running:
        return actor.state
    first = max(actor.running, key=lambda one: one.seconds)
    more = f" and {len(actor.running) - 1} more" if len(actor.running) > 1 else ""
    return f"{first.endpoint} for {span(first.seconds)}{more}"


def _unwell(proc: ProcState) -> bool:
    return proc.state not in ("running", "starting") or any(
        one.seconds > 1 for actor in proc.actors for one in actor.running
    )


def _chosen(procs: Sequence[ProcState]) -> tuple[list[ProcState], int]:
    """Choose the processes to show, those that may be in trouble first, and count the others."""
    rows = 0
    chosen: set[str] = set()
    for proc in sorted(procs, key=lambda proc: not _unwell(proc)):
        rows += 1 + min(len(proc.actors), _MOST_ACTORS + 1)
        if rows > _MOST_ROWS and chosen:
            break
        chosen.add(proc.name)
    return [proc for proc in procs if proc.name in chosen], len(procs) - len(chosen)


def _tables(host: HostState) -> Table:
    table = Table(["", "pid", "does", "queue", "handled", "rate", "mean", "cpu", "memory"])
    shown, hidden = _chosen((*host.procs, *host.dead))
    for proc in shown:
        where = ", ".join(f"{label}={place}" for label, place in proc.point.items())
        table.add(
            f"{proc.name}{f' ({where})' if where else ''}",
            "-" if proc.pid is None else str(proc.pid),
            proc.state,
            size(proc.outgoing) if proc.outgoing else "",
            "",
            "",
            "",
            "-" if proc.cpu is None else f"{proc.cpu:,.1f} s",
            size(proc.rss if proc.pss is None else proc.pss),
        )
        for actor in proc.actors[:_MOST_ACTORS]:
            table.add(
                f"  {actor.name}[{actor.rank}] {actor.class_name}",
                "",
                doing(actor),
                f"{actor.queue:,}" if actor.queue else "",
                f"{actor.handled:,}" + (f" ({actor.failed:,} failed)" if actor.failed else ""),
                f"{actor.rate:,.0f}/s" if actor.rate >= 0.5 else "",
                span(actor.mean) if actor.handled else "",
                "",
                "",
            )
        if len(proc.actors) > _MOST_ACTORS:
            table.add(f"  … {len(proc.actors) - _MOST_ACTORS:,} more actors")
        for promise in proc.promises[:_MOST_PROMISES]:
            table.add(f"  promise {promise.name!r}", "", f"open for {span(promise.seconds)}")
        if len(proc.promises) > _MOST_PROMISES:
            table.add(f"  … {len(proc.promises) - _MOST_PROMISES:,} more promises")
    if hidden:
        table.add(f"… {hidden:,} more processes")
    return table


def _title(snapshot: Snapshot) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    parts = (
        counted(len(snapshot.hosts), "host"),
        counted(len(snapshot.procs), "process", "processes"),
        counted(len(snapshot.actors), "actor"),
    )
    return f"{', '.join(parts)} at {when}"


def _host_line(host: HostState) -> str:
    state = "" if host.state == "running" else f", {host.state}{f' ({host.why})' if host.why else ''}"
    if not host.memory and state:
        return f"host {host.name}{state}"
    used = host.memory - host.memory_free
    return (
        f"host {host.name}: {counted(host.cpus, 'cpu')}, load {host.load:.1f}, "
        f"memory {size(used)} of {size(host.memory)} in use{state}"
    )


def _fork_server_lines(host: HostState) -> list[str]:
    """Describe the fork servers that have imported something, or are importing."""
    lines = []
    for one in host.fork_servers:
        if not (one.importing or one.preloaded):
            continue
        does = f" is importing {one.importing}" if one.importing else ""
        has = f" has imported {', '.join(one.preloaded)}" if one.preloaded else ""
        workers = counted(one.workers, "process", "processes")
        lines.append(f"fork server {one.pid} of {workers}{' and'.join(filter(None, (has, does)))}")
    return lines


def as_text(snapshot: Snapshot) -> str:
    """Format the snapshot as lines."""
    lines = [_title(snapshot)]
    for host in snapshot.hosts:
        lines.append(_host_line(host))
        lines += [f"  {line}" for line in _fork_server_lines(host)]
        if host.procs or host.dead:
            lines.append(_tables(host).text(indent="  "))
    if snapshot.failures:
        lines.append(f"failures: {len(snapshot.failures)}, the latest:")
        lines += [f"  {event}" for event in snapshot.failures[-_MOST_FAILURES:]]
    return "\n".join(lines)


def as_html(snapshot: Snapshot) -> str:
    """Format the snapshot as HTML tables."""
    import html

    parts = [f"<div><b>{html.escape(_title(snapshot))}</b></div>"]
    parts += [
        _tables(host).html("; ".join([_host_line(host), *_fork_server_lines(host)]))
        for host in snapshot.hosts
    ]
    if snapshot.failures:
        items = "".join(
            f"<li>{html.escape(str(event))}</li>" for event in snapshot.failures[-_MOST_FAILURES:]
        )
        parts.append(f"<div>failures: {len(snapshot.failures)}, the latest:</div><ul>{items}</ul>")
    return "".join(parts)
