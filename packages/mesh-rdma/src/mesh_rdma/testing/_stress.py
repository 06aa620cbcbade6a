"""What holds for a transport that is used for long, by many, and for much."""

from __future__ import annotations

import random

from mesh_core.testing import expect_bytes
from mesh_rdma._errors import BufferGone
from mesh_rdma.testing._ends import Ends, in_threads
from mesh_rdma.testing._memory import look
from mesh_rdma.testing._owner import pattern

_GIB = 1 << 30


class TransportStress(Ends):
    """The part of the suite that takes longer: up to a GiB at once, eight processes, and ends at any moment.

    >>> from mesh_core.plugins import PluginManager
    >>> from mesh_rdma import TRANSPORTS
    >>> from mesh_rdma.testing import TransportStress
    >>> class TestStress(TransportStress):
    ...     plugin = PluginManager().get(TRANSPORTS, "shm")  # your descriptor
    ...     distribution = "mesh-rdma"
    """

    seed = 1
    """Of all that is random. Another one makes other sizes and moments."""

    def test_sizes_up_to_a_gibibyte(self) -> None:
        """One of a GiB, and random ones; a window of each is written."""
        chance = random.Random(self.seed)
        for size in (_GIB, *(int(2 ** chance.uniform(20, 28)) for _ in range(2))):
            data = bytearray(pattern(self.seed, size))
            buffer = self.owner.offer_pattern("a", self.seed, size)
            copy = bytearray(size)
            buffer.read_into(copy, timeout=None, transport=self.plugin.name).get(timeout=50)
            expect_bytes(copy, data, f"{size} bytes, seed {self.seed}")
            start = chance.randrange(size)
            length = chance.randint(0, size - start)
            data[start : start + length] = bytes(length)
            with memoryview(data)[start : start + length] as window:
                buffer.write_from(window, offset=start, timeout=None, transport=self.plugin.name).get(
                    timeout=50
                )
            buffer.read_into(copy, timeout=None, transport=self.plugin.name).get(timeout=50)
            expect_bytes(copy, data, f"{length} bytes were written to {start} of {size}, seed {self.seed}")
            self.owner.forget("a")

    def test_many_threads_of_many_processes(self) -> None:
        """Eight processes read at once, and 64 threads of this one beside them; each gets what it has asked for."""
        size = 1 << 20
        buffer = self.owner.offer_pattern("a", self.seed, size)
        data = pattern(self.seed, size)
        chances = [random.Random(self.seed + n) for n in range(64)]

        def read(n: int) -> str | None:
            for _ in range(10):
                start = chances[n].randrange(size)
                length = chances[n].randint(0, min(size - start, 1 << 16))
                if self._read(buffer, length, start) != data[start : start + length]:
                    return f"{length} bytes from {start} on are others"
            return None

        def compare() -> str | None:
            with self.another() as reader:
                said: str | None = reader.compare(buffer, self.seed, 100, self.plugin.name)
                return said

        wrong = in_threads(lambda n: compare() if n < 8 else read(n - 8), 72)
        assert not wrong, f"{len(wrong)} of 72 went wrong, first: {wrong[0]!r}"

    def test_owners_that_are_killed_at_any_moment(self) -> None:
        """Each transfer ends with what was offered or with BufferGone, though it has no deadline."""
        size = 32 << 20
        for turn in range(6):
            with self.another() as owner:
                buffer = owner.offer_pattern("a", turn, size)
                copies = [bytearray(size) for _ in range(3)]
                reads = [buffer.read_into(copy, timeout=None, transport=self.plugin.name) for copy in copies]
                # Later in each turn: after so many others.
                for _ in range(turn * 3):
                    self._read(self.owner.offer_pattern("b", 0, size // 16), size // 16)
                owner.kill()
                for copy, read in zip(copies, reads, strict=True):
                    error = read.exception(timeout=self.patience)
                    if error is None:
                        expect_bytes(
                            copy, pattern(turn, size), "a read that was reported as done has other bytes"
                        )
                    else:
                        assert isinstance(error, BufferGone), f"expected BufferGone, got {error!r}"

    def test_readers_that_are_killed_at_any_moment(self) -> None:
        """The owner has its memory back, each time, and what it makes of it stays."""
        size = 8 << 20
        for turn in range(6):
            (first, read), (second, written) = self._own(bytes(size)), self._own(bytes(size))
            buffers = [first, second]
            del first, second
            with self.another() as reader:
                reader.work(*buffers, self.plugin.name)
                for _ in range(turn):
                    self._read(self.owner.offer("b", b"b"), 1)
                reader.kill()
            for buffer in buffers:
                buffer.drop()
            del buffer, buffers
            for memory in (read, written):
                assert self._let_go(memory), f"memory is still held for a reader that has ended, turn {turn}"
            written[:] = bytes(size)
            assert self._read(self.owner.offer("b", b"b"), 1) == b"b"
            assert not any(look(written)[::4096]), "memory was written to after it was dropped"
