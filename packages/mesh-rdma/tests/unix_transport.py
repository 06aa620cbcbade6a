"""A transport as another package would have it: a thread of the owner answers over a Unix socket. Installed by the tests."""

import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import closing, suppress

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_rdma import (
    BufferGone,
    HandleRefused,
    Peer,
    Transport,
    TransportCapabilities,
    TransportPlugin,
)

ASK = struct.Struct("<?16sQQQ")  # write, secret, key, offset, length
OK, GONE, REFUSED = b"\0", b"\1", b"\2"


def take(stream, length, watch=None):
    data = bytearray(length)
    fill(stream, memoryview(data), watch)
    return bytes(data)


def fill(stream, view, watch=None):
    while view.nbytes:
        count = until(watch, stream.recv_into, view)
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        view = view[count:]


def push(stream, view, watch):
    view = memoryview(view)
    while view.nbytes:
        view = view[until(watch, stream.send, view) :]


def until(watch, work, view):
    """Do it as soon as that can be done; several times a second look whether anybody still wants it."""
    while True:
        try:
            return work(view)
        except TimeoutError:
            watch.check()


class Server:
    """Answers those who ask for what is offered."""

    checks_bounds = True

    def __init__(self):
        self.exports = {}  # by key, each with a secret of its own
        self.lock = threading.Lock()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = b"\0mesh-unix-" + secrets.token_hex(8).encode()
        self.socket.bind(self.name)
        self.socket.listen()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            try:
                stream, _ = self.socket.accept()
            except OSError:  # no descriptor left: who connects waits
                select.select([], [], [], 0.05)
                continue
            threading.Thread(target=self.serve, args=(stream,), daemon=True).start()

    def serve(self, stream):
        with stream, suppress(OSError):
            while True:
                write, secret, key, offset, length = ASK.unpack(take(stream, ASK.size))
                data = take(stream, length) if write and length <= 1 << 30 else b""
                # One at a time: what is withdrawn is not in use.
                with self.lock:
                    answer, payload = self.work(write, secret, key, (offset, length), data)
                stream.sendall(answer + payload)

    def work(self, write, secret, key, window, data):
        offset, length = window
        export, expected = self.exports.get(key, (None, b""))
        if export is None:
            return GONE, b""
        if not secrets.compare_digest(secret, expected):
            return REFUSED, b""
        if self.checks_bounds and (offset + length > export.nbytes or (write and not export.writable)):
            return REFUSED, b""
        parts = window_of(export.memory, offset, length)
        if write:
            for part in parts:
                part[:], data = data[: part.nbytes], data[part.nbytes :]
            return OK, b""
        return OK, b"".join(parts).ljust(length, b"?")


def window_of(memory, start, length):
    """The pieces of memory that have these bytes."""
    for piece in memory:
        part = piece[start : start + length]
        yield part
        start, length = max(start - piece.nbytes, 0), length - part.nbytes


class Connected(Peer):
    """An owner, asked over a new connection each time."""

    def __init__(self, name):
        self.name = name

    def connected(self):
        return closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))

    def run(self, copies, watch):
        with self.connected() as stream:
            stream.settimeout(0.1)
            try:
                stream.connect(self.name)
                for copy in copies:
                    watch.check()
                    self.one(stream, copy, watch)
            except ConnectionError as error:
                raise BufferGone(f"the owner has ended ({error})") from None

    def one(self, stream, copy, watch):
        secret, key = copy.section[:16], int.from_bytes(copy.section[16:24], "little")
        push(stream, ASK.pack(copy.write, secret, key, copy.offset, copy.nbytes), watch)
        for piece in copy.memory if copy.write else ():
            push(stream, piece, watch)
        answer = take(stream, 1, watch)
        if answer == GONE:
            raise BufferGone("the buffer was dropped by its owner")
        if answer != OK:
            raise HandleRefused("the owner refuses")
        for piece in () if copy.write else copy.memory:
            fill(stream, piece, watch)


class UnixTransport(Transport):
    """The transport."""

    def __init__(self):
        self.lock = threading.Lock()
        self.server = None

    def offer(self, export):
        with self.lock:
            self.server = self.server or self.make_server()
        secret = self.secret()
        self.server.exports[export.key] = export, secret
        return secret + export.key.to_bytes(8, "little") + self.server.name

    def secret(self):
        return secrets.token_bytes(16)

    def make_server(self):
        return Server()

    def withdraw(self, export):
        with self.server.lock:
            del self.server.exports[export.key]

    def reach(self, section, owner, watch):
        return Connected(section[24:])


class HoardingPeer(Connected):
    """Keeps the memory of transfers."""

    def __init__(self, name):
        super().__init__(name)
        self.kept = []

    def run(self, copies, watch):
        super().run(copies, watch)
        self.kept.extend(memoryview(piece)[:] for copy in copies for piece in copy.memory)


class HoardingTransport(UnixTransport):
    def reach(self, section, owner, watch):
        return HoardingPeer(section[24:])


class RaisingPeer(Connected):
    """Has a defect."""

    def run(self, copies, watch):
        return self.missing(copies)


class RaisingTransport(UnixTransport):
    def reach(self, section, owner, watch):
        return RaisingPeer(section[24:])


class VanishingPeer(Connected):
    """Its device goes away: in the middle of the second transfer."""

    transfers = 0

    def run(self, copies, watch):
        VanishingPeer.transfers += 1
        if VanishingPeer.transfers == 1:
            return super().run(copies, watch)
        for piece in copies[0].memory:
            if not copies[0].write:
                piece[: piece.nbytes // 2] = b"?" * (piece.nbytes // 2)
        raise OSError(errno.ENODEV, "the device is gone")


class VanishingTransport(UnixTransport):
    def reach(self, section, owner, watch):
        if VanishingPeer.transfers > 1:
            raise OSError(errno.ENODEV, "the device is gone")
        return VanishingPeer(section[24:])


PROBED = []


def probe():
    PROBED.append(1)
    if KIND == "slow":
        time.sleep(2.0)
    # What vanishes is to be better than tcp.
    one_sided = KIND == "vanishing"
    return ProbeResult.yes(
        TransportCapabilities(copies=True, atomics=False, remote=False, one_sided=one_sided)
    )


def probe_without():
    return ProbeResult.no("there is no such device", remedy="buy one")


def create_wrong():
    return object()


KINDS = {
    "good": UnixTransport,
    "hoarding": HoardingTransport,
    "raising": RaisingTransport,
    "vanishing": VanishingTransport,
    "wrong": create_wrong,
}
KIND = os.environ.get("MESH_TEST_UNIX", "good")
if KIND == "heavy":
    import torch  # noqa: F401
UNIX = TransportPlugin(
    name="unix",
    api_version=2 if KIND == "newer" else 1,
    create=KINDS.get(KIND, UnixTransport),
    probe=probe_without if KIND == "absent" else probe,
    summary="a Unix socket",
)


@hookimpl
def mesh_register_transports():
    yield UNIX
