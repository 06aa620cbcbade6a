"""Figures of mesh-rdma, each beside what the machine itself takes for the same bytes, in the same run.

    python benchmarks/transfers.py [RAWTLS]

Wants numpy, and release builds of mesh-core and mesh-rdma. Prints medians, and ratios of neighbours in time. RAWTLS is the program
that cargo builds from `rawtls/`: one rustls stream, to which transfers between hosts are compared.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import numpy as np

from mesh_core import Credentials
from mesh_rdma import RDMAAction, RDMABuffer
from mesh_rdma._here import engine

LARGE = 256 << 20
SMALL = 4096
MANY = 40_000
"""So many buffers, of a GiB together."""
EACH = (1 << 30) // MANY // 8 * 8
ROUNDS = 9
IOV_MAX = 1024
"""Pieces that the kernel takes in one call."""

OWNER = """
import pickle, socket, sys
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
import numpy as np
from mesh_rdma import RDMABuffer, empty
from mesh_rdma._here import engine
if sys.argv[2]:
    engine().join(Path(sys.argv[1]), None, [ip_address(sys.argv[2])], timedelta(seconds=10))
def mapped(size):
    memory = np.frombuffer(empty(size), np.uint8)
    memory[:] = 1
    return memory
memory = np.ones({small} + {large}, np.uint8)
large, small = memory[{small}:], memory[:{small}]
huge = np.ones({each} * {many}, np.uint8)
plain = bytearray(huge)
many = [np.ones({each}, np.uint8) for _ in range({many})]
ours = [mapped({each}) for _ in range({many})]
offered = (RDMABuffer(large), RDMABuffer(small), [RDMABuffer(each) for each in many], RDMABuffer(plain), RDMABuffer(huge))
pooled = (RDMABuffer(mapped({large})), [RDMABuffer(each) for each in ours])
listener = socket.create_server(("127.0.0.1", 0))
places = (memory.ctypes.data, [each.ctypes.data for each in many])
handles = pickle.dumps((offered, listener.getsockname()[1], places, pooled))
sys.stdout.buffer.write(len(handles).to_bytes(8, "little") + handles)
sys.stdout.buffer.flush()
stream, _ = listener.accept()
while stream.recv(1):
    stream.sendall(large)
"""


def own_address() -> str:
    """This machine's address on the way to others; none where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return ""
        return str(asked.getsockname()[0])


def from_elsewhere(buffer: RDMABuffer) -> RDMABuffer:
    """The same buffer, as if its owner was in another network: its loopback interface is out of reach then."""
    make, (handle,) = buffer.__reduce__()
    changed = bytearray(handle)
    network = changed.index(b"\x03tcp") + 4 + 2 + 2
    changed[network] ^= 0xFF
    made: RDMABuffer = make(bytes(changed))
    return made


class Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def seconds(work: Callable[[], object], times: int = 1) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begun) / times


def beside(ours: Callable[[], object], theirs: Callable[[], object], times: int = 1) -> tuple[float, float]:
    """Medians of both, measured in turns, so that a busy machine is busy for both."""
    ours()
    theirs()
    pairs = [(seconds(ours, times), seconds(theirs, times)) for _ in range(ROUNDS)]
    return statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs)


