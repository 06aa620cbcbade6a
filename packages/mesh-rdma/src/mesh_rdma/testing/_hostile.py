"""What holds for handles that somebody has changed, or made up."""

from __future__ import annotations

import random
import struct

from mesh_rdma._buffer import RDMABuffer
from mesh_rdma._errors import BufferGone, InvalidTransfer, RDMAError
from mesh_rdma.testing._ends import Ends, forged, outcome

_FLAGS, _REALM, _TOKEN, _SLOT, _GENERATION, _LENGTH, _START, _WINDOW, _HOST = 4, 5, 41, 57, 61, 65, 73, 81, 89
"""Where in the bytes of a handle they are. The last three: of all the memory, where the buffer begins, and how long it is."""


def _section(data: bytes, name: str) -> tuple[int, int]:
    """Return where in the bytes of a handle a transport's own ones begin and end."""
    at = _HOST + 1 + data[_HOST]
    count, at = data[at], at + 1
    for _ in range(count):
        end = at + 1 + data[at]
        found = data[at + 1 : end].decode()
        (length,) = struct.unpack_from("<H", data, end)
        at = end + 2 + length
        if found == name:
            return end + 2, at
    raise AssertionError(f"the handle does not name the transport {name}")


def cut_out(handle: bytearray, name: str) -> None:
    """Have a handle no longer name that transport."""
    start, end = _section(bytes(handle), name)
    handle[_HOST + 1 + handle[_HOST]] -= 1
    del handle[start - 3 - len(name) : end]


class Hostile(Ends):
    """Part of the suite: the owner, or the device, believes no handle."""

    def _refuses(self, buffer: RDMABuffer, what: str, length: int = 8, offset: int = 0) -> None:
        for way, work in (
            ("read", lambda: self._read(buffer, length, offset, timeout=5)),
            ("written", lambda: self._write(buffer, bytes(length), offset)),
        ):
            error = outcome(work)
            assert isinstance(error, RDMAError), f"with {what}, memory was {way}: {error!r}"

    def test_read_only_memory_is_not_written(self) -> None:
        """Also where the handle was forged to say that it may be."""
        buffer = self.owner.offer("a", b"secret", readonly=True)
        error = outcome(lambda: self._write(buffer, b"x"))
        assert isinstance(error, InvalidTransfer), f"expected InvalidTransfer, got {error!r}"

        def allow(handle: bytearray) -> None:
            handle[_FLAGS] |= 1

        error = outcome(lambda: self._write(forged(buffer, allow), b"x"))
        assert isinstance(error, RDMAError), f"the owner must refuse, got {error!r}"
        assert self.owner.look("a") == b"secret"
        assert self._read(buffer, 6) == b"secret"

    def test_nothing_outside_of_the_memory_is_reached(self) -> None:
        """Also where the handle was forged to name more than is offered."""
        buffer = self.owner.offer("a", bytes(4096))

        def widen(handle: bytearray) -> None:
            for at in (_LENGTH, _WINDOW):
                struct.pack_into("<Q", handle, at, 1 << 63)

        wide = forged(buffer, widen)
        largest = (1 << 63) - 8
        for offset, length in (
            (4090, 10),
            (4096, 1),
            (0, 4097),
            (1 << 30, 8),
            ((1 << 40) - 8, 8),
            (largest, 8),
        ):
            self._refuses(wide, f"{length} bytes at {offset} of 4096", length, offset)

        def shift(handle: bytearray) -> None:
            struct.pack_into("<QQQ", handle, _LENGTH, 5000, 4090, 100)

        self._refuses(forged(buffer, shift), "a window that ends behind the memory", 100)
        assert self._read(buffer, 4096) == bytes(4096)

    def test_names_of_other_memory(self) -> None:
        """Places, generations, tokens and incarnations that are not this memory's reach nothing, as guesses would not."""
        neighbours = [self.owner.offer(f"near-{n}", b"neighbour") for n in range(4)]
        buffer = self.owner.offer("a", bytes(9))
        assert self._read(neighbours[0], 9) == b"neighbour"
        chance = random.Random(11)
        for what, at, length in (
            ("another place", _SLOT, 4),
            ("another generation", _GENERATION, 4),
            ("another token", _TOKEN, 16),
            ("another incarnation", _REALM, 16),
        ):
            for new in (chance.randbytes(length), b"\x01" + bytes(length - 1), b"\xff" * length):

                def change(handle: bytearray, at: int = at, new: bytes = new) -> None:
                    handle[at : at + len(new)] = new

                made = forged(buffer, change)
                if made.__reduce__() == buffer.__reduce__():
                    continue
                error = outcome(lambda b=made: self._must_be(b, bytes(9)))  # type: ignore[misc]
                assert error is None or isinstance(error, RDMAError), f"with {what}: {error!r}"
        assert self.owner.look("a") == bytes(9)
        assert [self._read(each, 9) for each in neighbours] == [b"neighbour"] * 4

    def _must_be(self, buffer: RDMABuffer, data: bytes, timeout: float = 5) -> None:
        found = self._read(buffer, len(data), timeout=timeout)
        assert found == data, f"memory of another buffer was read: {found!r}"

    def test_the_transports_own_part_of_a_handle(self) -> None:
        """Changed in any byte, cut or made up, it reaches this memory or nothing: no other that the owner offers."""
        near = [self.owner.offer(f"near-{n}", b"neighbour") for n in range(4)]
        buffer = self.owner.offer("a", b"this one!")
        near += [self.owner.offer(f"near-{n}", b"neighbour") for n in range(4, 8)]
        (data,) = buffer.__reduce__()[1]
        start, end = _section(data, self.plugin.name)
        chance = random.Random(12)
        own = data[start:end]
        changed = [bytes([*own[:at], own[at] ^ 1, *own[at + 1 :]]) for at in range(len(own))]
        changed += [own[:-1], own[: len(own) // 2], b"", own + b"\0", chance.randbytes(len(own))]
        # Spliced with those of others of the same owner: what they have in common is no secret.
        for other in near:
            theirs = other.__reduce__()[1][0]
            there = theirs[slice(*_section(theirs, self.plugin.name))]
            differs = [at for at in range(min(len(own), len(there))) if own[at] != there[at]]
            if differs:
                half = differs[len(differs) // 2]
                spliced = [own[:half] + there[half:], there[:half] + own[half:]]
                changed += [each for each in spliced if each not in (own, there)]
        for new in dict.fromkeys(changed):

            def change(handle: bytearray, new: bytes = new) -> None:
                handle[start - 2 : end] = struct.pack("<H", len(new)) + new

            made = forged(buffer, change)
            error = outcome(lambda b=made: self._must_be(b, b"this one!", 2))  # type: ignore[misc]
            assert error is None or isinstance(error, RDMAError), f"with the part {new.hex()}: {error!r}"
        assert self._read(buffer, 9) == b"this one!"

    def test_bytes_that_are_no_handle(self) -> None:
        """Cut anywhere, longer, or made up: said to be none, or gone."""
        buffer = self.owner.offer("a", b"here")
        make, (data,) = buffer.__reduce__()
        chance = random.Random(13)
        cut = [data[:length] for length in range(len(data))]
        made_up = [chance.randbytes(chance.randint(0, 400)) for _ in range(100)]
        for each in [*cut, data + b"\0", *made_up, data[:4] + chance.randbytes(len(data) - 4)]:
            error = outcome(lambda each=each: self._read(make(each), 1, timeout=5))  # type: ignore[misc]
            assert isinstance(error, (InvalidTransfer, BufferGone)), f"{each.hex()} gave {error!r}"
        assert self._read(buffer, 4) == b"here"
