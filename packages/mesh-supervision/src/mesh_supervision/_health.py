"""Problems of a job that has not failed: handlers that do not end, ranks that fall behind, processes that do not answer.

A state machine over snapshots, without a clock or a thread. HLT-1: a trouble is reported once, and again only after it was over.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from mesh_core.inspect import ActorState, ProcState, Snapshot

_FEWEST_RANKS = 3
"""With fewer ranks nobody can say which one is slow."""
_FEWEST_MESSAGES = 3
"""The number of messages that a rank must have handled for its mean to count."""
_LEAST_S = 1e-3
"""Differences below this are noise of the machine."""


class TroubleKind(StrEnum):
    """The kind of a problem."""

    STUCK = "stuck"
    """An actor has been handling one message for too long."""
    HUNG = "hung"
    """A process has kept others waiting for so long that it is ended."""
    STRAGGLER = "straggler"
    """A rank takes much longer than the others of its mesh for the same work."""
    SILENT = "silent"
    """A process does not answer, although it runs."""
    STOPPED = "stopped"
    """A signal has stopped a process."""
    MEMORY = "memory"
    """A process uses more memory than it should."""
    FILES = "files"
    """A process has more files open than it should."""


_Key = tuple[TroubleKind, str, int, int]
"""Identifies a trouble: its kind, the process, the actor, and which message of it."""


@dataclass(frozen=True)
class Trouble:
    """Something is wrong, although nothing has failed yet."""

    kind: TroubleKind
    proc: str
    """The process, as `ProcState.name`: ``workers[2]``."""
    pid: int | None
    text: str
    """A description in words."""
    actor: str = ""
    rank: int | None = None
    """The rank of the actor in its mesh."""
    stack: str = ""
    """Where the thread of a handler that does not end is in its code."""
    is_fatal: bool = False
    """Whether the process is ended because of it."""
    is_culprit: bool | None = None
    """Of a handler that does not end: whether it keeps others waiting, or itself waits for another one; ``None`` if that is not known."""

    def __str__(self) -> str:
        return self.text + (f"\n{self.stack}" if self.stack else "")


@dataclass(frozen=True)
class Limits:
    """The limits of what is healthy. ``None`` switches a check off."""

    stuck: float | None = 60.0
    """Seconds that handling one message may take."""
    hung: float | None = None
    """Seconds that handling one message may take until the process that others wait for is ended, so that the policy of its mesh replaces it. Those that
    only wait are left alone."""
    straggler: float | None = 2.0
    """How many times the median of its mesh a rank's mean may be; it must stand out from the spread of the others too. Time in
    watched collectives does not count (:func:`watch_collectives`)."""
    silent: int | None = 3
    """The number of successive looks that a process may leave unanswered."""
    memory: int | None = None
    """Bytes of resident memory that a process may have; one that exceeds this is ended."""
    files: int | None = None
    """Files that a process may have open; one that exceeds this is ended."""
    warning: float = 0.8
    """The part of `memory` and `files` at which there is a warning."""

    def __post_init__(self) -> None:
        for name in ("stuck", "hung", "straggler", "silent", "memory", "files"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ValueError(f"{name} must be a positive number or None, got {value!r}")
        if self.straggler is not None and self.straggler <= 1:
            raise ValueError(
                f"straggler is how many times the median is too much: more than 1, got {self.straggler!r}"
            )
        if not 0 < self.warning <= 1:
            raise ValueError(f"warning is a part of the limits, from 0 to 1, got {self.warning!r}")


@dataclass(frozen=True)
class Health:
    """What is known about a job's troubles.

    >>> from mesh_core import inspect, this_host
    >>> from mesh_supervision import Health, Limits
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     _ = procs.initialized.get(timeout=30)
    ...     health, troubles = Health(Limits(stuck=10.0)).on(inspect.snapshot())
    ...     print(troubles)
    ()
    """

    limits: Limits = Limits()
    _told: frozenset[_Key] = frozenset()
    """Troubles that were reported and are not over."""
    _silent: tuple[tuple[str, int], ...] = ()
    """The number of looks that each process has left unanswered."""

    def on(self, snap: Snapshot) -> tuple[Health, tuple[Trouble, ...]]:
        """Evaluate the next snapshot; return the troubles that have begun since the previous one (HLT-1)."""
        silent = self._count_silent(snap)
        found = dict(self._look(snap, dict(silent)))
        fresh = tuple(trouble for key, trouble in found.items() if key not in self._told)
        return replace(self, _told=frozenset(found), _silent=silent), fresh

    def _count_silent(self, snap: Snapshot) -> tuple[tuple[str, int], ...]:
        before = dict(self._silent)
        return tuple(
            (proc.name, before.get(proc.name, 0) + 1) for proc in snap.procs if proc.state == "silent"
        )

    def _look(self, snap: Snapshot, silent: dict[str, int]) -> Iterator[tuple[_Key, Trouble]]:
        for proc in snap.procs:
            if proc.state == "stopped":
                yield _of(
                    TroubleKind.STOPPED,
                    proc,
                    f"process {proc.name} (pid {proc.pid}) was stopped by a signal; SIGCONT continues it",
                )
            elif self.limits.silent is not None and silent.get(proc.name, 0) >= self.limits.silent:
                text = f"process {proc.name} (pid {proc.pid}) has not answered {silent[proc.name]} times"
                yield _of(TroubleKind.SILENT, proc, text)
            for actor in proc.actors:
                yield from self._stuck(proc, actor)
        yield from self._stragglers(snap)

    def _stuck(self, proc: ProcState, actor: ActorState) -> Iterator[tuple[_Key, Trouble]]:
        if not actor.running:
            return
        longest = max(actor.running, key=lambda each: each.seconds)
        for kind, limit in ((TroubleKind.STUCK, self.limits.stuck), (TroubleKind.HUNG, self.limits.hung)):
            if limit is None or longest.seconds <= limit:
                continue
            text = f"{actor.name}[{actor.rank}] in {proc.name} has run {longest.endpoint} for {longest.seconds:.1f} s, called by {longest.caller}"
            # Another message is another trouble; the number of messages handled before it tells them apart.
            key = (kind, proc.name, actor.actor_id, actor.handled)
            yield key, Trouble(kind, proc.name, proc.pid, text, actor.name, actor.rank)

    def _stragglers(self, snap: Snapshot) -> Iterator[tuple[_Key, Trouble]]:
        if self.limits.straggler is None:
            return
        meshes: dict[int, list[tuple[ProcState, ActorState]]] = {}
        for proc in snap.procs:
            for actor in proc.actors:
                if actor.handled >= _FEWEST_MESSAGES:
                    meshes.setdefault(actor.actor_id, []).append((proc, actor))
        for ranks in meshes.values():
            if len(ranks) < _FEWEST_RANKS:
                continue
            # An actor that waits in a collective waits for the straggler, and is not one.
            means = [actor.mean - actor.waited for _, actor in ranks]
            middle = statistics.median(means)
            # The median distance from the median: a few outliers do not change what is usual.
            spread = statistics.median(abs(each - middle) for each in means)
            most = max(self.limits.straggler * middle, middle + 5 * spread, middle + _LEAST_S)
            for (proc, actor), mean in zip(ranks, means, strict=True):
                if mean > most:
                    times = f"{mean / middle:.1f} times" if middle > 0 else "above"
                    apart = f", not counting {_ms(actor.waited)} in collectives" if actor.waited else ""
                    text = (
                        f"{actor.name}[{actor.rank}] in {proc.name} takes {_ms(mean)} for a message{apart}: {times} the median of "
                        f"its {len(ranks)} ranks, {_ms(middle)}"
                    )
                    key = (TroubleKind.STRAGGLER, proc.name, actor.actor_id, 0)
                    yield (
                        key,
                        Trouble(TroubleKind.STRAGGLER, proc.name, proc.pid, text, actor.name, actor.rank),
                    )


def _of(kind: TroubleKind, proc: ProcState, text: str) -> tuple[_Key, Trouble]:
    return (kind, proc.name, 0, 0), Trouble(kind, proc.name, proc.pid, text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
