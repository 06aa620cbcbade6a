"""What holds for every transport."""

from __future__ import annotations

import random

from mesh_core.testing import expect_bytes
from mesh_rdma._action import RDMAAction
from mesh_rdma._contract import TRANSPORTS, NativeTransport, Transport
from mesh_rdma._explain import explain
from mesh_rdma.testing._ends import in_threads
from mesh_rdma.testing._hostile import Hostile
from mesh_rdma.testing._lifetimes import Lifetimes
from mesh_rdma.testing._limits import Limits
from mesh_rdma.testing._owner import pattern


class TransportConformance(Lifetimes, Hostile, Limits):
    """What holds for a transport: what holds for every plugin, and what buffers promise whichever transport is used.

    The plugin must be installed where the suite runs, and its probe must say yes there: the suite starts processes that offer
    memory, and reads and writes that from its own. It asks more of a transport that declares more, and nothing else of it.
    It takes some seconds; :class:`TransportStress` has what takes longer.
    """

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
            self._reads(buffer, data)
            start = chance.randint(0, size)
            length = chance.randint(0, size - start)
            part = self._read(buffer, length, start)
            expect_bytes(part, data[start : start + length], f"{length} bytes from {start} on, of {size}")

    def test_writes_what_it_is_given_and_nothing_else(self) -> None:
        """When it is done, the bytes are there; those around them are as they were."""
        chance = random.Random(2)
        for size in (0, 1, 9, 4096, 70_001, 5 << 20):
            data = chance.randbytes(size)
            buffer = self.owner.offer("a", bytes(size + 20))
            self._write(buffer, data, 7)
            expect_bytes(self.owner.look("a"), bytes(7) + data + bytes(13), f"{size} bytes were written at 7")

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

    def test_random_sizes_offsets_and_alignments(self) -> None:
        """Wherever it begins, at both ends: what is asked for is copied, and nothing beside it."""
        chance, size = random.Random(5), 3 << 20
        there = bytearray(pattern(5, size))
        buffer = self.owner.offer("a", bytes(there))
        for turn in range(60):
            length = min(int(2 ** chance.uniform(0, 21)), size)
            start = chance.randint(0, size - length)
            shift = chance.randrange(64)
            said = f"turn {turn}: {length} bytes at {start}, {shift} from the beginning of the memory here"
            here = bytearray(b"\x55" * (shift + length + 64))
            window = memoryview(here)[shift : shift + length]
            if turn % 2:
                window[:] = chance.randbytes(length)
                self._write(buffer, window, start)
                there[start : start + length] = window
            else:
                buffer.read_into(window, offset=start, timeout=30, transport=self.plugin.name).get(timeout=60)
                expect_bytes(window, there[start : start + length], said)
            around = here[:shift] + here[shift + length :]
            expect_bytes(around, b"\x55" * len(around), f"{said}: bytes beside it were changed")
        expect_bytes(self.owner.look("a"), there, "after all writes")

    def test_what_is_done_comes_before_what_is_asked_for_then(self) -> None:
        """Who has seen a write done sees it in all that they read from then on, by any transport, as does the owner."""
        size = 200_000
        buffer = self.owner.offer("a", bytes(size))
        for turn in range(1, 30):
            data = bytes([turn]) * size
            self._write(buffer, data)
            if turn % 3 == 0:
                expect_bytes(self.owner.look("a"), data, "a write was reported as done before it was")
            copy = bytearray(size)
            name = None if turn % 2 else self.plugin.name
            buffer.read_into(copy, timeout=30, transport=name).get(timeout=60)
            expect_bytes(copy, data, "a read has not seen the write that was done before")

    def test_many_threads(self) -> None:
        """64 at once, more than there are places for: each gets what it has asked for."""
        data = pattern(4, 1 << 16)
        buffer = self.owner.offer("a", data)
        chances = [random.Random(seed) for seed in range(64)]

        def work(n: int) -> str | None:
            for _ in range(8):
                start = chances[n].randrange(len(data))
                length = chances[n].randint(0, len(data) - start)
                if self._read(buffer, length, start) != data[start : start + length]:
                    return f"{length} bytes from {start} on are others"
            return None

        wrong = in_threads(work, 64)
        assert not wrong, f"{len(wrong)} of 64 threads went wrong, first: {wrong[0]!r}"
