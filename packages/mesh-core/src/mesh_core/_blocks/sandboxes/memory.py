"""How much memory the processes of a box use together.

BXM-1: what is counted does not depend on how memory was allocated: private, shared, in memory files of any kind or System V objects, mapped or not,
swapped out or not, in whichever thread's table of descriptors, and the tables of mappings. Processes that do not let their keeper look, or make that take long, count as ones that exceed every
limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_core._system.process_marks import task_of

try:
    import ctypes
except ImportError:  # an interpreter without it
    _SYSCALL: Any = None
else:
    _SYSCALL = ctypes.CDLL(None).syscall

_PRIVATE = re.compile(rb"^(?:RssAnon|VmSwap|VmPTE):\s+(\d+) kB$", re.MULTILINE)
_SHARED = re.compile(rb"^RssShmem:\s+(\d+) kB$", re.MULTILINE)
_MAPPED_SHARE = re.compile(rb"^Pss_Shmem:\s+(\d+) kB$", re.MULTILINE)
_OTHER = re.compile(rb"^(?:VmLck|HugetlbPages):\s+(\d+) kB$", re.MULTILINE)
"""What may be mapped of memory files of other kinds: secret ones are locked."""
_MAPPING = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$(?:\n[A-Z].*)*?\nPss: +(\d+) kB$"
    rb"(?:\n[A-Z].*)*?\nShared_Hugetlb: +(\d+) kB\nPrivate_Hugetlb: +(\d+) kB$",
    re.MULTILINE,
)
_BLOCK = 512
_MEMFD_SECRET = 447
_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
_KCMP_FILES = 2
_HUGE_SIZE_SHIFT = 26
_MOST_FILES = 1 << 16
"""So many descriptors are looked at in a fraction of a second; processes may share a table of a million, at no cost for them."""
_MOST_MAPPINGS = 1 << 15
_PIECE = 1 << 20
_SEGMENT = b"/SYSV"
"""What the names of mapped System V memory begin with, and of no other memory files."""
_SMALL = 64
"""About what the kernel needs for a System V message, besides its text, or for a semaphore."""


class _Hidden(Exception):
    """There is more to look at than can be looked at in time."""


class Memory:
    """Made before a box starts anything: memory that its processes share with this one does not count.

    With ``system_v``, the namespace of System V objects is the box's own, so that all of them count.
    """

    def __init__(self, *, system_v: bool) -> None:
        self._system_v = system_v
        self._base = _resident("self", _PRIVATE)
        self._compares = _has_one_table(os.getpid(), os.getpid())
        """Whether the kernel says which threads have tables of their own; some containers forbid to ask."""
        self._secret = _secret_device()
        self._devices = {_device(0), *_huge_devices(), *self._secret}
        """Those of memory files, and of memory that is shared without a file."""

    def exceeds(self, pids: Iterable[int], limit: int) -> bool:
        """Return whether these processes use more than that."""
        try:
            return self._known_to_exceed(list(map(task_of, pids)), limit)
        except (PermissionError, _Hidden):
            return True

    def _known_to_exceed(self, tasks: list[str], limit: int) -> bool:
        files = self._files(tasks)
        certain = sum(map(self._private, tasks)) + sum(files.values()) + (_objects() if self._system_v else 0)
        other = {task: _resident(task, _OTHER) for task in tasks}
        shared = {task: size for task in tasks if (size := _resident(task, _SHARED) + other[task])}
        if certain + sum(shared.values()) <= limit:
            return False
        # What is mapped by several of them has been counted more than once. To know better takes longer.
        shared = {task: min(most, _mapped_share(task, most) + other[task]) for task, most in shared.items()}
        if certain + sum(shared.values()) <= limit:
            return False
        # So has what is in a file, which only a list of all mappings shows.
        left = [_MOST_MAPPINGS]
        return certain + sum(self._shares(task, most, files, left) for task, most in shared.items()) > limit

    def private(self, pid: int) -> int:
        """Return the memory of a process that is its own."""
        return self._private(task_of(pid))

    def _private(self, task: str) -> int:
        return max(0, _resident(task, _PRIVATE) - self._base)

    def _files(self, tasks: Iterable[str]) -> dict[tuple[int, int], int]:
        """Return the sizes of open memory files, by their devices and inodes."""
        found: dict[tuple[int, int], int] = {}
        left = _MOST_FILES
        for task in tasks:
            try:
                for table in _tables(task) if self._compares else (task,):
                    left = self._look_at(table, found, left)
            except PermissionError:
                # Nor may users look at their processes that are about to end, which have no memory any more.
                if _resident(task, _PRIVATE):
                    raise
        return found

    def _look_at(self, task: str, found: dict[tuple[int, int], int], left: int) -> int:
        """Add what a thread has open; return how many more descriptors may be looked at."""
        with suppress(FileNotFoundError, ProcessLookupError), os.scandir(f"/proc/{task}/fd") as entries:
            for each in entries:
                left -= 1
                if left < 0:
                    raise _Hidden
                with suppress(FileNotFoundError, ProcessLookupError):
                    about = os.stat(each.path)  # noqa: PTH116 - of many files
                    if about.st_dev in self._devices:
                        # Secret ones have no count of blocks.
                        is_secret = about.st_dev in self._secret
                        size = about.st_size if is_secret else about.st_blocks * _BLOCK
                        found[about.st_dev, about.st_ino] = size
        return left

    def _shares(self, task: str, most: int, files: dict[tuple[int, int], int], left: list[int]) -> int:
        """Return a process's shares of memory that it and others have mapped, except for what counts otherwise."""
        try:
            told = _mappings(task, left)
        except OSError:
            return most
        share = 0
        for major, minor, inode, name, *kilobytes in _MAPPING.findall(told):
            file = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            if file[0] not in self._devices:
                continue
            if not (self._system_v if name.startswith(_SEGMENT) else file in files):
                share += sum(map(int, kilobytes)) << 10
        return share


