"""Throws garbage at an address: connections that no honest peer of a TLS gateway makes.

    python tests/network/garbage.py 10.77.0.2:7171 --connections 1000 --seed 7

Kinds and bytes come from the seed, and are the same in each run; what the other side does with them is the report.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
import socket
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

Outcome = str
"""`refused`, `closed`, `reset`, `alert N` (TLS told why), `answered` (it sent something else, and closed or stayed), `left` (it
stayed, silent, until this side had enough), `gone` (this side ended it at once)."""

_RECORD_ALERT, _RECORD_HANDSHAKE, _RECORD_DATA = 21, 22, 23
_OVERSIZED = 1 << 20


@dataclass
class Report:
    """What became of the garbage."""

    outcomes: dict[str, collections.Counter[Outcome]] = field(default_factory=dict)
    """Of each kind, how many connections ended how."""
    received: int = 0
    """Bytes that the other side sent to strangers."""
    longest: float = 0.0
    """Seconds that the longest connection was kept open by the other side."""

    @property
    def connections(self) -> int:
        """How many there were."""
        return sum(counter.total() for counter in self.outcomes.values())

    def total(self, outcome: Outcome) -> int:
        """How many ended in one way."""
        return sum(counter[outcome] for counter in self.outcomes.values())

    def __str__(self) -> str:
        lines = [
            f"{self.connections} connections, {self.received} bytes received, longest {self.longest:.2f} s"
        ]
        for kind, counter in sorted(self.outcomes.items()):
            how = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(counter.items()))
            lines.append(f"  {kind}: {how}")
        return "\n".join(lines)


@dataclass
class Throw:
    """One connection and what is to be done with it."""

    address: tuple[str, int]
    dice: random.Random
    patience: float
    context: ssl.SSLContext | None

    async def send(self, *pieces: bytes, reset: bool = False, leave: bool = False) -> tuple[Outcome, bytes]:
        """Connect, send, and see what comes; or reset the connection, or leave, without waiting."""
        loop = asyncio.get_running_loop()
        with await self._connect() as link:
            if not await self._push(link, *pieces):
                return "left", b""
            if reset:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if reset or leave:
                return "gone", b""
            end, received = await self._watch(lambda: loop.sock_recv(link, 65536))
        if not received:
            return end, received
        number = alert(received)
        return f"alert {number}" if number is not None else "answered", received

    async def shake_hands(self, *pieces: bytes) -> tuple[Outcome, bytes]:
        """Make the whole handshake, without a certificate unless one was given, and send what lies beyond it."""
        context = self.context
        if context is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        with await self._connect() as link:
            secure = _Secure(context, link)
            try:
                async with asyncio.timeout(self.patience):
                    await secure.handshake()
                for piece in pieces:
                    await self._push(link, secure.seal(piece))
                end, received = await self._watch(secure.read)
            except ssl.SSLEOFError:
                return "closed", b""
            except ssl.SSLError as error:
                # With TLS 1.3 a client is told only after its handshake that it lacks a certificate.
                return f"alert {error.reason}", b""
            except ConnectionError:
                return "reset", b""
        return "answered" if received else end, received

    async def _connect(self) -> socket.socket:
        link = socket.socket(
            socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET, socket.SOCK_STREAM
        )
        try:
            link.setblocking(False)
            await asyncio.get_running_loop().sock_connect(link, self.address)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            link.close()
            raise
        return link

    async def _push(self, link: socket.socket, *pieces: bytes) -> bool:
        try:
            async with asyncio.timeout(self.patience):
                for piece in pieces:
                    await asyncio.get_running_loop().sock_sendall(link, piece)
        except TimeoutError:
            return False
        except ConnectionError:
            # Why is perhaps still to be read.
            pass
        return True

    async def _watch(self, read: Callable[[], Awaitable[bytes]]) -> tuple[Outcome, bytes]:
        received = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience):
                while True:
                    try:
                        data = await read()
                    except ConnectionError:
                        return "reset", received
                    if not data:
                        return "closed", received
                    received += data
        return "left", received


class _Secure:
    """The client's end of TLS on a socket, of which every byte is in this program's hands."""

    def __init__(self, context: ssl.SSLContext, link: socket.socket) -> None:
        self._link = link
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="host")

    async def handshake(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(self._link, self._outgoing.read())
                await self._receive()
            else:
                await loop.sock_sendall(self._link, self._outgoing.read())
                return

    def seal(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(65536)
            except ssl.SSLWantReadError:
                if not await self._receive():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    async def _receive(self) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self._link, 65536)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return bool(data)


def alert(received: bytes) -> int | None:
    """The number of the alert that ends what was received in the clear, if one does."""
    while len(received) >= 5:
        kind, _, length = struct.unpack(">BHH", received[:5])
        if kind == _RECORD_ALERT and length == 2 and len(received) >= 7:
            return received[6]
        received = received[5 + length :]
    return None


def record(kind: int, body: bytes, *, length: int | None = None) -> bytes:
    """A TLS record; one that lies about its length, if asked for."""
    return struct.pack(">BHH", kind, 0x0301, len(body) if length is None else length) + body


def client_hello(dice: random.Random) -> bytes:
    """A ClientHello for TLS 1.3 that every server takes for good."""

    def sized(body: bytes, width: int) -> bytes:
        return len(body).to_bytes(width, "big") + body

    def extension(kind: int, body: bytes) -> bytes:
        return kind.to_bytes(2, "big") + sized(body, 2)

    name = sized(b"\x00" + sized(b"host", 2), 2)
    extensions = b"".join(
        [
            extension(0, name),
            extension(10, sized(b"\x00\x1d", 2)),  # group: X25519
            extension(13, sized(b"\x04\x03\x08\x07\x08\x04", 2)),  # signatures: ECDSA P-256, Ed25519, RSA-PSS
            extension(43, sized(b"\x03\x04", 1)),  # version: 1.3
            extension(51, sized(b"\x00\x1d" + sized(dice.randbytes(32), 2), 2)),  # key share
        ]
    )
    suites = sized(b"\x13\x01\x13\x02\x13\x03", 2)
    body = b"\x03\x03" + dice.randbytes(32) + sized(dice.randbytes(32), 1) + suites + sized(b"\x00", 1)
    body += sized(extensions, 2)
    return record(_RECORD_HANDSHAKE, b"\x01" + sized(body, 3))


Kind = Callable[[Throw], Coroutine[Any, Any, tuple[Outcome, bytes]]]


def random_bytes(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """Noise."""
    return throw.send(throw.dice.randbytes(throw.dice.randint(1, 4096)))


def nothing(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A connection and no word."""
    return throw.send()


