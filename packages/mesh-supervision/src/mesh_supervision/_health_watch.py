"""Watches a job's health: a thread that takes snapshots, and in each process one that checks what the process uses."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from mesh_core import MeshError, inspect
from mesh_core.extensions import Extension, Proc, current_proc, find, install, uninstall
from mesh_supervision._health import Health, Limits, Trouble, TroubleKind

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOG = "mesh"


class _Usage(Extension):
    """Checks what its process uses, and ends it if that is too much: only the process itself can do so on every host."""

    name = "supervision.usage"
    payload: tuple[Limits, float, Proc]

    def start(self) -> None:
        """Start checking."""
        self.watch: HealthWatch | None = None
        self._over = threading.Event()
        self._limits, self._interval, self._owner = self.payload
        self._warned: set[TroubleKind] = set()
        if self.proc != self._owner and (self._limits.memory or self._limits.files):
            threading.Thread(target=self._look, name="mesh-usage", daemon=True).start()

    def stop(self) -> None:
        """Stop checking."""
        self._over.set()

    def receive(self, message: Trouble, sender: Proc) -> None:
        """Pass on what another process has reported."""
        if self.watch is not None:
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
        install(_Usage, (limits, interval, current_proc())).watch = self
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
            for trouble in troubles:
                self.tell(_with_stack(trouble))


def _with_stack(trouble: Trouble) -> Trouble:
    """Add where the thread is in its code, if it is stuck."""
    if trouble.kind is not TroubleKind.STUCK:
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
