"""What holds when memory is dropped, owners and readers end, and callers give up."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mesh_core.testing import expect_bytes
from mesh_rdma._buffer import RDMABuffer
from mesh_rdma._errors import BufferGone, RDMAError, RDMATimeout
from mesh_rdma._pool import empty
from mesh_rdma.testing._ends import Ends, outcome
from mesh_rdma.testing._memory import HOST, look, make
from mesh_rdma.testing._owner import pattern

_LARGE = 16 << 20


class Lifetimes(Ends):
    """Part of the suite: whoever ends or gives up."""

    def test_dropped_memory_is_gone(self) -> None:
        """From ``drop()`` on nobody reads or writes it, also who has reached it before."""
        buffer = self.owner.offer("a", b"before")
        assert self._read(buffer, 6) == b"before"
        self.owner.drop("a")
        for work in (lambda: self._read(buffer, 6), lambda: self._write(buffer, b"after!")):
            error = outcome(work)
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

    def test_memory_that_is_freed_under_transfers(self) -> None:
        """A read brings what was offered, or an error, and never what came into its place."""
        size = 4 << 20
        for _ in range(2):
            buffer = self.owner.offer_pattern("a", 7, size)
            copies = [bytearray(size) for _ in range(4)]
            reads = [buffer.read_into(copy, timeout=30, transport=self.plugin.name) for copy in copies]
            self.owner.forget("a")
            self.owner.offer("noise", b"\xee" * size)
            for copy, read in zip(copies, reads, strict=True):
                error = read.exception(timeout=60)
                if error is None:
                    expect_bytes(copy, pattern(7, size), "a read that was reported as done has other bytes")
                else:
                    assert isinstance(error, BufferGone), f"expected BufferGone, got {error!r}"
                    assert copy.count(b"\xee" * 64) == 0, "memory of another was read"
            self.owner.forget("noise")

    def test_memory_whose_buffer_was_sent_and_not_kept(self) -> None:
        """It is offered for as long as it exists. It is freed after the transfers that are under way, and gone for the next."""
        size, pause, name = 4 << 20, threading.Event(), self.plugin.name
        for make_memory in self._kinds_of_memory():
            for turn in range(2):
                memory = make_memory(b"\x07" * size)
                there = pickle.loads(pickle.dumps(RDMABuffer(memory)))
                gc.collect()
                expect_bytes(self.owner.read(there, name), b"\x07" * size, "what was offered was not read")
                with ThreadPoolExecutor(1) as pool:
                    reading = pool.submit(self.owner.read, there, name)
                    pause.wait(0.004 * turn)
                    del memory
                    gc.collect()
                    # At once used for something else, if it were free.
                    noise = make_memory(b"\xee" * size)
                    error = reading.exception()
                if error is None:
                    expect_bytes(reading.result(), b"\x07" * size, "memory of another was read")
                else:
                    assert "BufferGone" in str(error), f"expected BufferGone, got {error!r}"
                del noise
                error = outcome(lambda: self.owner.read(there, name))  # noqa: B023 - called at once
                assert "BufferGone" in str(error), f"expected BufferGone, got {error!r}"

    def _kinds_of_memory(self) -> list[Callable[[bytes], Any]]:
        """What makes memory that a buffer can be of: such as tells of its end, and such as cannot."""
        kinds: list[Callable[[bytes], Any]] = [lambda data: make(self.memory_there, data)[:]]
        if self.memory_there == HOST:

            def block(data: bytes) -> memoryview:
                memory = empty(len(data))
                memory[:] = data
                return memory

            kinds.append(block)
            if importlib.util.find_spec("numpy") is not None:
                import numpy

                kinds.append(lambda data: numpy.frombuffer(data, numpy.uint8).copy())
        return kinds

    def test_an_owner_that_does_not_answer(self) -> None:
        """A transfer ends by its deadline, unless it needs nothing of the owner; afterwards all is as before."""
        buffer = self.owner.offer("a", b"there")
        assert self._read(buffer, 5) == b"there"
        one_sided = self._can().one_sided
        with self.owner.halted():
            error = outcome(lambda: self._read(buffer, 5, timeout=None if one_sided else 0.3))
        if one_sided:
            assert error is None, (
                f"it is declared one_sided, and fails where the owner does nothing: {error!r}"
            )
        else:
            assert error is None or isinstance(error, RDMATimeout), f"expected RDMATimeout, got {error!r}"
        assert self._read(buffer, 5) == b"there"

    def test_memory_of_a_transfer_that_is_late(self) -> None:
        """From the outcome on nobody touches the caller's memory, whatever comes from the owner later."""
        size = 1 << 20
        buffer = self.owner.offer_pattern("a", 8, size)
        self._reads(buffer, pattern(8, size))
        memory = bytearray(size)
        with self.owner.halted():
            read = buffer.read_into(memory, timeout=0.3, transport=self.plugin.name)
            error = read.exception(timeout=60)
            assert error is None or isinstance(error, RDMATimeout), f"expected RDMATimeout, got {error!r}"
            assert self._let_go(memory), "the memory of a transfer that is over is still referred to"
            memory[:] = b"\xaa" * size
        # Behind whatever was on its way.
        self._reads(buffer, pattern(8, size))
        expect_bytes(memory, b"\xaa" * size, "memory was written to after the deadline of its transfer")

    def test_memory_of_a_transfer_that_was_cancelled(self) -> None:
        """It is let go soon, also where the owner does nothing, and nobody touches it from then on."""
        for size in (5, 8 << 20):
            buffer = self.owner.offer_pattern("a", 9, size)
            self._reads(buffer, pattern(9, size))
            memory = bytearray(size)
            with self.owner.halted():
                buffer.read_into(memory, timeout=600, transport=self.plugin.name).cancel()
                assert self._let_go(memory), "a cancelled transfer goes on: ask `watch` ten times a second"
                memory[:] = b"\xaa" * size
            self._reads(buffer, pattern(9, size))
            expect_bytes(memory, b"\xaa" * size, "memory was written to after its transfer was cancelled")

    def test_an_owner_that_has_ended(self) -> None:
        """Its memory is gone, which is told at once; the next owner is reached."""
        for _ in range(2):
            with self.another() as owner:
                buffer = owner.offer("a", b"alive")
                assert self._read(buffer, 5) == b"alive"
                owner.kill()
                error = outcome(lambda b=buffer: self._read(b, 5))  # type: ignore[misc]
                assert isinstance(error, BufferGone), f"expected BufferGone, got {error!r}"

    def test_an_owner_that_is_killed_under_transfers(self) -> None:
        """Those who wait hear of it from its end, as nothing else would tell them: they have no deadline."""
        with self.another() as owner:
            large = owner.offer_pattern("large", 10, _LARGE)
            small = owner.offer("small", bytes(100))
            assert self._read(small, 100) == bytes(100)
            copies = [bytearray(_LARGE), bytearray(_LARGE), bytearray(100)]
            with owner.halted():
                reads = [
                    buffer.read_into(copy, timeout=None, transport=self.plugin.name)
                    for buffer, copy in zip((large, large, small), copies, strict=True)
                ]
                write = small.write_from(bytes(100), timeout=None, transport=self.plugin.name)
                owner.kill()
            for future in (*reads, write):
                error = future.exception(timeout=self.patience)
                assert error is None or isinstance(error, BufferGone), f"expected BufferGone, got {error!r}"
            for read, copy in zip(reads[:2], copies, strict=False):
                if read.exception(timeout=0) is None:
                    expect_bytes(
                        copy, pattern(10, _LARGE), "a read that was reported as done has other bytes"
                    )

    def test_a_reader_that_is_killed_under_transfers(self) -> None:
        """The owner drops the memory at once, has it back soon, and nobody writes to it from then on."""
        size = 4 << 20
        (first, read), (second, written) = self._own(bytes(size)), self._own(bytes(size))
        buffers = [first, second]
        del first, second
        with self.another() as reader:
            reader.work(*buffers, self.plugin.name)
            # Somewhere in the middle of one.
            with reader.halted():
                for buffer in buffers:
                    buffer.drop()
                reader.kill()
        del buffer, buffers
        for memory in (read, written):
            assert self._let_go(memory), "memory is still held for a reader that has ended"
        written[:] = b"\xaa" * size
        fresh, _ = self._own(b"fresh")
        assert self.owner.read(fresh, self.plugin.name) == b"fresh"
        expect_bytes(look(written), b"\xaa" * size, "memory was written to after it was dropped")

    def test_another_program_of_the_same_number(self) -> None:
        """Handles of a process that has become another program reach nothing in that, though it is at the same place."""
        with self.another() as owner:
            reached, fresh = owner.offer("a", b"before"), owner.offer("b", b"before")
            assert self._read(reached, 6) == b"before"
            owner.replace()
            owner.offer("a", b"other!"), owner.offer("b", b"other!")
            for buffer in (reached, fresh):
                for work in (
                    lambda b=buffer: self._read(b, 6),
                    lambda b=buffer: self._write(b, b"wrong!"),
                ):
                    error = outcome(work)
                    assert isinstance(error, RDMAError), f"another program's memory was reached: {error!r}"
            assert (owner.look("a"), owner.look("b")) == (b"other!", b"other!")

    def test_a_fork(self) -> None:
        """A forked child uses nothing of its parent's, is told so, and hurts nobody. CUD-3: it calls nothing of CUDA."""
        mine, (theirs, _) = self.owner.offer("mine", b"mine"), self._own(b"theirs")
        assert self.owner.read(theirs, self.plugin.name) == b"theirs"
        status, said = self.owner.fork("mine", theirs, self.plugin.name)
        assert status == 0, f"the forked child ended with {status}"
        assert all("fork" in each for each in said), f"a forked child must be refused, and was told: {said}"
        assert self._read(mine, 4) == b"mine"
        assert self.owner.read(theirs, self.plugin.name) == b"theirs"
