"""Marks which processes belong to a worker or a tool, and ends all processes with a mark.

A mark is a process's pair of file lock limits (``RLIMIT_LOCKS``). Linux has ignored these since 2.4, every
process has them, and children inherit them through fork, exec, setsid, a change of process group and an emptied
environment. The hard limit identifies the owner: a fork server, or a script that runs tools. The soft limit identifies
the owner's worker and, below that, the tool. What is detached has another hard limit, and an equal soft one.

An owner's number tells which process that is. So what has a mark can be found by others once that process and its minder are gone.

MRK-1: a process is signalled only if it has such a mark, or a parent that is being ended, and is not detached; or if it has come to a
subreaper of ours without the mark that everything below has (:func:`strays`).
MRK-2: a pid may be reused between the look and the signal: only the process that was looked at is signalled.
MRK-3: a mark is taken for an ended owner's only where that owner would be seen if it lived: in its own namespaces and by its own user, by its pid and start.

What starts a script's tools loads this file by its path: it imports only the standard library.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

LOCKS = 10
"""``RLIMIT_LOCKS``, which the module ``resource`` does not define."""

GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL."""

# An owner's number is its level, its pid, its namespaces with its user, and its start, the latter two hashed. Levels begin at 1, so that limits set for other
# purposes are not mistaken for one. Those of owners are even; what is detached from an owner is one level below it. An owner below another
# one is at a lower level than that: without privileges a hard limit can only be lowered.
_LEVEL_BIT, _PID_BIT, _PLACE_BIT = 50, 28, 16
_LEVELS = 1 << 12
_LOWEST, _HIGHEST = 1 << _LEVEL_BIT, _LEVELS << _LEVEL_BIT
_PID_BITS = 22  # the kernel's maximum
_NAMESPACES = ("pid", "time")
"""What pids and starts depend on."""

# On a host where processes end all the time, every look may be disturbed.
_LOOKS = 8

_MEANWHILE_S = 0.2
"""When a minder does what is not urgent: once its processes have started."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


class Mark(NamedTuple):
    """What a process's limits say."""

    owner: int
    soft: int

    @property
    def worker(self) -> int:
        """The number of the worker below the owner."""
        return self.soft >> _PID_BITS

    @property
    def tool(self) -> int:
        """The pid of the tool's first process, or 0."""
        return self.soft & ((1 << _PID_BITS) - 1)

    @property
    def detached(self) -> bool:
        """Whether the process may outlive its owner."""
        return self.soft == self.owner and _level(self.owner) % 2 == 1

    @property
    def pid(self) -> int:
        """The pid of the owner."""
        return self.owner >> _PID_BIT & (1 << _PID_BITS) - 1

    @property
    def place(self) -> int:
        """The hash of the owner's namespaces and user."""
        return self.owner >> _PLACE_BIT & (1 << _PID_BIT - _PLACE_BIT) - 1

    @property
    def birth(self) -> int:
        """The hash of the owner's start."""
        return self.owner & (1 << _PLACE_BIT) - 1


class Look(NamedTuple):
    """A process at one moment. Its start time distinguishes it from a later process with the same pid."""

    parent: int
    ended: bool
    start: bytes


Found = dict[int, Look]


def read(pid: int) -> Mark | None:
    """Return a process's mark; ``None`` if it has none, is gone, or belongs to another user."""
    try:
        soft, hard = resource.prlimit(pid, LOCKS)
    except OSError:
        return None
    return Mark(hard, soft) if _LOWEST <= hard < _HIGHEST else None


def look(pid: int | str) -> Look | None:
    """Look at a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - for hundreds of processes in a row
            # The second field is the name, in parentheses, and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # The first thread may have ended, and others go on: the state is its own.
    return Look(int(fields[1]), fields[0] in b"ZXx" and int(fields[17]) <= 1, fields[19])


def task_of(pid: int) -> str:
    """Return where in ``/proc`` a process's memory and descriptors are shown: at the first of its threads that has not ended."""
    if not _has_ended(str(pid)):
        return str(pid)
    try:
        names = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names are wanted
    except OSError:
        return str(pid)
    tasks = (f"{pid}/task/{name}" for name in names)
    return next((each for each in tasks if not _has_ended(each)), str(pid))


