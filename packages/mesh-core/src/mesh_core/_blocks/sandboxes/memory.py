"""How much memory the processes of a box use together.

BXM-1: what is counted does not depend on how memory was allocated: private, shared, in memory files or System V objects, mapped or not, and the tables
of mappings. A process that does not let its keeper look counts as one that exceeds every limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PRIVATE = re.compile(rb"^(?:RssAnon|VmPTE):\s+(\d+) kB$", re.MULTILINE)
_SHARED = re.compile(rb"^RssShmem:\s+(\d+) kB$", re.MULTILINE)
_MAPPING = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$(?:\n[A-Z].*)*?\nPss: +(\d+) kB$",
    re.MULTILINE,
)
_BLOCK = 512
_SEGMENT = b"/SYSV"
"""What the names of mapped System V memory begin with, and of no other memory files."""
_SMALL = 64
"""About what the kernel needs for a System V message, besides its text, or for a semaphore."""


class Memory:
    """Made before a box starts anything: memory that its processes share with this one does not count.

    With ``system_v``, the namespace of System V objects is the box's own, so that all of them count.
    """

    def __init__(self, *, system_v: bool) -> None:
        self._system_v = system_v
        self._base = _resident("self", _PRIVATE)
        file = os.memfd_create("mesh-probe")
        self._device = os.fstat(file).st_dev
        """That of memory files, and of memory that is shared without a file."""
        os.close(file)

    def exceeds(self, pids: Iterable[int], limit: int) -> bool:
        """Return whether these processes use more than that."""
        pids = list(pids)
        try:
            files = self._files(pids)
        except PermissionError:
            return True
        certain = sum(map(self.private, pids)) + sum(files.values()) + (_objects() if self._system_v else 0)
        shared = {pid: size for pid in pids if (size := _resident(pid, _SHARED))}
        if certain + sum(shared.values()) <= limit:
            return False
        # What is mapped by several of them, or is in a file, has been counted more than once. To know better takes longer.
        return certain + sum(self._shares(pid, most, files) for pid, most in shared.items()) > limit

    def private(self, pid: int) -> int:
        """Return the memory of a process that is its own."""
        return max(0, _resident(pid, _PRIVATE) - self._base)

    def _files(self, pids: Iterable[int]) -> dict[int, int]:
        """Return the sizes of open memory files, by their inodes."""
        found = {}
        for pid in pids:
            try:
                with (
                    suppress(FileNotFoundError, ProcessLookupError),
                    os.scandir(f"/proc/{pid}/fd") as entries,
                ):
                    for each in entries:
                        with suppress(FileNotFoundError, ProcessLookupError):
                            about = os.stat(each.path)  # noqa: PTH116 - of many files
                            if about.st_dev == self._device:
                                found[about.st_ino] = about.st_blocks * _BLOCK
            except PermissionError:
                # Nor may users look at their processes that are about to end, which have no memory any more.
                if _resident(pid, _PRIVATE):
                    raise
        return found

    def _shares(self, pid: int, most: int, files: dict[int, int]) -> int:
        """Return a process's shares of memory that it and others have mapped, except for what counts otherwise."""
        try:
            told = Path(f"/proc/{pid}/smaps").read_bytes()
        except OSError:
            return most
        return sum(
            int(kilobytes) << 10
            for major, minor, inode, name, kilobytes in _MAPPING.findall(told)
            if os.makedev(int(major, 16), int(minor, 16)) == self._device
            and not (self._system_v if name.startswith(_SEGMENT) else int(inode) in files)
        )


def _resident(pid: int | str, kind: re.Pattern[bytes]) -> int:
    """Return the bytes of one kind."""
    try:
        return sum(map(int, kind.findall(Path(f"/proc/{pid}/status").read_bytes()))) << 10
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
