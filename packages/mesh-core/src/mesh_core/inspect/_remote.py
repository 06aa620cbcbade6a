"""Inspect a job from another process, through its inspection socket."""

from __future__ import annotations

import os
import string
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

from mesh_core._common.display import ROWS, Table
from mesh_core._common.errors import MeshError
from mesh_core._features.debug import places
from mesh_core._features.debug.wire import Garbled, Told
from mesh_core.inspect._doors import Door, Ended, Link, LocalDoor, doors_of_host
from mesh_core.inspect._event import Event
from mesh_core.inspect._rebuilt import Strange, rebuilt
from mesh_core.inspect._snapshot import Snapshot
from mesh_core.inspect._stacks import ProcStacks
from mesh_core.inspect._waits import Waits

T = TypeVar("T")

_ANSWER_S = 5.0
"""How many seconds a job may take to answer, in addition to the question's own timeout."""
_SILENT_S = 10.0
"""How many seconds a followed job may be silent; it reports every second that it is alive."""


@dataclass(frozen=True)
class JobInfo:
    """A running job: one of this user on this machine, or one that a host takes part in."""

    pid: int
    """The script's process."""
    script: str
    """The path of the script."""
    host: str
    began: float
    """When it first used Mesh, in seconds since the epoch."""
    folder: str
    """The script's working directory."""
    version: str
    """Its version of Mesh."""
    id: str = ""
    """Its unique ID: 16 hexadecimal digits."""


@dataclass(frozen=True)
class LogText:
    """One or more lines of the workers' output, as the script shows them."""

    text: str
    is_error: bool
    """Whether it was written to stderr."""
    missed: int = 0
    """How many texts before this one were lost because the reader was too slow."""