def immediate_close(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A connection that is closed at once."""
    return throw.send(leave=True)


def immediate_reset(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A connection that is reset at once."""
    return throw.send(reset=True)


def half_hello(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """The first bytes of a handshake, and then none."""
    hello = client_hello(throw.dice)
    return throw.send(hello[: throw.dice.randint(1, len(hello) - 1)])


def hello_then_silence(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A good first flight; the server answers and waits for the second."""
    return throw.send(client_hello(throw.dice))


def hello_then_noise(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A good first flight, and a second that cannot be decrypted."""
    return throw.send(client_hello(throw.dice), record(_RECORD_DATA, throw.dice.randbytes(500)))


def hello_then_reset(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A good first flight, and away."""
    return throw.send(client_hello(throw.dice), reset=True)


def broken_hello(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A first flight with one wrong byte."""
    hello = bytearray(client_hello(throw.dice))
    hello[throw.dice.randrange(len(hello))] ^= throw.dice.randint(1, 255)
    return throw.send(bytes(hello))


def dripping_hello(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A good first flight, byte by byte."""
    return throw.send(*(bytes([byte]) for byte in client_hello(throw.dice)))


def oversized_record(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A record that claims more than TLS allows."""
    kind = throw.dice.choice([_RECORD_HANDSHAKE, _RECORD_DATA])
    return throw.send(record(kind, throw.dice.randbytes(40_000), length=0xFFFF))


def endless_handshake(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A handshake message that claims 16 MiB, in records that are all allowed."""
    piece = record(_RECORD_HANDSHAKE, throw.dice.randbytes(16_000))
    return throw.send(record(_RECORD_HANDSHAKE, b"\x01\xff\xff\xff"), *[piece] * 20)


def other_protocol(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """Somebody else's language."""
    return throw.send(b"GET / HTTP/1.1\r\nHost: host\r\nAuthorization: Basic Og==\r\n\r\n")


def no_certificate(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A whole handshake (with a certificate, if one was given), and noise beyond it."""
    return throw.shake_hands(throw.dice.randbytes(1000))


def oversized_frame(throw: Throw) -> Coroutine[Any, Any, tuple[Outcome, bytes]]:
    """A whole handshake, and beyond it a length of nearly 2^64, or of 2^32, and a megabyte."""
    head = throw.dice.choice([b"\xff" * 8, b"\x00\x00\x00\x00" + b"\xff" * 4, b"\xff" * 80])
    return throw.shake_hands(head, throw.dice.randbytes(_OVERSIZED))


KINDS: tuple[Kind, ...] = (
    random_bytes, nothing, immediate_close, immediate_reset, half_hello, hello_then_silence, hello_then_noise,
    hello_then_reset, broken_hello, dripping_hello, oversized_record, endless_handshake, other_protocol,
    no_certificate, oversized_frame,
)  # fmt: skip


async def flood_async(
    address: tuple[str, int],
    *,
    connections: int = 1000,
    seed: int = 0,
    parallel: int = 64,
    patience: float = 2.0,
    over: float = 0.0,
    context: ssl.SSLContext | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> Report:
    """As `flood`, in a coroutine."""
    report = Report()
    loop = asyncio.get_running_loop()
    start = loop.time()
    turns = asyncio.Semaphore(parallel)
    choice = random.Random(seed)

    async def throw(number: int, kind: Kind) -> None:
        await asyncio.sleep(start + over * number / connections - loop.time())
        async with turns:
            began = loop.time()
            each = Throw(address, random.Random(f"{seed}/{number}"), patience, context)
            try:
                outcome, received = await kind(each)
            except ConnectionRefusedError:
                outcome, received = "refused", b""
            except TimeoutError:
                outcome, received = "left", b""
            except OSError as error:
                outcome, received = type(error).__name__, b""
            name = kind.__name__.replace("_", " ")
            report.outcomes.setdefault(name, collections.Counter())[outcome] += 1
            report.received += len(received)
            report.longest = max(report.longest, loop.time() - began)

    async with asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(throw(number, choice.choice(kinds)))
    return report


def flood(
    address: tuple[str, int],
    *,
    connections: int = 1000,
    seed: int = 0,
    parallel: int = 64,
    patience: float = 2.0,
    over: float = 0.0,
    context: ssl.SSLContext | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> Report:
    """Throw garbage at an address, so many connections at a time, and watch each for so many seconds.

    They begin evenly `over` so many seconds, as far as the number at a time allows; with 0, as fast as they can.
    With a `context` that holds a good certificate, `no_certificate` and `oversized_frame` get behind the handshake.
    """
    return asyncio.run(
        flood_async(
            address, connections=connections, seed=seed, parallel=parallel, patience=patience, over=over,
            context=context, kinds=kinds,
        )
    )  # fmt: skip


def main() -> None:
    """Throw garbage at an address, and print what became of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--patience", type=float, default=2.0, help="seconds to watch one connection")
    parser.add_argument("--over", type=float, default=0.0, help="seconds over which they begin, evenly")
    options = parser.parse_args()
    host, _, port = options.address.rpartition(":")
    report = flood(
        (host.strip("[]"), int(port)), connections=options.connections, seed=options.seed,
        parallel=options.parallel, patience=options.patience, over=options.over,
    )  # fmt: skip
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
