"""The bytes that two ends of the transport ibverbs exchange, whichever engine each of them has.

All integers are little-endian. Everything is of fixed length, so that a stranger can make nobody wait for more.

Both ends prove that they know the owner's door key, which only its handles carry, before anything else is said; what they then
say of their queue pairs is signed with it (VRB-1).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address

from mesh_rdma._errors import InvalidTransfer, TransportUnavailable

VERSION = 1
MAGIC = b"MXV1"
NONCE = 16
PROOF = 32
HELLO = len(MAGIC) + NONCE + 16
"""What a client says first: the magic, a nonce, and whom it wants."""
WELCOME = NONCE + PROOF
"""What the server answers: its nonce, and its proof."""
READY = b"R"
MAX_RAILS = 4

_DAMAGED = "the handle's part for the transport ibverbs is damaged"
_SEAL = 16
_WRITABLE = 1
_SECTION = struct.Struct("<BBH16s16sQQIIB")
_RAIL = struct.Struct("<16sHBBII")
_CONNECT = struct.Struct("<B16sHIIBB")
_ACCEPT = struct.Struct("<BIIBB")
_ASK = struct.Struct("<sII16s")

CONNECT = _CONNECT.size + _SEAL
ACCEPT = _ACCEPT.size + _SEAL
ASK = _ASK.size


class Side(IntEnum):
    """Who says it, so that nobody can send another's words back."""

    SERVER = 0
    CLIENT = 1

    @property
    def word(self) -> bytes:
        """As it is hashed."""
        return b"client" if self is Side.CLIENT else b"server"


class Link(IntEnum):
    """What is below the transport."""

    INFINIBAND = 1
    ETHERNET = 2


class Answer(IntEnum):
    """Whether an export is there."""

    LIVE = 0
    GONE = 1
    REFUSED = 2


class Damaged(TransportUnavailable):
    """The other end of a connection says what no engine says."""


@dataclass(frozen=True)
class Talk:
    """A connection on which both ends have drawn their nonces."""

    door: bytes
    realm: bytes
    client: bytes
    server: bytes

    def _tag(self, side: Side, message: bytes) -> bytes:
        said = side.word + self.realm + self.client + self.server + message
        return hmac.digest(self.door, said, hashlib.sha256)

    def prove(self, side: Side) -> bytes:
        """Return the proof that this side knows the door key."""
        return self._tag(side, b"")

    def proves(self, side: Side, proof: bytes) -> bool:
        """Whether it is the proof of that side."""
        return hmac.compare_digest(self.prove(side), proof)

    def seal(self, side: Side, message: bytes) -> bytes:
        """Return a message as that side sends it."""
        return message + self._tag(side, message)[:_SEAL]

    def open(self, side: Side, sealed: bytes) -> bytes:
        """Return the message that the other side has sealed."""
        message, seal = sealed[:-_SEAL], sealed[-_SEAL:]
        if not hmac.compare_digest(self._tag(side, message)[:_SEAL], seal):
            raise Damaged(
                "what the other end says of its queue pair is not sealed with the key of the handle"
            )
        return message


@dataclass(frozen=True)
class Rail:
    """A port of a device of the owner, with the key of one export there."""

    gid: bytes
    lid: int
    link: Link
    mtu: int
    """The active one, as the verbs number it: 1 is 256 bytes, 5 is 4096."""
    rate: int
    """In Mb/s."""
    rkey: int

    def encode(self) -> bytes:
        """As bytes."""
        return _RAIL.pack(self.gid, self.lid, self.link, self.mtu, self.rate, self.rkey)

    @classmethod
    def decode(cls, data: bytes) -> Rail:
        """From bytes that anybody may have written."""
        gid, lid, link, mtu, rate, rkey = _RAIL.unpack(data)
        if link not in (1, 2) or not 1 <= mtu <= 5:
            raise InvalidTransfer(f"{_DAMAGED}: it names an unknown kind of port")
        return cls(gid, lid, Link(link), mtu, rate, rkey)