class RunningJob:
    """A job of another process; returned by :func:`connect`.

    Each question opens a new connection. Questions never change the job.
    """

    def __init__(self, info: JobInfo, door: Door) -> None:
        self.info = info
        """Its description."""
        self._door = door
        self.missed = 0
        """How many events were lost because their readers were too slow."""

    def snapshot(self, timeout: float = 1.0, *, pss: bool = True) -> Snapshot:
        """Take a snapshot of the job; see :func:`mesh_core.inspect.snapshot`."""
        return self._ask(Snapshot, timeout, do="snapshot", timeout=timeout, pss=pss)

    def waits(self, timeout: float = 1.0) -> Waits:
        """Return who waits for whom; see :func:`mesh_core.inspect.waits`."""
        return self._ask(Waits, timeout, do="waits", timeout=timeout)

    def stacks(self, mesh: str = "", timeout: float = 2.0) -> tuple[ProcStacks, ...]:
        """Return the Python threads of all processes, the script's first, or of the process mesh with this name."""
        told = self._answer(timeout, do="stacks", timeout=timeout, mesh=mesh)
        if not isinstance(told, list):
            raise self._strange("stacks must be a list")
        return tuple(self._made(ProcStacks, one) for one in told)

    def events(self, *, past: bool = False) -> Iterator[Event]:
        """Follow events until the job ends; with ``past``, begin with the events that are still kept.

        To stop earlier, close or drop the iterator.
        """
        for told in self._follow(do="events", past=past):
            if isinstance(missed := told.get("missed"), int):
                self.missed += missed
            elif "event" in told:
                yield self._event(told["event"])

    def logs(self) -> Iterator[LogText]:
        """Follow the workers' output, as the script shows it, until the job ends."""
        missed = 0
        for told in self._follow(do="logs"):
            if isinstance(more := told.get("missed"), int):
                missed += more
            elif isinstance(text := told.get("text"), str):
                yield LogText(text, told.get("error_stream") is True, missed)
                missed = 0

    def _event(self, told: Any) -> Event:
        # A failure is sent as its report.
        if isinstance(told, dict) and isinstance(report := told.pop("failure", None), str):
            told["text"] = report
        return self._made(Event, told)

    def _ask(self, cls: type[T], limit: float, **question: Any) -> T:
        told = self._answer(limit, **question)
        if cls is Snapshot and isinstance(told, dict) and isinstance(told.get("failures"), list):
            for one in told["failures"]:
                if isinstance(one, dict) and isinstance(report := one.pop("failure", None), str):
                    one["text"] = report
        return self._made(cls, told)

    def _made(self, cls: type[T], told: Any) -> T:
        try:
            return rebuilt(cls, told)
        except Strange as error:
            raise self._strange(str(error)) from None

    def _strange(self, what: str) -> MeshError:
        from mesh_core._native import __version__

        return MeshError(
            f"job {self.info.pid} gave an answer that this version of Mesh ({__version__}) does not understand: {what}. "
            f"Use the job's version, {self.info.version}"
        )

    def _answer(self, limit: float, **question: Any) -> Any:
        with self._asked(**question) as link:
            return self._ok(self._hear(link, limit + _ANSWER_S))

    def _follow(self, **question: Any) -> Iterator[Told]:
        with self._asked(**question) as link:
            heard = self._hear(link, _ANSWER_S)
            self._ok(heard[:1])
            heard = heard[1:]
            while True:
                yield from heard
                try:
                    heard = self._hear(link, _SILENT_S)
                except _Over:
                    return

    def _ok(self, heard: list[Told]) -> Any:
        if "ok" in heard[0]:
            return heard[0]["ok"]
        raise MeshError(f"job {self.info.pid}: {heard[0].get('error', 'it gave no answer')}")

    @contextmanager
    def _asked(self, **question: Any) -> Iterator[Link]:
        try:
            link = self._door.open()
        except Ended as error:
            raise _Over(
                f"job {self.info.pid} cannot be reached: {error}. It has ended, or is about to end"
            ) from None
        try:
            link.wire.tell(**question)
            yield link
        finally:
            link.wire.close()

    def _hear(self, link: Link, limit: float) -> list[Told]:
        try:
            heard = link.wire.hear(limit)
        except TimeoutError:
            raise MeshError(
                f"job {self.info.pid} did not answer within {limit:g} s: it may be stopped by a signal, or C code may "
                "hold its interpreter's lock"
            ) from None
        except Garbled as error:
            raise self._strange(str(error)) from None
        if heard is None and link.broken:
            raise MeshError(f"job {self.info.pid} can no longer be looked into: {link.broken}")
        if heard is None:
            raise _Over(f"job {self.info.pid} has ended")
        return heard

    def __repr__(self) -> str:
        return f"<RunningJob {self.info.pid}: {self.info.script or 'python'}>"


class _Over(MeshError):
    """The job has ended."""


Found = tuple[list[tuple[JobInfo, Door]], list[str]]
"""The jobs that answer, and the pids or IDs of those that do not."""


def _here(pid: int | None) -> Found:
    silent: list[str] = []
    asked: list[tuple[str, Door, Link]] = []
    for number, path, peer in places.find_inspected(pid):
        if peer is None:
            silent.append(str(number))
        else:
            asked.append((str(number), LocalDoor(path), Link(peer)))
    return _described(asked, silent)


def _through(host: str, credentials: str | os.PathLike[str]) -> Found:
    silent: list[str] = []
    asked: list[tuple[str, Door, Link]] = []
    try:
        for door in doors_of_host(host, credentials):
            try:
                asked.append((f"{door.job:016x}", door, door.open()))
            except MeshError:
                # The job or the host ended after the host listed the job.
                continue
    except BaseException:
        for _, _, link in asked:
            link.wire.close()
        raise
    return _described(asked, silent)


def _described(asked: Iterable[tuple[str, Door, Link]], silent: list[str]) -> Found:
    found: list[tuple[JobInfo, Door]] = []
    asked = list(asked)
    for _, _, link in asked:
        link.wire.tell(do="describe")
    until = time.monotonic() + _ANSWER_S
    for name, door, link in asked:
        try:
            told = link.wire.hear(max(0.0, until - time.monotonic()))
            if told is not None:
                found.append((rebuilt(JobInfo, told[0].get("ok")), door))
        except (TimeoutError, Garbled, Strange):
            silent.append(name)
        finally:
            link.wire.close()
    found.sort(key=lambda each: (each[0].began, each[0].pid))
    return found, silent


