"""The devices of this machine, and queue pairs on them."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from mesh_rdma._pyverbs._library import Guard, Library
from mesh_rdma._pyverbs._wire import MAX_RAILS, End, Link, Rail, Section

SYSFS = Path("/sys/class/infiniband")
"""Where the kernel lists devices."""
MOST_READS = 16
"""More reads at once do not help."""
_LOOPBACK = IPv6Address("::ffff:127.0.0.1")
_MAPPED = bytes(10) + b"\xff\xff"
_LINKS = {"InfiniBand": Link.INFINIBAND, "Ethernet": Link.ETHERNET}


@dataclass(frozen=True)
class Port:
    """A port that can be used."""

    device: str
    number: int
    link: Link
    lid: int
    rate: int
    gid: bytes
    gid_index: int


class Device:
    """An open device, with one of its ports. What it makes is closed by it."""

    def __init__(self, library: Library, guard: Guard, port: Port) -> None:
        self.port = port
        self._library, self.guard = library, guard
        self._context = guard.keep(library.device.Context(name=port.device))
        self.mtu: int = self._context.query_port(port.number).active_mtu
        self._pd = guard.keep(library.pd.PD(self._context))
        # Nothing completes at an owner's end: all of its queue pairs share a queue that stays empty.
        self._idle = guard.keep(library.cq.CQ(self._context, 1))
        told = self._context.query_device()
        enums = library.enums
        self.reads = max(1, min(MOST_READS, told.max_qp_rd_atom, told.max_qp_init_rd_atom))
        self._local: int = enums.IBV_ACCESS_LOCAL_WRITE
        self._remote: int = enums.IBV_ACCESS_REMOTE_READ
        self._writes: int = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        if told.atomic_caps != enums.IBV_ATOMIC_NONE:
            # pyverbs is asked for none; another engine's process may.
            self._writes |= enums.IBV_ACCESS_REMOTE_ATOMIC

    def rail(self, rkey: int) -> Rail:
        """Return what handles say of it."""
        port = self.port
        return Rail(port.gid, port.lid, port.link, self.mtu, port.rate, rkey)

    def offer(self, at: int, length: int, writable: bool) -> Any:
        """Register memory that others may read, and perhaps write. To be closed by `close`."""
        access = self._remote | (self._writes if writable else 0)
        return self.guard.keep(self._library.mr.MR(self._pd, length, access, address=at))

    def use(self, at: int, length: int, writable: bool) -> Any:
        """Register memory for transfers of this process. To be closed by `close`."""
        access = self._local if writable else 0
        return self.guard.keep(self._library.mr.MR(self._pd, length, access, address=at))

    def close(self, made: Any) -> None:
        """End what one of the other methods has made."""
        self.guard.close(made)

    def pair(self, depth: int) -> Pair:
        """Make a queue pair for so many operations at once; for none, one that only answers."""
        queue = self._idle
        if depth:
            queue = self.guard.keep(self._library.cq.CQ(self._context, depth))
        try:
            library = self._library
            cap = library.qp.QPCap(max_send_wr=max(depth, 1), max_recv_wr=1)
            asked = library.qp.QPInitAttr(
                qp_type=library.enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=cap, sq_sig_all=1
            )
            made = self.guard.keep(library.qp.QP(self._pd, asked))
        except BaseException:
            if depth:
                self.guard.close(queue)
            raise
        return Pair(self, library, made, queue if depth else None)

    def connect(self, made: Any, mine: End, agreed: End, gid: bytes, lid: int) -> None:
        """Have a queue pair talk to another one."""
        enums, qp, addr = self._library.enums, self._library.qp, self._library.addr
        told = qp.QPAttr(port_num=self.port.number)
        told.qp_access_flags = self._remote | self._writes
        told.path_mtu = agreed.mtu
        told.dest_qp_num = agreed.qpn
        told.rq_psn, told.sq_psn = agreed.psn, mine.psn
        told.max_rd_atomic = told.max_dest_rd_atomic = agreed.rd_atomic
        # 67 ms for an answer, and six times more: Soft-RoCE takes seven for ever, as all do that for receivers that are not ready.
        told.timeout, told.retry_cnt, told.rnr_retry, told.min_rnr_timer = 14, 6, 7, 12
        is_global = self.port.link is Link.ETHERNET or gid[:8] != self.port.gid[:8]
        route = addr.GlobalRoute(dgid=addr.GID(_in_words(gid)), sgid_index=self.port.gid_index, hop_limit=64)
        told.ah_attr = addr.AHAttr(
            dlid=lid, is_global=int(is_global), port_num=self.port.number, gr=route if is_global else None
        )
        told.qp_state = enums.IBV_QPS_INIT
        made.to_rts(told)


class Pair:
    """One end of a connection between two queue pairs."""

    def __init__(self, device: Device, library: Library, made: Any, queue: Any) -> None:
        self.device = device
        self._library, self._made, self._queue = library, made, queue
        self.end = End(made.qp_num, secrets.randbits(24), device.mtu, device.reads)

    def connect(self, agreed: End, gid: bytes, lid: int) -> None:
        """Talk to another: `agreed` is the other end, with what both can do."""
        self.device.connect(self._made, self.end, agreed, gid, lid)

    def post(self, number: int, write: bool, here: tuple[int, int, int], there: tuple[int, int]) -> None:
        """Begin to copy: from or to address, length and key here; address and key there."""
        wr, enums = self._library.wr, self._library.enums
        opcode = enums.IBV_WR_RDMA_WRITE if write else enums.IBV_WR_RDMA_READ
        # Neither frees what it has allocated when it is garbage.
        piece = wr.SGE(*here)
        try:
            request = wr.SendWR(wr_id=number, opcode=opcode, num_sge=1, sg=[piece])
            try:
                request.set_wr_rdma(there[1], there[0])
                self._made.post_send(request)
            finally:
                request.close()
        finally:
            piece.close()

    def completed(self, most: int) -> list[tuple[int, int]]:
        """Return what has been done since: the number of each, and its status, 0 for success."""
        return [(each.wr_id, each.status) for each in self._queue.poll(most)[1]]

    def close(self) -> None:
        """End it. When this returns nothing is copied any longer."""
        self.device.close(self._made)
        if self._queue is not None:
            self.device.close(self._queue)


def ports(library: Library, root: Path = SYSFS) -> list[Port]:
    """Return the ports that can be used, the fastest first, as many as a handle names."""
    found: list[Port] = []
    for device in root.iterdir() if root.exists() else ():
        for port in (device / "ports").iterdir():
            with suppress(Exception):  # one that cannot be opened is as good as none
                if _text(port / "state").startswith("4"):
                    found.append(_port(library, device.name, port))
    found.sort(key=lambda port: (-port.rate, port.device, port.number))
    return found[:MAX_RAILS]


def pairs(devices: list[Device], section: Section) -> list[tuple[Device, int]]:
    """Return which of the devices may reach which of the owner's rails, the best first: those of the most similar addresses."""
    both: list[tuple[tuple[int, bool, int], Device, int]] = []
    for at, rail in enumerate(section.rails):
        for device in devices:
            common = _common(device.port.gid, rail.gid)
            # Two subnets of InfiniBand need a router that nobody is known to have.
            if device.port.link is rail.link and (rail.link is Link.ETHERNET or common >= 64):
                both.append(((common, at == section.nearest, device.port.rate), device, at))
    both.sort(key=lambda each: each[0], reverse=True)
    return [(device, at) for _, device, at in both]


