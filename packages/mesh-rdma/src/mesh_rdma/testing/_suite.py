"""What holds for every transport."""

from __future__ import annotations

import random
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from mesh_core.testing import PluginConformance
from mesh_rdma._action import RDMAAction
from mesh_rdma._buffer import RDMABuffer
from mesh_rdma._contract import TRANSPORTS, NativeTransport, Transport, TransportCapabilities
from mesh_rdma._errors import BufferGone, InvalidTransfer, RDMAError, RDMATimeout
from mesh_rdma._explain import explain
from mesh_rdma.testing._owner import receive, send

_FLAGS, _LENGTH, _WINDOW = 4, 65, 81
"""Where in the bytes of a handle they are: what may be done, the length of all the memory, and that of the buffer."""


class _Process:
    """A process that owns memory; its methods are those of `Owner`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "mesh_rdma.testing._owner"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            send(self.process.stdin, (name, arguments, options))
            error, result = receive(self.process.stdout)
            assert error is None, f"the owner failed: {error}"
            return result

        return ask

    @contextmanager
    def halted(self) -> Iterator[None]:
        """The process does nothing meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.kill()
        self.process.wait()


def _outcome(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return error
    return None


def _forged(buffer: RDMABuffer, change: Callable[[bytearray], None]) -> RDMABuffer:
    """Return a buffer of a handle that somebody has changed."""
    make, (data,) = buffer.__reduce__()
    changed = bytearray(data)
    change(changed)
    made: RDMABuffer = make(bytes(changed))
    return made


class TransportConformance(PluginConformance):
    """What holds for a transport: what holds for every plugin, and what buffers promise whichever transport is used.

    The plugin must be installed where the suite runs, and its probe must say yes there: the suite starts processes that offer
    memory, and reads and writes that from its own.
    """

    kind = TRANSPORTS

    owner: ClassVar[_Process]

    @classmethod
    def setup_class(cls) -> None:
        """Start the owner."""
        cls.owner = _Process()

    @classmethod
    def teardown_class(cls) -> None:
        """End it."""
        cls.owner.end()

    def _can(self) -> TransportCapabilities:
        able = self.plugin.probe()
        assert isinstance(able.capabilities, TransportCapabilities), f"it cannot work here: {able.reason}"
        return able.capabilities

    def _read(self, buffer: RDMABuffer, length: int, offset: int = 0, timeout: float = 30) -> bytes:
        copy = bytearray(length)
        buffer.read_into(copy, offset=offset, timeout=timeout, transport=self.plugin.name).get(timeout=60)
        return bytes(copy)

    def _write(self, buffer: RDMABuffer, data: Any, offset: int = 0) -> None:
        buffer.write_from(data, offset=offset, timeout=30, transport=self.plugin.name).get(timeout=60)

    def test_creates_a_transport(self) -> None:
        """``create`` makes what the contract names."""
        assert isinstance(self.plugin, TRANSPORTS.descriptor)
        made = self.plugin.create()
        assert isinstance(made, (Transport, NativeTransport)), f"create() gave {type(made).__name__}"

    def test_copies(self) -> None:
        """A transport is there to read and write."""
        assert self._can().copies, "the capability 'copies' must be declared"

    def test_is_offered(self) -> None:
        """Handles name it, and it is a candidate for them."""
        chosen = explain(self.owner.offer("a", b"x"), transport=self.plugin.name)
        assert chosen.candidates == (self.plugin.name,), str(chosen)

    def test_reads_what_is_there(self) -> None:
        """All sizes, from nothing to megabytes, at all offsets."""
        chance = random.Random(1)
        for size in (0, 1, 7, 8, 4095, 4096, 70_001, 5 << 20):
            data = chance.randbytes(size)
            buffer = self.owner.offer("a", data)
            assert self._read(buffer, size) == data, f"{size} bytes"
            start = chance.randint(0, size)
            length = chance.randint(0, size - start)
            part = self._read(buffer, length, start)
            assert part == data[start : start + length], f"{length} bytes from {start} on, of {size}"

    def test_writes_what_it_is_given_and_nothing_else(self) -> None:
        """When it is done, the bytes are there; those around them are as they were."""
        chance = random.Random(2)
        for size in (0, 1, 9, 4096, 70_001, 5 << 20):
            data = chance.randbytes(size)
            buffer = self.owner.offer("a", bytes(size + 20))
            self._write(buffer, data, 7)
            assert self.owner.look("a") == bytes(7) + data + bytes(13), f"{size} bytes"

    def test_slices(self) -> None:
        """Of a slice the offset counts from its own beginning."""
        data = bytes(range(256))
        part = self.owner.offer("a", data)[100:200]
        assert self._read(part, 50, 10) == data[110:160]
        self._write(part, b"new", 97)
        assert self.owner.look("a") == data[:197] + b"new" + data[200:]

    def test_memory_in_pieces(self) -> None:
        """Strided memory there, if it can, and here."""
        data = random.Random(3).randbytes(600)
        step = 3 if self._can().pieces else 1
        buffer = self.owner.offer("a", data, step=step)
        assert self._read(buffer, len(data[::step])) == data[::step]
        here = bytearray(2 * len(data[::step]))
        buffer.read_into(memoryview(here)[::2], transport=self.plugin.name).get(timeout=60)
        assert here[::2] == data[::step]
        assert not any(here[1::2])
        said = random.Random(5).randbytes(len(here))
        self._write(buffer, memoryview(said)[::2])
        assert self.owner.look("a")[::step] == said[::2]
        if not self._can().pieces:
            chosen = explain(self.owner.offer("a", data, step=3), transport=self.plugin.name)
            assert chosen.candidates == (), "memory in pieces is offered, though it is declared not to be"

    def test_many_at_once(self) -> None:
        """Reads and writes of many buffers in one action."""
        buffers = [self.owner.offer(f"many-{n}", b"%04d" % n) for n in range(100)]
        copies = [bytearray(4) for _ in buffers]
        action = RDMAAction()
        for n, (copy, buffer) in enumerate(zip(copies, buffers, strict=True)):
            if n % 2:
                action.read_remote(copy, buffer)
            else:
                action.write_remote(buffer, b"w%03d" % n)
        action.submit(timeout=30, transport=self.plugin.name).get(timeout=60)
        assert [bytes(copy) for copy in copies[1::2]] == [b"%04d" % n for n in range(1, 100, 2)]
        assert [self.owner.look(f"many-{n}") for n in range(0, 100, 2)] == [
            b"w%03d" % n for n in range(0, 100, 2)
        ]

    def test_many_threads(self) -> None:
        """Each gets what it has asked for."""
        data = random.Random(4).randbytes(1 << 16)
        buffer = self.owner.offer("a", data)
        wrong: list[object] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(30):
                start = chance.randrange(len(data))
                length = chance.randint(0, len(data) - start)
                try:
                    if self._read(buffer, length, start) != data[start : start + length]:
                        wrong.append(f"{length} bytes from {start} on are others")
                except RDMAError as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, f"{len(wrong)} of 240 reads went wrong, first: {wrong[0]!r}"

    def test_dropped_memory_is_gone(self) -> None:
        """From ``drop()`` on nobody reads or writes it, also who has reached it before."""
        buffer = self.owner.offer("a", b"before")
        assert self._read(buffer, 6) == b"before"
        self.owner.drop("a")
        for work in (lambda: self._read(buffer, 6), lambda: self._write(buffer, b"after!")):
            error = _outcome(work)
            assert isinstance(error, BufferGone), f"expected BufferGone, got {error!r}"
        assert self.owner.look("a") == b"!!!!!!", "dropped memory was written to"

    def test_other_memory_stays(self) -> None:
        """What is dropped takes nothing else with it, and what comes after it is reached."""
        kept = self.owner.offer("kept", b"kept")
        for n in range(20):
            buffer = self.owner.offer("a", b"%02d" % n)
            assert self._read(buffer, 2) == b"%02d" % n
            self.owner.forget("a")
        assert self._read(kept, 4) == b"kept"

    def test_read_only_memory_is_not_written(self) -> None:
        """Also where the handle was forged to say that it may be."""
        buffer = self.owner.offer("a", b"secret", readonly=True)
        error = _outcome(lambda: self._write(buffer, b"x"))
        assert isinstance(error, InvalidTransfer), f"expected InvalidTransfer, got {error!r}"

        def allow(handle: bytearray) -> None:
            handle[_FLAGS] |= 1

        error = _outcome(lambda: self._write(_forged(buffer, allow), b"x"))
        assert isinstance(error, RDMAError), f"the owner must refuse, got {error!r}"
        assert self.owner.look("a") == b"secret"
        assert self._read(buffer, 6) == b"secret"

    def test_nothing_outside_of_the_memory_is_reached(self) -> None:
        """Also where the handle was forged to name more than is offered."""
        buffer = self.owner.offer("a", bytes(4096))

        def widen(handle: bytearray) -> None:
            for at in (_LENGTH, _WINDOW):
                struct.pack_into("<Q", handle, at, 1 << 40)

        wide = _forged(buffer, widen)
        for offset, length in ((4090, 10), (4096, 1), (1 << 30, 8), ((1 << 40) - 8, 8)):
            error = _outcome(lambda o=offset, n=length: self._read(wide, n, o))  # type: ignore[misc]
            assert isinstance(error, RDMAError), f"{length} bytes at {offset} of 4096 were read: {error!r}"
            error = _outcome(lambda o=offset, n=length: self._write(wide, bytes(n), o))  # type: ignore[misc]
            assert isinstance(error, RDMAError), f"{length} bytes at {offset} of 4096 were written: {error!r}"
        assert self._read(buffer, 4096) == bytes(4096)

    def test_an_owner_that_does_not_answer(self) -> None:
        """A transfer ends by its deadline, unless it needs nothing of the owner; afterwards all is as before."""
        buffer = self.owner.offer("a", b"there")
        assert self._read(buffer, 5) == b"there"
        with self.owner.halted():
            error = _outcome(lambda: self._read(buffer, 5, timeout=0.3))
        if self._can().one_sided:
            assert error is None, (
                f"it is declared one_sided, and fails where the owner does nothing: {error!r}"
            )
        else:
            assert error is None or isinstance(error, RDMATimeout), f"expected RDMATimeout, got {error!r}"
        assert self._read(buffer, 5) == b"there"

    def test_an_owner_that_has_ended(self) -> None:
        """Its memory is gone, which is told at once; the next owner is reached."""
        for _ in range(2):
            owner = _Process()
            try:
                buffer = owner.offer("a", b"alive")
                assert self._read(buffer, 5) == b"alive"
                owner.process.kill()
                owner.process.wait()
                error = _outcome(lambda b=buffer: self._read(b, 5))  # type: ignore[misc]
                assert isinstance(error, BufferGone), f"expected BufferGone, got {error!r}"
            finally:
                owner.end()
