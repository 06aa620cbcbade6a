"""The conformance suite for tcp between hosts: two processes of a job that take each other for that.

`test_between_hosts.py` runs it, in a process of its own, as one that has joined a job stays its member. Run as a program it is
the suite's other process.
"""

import os
import signal
import sys
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from mesh_rdma import BufferGone, RDMABuffer
from mesh_rdma._here import engine
from mesh_rdma._native_transports import TCP
from mesh_rdma.testing import TransportConformance, _ends, _owner

ADDRESS, CREDENTIALS = os.environ["MESH_TEST_ADDRESS"], Path(os.environ["MESH_TEST_CREDENTIALS"])


def join():
    """What a process of a job of several hosts does by itself."""
    engine().join(CREDENTIALS, None, [ip_address(ADDRESS)], timedelta(seconds=10))


def from_elsewhere(buffer):
    """The same buffer, as if its owner was in another network: its loopback interface is out of reach then."""
    make, (handle,) = buffer.__reduce__()
    changed = bytearray(handle)
    network = changed.index(b"\x03tcp") + 4 + 2 + 2
    changed[network] ^= 0xFF
    return make(bytes(changed))


class Owner(_owner.Owner):
    """Offers what it offers to other hosts only."""

    def offer(self, name: str, data: bytes, step: int = 1, readonly: bool = False) -> RDMABuffer:
        return from_elsewhere(super().offer(name, data, step, readonly))

    def leave_a_copy(self) -> int:
        """Leave a copy behind that does nothing."""
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        return child


class TestTcp(TransportConformance):
    plugin = TCP
    distribution = "mesh-rdma"

    @classmethod
    def setup_class(cls) -> None:
        join()
        cls.patch = pytest.MonkeyPatch()
        cls.patch.setattr(_ends, "COMMAND", [sys.executable, __file__])

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.patch.undo()

    def test_a_forked_copy_keeps_nobody_waiting(self):
        """TCP-5: its parent's end is seen all the same, by who was connected and by who was not."""
        owner = _ends.Process()
        known, fresh = owner.offer("known", b"known"), owner.offer("fresh", b"fresh")
        assert self._read(known, 5) == b"known"
        copy = owner.leave_a_copy()
        try:
            assert self._read(known, 5) == b"known"
            owner.process.kill()
            owner.process.wait()
            for buffer in (known, fresh):
                with pytest.raises(BufferGone):
                    self._read(buffer, 5, timeout=60)
        finally:
            os.kill(copy, signal.SIGKILL)
            owner.end()


if __name__ == "__main__":
    join()
    _owner.Owner = Owner
    _owner.main()
