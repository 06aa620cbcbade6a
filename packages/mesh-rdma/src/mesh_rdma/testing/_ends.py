"""What all parts of the suite stand on: the process that owns memory, and transfers to and from it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from mesh_core.testing import PluginConformance, expect_bytes
from mesh_rdma._buffer import RDMABuffer
from mesh_rdma._contract import TRANSPORTS, TransportCapabilities
from mesh_rdma.testing._memory import HOST, is_free, look, make
from mesh_rdma.testing._owner import COMMAND, receive, send


class Process:
    """A process that owns memory; its methods are those of `Owner`."""

    def __init__(self, kind: str = HOST) -> None:
        self.kind = kind
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*COMMAND, self.kind]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            error, result = self.attempt(name, *arguments, **options)
            assert error is None, f"the owner failed: {error}"
            return result

        return ask

    def attempt(self, name: str, *arguments: Any, **options: Any) -> tuple[str | None, Any]:
        """Return the error, as text, or none and the result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        send(self.process.stdin, (name, arguments, options))
        error, result = receive(self.process.stdout)
        return error, result

    @contextmanager
    def halted(self) -> Iterator[None]:
        """The process does nothing meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it now; return when it has ended."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it, and let go of its pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.kill()


def outcome(work: Callable[[], object]) -> BaseException | None:
    """Return what it raises."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return error
    return None


def forged(buffer: RDMABuffer, change: Callable[[bytearray], object]) -> RDMABuffer:
    """Return a buffer of a handle that somebody has changed."""
    make, (data,) = buffer.__reduce__()
    changed = bytearray(data)
    change(changed)
    made: RDMABuffer = make(bytes(changed))
    return made


def in_threads(work: Callable[[int], object], count: int) -> list[object]:
    """Call it in so many threads at once; return what went wrong: what it returns but None, or raises."""
    wrong: list[object] = []

    def one(n: int) -> None:
        try:
            said = work(n)
        except Exception as error:  # noqa: BLE001 - told by the test
            said = error
        if said is not None:
            wrong.append(said)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


class Ends(PluginConformance):
    """Two ends of a transport: this process and others, which are started when they are first needed."""

    kind = TRANSPORTS

    patience: ClassVar[float] = 30
    """Seconds after which what should have come is late."""

    memory_there: ClassVar[str] = HOST
    """The memory that is offered: ``"host"``, or ``"gpu"`` for memory of a GPU."""

    memory_here: ClassVar[str] = HOST
    """The memory that is read into and written from."""

    _kind_of_process: ClassVar[type[Process]] = Process
    _owner: ClassVar[Process | None] = None
    _spare: ClassVar[Process | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def teardown_class(cls) -> None:
        """End the processes."""
        for each in (cls._owner, cls._spare):
            if each is not None:
                each.end()
        cls._owner = cls._spare = None

    @property
    def owner(self) -> Process:
        """The process that owns memory. No test ends it."""
        cls = type(self)
        if cls._owner is None:
            cls._owner = cls._begin()
        return cls._owner

    @classmethod
    def _begin(cls) -> Process:
        return cls._kind_of_process(cls.memory_there)

    def _own(self, data: bytes) -> tuple[RDMABuffer, Any]:
        """Offer memory of this process, which other processes read and write by the transport."""
        memory = make(self.memory_there, data)
        return RDMABuffer(memory[:]), memory

    @contextmanager
    def another(self) -> Iterator[Process]:
        """A process of the test's own; the next one starts meanwhile."""
        cls = type(self)
        with cls._lock:
            process, cls._spare = cls._spare or cls._begin(), cls._begin()
        try:
            yield process
        finally:
            process.end()

    def _can(self) -> TransportCapabilities:
        able = self.plugin.probe()
        assert isinstance(able.capabilities, TransportCapabilities), f"it cannot work here: {able.reason}"
        return able.capabilities

    def _read(self, buffer: RDMABuffer, length: int, offset: int = 0, timeout: float | None = None) -> bytes:
        copy, timeout = make(self.memory_here, length), timeout or self.patience
        buffer.read_into(copy[:], offset=offset, timeout=timeout, transport=self.plugin.name).get(timeout=60)
        return look(copy)

    def _reads(self, buffer: RDMABuffer, expected: bytes) -> None:
        """Read all of it: it has to be this."""
        found = self._read(buffer, len(expected))
        expect_bytes(found, expected, f"{len(expected)} bytes were offered, and others read")

    def _write(self, buffer: RDMABuffer, data: Any, offset: int = 0) -> None:
        source = data if self.memory_here == HOST else make(self.memory_here, bytes(data))[:]
        buffer.write_from(source, offset=offset, timeout=self.patience, transport=self.plugin.name).get(
            timeout=60
        )

    def _let_go(self, memory: Any) -> bool:
        """Wait until nobody refers to memory any longer."""
        end = time.monotonic() + self.patience
        pause = threading.Event()
        while not is_free(memory):
            if time.monotonic() > end:
                return False
            # What the engine's threads have let go is freed where Python next calls into it.
            RDMABuffer(bytearray(1)).drop()
            pause.wait(0.01)
        return True