def _find(job: int | str | None, host: str | None, credentials: str | os.PathLike[str] | None) -> Found:
    if host is None and credentials is None:
        return _here(job if isinstance(job, int) else None)
    if host is None or credentials is None:
        raise TypeError("host= and credentials= must be given together")
    return _through(host, credentials)


def jobs(*, host: str | None = None, credentials: str | os.PathLike[str] | None = None) -> list[JobInfo]:
    """List this user's jobs on this machine that can be inspected, the oldest first.

    A script can be inspected from its first spawn until it ends. A job that does not answer, for example because a signal
    has stopped it, is not in the list.

    Args:
        host: the address of a host's agent on any machine, such as ``"tcp://b7:26600"``, to list the jobs that this host
            takes part in.
        credentials: the folder of the job's owner, or one made by :meth:`Credentials.issue_observer`; required with
            ``host``.

    >>> from mesh_core import inspect, shutdown, this_host
    >>> import os
    >>> this_host().spawn_procs().initialized.get()
    >>> os.getpid() in [job.pid for job in inspect.jobs()]
    True
    >>> _ = shutdown()
    """
    return [info for info, _ in _find(None, host, credentials)[0]]


def connect(
    job: int | str | None = None,
    *,
    host: str | None = None,
    credentials: str | os.PathLike[str] | None = None,
) -> RunningJob:
    """Connect to a job of this user on this machine, or to a job on other machines.

    Args:
        job: the pid of its script, or its :attr:`JobInfo.id`; may be omitted if there is only one job.
        host: the address of a host's agent, such as ``"tcp://b7:26600"``. Any host of the job forwards the questions, so
            the controller needs no open port.
        credentials: the folder of the job's owner, or one made by :meth:`Credentials.issue_observer`; required with
            ``host``.

    >>> from mesh_core import inspect, shutdown, this_host
    >>> import os
    >>> this_host().spawn_procs(name="workers").initialized.get()
    >>> job = inspect.connect(os.getpid())
    >>> [proc.name for proc in job.snapshot().procs]
    ['controller', 'workers[0]']
    >>> _ = shutdown()
    """
    if job is not None and (isinstance(job, bool) or not isinstance(job, int | str)):
        raise TypeError(f"job must be the pid of a job's script or the job's ID, got {job!r}")
    if isinstance(job, str) and not (len(job) == 16 and set(job) <= set(string.hexdigits)):
        raise ValueError(f"a job's ID must have 16 hexadecimal digits, got {job!r}")
    all_found, silent = _find(job, host, credentials)
    found = [each for each in all_found if job in (None, each[0].pid) or job == each[0].id]
    if len(found) == 1:
        return RunningJob(*found[0])
    if found:
        raise MeshError(
            f"there are {len(found)} jobs; name one by its pid or ID, the oldest first:\n{_table(found)}"
        )
    if silent and (job is None or str(job) in silent or host is not None):
        raise MeshError(
            f"job {', '.join(silent)} does not answer: it may be stopped by a signal, or C code may hold its "
            "interpreter's lock"
        )
    if host is not None:
        which = "no job" if job is None else f"no job {job}"
        raise MeshError(
            f"{which} can be looked into through {host}: the host must be attached to the job, and the job's script must "
            "have spawned something"
        )
    which = "no job of this user runs" if job is None else f"no job {job} of this user runs"
    raise MeshError(
        f"{which} on this machine; a script can be looked into after its first spawn, on the machine where it runs"
    )


def _table(found: list[tuple[JobInfo, Door]]) -> str:
    table = Table(["JOB", "SCRIPT", "IN", "ON"])
    for info, _ in found[:ROWS]:
        table.add(_called(info, found), PurePath(info.script).name or "python", info.folder, info.host)
    if len(found) > ROWS:
        table.add(f"and {len(found) - ROWS} more")
    return table.text("  ")


def _called(info: JobInfo, among: list[tuple[JobInfo, Door]]) -> str:
    """Return a job's pid, or its ID if a job on another machine has the same pid."""
    same = sum(other.pid == info.pid for other, _ in among)
    return str(info.pid) if same == 1 else info.id
