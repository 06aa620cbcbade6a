"""Modules that a fork server imports because its workers have: those of actor classes, for workers that are respawned.

A worker tells its fork server about the module of each class of which it hosts actors. A copy of the fork server imports the
module first, and looks at what the import has changed. If a fork is as good as the import, the fork server imports it too.

LSN-1: a worker finds the same, whether its fork server has imported a module or it does so itself. A module is left alone if
its import starts threads or processes, opens files or connections, uses a device, or sets anything that workers get anew. If a
file of a module is changed later, workers get fresh interpreters.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mesh_core._common.import_hooks import SURVIVE_FORKS, ThreadCount

_PACKET = 4096
_PATIENCE_S = 60
_STANDARD = os.__file__.removesuffix("os.py")
_MOST = 100
"""How many modules a fork server tries at most, whatever its workers say."""
_GENERATORS = frozenset(
    {
        ("random", "Random"),
        ("numpy.random._generator", "Generator"),
        ("numpy.random.mtrand", "RandomState"),
        ("torch._C", "Generator"),
        ("torch", "Generator"),
        ("uuid", "UUID"),
    }
)


def threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - asked before and after every import


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drop what is printed: the workers that imported the module have printed it."""
    kept = [os.dup(fd) for fd in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(null, fd)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(null)


class Teacher:
    """A worker's end: tells the fork server about the modules of the classes that it hosts."""

    def __init__(self, fd: int) -> None:
        self._channel = socket.socket(fileno=fd)
        self._told: set[str] = set()

    def tell(self, cls: type) -> None:
        """Tell about the module of a class, if others can import it."""
        name = cls.__module__
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if name in self._told or name.startswith("__") or spec is None or not spec.origin:
            return
        self._told.add(name)
        # The fork server is gone, or has much to read: it does without.
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps([name, spec.origin]).encode())


class Lessons:
    """A fork server's end."""

    def __init__(self, remember: Callable[[str], str]) -> None:
        self._remember = remember
        """Imports a module here; returns why forks are unsound from then on, or an empty string."""
        self._heard, self._says = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._known: set[str] = set()
        self._waiting: list[tuple[str, str]] = []
        self._trying = ("", 0)
        """The module that a copy is trying, and the copy's pid."""
        self._files: dict[str, tuple[int, int]] = {}
        """The files of imported modules of the user's: when each was changed, and its size."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a worker tells something."""
        return self._heard.fileno()

    @property
    def pid(self) -> int:
        """The pid of the copy that is trying a module, or 0."""
        return self._trying[1]

    def become_worker(self, *, alike: bool) -> int:
        """Return, in a copy that becomes a worker, the descriptor to tell by; -1 if its environment is not the one here."""
        self._heard.close()
        if alike:
            return self._says.detach()
        self._says.close()
        return -1

    def hear(self) -> None:
        """Read what workers have told."""
        while True:
            try:
                name, origin = json.loads(self._heard.recv(_PACKET))
            except OSError:
                return
            except ValueError:
                continue
            if isinstance(name, str) and name not in self._known and len(self._known) < _MOST:
                self._known.add(name)
                if name not in sys.modules:
                    self._waiting.append((name, str(origin)))

    def next_trial(self) -> Callable[[], NoReturn] | None:
        """Return what a copy is to do next, if there is anything to try; see :meth:`tried`."""
        if self._trying[1] or not self._waiting:
            return None
        name, origin = self._waiting.pop(0)
        self._trying = (name, 0)
        return lambda: _try(name, origin)

    def trying(self, pid: int) -> None:
        """Record the copy that does what :meth:`next_trial` returned."""
        self._trying = (self._trying[0], pid)

    def tried(self, status: int) -> str:
        """Import the module if its trial went well. Return why forks are unsound from then on, or an empty string."""
        name, _ = self._trying
        self._trying = ("", 0)
        if status:
            return ""
        before = set(sys.modules)
        why = self._remember(name)
        for module in [sys.modules[each] for each in set(sys.modules) - before]:
            self._note(module)
        return why

    def _note(self, module: ModuleType) -> None:
        file = _file_of(module)
        if file and not _is_of_package(file):
            with contextlib.suppress(OSError):
                found = os.stat(file)  # noqa: PTH116
                self._files[file] = (found.st_mtime_ns, found.st_size)

    def changed(self) -> str:
        """Return a file of a module that was changed since it was imported here; empty if there is none."""
        for file, known in self._files.items():
            try:
                found = os.stat(file)  # noqa: PTH116
            except OSError:
                return file
            if (found.st_mtime_ns, found.st_size) != known:
                return file
        return ""


def _file_of(module: ModuleType) -> str:
    spec = getattr(module, "__spec__", None)
    origin = None if spec is None or not spec.has_location else spec.origin
    return origin or ""


def _is_of_package(file: str) -> bool:
    return "/site-packages/" in file or "/dist-packages/" in file or file.startswith(_STANDARD)


def _try(name: str, origin: str) -> NoReturn:
    """Import a module in a copy of the fork server, and exit with 0 if a fork is as good as that."""
    status = 1
    try:
        signal.alarm(_PATIENCE_S)
        with silenced():
            hook = ThreadCount(threads, SURVIVE_FORKS)
            before, known = _footprint(), set(sys.modules)
            hook.install()
            module = importlib.import_module(name)
            hook.remove()
            new = [sys.modules[each] for each in set(sys.modules) - known]
            same = getattr(module.__spec__, "origin", None) == origin
            if same and not hook.started and _is_left(before) and not any(map(_is_random, new)):
                status = 0
    finally:
        os._exit(status)


def _footprint() -> dict[str, Any]:
    """Return what a worker would not get from a fork, or would get and should not."""
    import logging

    me = os.getpid()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return {
        "descriptors": sorted(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "children": _children(me),
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "logging": (list(logging.root.handlers), logging.root.level),
        "random": random.getstate(),
        "numpy": None if numpy is None else repr(numpy.random.get_state()),
        "torch": None if torch is None else torch.get_rng_state().tolist(),
        "cuda": torch is not None and torch.cuda.is_initialized(),
    }


def _is_left(before: dict[str, Any]) -> bool:
    """Whether everything is as it was; workers seed the generators of packages that were imported since."""
    after = _footprint()
    return all(after[key] == value for key, value in before.items() if value is not None)


def _children(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return ""


def _is_random(module: ModuleType) -> bool:
    """Whether a module of the user's holds a generator, or a number that is to be unique, of which all copies would be the same."""
    file = _file_of(module)
    if not file or _is_of_package(file):
        return False
    kinds = (type(value) for value in list(vars(module).values()))
    return any((kind.__module__, kind.__name__) in _GENERATORS for kind in kinds)