@dataclass(frozen=True)
class Section:
    """What a handle says of an export."""

    writable: bool
    nearest: int
    """Which of the rails is nearest to the memory."""
    port: int
    """Of the TCP listener that shakes hands."""
    address: IPv6Address
    """Of the same; an IPv4 address is mapped."""
    door: bytes
    at: int
    """The address of the export's first byte, in the owner."""
    length: int
    slot: int
    generation: int
    rails: tuple[Rail, ...]

    @property
    def key(self) -> int:
        """Which export of the owner it is."""
        return self.generation << 32 | self.slot

    def encode(self) -> bytes:
        """As bytes, at most 256."""
        head = _SECTION.pack(
            VERSION,
            (_WRITABLE if self.writable else 0) | self.nearest << 1,
            self.port,
            self.address.packed,
            self.door,
            self.at,
            self.length,
            self.slot,
            self.generation,
            len(self.rails),
        )
        return head + b"".join(rail.encode() for rail in self.rails)

    @classmethod
    def decode(cls, data: bytes) -> Section:
        """From bytes that anybody may have written."""
        if data and data[0] != VERSION:
            raise TransportUnavailable(
                f"the owner speaks version {data[0]} of the transport ibverbs, and this process version {VERSION}"
            )
        if len(data) < _SECTION.size:
            raise InvalidTransfer(f"{_DAMAGED}: it is cut off")
        _, flags, port, address, door, at, length, slot, generation, count = _SECTION.unpack_from(data)
        nearest = flags >> 1
        if not nearest < count <= MAX_RAILS or len(data) != _SECTION.size + count * _RAIL.size:
            raise InvalidTransfer(_DAMAGED)
        if at + length > 1 << 64:
            raise InvalidTransfer(f"{_DAMAGED}: it names memory beyond the last address")
        starts = range(_SECTION.size, len(data), _RAIL.size)
        rails = tuple(Rail.decode(data[start : start + _RAIL.size]) for start in starts)
        where = IPv6Address(address)
        return cls(bool(flags & _WRITABLE), nearest, port, where, door, at, length, slot, generation, rails)


@dataclass(frozen=True)
class End:
    """One end of a connection between queue pairs, as it tells the other of itself."""

    qpn: int
    psn: int
    mtu: int
    rd_atomic: int
    """How many reads may be under way."""

    def agreed(self, other: End) -> End:
        """The same with what both can do."""
        return End(self.qpn, self.psn, min(self.mtu, other.mtu), min(self.rd_atomic, other.rd_atomic))

    def check(self) -> End:
        """Raise if no queue pair has such numbers."""
        if self.qpn >= 1 << 24 or self.psn >= 1 << 24 or not 1 <= self.mtu <= 5:
            raise Damaged("the other end of a queue pair tells of one that cannot be")
        return self


@dataclass(frozen=True)
class Connect:
    """What the client says once both have proved who they are."""

    rail: int
    """Which of the owner's ports."""
    gid: bytes
    lid: int
    end: End

    def encode(self, talk: Talk) -> bytes:
        """As sealed bytes."""
        end = self.end
        said = _CONNECT.pack(self.rail, self.gid, self.lid, end.qpn, end.psn, end.mtu, end.rd_atomic)
        return talk.seal(Side.CLIENT, said)

    @classmethod
    def decode(cls, data: bytes, talk: Talk) -> Connect:
        """From bytes that anybody may have written."""
        rail, gid, lid, *numbers = _CONNECT.unpack(talk.open(Side.CLIENT, data))
        return cls(rail, gid, lid, End(*numbers).check())


def encode_accept(end: End | None, talk: Talk) -> bytes:
    """Return the server's answer to a `Connect`; none if it cannot."""
    if end is None:
        return talk.seal(Side.SERVER, _ACCEPT.pack(1, 0, 0, 0, 0))
    return talk.seal(Side.SERVER, _ACCEPT.pack(0, end.qpn, end.psn, end.mtu, end.rd_atomic))


def decode_accept(data: bytes, talk: Talk) -> End | None:
    """Return what the server says of its queue pair; none if it has refused."""
    status, *numbers = _ACCEPT.unpack(talk.open(Side.SERVER, data))
    return None if status else End(*numbers).check()


def encode_ask(slot: int, generation: int, token: bytes) -> bytes:
    """Return the question whether an export is live."""
    return _ASK.pack(b"A", slot, generation, token)


def decode_ask(data: bytes) -> tuple[int, bytes]:
    """Return which export is asked for, and the token that was shown."""
    letter, slot, generation, token = _ASK.unpack(data)
    if letter != b"A":
        raise Damaged("the other end asks for what is not known here")
    return generation << 32 | slot, token
