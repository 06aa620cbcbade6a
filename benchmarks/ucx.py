"""`RDMABuffer` by the transport ucx, beside the same calls made directly through libucp, in the same run.

    python benchmarks/ucx.py [sysv,posix cma,posix]

Wants the package libucx-cu12 (or MESH_RDMA_UCX_LIBRARY), and release builds of mesh-core and mesh-rdma. Each argument is a
value of UCX_TLS. Prints medians, and the median of the ratios of neighbours in time.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"256 MiB": (256 << 20, 1), "1 MiB": (1 << 20, 20), "4 KiB": (4096, 200)}
ROUNDS = int(os.environ.get("MESH_BENCH_ROUNDS", "11"))
LARGE = max(size for size, _ in SIZES.values())
IN_PROGRESS = 1
FEATURES = 1 << 1 | 1 << 4
"""One-sided operations, and a descriptor to sleep on."""
CARELESS = bool(os.environ.get("MESH_BENCH_CARELESS"))
"""Endpoints of the direct calls do without UCX's error handling, which we cannot."""
ON_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int8)


class Params(ctypes.Structure):
    """The beginning of a structure of UCX: a mask of fields, and as many words as it may have."""

    _fields_ = (("mask", ctypes.c_uint64), ("words", ctypes.c_uint64 * 64))


class Request(ctypes.Structure):
    """`ucp_request_param_t`, empty."""

    _fields_ = (("mask", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("words", ctypes.c_uint64 * 32))


class Direct:
    """A worker of libucp, and what is done with it, without anything in between."""

    def __init__(self, path: str) -> None:
        folder = Path(path).parent
        for name in ("libucs.so.0", "libucm.so.0", "libuct.so.0"):
            if (folder / name).exists():
                ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
        self.ucp = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        for name in ("get", "put"):
            call = getattr(self.ucp, f"ucp_{name}_nbx")
            call.restype = ctypes.c_void_p
            call.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_uint64,
                *[ctypes.c_void_p] * 2,
            ]
        self.ucp.ucp_ep_flush_nbx.restype = ctypes.c_void_p
        self.ucp.ucp_ep_flush_nbx.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        for name in ("worker_progress", "worker_arm", "request_check_status", "request_free"):
            getattr(self.ucp, f"ucp_{name}").argtypes = [ctypes.c_void_p]
        self.ucp.ucp_request_check_status.restype = ctypes.c_int8
        self.ucp.ucp_worker_arm.restype = ctypes.c_int8
        config, self.context, self.worker = (ctypes.c_void_p() for _ in range(3))
        self.check(self.ucp.ucp_config_read(None, None, ctypes.byref(config)))
        settings = (
            b"MM_ERROR_HANDLING",
            b"POSIX_ERROR_HANDLING",
            b"SYSV_ERROR_HANDLING",
            b"CMA_MEMORY_INVALIDATE",
        )
        for setting in settings:
            self.ucp.ucp_config_modify(config, setting, b"n" if CARELESS else b"y")
        params = Params(mask=1)
        params.words[0] = FEATURES
        self.check(self.ucp.ucp_init_version(1, 13, ctypes.byref(params), config, ctypes.byref(self.context)))
        params = Params(mask=1)
        self.check(self.ucp.ucp_worker_create(self.context, ctypes.byref(params), ctypes.byref(self.worker)))
        self.nothing = ctypes.byref(Request())

    @staticmethod
    def check(status: int) -> None:
        if status & 0xFF:
            raise OSError(f"UCX gave status {status}")

    def offer(self, address: int, length: int) -> tuple[bytes, bytes]:
        """Register memory; returns the worker's address and the key."""
        params, memory = Params(mask=3), ctypes.c_void_p()
        params.words[0], params.words[1] = address, length
        self.check(self.ucp.ucp_mem_map(self.context, ctypes.byref(params), ctypes.byref(memory)))
        found, size = ctypes.c_void_p(), ctypes.c_size_t()
        self.check(self.ucp.ucp_rkey_pack(self.context, memory, ctypes.byref(found), ctypes.byref(size)))
        key = ctypes.string_at(found, size.value)
        self.check(self.ucp.ucp_worker_get_address(self.worker, ctypes.byref(found), ctypes.byref(size)))
        return ctypes.string_at(found, size.value), key

    def serve(self) -> None:
        """Do what UCX wants done, until stdin ends."""
        descriptor = ctypes.c_int()
        self.check(self.ucp.ucp_worker_get_efd(self.worker, ctypes.byref(descriptor)))
        while True:
            while self.ucp.ucp_worker_progress(self.worker):
                pass
            if self.ucp.ucp_worker_arm(self.worker) == 0:
                ready, _, _ = select.select([descriptor.value, sys.stdin.fileno()], [], [])
                if sys.stdin.fileno() in ready:
                    return

    def reach(self, address: bytes, key: bytes) -> None:
        """Make ready for `get` and `put`."""
        self.endpoint, self.key = ctypes.c_void_p(), ctypes.c_void_p()
        self.address, self.on_error = ctypes.create_string_buffer(address), ON_ERROR(lambda *_: None)
        params = Params(mask=1 if CARELESS else 7)
        params.words[0], params.words[1] = ctypes.addressof(self.address), 1
        params.words[2] = ctypes.cast(self.on_error, ctypes.c_void_p).value or 0
        self.check(self.ucp.ucp_ep_create(self.worker, ctypes.byref(params), ctypes.byref(self.endpoint)))
        self.check(self.ucp.ucp_ep_rkey_unpack(self.endpoint, key, ctypes.byref(self.key)))

    def wait(self, request: int | None) -> None:
        if not request:
            return
        while (status := self.ucp.ucp_request_check_status(request)) == IN_PROGRESS:
            self.ucp.ucp_worker_progress(self.worker)
        self.ucp.ucp_request_free(request)
        self.check(status)

    def get(self, here: int, there: int, length: int) -> None:
        self.wait(self.ucp.ucp_get_nbx(self.endpoint, here, length, there, self.key, self.nothing))

    def put(self, here: int, there: int, length: int) -> None:
        self.wait(self.ucp.ucp_put_nbx(self.endpoint, here, length, there, self.key, self.nothing))
        self.wait(self.ucp.ucp_ep_flush_nbx(self.endpoint, self.nothing))


