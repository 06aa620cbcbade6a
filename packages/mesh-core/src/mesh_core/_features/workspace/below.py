"""Access paths below a folder, one step at a time from its descriptor.

WSP-3: no link in a copy is followed, no matter who put it there or when (PRV-1).
"""

from __future__ import annotations

import contextlib
import os
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Below:
    """The tree below an open folder. Paths are relative, with slashes."""

    def __init__(self, root: int) -> None:
        self.root = root
        """Its descriptor, closed by :meth:`close`."""
        self._way: list[tuple[str, int]] = []
        """The open folders on the way to the last path: neighbours are usually visited in sequence."""

    def close(self) -> None:
        """Close all descriptors."""
        self.forget()
        os.close(self.root)

    def forget(self) -> None:
        """Walk from the top again, because a folder on the way may have been replaced."""
        for _, at in self._way:
            os.close(at)
        self._way.clear()

    def parent(self, path: str) -> tuple[int, str]:
        """Return the descriptor of a path's folder, valid until the next call, and the path's last part."""
        *folders, name = path.split("/")
        same = 0
        for (known, _), folder in zip(self._way, folders, strict=False):
            if known != folder:
                break
            same += 1
        for _, at in self._way[same:]:
            os.close(at)
        del self._way[same:]
        for folder in folders[same:]:
            self._way.append((folder, os.open(folder, _FOLDER, dir_fd=self._last())))
        return self._last(), name

    def _last(self) -> int:
        return self._way[-1][1] if self._way else self.root

    def look(self, path: str) -> os.stat_result | None:
        """Return the status of a path; ``None`` if it does not exist or a parent is not a folder."""
        try:
            at, name = self.parent(path)
            return os.stat(name, dir_fd=at, follow_symlinks=False)
        except OSError:
            return None

    def open_file(self, path: str) -> int:
        """Open a regular file for reading."""
        at, name = self.parent(path)
        # Do not wait for a writer if it has become a pipe.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError(f"{path} is no longer a file")
        return file

    def points(self, path: str) -> bytes:
        """Return the target of a link."""
        at, name = self.parent(path)
        return os.fsencode(os.readlink(name, dir_fd=at))

    def set_mode(self, path: str, mode: int) -> None:
        """Change the mode of a file or folder, even if it cannot be read."""
        at, name = self.parent(path)
        thing = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            found = os.fstat(thing)
            # A link has no mode; this would change the mode of its target.
            if not stat.S_ISLNK(found.st_mode):
                with contextlib.suppress(PermissionError):  # a file system without modes
                    os.chmod(f"/proc/self/fd/{thing}", mode | group_bit(found))  # noqa: PTH101 - the shortest way
        finally:
            os.close(thing)

    def make_folder(self, path: str) -> None:
        """Make a folder that nobody else can enter yet, unless it exists."""
        at, name = self.parent(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=at)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        at, name = self.parent(path)
        os.rmdir(name, dir_fd=at)
        self.forget()

    def unlink(self, path: str) -> None:
        """Remove a file or link."""
        at, name = self.parent(path)
        os.unlink(name, dir_fd=at)

    def put(self, path: str, source: int, name: str) -> None:
        """Move ``name`` from the folder ``source`` to a path, replacing what is there."""
        at, last = self.parent(path)
        os.rename(name, last, src_dir_fd=source, dst_dir_fd=at)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; empty if there is no such folder."""
        try:
            at, _ = self.parent(f"{path}/." if path else ".")
            return os.listdir(at)  # noqa: PTH208 - names are wanted
        except OSError:
            return []


def group_bit(found: os.stat_result) -> int:
    """Return a folder's setgid bit, if it is set: new entries then belong to the folder's group."""
    return found.st_mode & stat.S_ISGID if stat.S_ISDIR(found.st_mode) else 0
