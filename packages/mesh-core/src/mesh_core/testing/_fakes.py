"""Plugins that work in memory, and a way to have plugins installed for a while."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_core.plugins import KINDS, LauncherPlugin, Plugin, ProbeResult, TransportPlugin, hookimpl

if TYPE_CHECKING:
    from importlib.metadata import DistributionFinder
    from typing import Self

    from typing_extensions import Buffer


class FakeJob:
    """What :class:`FakeLauncher` launches: names of hosts, and a state that the test can change."""

    def __init__(self, hosts: int, options: dict[str, Any]) -> None:
        self.options = options
        """What the job was launched with."""
        self._state = "running"
        self._names = [f"fake-{n}" for n in range(hosts)]
        self._log: list[str] = [f"launched {hosts} hosts"]

    @property
    def host_names(self) -> list[str]:
        """The hosts that it would have; nothing runs on them."""
        return list(self._names)

    def state(self) -> str:
        """``running``, ``failed`` or ``stopped``."""
        return self._state

    def logs(self) -> list[str]:
        """What has happened to it."""
        return list(self._log)

    def scale(self, hosts: int) -> None:
        """Have so many hosts."""
        if self._state != "running":
            raise RuntimeError(f"a job that is {self._state} cannot be scaled")
        self._names = [f"fake-{n}" for n in range(hosts)]
        self._log.append(f"scaled to {hosts} hosts")

    def fail(self, reason: str) -> None:
        """Let it have failed."""
        self._state = "failed"
        self._log.append(f"failed: {reason}")

    def stop(self) -> None:
        """End it; again does nothing."""
        if self._state != "stopped":
            self._state, self._names = "stopped", []
            self._log.append("stopped")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class FakeLauncher:
    """A launcher that launches nothing, and remembers what it was asked for; for tests of code that selects launchers.

    >>> from mesh_core.plugins import LAUNCHERS, PluginManager
    >>> from mesh_core.testing import FakeLauncher, installed_plugins
    >>> fake = FakeLauncher()
    >>> with installed_plugins(fake.plugin):
    ...     launcher = PluginManager().get(LAUNCHERS, "fake").create(queue="short")
    >>> with launcher.launch(hosts=2) as job:
    ...     job.host_names, job.options
    (['fake-0', 'fake-1'], {'queue': 'short'})
    >>> fake.jobs[0].state()
    'stopped'
    """

    def __init__(self, name: str = "fake", *, unavailable: ProbeResult | None = None) -> None:
        self._unavailable = unavailable
        self._options: dict[str, Any] = {}
        self.jobs: list[FakeJob] = []
        """All that were launched, in order."""
        self.plugin = LauncherPlugin(
            name=name,
            api_version=1,
            create=self._create,
            probe=self._probe,
            summary="launches nothing, for tests",
        )
        """The descriptor, as a hook would yield it."""

    def _create(self, **options: Any) -> FakeLauncher:
        self._options = options
        return self

    def _probe(self) -> ProbeResult:
        return self._unavailable or ProbeResult.yes(hosts=1_000_000)

    def launch(self, hosts: int = 1, **options: Any) -> FakeJob:
        """Launch a job; ``options`` go beside those that the launcher was made with."""
        if hosts < 1:
            raise ValueError(f"a job has at least one host, not {hosts}")
        job = FakeJob(hosts, {**self._options, **options})
        self.jobs.append(job)
        return job


class MemoryTransport:
    """A transport between memory of one process and itself, with handles and counts; for tests of code that moves data.

    >>> from mesh_core.testing import MemoryTransport
    >>> transport = MemoryTransport()
    >>> handle, here = transport.register(bytearray(b"hello")), bytearray(4)
    >>> transport.read_into(handle, here, offset=1), bytes(here)
    (4, b'ello')
    >>> transport.operations
    ['register', 'read_into']
    """

    def __init__(self, name: str = "memory") -> None:
        self._memory: dict[int, memoryview] = {}
        self._handles = itertools.count(1)
        self._failures: list[BaseException] = []
        self.operations: list[str] = []
        """What was done, in order."""
        self.plugin = TransportPlugin(
            name=name,
            api_version=1,
            create=self._create,
            probe=lambda: ProbeResult.yes(same_process_only=True),
            summary="moves bytes within one process, for tests",
        )
        """The descriptor, as a hook would yield it."""

    def _create(self, **options: Any) -> MemoryTransport:
        return self

    def fail_next(self, error: BaseException) -> None:
        """Let the next operation raise ``error`` instead of doing anything."""
        self._failures.append(error)

    def _begin(self, what: str) -> None:
        self.operations.append(what)
        if self._failures:
            raise self._failures.pop(0)

    def register(self, data: Buffer) -> int:
        """Make memory reachable; returns its handle. Reads and writes go to this very memory."""
        self._begin("register")
        handle = next(self._handles)
        self._memory[handle] = memoryview(data).cast("B")
        return handle

    def _at(self, handle: int, offset: int, length: int) -> memoryview:
        memory = self._memory.get(handle)
        if memory is None:
            raise ConnectionError(f"handle {handle} is not registered, or was dropped")
        if offset < 0 or offset + length > len(memory):
            raise IndexError(
                f"bytes {offset} to {offset + length} are outside of memory of {len(memory)} bytes"
            )
        return memory[offset : offset + length]

    def size(self, handle: int) -> int:
        """How many bytes a handle stands for."""
        self._at(handle, 0, 0)
        return len(self._memory[handle])

    def read_into(self, handle: int, dst: Buffer, *, offset: int = 0) -> int:
        """Fill ``dst`` from the memory behind a handle; returns the number of bytes."""
        self._begin("read_into")
        view = memoryview(dst).cast("B")
        view[:] = self._at(handle, offset, len(view))
        return len(view)

    def write_from(self, handle: int, src: Buffer, *, offset: int = 0) -> int:
        """Write ``src`` into the memory behind a handle; returns the number of bytes."""
        self._begin("write_from")
        view = memoryview(src).cast("B")
        self._at(handle, offset, len(view))[:] = view
        return len(view)

    def drop(self, handle: int) -> None:
        """Make the memory unreachable; again does nothing."""
        self._begin("drop")
        self._memory.pop(handle, None)


class _Offer(importlib.metadata.Distribution):
    """A distribution that is nowhere on disk."""

    def __init__(self, name: str, entry_points: str) -> None:
        self._name = name
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n",
            "entry_points.txt": entry_points,
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _Finder:
    """What the standard library asks for distributions, and this for no module."""

    def __init__(self, offer: _Offer) -> None:
        self._offer = offer

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[_Offer]:
        wanted = None if context is None else context.name
        return [self._offer] if wanted in (None, self._offer._name) else []


@contextlib.contextmanager
def installed_plugins(*plugins: Plugin, distribution: str = "mesh-test-plugins") -> Iterator[None]:
    """Have plugins found by name in this process, by the same road as installed ones, for a ``with`` block.

    >>> from mesh_core.plugins import TRANSPORTS, PluginManager
    >>> from mesh_core.testing import MemoryTransport, installed_plugins
    >>> with installed_plugins(MemoryTransport().plugin):
    ...     "memory" in PluginManager().names(TRANSPORTS)
    True
    """
    strangers = [each for each in plugins if not any(isinstance(each, kind.descriptor) for kind in KINDS)]
    if strangers:
        raise TypeError(
            f"installed_plugins() takes descriptors such as FakeLauncher().plugin, not {strangers[0]!r}"
        )
    module = types.ModuleType(f"_{distribution.replace('-', '_')}_{id(plugins):x}")
    lines: list[str] = []
    for kind in KINDS:
        mine = [each for each in plugins if isinstance(each, kind.descriptor)]
        if mine:
            setattr(module, kind.hook, hookimpl(_yielding(kind.hook, mine)))
            lines += [f"[{kind.group}]", *(f"{each.name} = {module.__name__}" for each in mine)]
    finder: Any = _Finder(_Offer(distribution, "\n".join(lines) + "\n"))
    sys.modules[module.__name__] = module
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        del sys.modules[module.__name__]


def _yielding(name: str, plugins: list[Plugin]) -> Any:
    def hook() -> list[Plugin]:
        return plugins

    hook.__name__ = name
    return hook
