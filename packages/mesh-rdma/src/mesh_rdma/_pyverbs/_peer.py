"""An owner that is reached."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv6Address

from mesh_rdma._contract import Copy, Peer, Watch
from mesh_rdma._errors import BufferGone, RDMAError, TransportUnavailable, advice
from mesh_rdma._pyverbs._devices import Device, pairs
from mesh_rdma._pyverbs._lane import Lane, LaneBroken
from mesh_rdma._pyverbs._pieces import sectioned
from mesh_rdma._pyverbs._wire import Section

IDLE = 8
"""Queue pairs that are kept for later."""
FRESH = 2
"""New queue pairs that are tried for one transfer."""
DYING = 0.2
"""How many seconds a process may take to end once it has closed its connections."""
_BREATH = 0.01

Place = tuple[IPv6Address, int, bytes, bytes]
"""Where an owner is reached, with its key and its incarnation: what one handle says of it binds no other handle."""


class VerbsPeer(Peer):
    """Makes a queue pair for each thread that transfers, and keeps them."""

    def __init__(self, devices: list[Device], owner: str) -> None:
        self._devices, self._owner = devices, owner
        self._lock = threading.Lock()
        self._idle: dict[Place, list[Lane]] = {}
        self._ended: set[Place] = set()
        self._pid = os.getpid()

    def alive(self) -> bool:
        """Whether the owner was there when it was last looked for."""
        with self._lock:
            return not self._ended

    def close(self) -> None:
        """End all queue pairs that nobody uses; in a forked copy of this process, none."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            lanes = [lane for lanes in self._idle.values() for lane in lanes]
            self._idle.clear()
        for lane in lanes:
            with suppress(Exception):  # of the library; nothing is lent to it
                lane.close()

    def __del__(self) -> None:
        self.close()

    def run(self, copies: Sequence[Copy], watch: Watch) -> None:
        """See `Peer`."""
        places: dict[Place, list[tuple[Copy, Section]]] = {}
        for copy, section in sectioned(copies):
            place = (section.address, section.port, section.door, copy.realm)
            places.setdefault(place, []).append((copy, section))
        for place, asked in places.items():
            self._run(place, asked, watch)

    def _run(self, place: Place, asked: list[tuple[Copy, Section]], watch: Watch) -> None:
        fresh = 0
        while True:
            lane, is_fresh = self._take(place, asked[0][1], watch)
            if any(lane.rail >= len(section.rails) for _, section in asked):
                lane.close()
                raise TransportUnavailable(f"{self._owner} offers its buffers on different devices")
            try:
                lane.run(asked, watch)
            except Exception as error:
                if isinstance(error, RDMAError) and not isinstance(error, LaneBroken):
                    raise
                # One that was kept may have ended meanwhile. A new one has failed by itself; the next tells whether the owner
                # has ended.
                fresh += is_fresh
                if fresh < FRESH:
                    continue
                raise TransportUnavailable(f"the connection to {self._owner} failed: {error}") from None
            self._put_back(place, lane)
            return

    def _take(self, place: Place, section: Section, watch: Watch) -> tuple[Lane, bool]:
        while True:
            with self._lock:
                kept = self._idle.get(place)
                lane = kept.pop() if kept else None
            if lane is None:
                return self._dial(place, section, watch), True
            if lane.is_sound():
                return lane, False
            lane.close()

    def _put_back(self, place: Place, lane: Lane) -> None:
        with self._lock:
            kept = self._idle.setdefault(place, [])
            if len(kept) < IDLE:
                kept.append(lane)
                return
        lane.close()

    def _dial(self, place: Place, section: Section, watch: Watch) -> Lane:
        """Connect, by the nearest of the devices that works."""
        routes = pairs(self._devices, section)
        if not routes:
            raise TransportUnavailable(f"{self._owner} has RDMA devices of another kind only")
        # Words, not the exception: that would keep the frames it has passed, and with them the caller's memory.
        failed = "no device was tried"
        for device, rail in routes:
            try:
                return self._knock(place, section, device, rail, watch)
            except BufferGone:
                with self._lock:
                    self._ended.add(place)
                raise
            except LaneBroken as error:
                failed = str(error)
            except RDMAError:
                raise
            except Exception as error:  # noqa: BLE001 - of the library, which raises kinds of its own
                watch.check()
                failed = f"{error}{advice(error)}"
        raise TransportUnavailable(f"cannot connect to {self._owner}: {failed}")

    def _knock(self, place: Place, section: Section, device: Device, rail: int, watch: Watch) -> Lane:
        end = time.monotonic() + DYING
        while True:
            try:
                return Lane.open(section, place[3], device, rail, watch)
            # Errors of transfers are errors of the system, too.
            except RDMAError:
                raise
            except ConnectionRefusedError:
                raise BufferGone(f"{self._owner}, which owned the buffer, has ended") from None
            except ConnectionError:
                # A process that ends closes its connections a moment before it has ended.
                if time.monotonic() > end:
                    raise
                watch.check()
                time.sleep(_BREATH)
            except TimeoutError:
                watch.check()
                raise LaneBroken("it did not answer: it may be stopped, or out of descriptors") from None
