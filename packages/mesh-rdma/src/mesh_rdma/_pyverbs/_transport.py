"""The transport: what this process offers, and how it reaches others."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from mesh_core.plugins import ProbeResult
from mesh_rdma._contract import Exported, Transport, TransportCapabilities, TransportPlugin, Watch
from mesh_rdma._errors import InvalidTransfer, TransportUnavailable
from mesh_rdma._pyverbs._devices import Device, address, ports
from mesh_rdma._pyverbs._door import Door
from mesh_rdma._pyverbs._library import Absent, Guard, Library, address_of
from mesh_rdma._pyverbs._peer import VerbsPeer
from mesh_rdma._pyverbs._wire import Section

CAPABILITIES = TransportCapabilities(copies=True, atomics=False, remote=True, one_sided=True, pieces=False)


@dataclass
class _Offered:
    """An export, with its registration at each device."""

    export: Exported
    registered: list[tuple[Device, Any]]


class PyverbsTransport(Transport):
    """All devices are opened by the first buffer that is offered or reached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: list[Device] | None = None
        self._door: Door | None = None
        self._offered: dict[int, _Offered] = {}
        self._kept: list[_Offered] = []

    def _devices(self) -> list[Device]:
        with self._lock:
            if self._opened is None:
                library, guard = Library.load(), Guard()
                self._opened = [Device(library, guard, port) for port in ports(library)]
            if not self._opened:
                raise TransportUnavailable("no RDMA device of this machine has a port that works")
            return self._opened

    def _door_of(self, devices: list[Device], realm: bytes) -> Door:
        with self._lock:
            if self._door is None:
                self._door = Door(devices, address(devices[0].port), realm, self._token_of)
            return self._door

    def _token_of(self, key: int) -> bytes | None:
        found = self._offered.get(key)
        return None if found is None else found.export.token

    def offer(self, export: Exported) -> bytes:
        """See `Transport`."""
        if len(export.memory) > 1:
            raise InvalidTransfer("memory in several pieces is not offered by the transport ibverbs")
        devices = self._devices()
        door = self._door_of(devices, export.realm)
        at = address_of(export.memory[0]) if export.nbytes else 0
        offered = _Offered(export, [])
        try:
            for device in devices if export.nbytes else []:
                made = device.offer(at, export.nbytes, export.writable)
                offered.registered.append((device, made))
        except BaseException:
            self._withdraw(offered)
            raise
        # Of nothing there is nothing to register.
        rkeys = [made.rkey for _, made in offered.registered] or [0] * len(devices)
        rails = tuple(device.rail(rkey) for device, rkey in zip(devices, rkeys, strict=True))
        self._offered[export.key] = offered
        slot, generation = export.key & 0xFFFF_FFFF, export.key >> 32
        section = Section(
            export.writable, 0, door.port, door.address, door.key, at, export.nbytes, slot, generation, rails
        )
        return section.encode()

    def withdraw(self, export: Exported) -> None:
        """See `Transport`. Peers that come too late are refused by the device."""
        offered = self._offered.pop(export.key, None)
        if offered is not None:
            self._withdraw(offered)

    def _withdraw(self, offered: _Offered) -> None:
        try:
            for device, made in offered.registered:
                device.close(made)
        except Exception:
            # The device may still write there: the memory is never let go.
            self._kept.append(offered)
            raise

    def reach(self, section: bytes, owner: str, watch: Watch) -> VerbsPeer:
        """See `Transport`. Nothing is connected yet."""
        Section.decode(section)
        return VerbsPeer(self._devices(), owner)


def probe() -> ProbeResult[TransportCapabilities]:
    """Whether there is a device, and the library for it."""
    try:
        library = Library.load()
        names = library.names()
        if ports(library):
            return ProbeResult.yes(CAPABILITIES)
    except Absent as absent:
        return ProbeResult.no(str(absent), remedy=absent.remedy)
    except Exception as error:  # noqa: BLE001 - a probe never raises
        return ProbeResult.no(
            f"RDMA devices cannot be used ({error})", remedy="see whether ibv_devinfo can use them"
        )
    return ProbeResult.no(
        f"no port of {', '.join(names)} is active with an address",
        remedy="bring the port up; for RoCE, give its network interface an IP address",
    )


IBVERBS = TransportPlugin(
    name="ibverbs",
    api_version=1,
    create=PyverbsTransport,
    probe=probe,
    summary="RDMA devices (InfiniBand, RoCE), by the Python bindings of rdma-core",
)
"""Used where `MESH_RDMA_VERBS=pyverbs` says so."""