def _has_ended(task: str) -> bool:
    try:
        with open(f"/proc/{task}/stat", "rb") as file:  # noqa: PTH123 - as above
            return file.read().rpartition(b")")[2].split()[0] in b"ZXx"
    except OSError:
        return True


def new_owner() -> int:
    """Return a new number for what this process owns, different from all others."""
    _, hard = resource.getrlimit(LOCKS)
    levels = min(_LEVELS, hard >> _LEVEL_BIT) if hard >= 0 else _LEVELS
    # Few levels are used up, so that owners may be below owners.
    level = (levels - 1 - int.from_bytes(os.urandom(2), "big") % max(1, levels // 8)) & ~1
    if level < 2:
        raise OSError("the limit of file locks (ulimit -x) is too low for marks")
    seen, here = look("self"), _namespaces("self")
    if seen is None or not here:
        raise OSError("/proc does not show this process")
    pid = os.getpid()
    return level << _LEVEL_BIT | pid << _PID_BIT | _place(here, os.getuid(), pid) << _PLACE_BIT | _birth(seen)


def _level(owner: int) -> int:
    return owner >> _LEVEL_BIT


def _here() -> tuple[int, ...]:
    """Return the namespaces of this process; nothing if they cannot be known, or if /proc shows the processes of others."""
    try:
        shown = os.readlink("/proc/self")  # noqa: PTH115 - this file imports little
    except OSError:
        return ()
    return _namespaces("self") if shown == str(os.getpid()) else ()


def _namespaces(pid: str) -> tuple[int, ...]:
    found = []
    for name in _NAMESPACES:
        try:
            found.append(os.stat(f"/proc/{pid}/ns/{name}").st_ino)  # noqa: PTH116 - as above
        except FileNotFoundError:
            found.append(0)  # a kernel without such namespaces
        except OSError:
            return ()
    return tuple(found) if found[0] else ()


def _place(here: tuple[int, ...], user: int, pid: int) -> int:
    return _hash(sum(each << 32 * at for at, each in enumerate((*here, user))), pid, _PID_BIT - _PLACE_BIT)


def _birth(seen: Look) -> int:
    return _hash(int(seen.start), 0, _PLACE_BIT)


def _hash(number: int, salt: int, bits: int) -> int:
    """Return some bits, which differ for numbers next to each other."""
    for _ in range(2):
        number = (number % ((1 << 61) - 1) + salt) * 0x9E3779B97F4A7C15 + 1
    return number >> 40 & (1 << bits) - 1


class EndedOwners:
    """Says which processes have the marks of owners that have ended (MRK-3)."""

    def __init__(self) -> None:
        self._here = _here()
        self._known: dict[int, bool] = {}

    def __call__(self, pid: int, mark: Mark) -> bool:
        known = self._known.get(mark.owner)
        if known is None:
            known = self._known[mark.owner] = self._has_ended(mark)
        # The hash is short.
        return known and _namespaces(str(pid)) == self._here

    def _has_ended(self, mark: Mark) -> bool:
        if not self._here or _level(mark.owner) % 2:
            return False
        # What another user has started stays that user's, also for root.
        if mark.place != _place(self._here, os.getuid(), mark.pid):
            return False
        seen = look(mark.pid)
        if seen is None:
            # It may be another user's, whom this one does not see.
            return not _exists(mark.pid)
        return seen.ended or _birth(seen) != mark.birth


def soft_of(worker: int) -> int:
    """Return the soft limit of a worker; a tool's pid is added to it."""
    return worker << _PID_BITS


def mark_worker(owner: int, worker: int) -> None:
    """Mark this process, and so all its future descendants."""
    resource.setrlimit(LOCKS, (soft_of(worker), owner))


def detach_one(pid: int) -> None:
    """Detach one process, and so all its future descendants."""
    _, hard = resource.prlimit(pid, LOCKS)
    resource.prlimit(pid, LOCKS, (detached_from(hard),) * 2)


def detached_from(hard: int) -> int:
    """Return the limits, which are equal, of what is detached from the owner with this hard limit."""
    if not _LOWEST <= hard < _HIGHEST:
        return hard
    return hard - _LOWEST if _level(hard) % 2 == 0 else hard


def exempt_self() -> None:
    """Let nobody take this process for a worker's or a tool's, or for a stray: detach it from the owner above or, if there is none, from itself."""
    _, hard = resource.getrlimit(LOCKS)
    owner = hard if _LOWEST <= hard < _HIGHEST else new_owner()
    resource.setrlimit(LOCKS, (detached_from(owner),) * 2)


def all_pids() -> list[int]:
    """Return every visible process."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - much faster


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    found: list[int] = []
    try:
        for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - much faster
            with open(f"/proc/{pid}/task/{name}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
        return found
    except (
        FileNotFoundError
    ):  # a thread has ended, or all have, or this is a kernel without CONFIG_PROC_CHILDREN
        seen = look_at_all(all_pids())
        return [child for child, each in seen.items() if each.parent == pid]


def strays(reaper: int, owner: int, known: Collection[int] = ()) -> Found:
    """Return the running processes that have come to a subreaper without their mark, except ``known``, and what is below them.

    Everything that a subreaper of ours has begun is marked, by this owner, before it runs a program. So this is what somebody below has begun
    who has changed his limits, or what another owner below has left.
    """
    own, has_ended = _command(reaper), EndedOwners()
    roots = [
        pid
        for pid in children(reaper)
        if pid not in known and _is_stray(pid, owner, has_ended) and _command(pid) != own
    ]
    if not roots:
        return {}
    everyone = look_at_all(all_pids())
    return living(below(roots, everyone), everyone)


def _is_stray(pid: int, owner: int, has_ended: Callable[[int, Mark], bool]) -> bool:
    """Return whether a process is known to have no mark, or one that nobody of ours gives; another user's is not."""
    try:
        soft, hard = resource.prlimit(pid, LOCKS)
    except OSError:
        return False
    if not _LOWEST <= hard < _HIGHEST:
        return True
    mark = Mark(hard, soft)
    if mark.owner != owner:
        return has_ended(pid, mark)
    # Of tools, the first process is waited for last.
    return soft == hard or (mark.tool != 0 and not _exists(mark.tool))


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def below(roots: Collection[int], everyone: Mapping[int, Look]) -> set[int]:
    """Return ``roots`` and their descendants, except those that are detached."""

    def stays(pid: int) -> bool:
        mark = read(pid)
        return mark is None or not mark.detached

    return descendants(roots, everyone, stays)


def descendants(
    roots: Collection[int],
    everyone: Mapping[int, Look],
    follow: Callable[[int], bool] = lambda _pid: True,
) -> set[int]:
    """Return ``roots`` and their descendants, reached only through processes for which ``follow`` is true."""
    children: dict[int, list[int]] = {}
    for pid, seen in everyone.items():
        children.setdefault(seen.parent, []).append(pid)
    found: set[int] = set()
    due = list(roots)
    while due:
        pid = due.pop()
        if pid not in found and follow(pid):
            found.add(pid)
            due.extend(children.get(pid, ()))
    return found


def look_at_all(pids: Collection[int]) -> Found:
    """Look at several processes."""
    return {pid: seen for pid in pids if (seen := look(pid)) is not None}


def find(matches: Callable[[Mark], bool], known: Collection[int] = ()) -> Found:
    """Return all running processes whose mark matches, and their descendants; the caller knows that ``known`` ended."""
    return _find(lambda _, mark: matches(mark), known)


def _find(matches: Callable[[int, Mark], bool], known: Collection[int] = ()) -> Found:
    """Find processes by their pids and marks.

    If a process forks and ends during the search, neither it nor its child may be seen. So if any process ended
    meanwhile, an empty result is not conclusive, and the search is repeated.
    """
    gone = set(known)
    found: Found = {}
    for _ in range(_LOOKS):
        pids = all_pids()
        roots = [
            pid
            for pid in pids
            if (mark := read(pid)) is not None and not mark.detached and matches(pid, mark)
        ]
        if not roots or gone.issuperset(roots):
            if all(pid in gone or _exists(pid) for pid in pids):
                return {}
            gone.update(roots)
            continue
        everyone = look_at_all(pids)
        found = living(below(roots, everyone), everyone)
        if found:
            return found
        gone.update(roots)
    return found


def count(matches: Callable[[Mark], bool]) -> int:
    """Return how many processes have such a mark, including ended ones that were not waited for."""
    return sum(1 for pid in all_pids() if (mark := read(pid)) is not None and matches(mark))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def detached_of(owner: int) -> bool:
    """Return whether any process is detached from this owner."""
    equal = detached_from(owner)
    return any((mark := read(pid)) is not None and mark == (equal, equal) for pid in all_pids())


def living(pids: Collection[int], everyone: Found) -> Found:
    """Return those of ``pids`` that have not ended."""
    return {pid: everyone[pid] for pid in pids if pid in everyone and not everyone[pid].ended}


def send(pid: int, seen: Look, *numbers: int) -> None:
    """Signal the process that was looked at, and no other."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        now = look(pid)
        if now is not None and now.start == seen.start:
            for number in numbers:
                signal.pidfd_send_signal(fd, number)
    except OSError:
        pass  # it ended, or now belongs to another user
    finally:
        os.close(fd)


class Hunt:
    """Ends all that ``find`` finds, in rounds: SIGTERM first, then SIGKILL to what is left after the grace period."""

    def __init__(self, find: Callable[[], Found], grace: float = GRACE_S) -> None:
        self._find = find
        self._kill_at = time.monotonic() + grace
        self._asked: set[tuple[int, bytes]] = set()
        self._pause = _FIRST_PAUSE_S

    def step(self) -> float | None:
        """Do one round; return how long to wait until the next, or ``None`` if nothing is left."""
        found = self._find()
        if not found:
            return None
        left = self._kill_at - time.monotonic()
        for pid, seen in found.items():
            if left <= 0:
                send(pid, seen, signal.SIGKILL)
            elif (pid, seen.start) not in self._asked:
                self._asked.add((pid, seen.start))
                # SIGCONT, so that a stopped process sees it too.
                send(pid, seen, signal.SIGTERM, signal.SIGCONT)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return self._pause if left <= 0 else min(self._pause, left)

    def run(self, between: Callable[[], object] = lambda: None) -> None:
        """Hunt until nothing is left; call ``between`` after each round."""
        while (pause := self.step()) is not None:
            time.sleep(pause)
            between()


def sweep() -> Hunt:
    """Return the hunt for what owners of this user have left that have ended, and whose minders were killed with them."""
    return Hunt(lambda: _find(EndedOwners()))


def mind(owner: int, watched: int, meanwhile: Callable[[], object]) -> NoReturn:
    """Become a minder: wait for the end of the process behind a pidfd, and end what it left. Do something else meanwhile."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        # Whatever ends the watched process must not end this one before its work is done.
        exempt_self()
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.dup2(watched, 3)
        os.closerange(4, 1 << 20)
        poll = select.poll()
        poll.register(3, select.POLLIN)
        if not poll.poll(_MEANWHILE_S * 1000):
            try:
                meanwhile()
            except Exception:  # noqa: BLE001 - nobody hears of it, and the work here is more important
                pass
            poll.poll()
        Hunt(lambda: find(lambda mark: mark.owner == owner)).run()
    finally:
        os._exit(0)