def address(port: Port) -> IPv6Address:
    """Return where others find this machine: the address that the port has, or else one of the machine."""
    gid = IPv6Address(port.gid)
    if port.link is Link.ETHERNET and not gid.is_link_local:
        return gid
    return _host_address()


def _host_address() -> IPv6Address:
    """This machine's first address that others can reach, or that of its loopback interface."""
    for family, anybody in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: asks which address would be used.
            probe.connect((anybody, 9))
            said = probe.getsockname()[0]
            return IPv6Address(f"::ffff:{said}" if family == socket.AF_INET else said.partition("%")[0])
    return _LOOPBACK


def _common(a: bytes, b: bytes) -> int:
    """How many bits are the same, from the first on."""
    return 128 - (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_length()


def _text(path: Path) -> str:
    return path.read_text().strip()


def _port(library: Library, device: str, at: Path) -> Port:
    """Raise `ValueError` if it is of no use."""
    link = _LINKS.get(_text(at / "link_layer"))
    if link is None:
        raise ValueError("an unknown kind of link")
    number = int(at.name)
    if link is Link.INFINIBAND:
        index, gid = 0, bytes.fromhex(_text(at / "gids" / "0").replace(":", ""))
    else:
        index, gid = _routable(library.gids(device, number))
    rate = int(float(_text(at / "rate").split()[0]) * 1000)
    return Port(device, number, link, int(_text(at / "lid"), 16), rate, gid, index)


def _routable(gids: list[tuple[int, bytes]]) -> tuple[int, bytes]:
    """The address that reaches farthest: one of IPv4, else a global one of IPv6, else one of the link."""
    if not gids:
        raise ValueError("no address of RoCE v2")

    def reach(each: tuple[int, bytes]) -> tuple[int, int]:
        index, gid = each
        return (0 if gid.startswith(_MAPPED) else 2 if IPv6Address(gid).is_link_local else 1), index

    return min(gids, key=reach)


def _in_words(gid: bytes) -> str:
    text = gid.hex()
    return ":".join(text[at : at + 4] for at in range(0, 32, 4))