def seconds(work: Callable[[], object], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begun) / times


def place(memory: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


def owner(kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--owner", kind]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def told(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    return pickle.load(process.stdout)


def be_owner(kind: str) -> None:
    memory = bytearray(b"\1") * LARGE
    if kind == "direct":
        direct = Direct(libucp())
        at = place(memory)
        say((*direct.offer(at, LARGE), at))
        direct.serve()
    else:
        from mesh_rdma import RDMABuffer

        buffer = RDMABuffer(memory)
        say(buffer)
        sys.stdin.buffer.read()
        buffer.drop()


def say(what: object) -> None:
    sys.stdout.buffer.write(pickle.dumps(what))
    sys.stdout.buffer.flush()


def libucp() -> str:
    from mesh_rdma._ucx import places

    return (places() or [""])[0]


def figures() -> dict[str, dict[str, float]]:
    """Those of one value of UCX_TLS, which the environment has."""
    theirs, ours = owner("direct"), owner("mesh")
    direct = Direct(libucp())
    address, key, there = told(theirs)
    direct.reach(address, key)
    buffer = told(ours)
    memory = bytearray(LARGE)
    here = place(memory)
    view = memoryview(memory)
    found: dict[str, dict[str, float]] = {}
    for name, (size, times) in SIZES.items():
        part = view[:size]
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "read": (
                lambda p=part: buffer.read_into(p, transport="ucx").get(timeout=60),  # type: ignore[misc]
                lambda n=size: direct.get(here, there, n),  # type: ignore[misc]
            ),
            "write": (
                lambda p=part: buffer.write_from(p, transport="ucx").get(timeout=60),  # type: ignore[misc]
                lambda n=size: direct.put(here, there, n),  # type: ignore[misc]
            ),
        }
        for verb, (one, other) in pairs.items():
            one(), other()
            taken = [(seconds(one, times), seconds(other, times)) for _ in range(ROUNDS)]
            mine, its = (statistics.median(each) for each in zip(*taken, strict=True))
            ratio = statistics.median(b / a for a, b in taken)
            found[f"{verb} {name}"] = {"us": mine * 1e6, "direct_us": its * 1e6, "ratio": ratio}
    for process in (theirs, ours):
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    return found


def main(values: list[str]) -> None:
    for tls in values:
        environment = {**os.environ, "MESH_RDMA_UCX": "1", "UCX_TLS": tls}
        command = [sys.executable, __file__, "--figures"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        print(f"UCX_TLS={tls}")
        for name, each in json.loads(done.stdout).items():
            print(
                f"  {name:14} {each['us']:10.1f} us, directly {each['direct_us']:10.1f} us, ratio {each['ratio']:.3f}"
            )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--owner", kind]:
            be_owner(kind)
        case ["--figures"]:
            print(json.dumps(figures()))
        case values:
            main(values or ["sysv,posix", "cma,posix"])