class Figures:
    """What is measured with one owner, by name."""

    def __init__(self, owner: subprocess.Popen[bytes]) -> None:
        assert owner.stdout is not None
        (length,) = struct.unpack("<Q", owner.stdout.read(8))
        handles = pickle.loads(owner.stdout.read(length))
        self.offered: tuple[RDMABuffer, RDMABuffer, list[RDMABuffer], RDMABuffer, RDMABuffer] = handles[0]
        self.port: int = handles[1]
        self.address: int = handles[2][0]
        self.addresses: list[int] = handles[2][1]
        self.pooled: tuple[RDMABuffer, list[RDMABuffer]] = handles[3]
        self.owner = owner
        self.report: dict[str, float] = {}
        self.target, self.source = np.zeros(LARGE, np.uint8), np.ones(LARGE, np.uint8)

    def note(self, name: str, ours: float, theirs: float) -> None:
        self.report[f"{name}: GB/s"] = LARGE / ours / 1e9
        self.report[f"{name}: raw GB/s"] = LARGE / theirs / 1e9
        self.report[f"{name}: ratio"] = theirs / ours

    def system_call(self, into: int, at: int, size: int) -> Callable[[], object]:
        """The raw call, as Python reaches it."""
        library = ctypes.CDLL(None, use_errno=True)
        here, there = ctypes.byref(Piece(into, size)), ctypes.byref(Piece(at, size))
        return lambda: library.process_vm_readv(self.owner.pid, here, 1, there, 1, 0)

    def large(self) -> None:
        buffer, target, source = self.offered[0], self.target, self.source

        def read() -> None:
            buffer.read_into(target, transport="shm").get(timeout=60)

        def read_tcp() -> None:
            buffer.read_into(target, transport="tcp").get(timeout=60)

        def write() -> None:
            buffer.write_from(source, transport="shm").get(timeout=60)

        def copy() -> None:
            np.copyto(target, source)

        # The owner ends with it.
        stream = self.stream = socket.create_connection(("127.0.0.1", self.port))
        view = memoryview(target.data)

        def raw() -> None:
            stream.sendall(b"x")
            stream.recv_into(view, LARGE, socket.MSG_WAITALL)

        self.note("shm read 256 MiB, beside np.copyto", *beside(read, copy))
        self.note("shm write 256 MiB, beside np.copyto", *beside(write, copy))
        pooled = self.pooled[0]
        self.note(
            "shm read 256 MiB of empty(), beside np.copyto",
            *beside(lambda: pooled.read_into(target, transport="shm").get(timeout=60), copy),
        )
        call = self.system_call(target.ctypes.data, self.address + SMALL, LARGE)
        self.note("shm read 256 MiB, beside one process_vm_readv", *beside(read, call))
        self.note("tcp read 256 MiB, beside one raw stream", *beside(read_tcp, raw))

    def encrypted(self, rawtls: str | None) -> None:
        """As between hosts, and beside the same without TLS; both over this machine's own address."""
        plain, sealed = self.offered[0], from_elsewhere(self.offered[0])
        target, source = self.target, self.source

        def read(buffer: RDMABuffer) -> Callable[[], object]:
            return lambda: buffer.read_into(target, transport="tcp").get(timeout=60)

        def write(buffer: RDMABuffer) -> Callable[[], object]:
            return lambda: buffer.write_from(source, transport="tcp").get(timeout=60)

        self.note("tcp with TLS read 256 MiB, beside without", *beside(read(sealed), read(plain)))
        self.note("tcp with TLS write 256 MiB, beside without", *beside(write(sealed), write(plain)))
        if rawtls is not None:
            one: list[float] = []
            for _ in range(ROUNDS):
                done = subprocess.run(
                    [rawtls, "16", str(LARGE), "1"], capture_output=True, text=True, check=True
                )
                one.append(float(done.stdout))
            ours = statistics.median(seconds(read(sealed)) for _ in range(ROUNDS))
            self.note("tcp with TLS read 256 MiB, beside one rustls stream", ours, statistics.median(one))
        small, copy = from_elsewhere(self.offered[1]), np.zeros(SMALL, np.uint8)
        taken = seconds(lambda: small.read_into(copy, transport="tcp").get(timeout=60), 1000)
        self.report["tcp with TLS read 4 KiB: us"] = taken * 1e6

    def small(self) -> None:
        buffer = self.offered[1]
        copy = np.zeros(SMALL, np.uint8)
        call = self.system_call(copy.ctypes.data, self.address, SMALL)
        ours, theirs = beside(lambda: buffer.read_into(copy).get(), call, 2000)
        self.report["shm read 4 KiB: us"] = ours * 1e6
        self.report["process_vm_readv of 4 KiB through ctypes: us"] = theirs * 1e6
        nothing = self.system_call(copy.ctypes.data, self.address, 0)
        self.report["of that, ctypes and a call for nothing: us"] = seconds(nothing, 2000) * 1e6
        tcp = seconds(lambda: buffer.read_into(copy, transport="tcp").get(timeout=60), 1000)
        self.report["tcp read 4 KiB: us"] = tcp * 1e6
        self.report["fetch_add: us"] = seconds(lambda: buffer.fetch_add(1).get(timeout=60), 1000) * 1e6

    def raw_pieces(self, copies: list[np.ndarray]) -> Callable[[], None]:
        """The raw call with the pieces of all copies, as many in each as it takes."""
        library = ctypes.CDLL(None, use_errno=True)
        here = (Piece * len(copies))(*(Piece(each.ctypes.data, each.nbytes) for each in copies))
        there = (Piece * len(copies))(
            *(Piece(at, each.nbytes) for at, each in zip(self.addresses, copies, strict=True))
        )

        def call() -> None:
            for at in range(0, len(copies), IOV_MAX):
                count, skip = min(IOV_MAX, len(copies) - at), at * ctypes.sizeof(Piece)
                mine, theirs = ctypes.byref(here, skip), ctypes.byref(there, skip)
                library.process_vm_readv(self.owner.pid, mine, count, theirs, count, 0)

        return call

    def many(self) -> None:
        _, _, buffers, plain, huge = self.offered
        copies = [np.zeros(buffer.size(), np.uint8) for buffer in buffers]
        # Small arrays are on pages of 4 KiB, as a bytearray is; of a large array numpy asks the kernel for pages of 2 MiB.
        whole, wide = bytearray(plain.size()), np.zeros(huge.size(), np.uint8)
        action, pooled = RDMAAction(), RDMAAction()
        for copy, buffer, mapped in zip(copies, buffers, self.pooled[1], strict=True):
            action.read_remote(copy, buffer)
            pooled.read_remote(copy, mapped)

        def batch(action: RDMAAction, name: str) -> Callable[[], object]:
            return lambda: action.submit(transport=name).get(timeout=60)

        def one(name: str) -> Callable[[], object]:
            return lambda: plain.read_into(whole, transport=name).get(timeout=60)

        def one_wide() -> None:
            huge.read_into(wide, transport="shm").get(timeout=60)

        ours, raw = "40,000 buffers in one action", "the raw calls with the same pieces"
        rows: tuple[tuple[str, Callable[[], object], Callable[[], object]], ...] = (
            (f"shm: {ours}, times {raw}", batch(action, "shm"), self.raw_pieces(copies)),
            (f"shm: {ours}, times one read of the same bytes", batch(action, "shm"), one("shm")),
            (f"shm: {raw}, times one read of the same bytes", self.raw_pieces(copies), one("shm")),
            (f"shm: {ours}, times one read from and to pages of 2 MiB", batch(action, "shm"), one_wide),
            (f"shm: {ours} of empty(), times one read of the same bytes", batch(pooled, "shm"), one("shm")),
            (f"tcp: {ours}, times one read of the same bytes", batch(action, "tcp"), one("tcp")),
        )
        for words, work, other in rows:
            taken, beside_it = beside(work, other)
            self.report[words] = taken / beside_it


def main() -> None:
    code = OWNER.format(large=LARGE, small=SMALL, many=MANY, each=EACH)
    address = own_address()
    with tempfile.TemporaryDirectory() as folder:
        job = str(Credentials.new(Path(folder) / "job").path)
        owner = subprocess.Popen([sys.executable, "-c", code, job, address], stdout=subprocess.PIPE)
        try:
            figures = Figures(owner)
            figures.large()
            if address:
                engine().join(Path(job), None, [ip_address(address)], timedelta(seconds=10))
                figures.encrypted(sys.argv[1] if len(sys.argv) > 1 else None)
            figures.small()
            figures.many()
            print(json.dumps(figures.report, indent=2))
        finally:
            owner.kill()
            owner.wait()


if __name__ == "__main__":
    main()