def _tables(task: str) -> Iterator[str]:
    """Yield the threads of a process that have tables of descriptors of their own; all others have that of the first."""
    yield task
    pid, first = int(task.partition("/")[0]), int(task.rpartition("/")[2])
    try:
        names = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names are wanted
    except (FileNotFoundError, ProcessLookupError):
        return
    if len(names) > 1:
        for name in names:
            if int(name) != first and not _has_one_table(first, int(name)):
                yield f"{pid}/task/{name}"


def _has_one_table(one: int, other: int) -> bool:
    if _SYSCALL is None or _KCMP is None:
        return False
    return bool(_SYSCALL(_KCMP, one, other, _KCMP_FILES, 0, 0) == 0)


def _device(flags: int) -> int:
    """Return the device of memory files of a kind."""
    file = os.memfd_create("mesh-probe", flags)
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)


def _huge_devices() -> set[int]:
    """Return those of memory files in huge pages, of each size that there is."""
    found = set()
    with suppress(OSError):
        for each in os.listdir("/sys/kernel/mm/hugepages"):  # noqa: PTH208 - names are wanted
            size = int(each.removeprefix("hugepages-").removesuffix("kB")) << 10
            with suppress(OSError):
                found.add(_device(os.MFD_HUGETLB | (size.bit_length() - 1) << _HUGE_SIZE_SHIFT))
    return found


def _secret_device() -> set[int]:
    """Return that of files that even the kernel has not mapped, if there are such."""
    file = -1 if _SYSCALL is None else _SYSCALL(_MEMFD_SECRET, os.O_CLOEXEC)
    if file < 0:
        return set()
    try:
        return {os.fstat(file).st_dev}
    finally:
        os.close(file)


def _mapped_share(task: str, most: int) -> int:
    """Return a process's shares of mapped memory files, as the kernel sums them up."""
    try:
        found = _MAPPED_SHARE.search(Path(f"/proc/{task}/smaps_rollup").read_bytes())
    except OSError:
        found = None
    return most if found is None else int(found[1]) << 10


def _mappings(task: str, left: list[int]) -> bytes:
    """Return the list of a process's mappings, of which the keeper reads so many in all."""
    told = bytearray()
    with open(f"/proc/{task}/smaps", "rb", buffering=0) as file:  # noqa: PTH123 - read in pieces
        while piece := file.read(_PIECE):
            told += piece
            left[0] -= piece.count(b"\nPss:")
            if left[0] < 0:
                raise _Hidden
    return bytes(told)


def _resident(task: str, kind: re.Pattern[bytes]) -> int:
    """Return the bytes of one kind."""
    try:
        return sum(map(int, kind.findall(Path(f"/proc/{task}/status").read_bytes()))) << 10
    except OSError:
        return 0


def _objects() -> int:
    """Return the bytes of all System V objects in the namespace of this process, which are there without any process."""
    memory = sum(int(resident) + int(swapped) for *_, resident, swapped in _table("shm"))
    messages = sum(int(size) + _SMALL * int(count) for _, _, _, size, count, *_ in _table("msg"))
    return memory + messages + sum(_SMALL * int(count) for _, _, _, count, *_ in _table("sem"))


def _table(kind: str) -> list[list[bytes]]:
    try:
        return [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_bytes().splitlines()[1:]]
    except FileNotFoundError:
        return []  # a kernel without them
