"""pyverbs, as far as this uses it: imported when it is first needed, and told apart from what only looks like it."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

PACKAGES = "apt-get install python3-pyverbs ibverbs-providers, for the system's own Python; see the page on RDMA devices"


S = TypeVar("S", bound=socket.socket)
_PLACES = 1024
"""How many addresses of a device are looked at. The kernel takes no request for more than 2,047."""


class Absent(Exception):
    """It cannot be used here."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Library:
    """Its modules."""

    addr: Any
    cq: Any
    device: Any
    enums: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any

    @classmethod
    def load(cls) -> Library:
        """Import them, or raise `Absent`."""
        try:
            return cls(
                **{name: importlib.import_module(f"pyverbs.{name}") for name in cls.__dataclass_fields__}
            )
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.partition(".")[0] == "pyverbs":
                raise Absent("pyverbs is not installed for this Python", PACKAGES) from None
            raise Absent(f"pyverbs cannot be imported: {error}", PACKAGES) from None
        except ImportError as error:
            remedy = "install the pyverbs that belongs to the system's rdma-core: python3-pyverbs of the same version"
            raise Absent(f"pyverbs does not fit the system's libraries: {error}", remedy) from None

    def names(self) -> list[str]:
        """Return the names of the devices, or raise `Absent`."""
        try:
            found = [each.name for each in self.device.get_device_list()]
        except Exception as error:  # noqa: BLE001 - of the library, which raises kinds of its own
            remedy = "load the kernel's modules ib_uverbs and that of the device, such as mlx5_ib or rdma_rxe"
            raise Absent(f"this machine's kernel has no InfiniBand ({error})", remedy) from None
        if not found:
            remedy = "load the device's module (mlx5_ib), or make a software device: rdma link add rxe0 type rxe netdev eth0"
            raise Absent("this machine has no RDMA device", remedy)
        return [name.decode() if isinstance(name, bytes) else str(name) for name in found]

    def gids(self, device: str, port: int) -> list[tuple[int, bytes]]:
        """Return the addresses of RoCE v2 that a port has, with their places in its table."""
        context = self.device.Context(name=device)
        try:
            # One call: to read the table from sysfs takes three for each of a thousand places that are not in use.
            entries = context.query_gid_table(_PLACES)
        finally:
            context.close()
        return [
            (each.gid_index, bytes.fromhex(each.gid_str().replace(":", "")))
            for each in entries
            if each.port_num == port and each.gid_type == self.enums.IBV_GID_TYPE_ROCE_V2
        ]


class Guard:
    """Parts a forked copy of this process from what belongs to this process.

    The library's objects end what they stand for when they are garbage, and a fork's copies of them stand for the same. Nor may the
    fork keep the devices and connections open: their end tells others that this process has ended.
    """

    def __init__(self) -> None:
        self._alive: set[Any] = set()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        # Never garbage, neither in a fork nor at the interpreter's end, when the kernel does it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._alive))
        os.register_at_fork(after_in_child=self._part)

    def _part(self) -> None:
        for made in self._alive:
            descriptor = getattr(made, "cmd_fd", None)
            if descriptor is not None:
                os.close(descriptor)
        for each in self._sockets:
            each.close()

    def own(self, made: S) -> S:
        """Have the socket closed in forked copies of this process."""
        self._sockets.add(made)
        return made

    def keep(self, made: Any) -> Any:
        """Have the object of the library closed by `close` alone."""
        with self._lock:
            self._alive.add(made)
        return made

    def close(self, made: Any) -> None:
        """End what it stands for. In a forked copy, nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if made not in self._alive:
                return
            self._alive.discard(made)
        made.close()


class _View(ctypes.Structure):
    """`Py_buffer`, which is part of the stable interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(memory: memoryview) -> int:
    """Return where contiguous memory is; also read-only memory, of which ctypes makes no array."""
    view = _View()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
    try:
        return view.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
