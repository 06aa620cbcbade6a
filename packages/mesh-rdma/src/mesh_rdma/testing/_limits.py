"""What holds where the system has no more to give."""

from __future__ import annotations

from pathlib import Path

from mesh_rdma._buffer import RDMABuffer
from mesh_rdma._explain import explain
from mesh_rdma.testing._ends import Ends
from mesh_rdma.testing._owner import pattern

_DESCRIPTORS = Path("/proc/self/fd")


class Limits(Ends):
    """Part of the suite: what runs out is told, and is no end."""

    def test_descriptors_do_not_pile_up(self) -> None:
        """Neither transfers nor buffers that come and go keep any."""
        buffer = self.owner.offer("a", b"x")
        for _ in range(20):
            self._read(buffer, 1)
        before = len(list(_DESCRIPTORS.iterdir()))
        for _ in range(50):
            self._read(buffer, 1)
            RDMABuffer(bytearray(1)).drop()
        after = len(list(_DESCRIPTORS.iterdir()))
        assert after <= before + 5, f"50 transfers have left {after - before} open descriptors"

    def test_a_reader_without_descriptors(self) -> None:
        """It is told what is missing and what to do; once there are some it goes on."""
        mine, _ = self._own(b"mine")
        with self.another() as reader:
            # All is imported by that. This process was not reached yet.
            assert reader.read(reader.offer("own", b"own"), self.plugin.name) == b"own"
            reader.take_descriptors()
            error, found = reader.attempt("read", mine, self.plugin.name, 5)
            reader.give_descriptors()
            if error is None:
                assert found == b"mine"
            else:
                words = ("open files", "descriptor", "RLIMIT_NOFILE", "Too many open files")
                assert any(word in error for word in words), f"the error must say what is missing: {error}"
                assert "ulimit" in error, f"the error must say what to do: {error}"
            assert reader.read(mine, self.plugin.name) == b"mine"

    def test_an_owner_without_descriptors(self) -> None:
        """Whatever becomes of transfers meanwhile, it serves once there are some, and others were served all the time."""
        with self.another() as owner:
            buffer = owner.offer("a", b"offered before")
            owner.take_descriptors()
            # Answered, refused or late: but it comes to an end, and the owner lives.
            read = buffer.read_into(bytearray(14), timeout=2, transport=self.plugin.name)
            read.exception(timeout=60)
            # It may fail, and the owner lives.
            owner.attempt("offer", "b", b"offered meanwhile")
            assert self._read(self.owner.offer("a", b"other"), 5) == b"other"
            owner.give_descriptors()
            assert self._read(buffer, 14) == b"offered before"
            assert self._read(owner.offer("c", b"offered after"), 13) == b"offered after"

    def test_an_owner_that_may_lock_no_memory(self) -> None:
        """A transport that locks memory does not offer it, and says why; one that does not, does not mind."""
        size = 1 << 20
        with self.another() as owner:
            before = owner.limit("MEMLOCK", 0)
            error, buffer = owner.attempt("offer_pattern", "a", 14, size)
            if error is None:
                chosen = explain(buffer, transport=self.plugin.name)
                if chosen.candidates:
                    self._reads(buffer, pattern(14, size))
            owner.limit("MEMLOCK", before)
            self._reads(owner.offer_pattern("b", 15, size), pattern(15, size))
