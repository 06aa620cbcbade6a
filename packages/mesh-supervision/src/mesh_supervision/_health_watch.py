"""Watches a job's health: a thread that takes snapshots, and in each process one that checks what the process uses.

HLT-2: of handlers that do not end, those that keep others waiting are told apart from those that wait; only the former are ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from mesh_core import MeshError, inspect
from mesh_core.extensions import Extension, Proc, current_proc, find, install, uninstall
from mesh_supervision._health import Health, Limits, Trouble, TroubleKind
from mesh_supervision._watching._why import Culprit, Reason, confirmed, why

_PAGE = os.sysconf("SC_PAGE_SIZE")
_HEED_S = 5.0
"""How long a process that is told to end may take. One that holds the interpreter's lock is not told anything."""
_LOG = "mesh"


@dataclass(frozen=True)
class _Here:
    """A message: the sender can be told to end."""


@dataclass(frozen=True)
class _End:
    """A message: the receiver keeps others waiting, and is to end."""

    why: str
    """In words, with the stack of the handler: the last words of the process, which its failure shows."""


class _Usage(Extension):
    """Checks what its process uses, and ends it if that is too much or if it hangs: only the process itself can do so on every host."""

    name = "supervision.usage"
    payload: tuple[Limits, float, Proc]

    def start(self) -> None:
        """Start checking."""
        self.watch: HealthWatch | None = None
        self._over = threading.Event()
        self._limits, self._interval, self._owner = self.payload
        self._warned: set[TroubleKind] = set()
        self.procs: dict[str, Proc] = {}
        """Processes that can be told to end, by name."""
        if self.proc != self._owner and self._limits.hung:
            self.tell(self._owner, _Here())
        if self.proc != self._owner and (self._limits.memory or self._limits.files):
            threading.Thread(target=self._look, name="mesh-usage", daemon=True).start()

    def stop(self) -> None:
        """Stop checking."""
        self._over.set()

    def receive(self, message: Trouble | _Here | _End, sender: Proc) -> None:
        """Pass on what another process has reported; or end, as this one keeps others waiting."""
        if isinstance(message, _Here):
            self.procs[str(sender)] = sender
        elif isinstance(message, _End):
            # The last words of a process are in the error of those who wait for it.
            sys.stderr.write(f"mesh: {message.why}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.watch is not None:
            self.watch.tell(message)

    def _look(self) -> None:
        while not self._over.wait(self._interval):
            uses = (
                (TroubleKind.MEMORY, self._limits.memory, _memory, "bytes of memory"),
                (TroubleKind.FILES, self._limits.files, _files, "open files"),
            )
            for kind, limit, used, what in uses:
                if limit is not None:
                    self._compare(kind, limit, used(), what)

    def _compare(self, kind: TroubleKind, limit: int, used: int, what: str) -> None:
        name, pid = str(self.proc), self.proc.pid
        if used > limit:
            text = f"process {name} (pid {pid}) has {used:,} {what}, more than its limit of {limit:,}: it is ended"
            trouble = Trouble(kind, name, pid, text, is_fatal=True)
            # The last words of a process are in the error of those who wait for it.
            sys.stderr.write(f"mesh: {text}\n")
            sys.stderr.flush()
            try:
                self.call(self._owner, trouble).exception(timeout=self._interval)
            finally:
                os.kill(pid, signal.SIGKILL)
        elif used > limit * self._limits.warning:
            if kind not in self._warned:
                self._warned.add(kind)
                text = f"process {name} (pid {pid}) has {used:,} {what} of at most {limit:,}"
                self.tell(self._owner, Trouble(kind, name, pid, text))
        else:
            self._warned.discard(kind)


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def _files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


class HealthWatch:
    """Looks at a job at intervals, and reports each trouble once; created by :func:`watch_health`."""

    def __init__(self, on_trouble: Callable[[Trouble], object], limits: Limits, interval: float) -> None:
        self._on_trouble = on_trouble
        self._interval = interval
        self._health = Health(limits)
        self._over = threading.Event()
        self._lock = threading.Lock()
        if find(_Usage) is not None:
            raise MeshError("the health of this job is being watched already: close() that watch first")
        self._usage = install(_Usage, (limits, interval, current_proc()))
        self._usage.watch = self
        self._hung: dict[str, Trouble] = {}
        """Handlers that have run for too long, by their processes, until it is known who keeps them."""
        self._ending: dict[tuple[str, int | None], float] = {}
        """Processes here that were told to end, and when they are killed."""
        self._thread = threading.Thread(target=self._run, name="mesh-health", daemon=True)
        self._thread.start()

    def tell(self, trouble: Trouble) -> None:
        """Report a trouble; one after the other."""
        with self._lock:
            try:
                self._on_trouble(trouble)
            except Exception:
                logging.getLogger(_LOG).exception("on_trouble raised when it was told: %s", trouble.text)

    def close(self) -> None:
        """Stop watching. Processes that were spawned in the meantime keep their limits."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            uninstall(_Usage.name)
        except MeshError:
            # It has ended with the runtime.
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                snap = inspect.snapshot(pss=False)
            except MeshError:
                # Too busy just now, or nothing was spawned yet.
                continue
            self._health, troubles = self._health.on(snap)
            there = {
                (proc.name, proc.pid) for proc in snap.procs if any(actor.running for actor in proc.actors)
            }
            self._hung = {
                each.proc: each
                for each in (*self._hung.values(), *troubles)
                if each.kind is TroubleKind.HUNG and (each.proc, each.pid) in there
            }
            fresh = [each for each in troubles if each.kind is not TroubleKind.HUNG]
            reason = (
                _reason() if self._hung or any(each.kind is TroubleKind.STUCK for each in fresh) else None
            )
            for trouble in fresh:
                self.tell(_with_stack(_blamed(trouble, reason)))
            self._kill_overdue(snap)
            for trouble in [
                self._hung.pop(each.proc) for each in _culprits(reason) if each.proc in self._hung
            ]:
                self._end(_with_stack(_blamed(trouble, reason)))

    def _end(self, trouble: Trouble) -> None:
        """End a process that keeps others waiting, and whose policy then replaces it."""
        proc = self._usage.procs.get(trouble.proc)
        if proc is None:
            self.tell(
                replace(
                    trouble, text=f"{trouble.text}; it was spawned before it was watched, and cannot be ended"
                )
            )
            return
        text = f"{trouble.text}: it is ended, as {trouble.proc} has hung for too long"
        told = replace(trouble, text=text, is_fatal=True)
        self.tell(told)
        if proc.host == current_proc().host:
            self._ending[trouble.proc, trouble.pid] = time.monotonic() + _HEED_S
        self._usage.tell(proc, _End(str(told)))

    def _kill_overdue(self, snap: inspect.Snapshot) -> None:
        """Kill processes of this machine that have not ended as they were told."""
        there = {(proc.name, proc.pid) for proc in snap.procs}
        self._ending = {who: until for who, until in self._ending.items() if who in there}
        now = time.monotonic()
        for _, pid in [who for who, until in self._ending.items() if until <= now]:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _reason() -> Reason | None:
    """Look twice at who waits for whom; ``None`` if the job does not answer."""
    try:
        return confirmed(
            lambda: why(inspect.snapshot(pss=False), inspect.waits(), inspect.connect(os.getpid()).stacks())
        )
    except MeshError:
        return None


def _culprits(reason: Reason | None) -> tuple[Culprit, ...]:
    return () if reason is None else reason.culprits


def _blamed(trouble: Trouble, reason: Reason | None) -> Trouble:
    """Say whether a handler that does not end keeps others waiting, or waits for another one (HLT-2)."""
    culprits = _culprits(reason)
    if trouble.kind not in (TroubleKind.STUCK, TroubleKind.HUNG) or not culprits:
        return trouble
    mine = next((each for each in culprits if each.proc == trouble.proc), None)
    if mine is None:
        who = ", ".join(each.who for each in culprits)
        return replace(trouble, text=f"{trouble.text}; it waits for {who}", is_culprit=False)
    said = [trouble.text]
    # Of a collective it says which; that it runs is known.
    if "collective" in mine.text:
        said.append(f"it {mine.text}")
    if mine.waiting:
        said.append(f"{mine.waiting} {'waits' if mine.waiting == 1 else 'wait'} for it")
    return replace(trouble, text="; ".join(said), is_culprit=True)


def _with_stack(trouble: Trouble) -> Trouble:
    """Add where the thread is in its code, if it is stuck."""
    if trouble.kind not in (TroubleKind.STUCK, TroubleKind.HUNG):
        return trouble
    try:
        # This very job, asked as another terminal would.
        told = inspect.connect(os.getpid()).stacks(trouble.proc.partition("[")[0])
        found = next(each for each in told if each.proc == trouble.proc)
        named = [thread for thread in found.threads if trouble.actor in thread.actors]
        # Coroutines of actors that have plain endpoints too run on the process's loop.
        thread = named[0] if named else found.of("loop")
    except (MeshError, LookupError, StopIteration):
        return trouble
    return replace(trouble, stack=str(thread))


def watch_health(
    on_trouble: Callable[[Trouble], object] | None = None,
    limits: Limits | None = None,
    *,
    interval: float = 1.0,
) -> HealthWatch:
    """Watch over a job's health: handlers that do not end, ranks that fall behind, processes that do not answer or use too much memory or too many files.

    Call it before ``spawn_procs``, because limits of memory and files apply only to processes that are spawned afterwards.

    Args:
        on_trouble: called with each :class:`Trouble`, on a thread of the watch; without it troubles are logged as warnings.
        limits: the limits of what is healthy.
        interval: the number of seconds between two looks.
    """
    if isinstance(interval, bool) or not interval > 0:
        raise ValueError(f"interval must be a positive number of seconds, got {interval!r}")
    return HealthWatch(on_trouble or _log, limits or Limits(), interval)


def _log(trouble: Trouble) -> None:
    logging.getLogger(_LOG).warning("%s", trouble)
