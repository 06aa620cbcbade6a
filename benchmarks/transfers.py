"""Figures of mesh-rdma, each beside what the machine itself takes for the same bytes, in the same run.

    python benchmarks/transfers.py

Wants numpy, and release builds of mesh-core and mesh-rdma. Prints medians, and ratios of neighbours in time.
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
import time
from collections.abc import Callable

import numpy as np
from mesh_rdma import RDMAAction, RDMABuffer

LARGE = 256 << 20
SMALL = 4096
MANY = 40_000
ROUNDS = 9

OWNER = """
import pickle, socket, sys
import numpy as np
from mesh_rdma import RDMABuffer
large, small = np.ones({large}, np.uint8), np.ones({small}, np.uint8)
many = [np.ones({each}, np.uint8) for _ in range({many})]
offered = (RDMABuffer(large), RDMABuffer(small), [RDMABuffer(each) for each in many])
listener = socket.create_server(("127.0.0.1", 0))
handles = pickle.dumps((offered, listener.getsockname()[1], small.ctypes.data))
sys.stdout.buffer.write(len(handles).to_bytes(8, "little") + handles)
sys.stdout.buffer.flush()
stream, _ = listener.accept()
while stream.recv(1):
    stream.sendall(large)
"""


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
    pairs = []
    ours()
    theirs()
    for _ in range(ROUNDS):
        pairs.append((seconds(ours, times), seconds(theirs, times)))
    return statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs)


def main() -> None:
    code = OWNER.format(large=LARGE, small=SMALL, many=MANY, each=LARGE // MANY // 8 * 8)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    (length,) = struct.unpack("<Q", owner.stdout.read(8))
    handles: tuple[tuple[RDMABuffer, RDMABuffer, list[RDMABuffer]], int, int]
    handles = pickle.loads(owner.stdout.read(length))
    (large, small, many), port, address = handles
    report: dict[str, float] = {}
    target, source = np.zeros(LARGE, np.uint8), np.ones(LARGE, np.uint8)

    def read(buffer: RDMABuffer, into: object, transport: str) -> Callable[[], object]:
        return lambda: buffer.read_into(into, transport=transport).get(timeout=60)

    def note(name: str, ours: float, theirs: float, size: int) -> None:
        report[f"{name}: GB/s"] = size / ours / 1e9
        report[f"{name}: raw GB/s"] = size / theirs / 1e9
        report[f"{name}: ratio"] = theirs / ours

    def write() -> None:
        large.write_from(source, transport="shm").get(timeout=60)

    note(
        "shm read 256 MiB, beside np.copyto",
        *beside(read(large, target, "shm"), lambda: np.copyto(target, source)),
        LARGE,
    )
    note("shm write 256 MiB, beside np.copyto", *beside(write, lambda: np.copyto(target, source)), LARGE)

    stream = socket.create_connection(("127.0.0.1", port))

    def raw() -> None:
        stream.sendall(b"x")
        stream.recv_into(target, LARGE, socket.MSG_WAITALL)

    note("tcp read 256 MiB, beside one raw stream", *beside(read(large, target, "tcp"), raw), LARGE)

    library = ctypes.CDLL(None, use_errno=True)
    copy = np.zeros(SMALL, np.uint8)
    here = ctypes.byref(Piece(copy.ctypes.data, SMALL))
    there = ctypes.byref(Piece(address, SMALL))
    nothing = (ctypes.byref(Piece(copy.ctypes.data, 0)), ctypes.byref(Piece(address, 0)))

    def system_call() -> None:
        library.process_vm_readv(owner.pid, here, 1, there, 1, 0)

    def empty_call() -> None:
        library.process_vm_readv(owner.pid, nothing[0], 0, nothing[1], 0, 0)

    ours, theirs = beside(read(small, copy, "shm"), system_call, 2000)
    ours_unforced, empty = beside(lambda: small.read_into(copy).get(), empty_call, 2000)
    report["shm read 4 KiB: us"] = ours_unforced * 1e6
    report["shm read 4 KiB by process_vm_readv through ctypes: us"] = theirs * 1e6
    report["of that, ctypes and an empty call: us"] = empty * 1e6
    report["shm read 4 KiB beyond process_vm_readv through ctypes: us"] = (ours_unforced - theirs) * 1e6
    report["tcp read 4 KiB: us"] = seconds(read(small, copy, "tcp"), 1000) * 1e6
    report["fetch_add: us"] = seconds(lambda: small.fetch_add(1).get(timeout=60), 1000) * 1e6

    copies = [np.zeros(buffer.size(), np.uint8) for buffer in many]
    action = RDMAAction()
    for copy_of_it, buffer in zip(copies, many, strict=True):
        action.read_remote(copy_of_it, buffer)
    whole = sum(buffer.size() for buffer in many)
    piece = target[:whole]
    for transport in ("shm", "tcp"):
        ours, theirs = beside(
            lambda name=transport: action.submit(transport=name).get(timeout=60),  # type: ignore[misc]
            lambda name=transport: large[:whole].read_into(piece, transport=name).get(timeout=60),  # type: ignore[misc]
        )
        report[f"{transport} 40,000 buffers in one action, times one read of the same bytes"] = ours / theirs
    stream.close()
    owner.kill()
    owner.wait()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
