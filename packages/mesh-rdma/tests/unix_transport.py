"""A transport as another package would have it: a thread of the owner answers over a Unix socket. Installed by the tests."""

import os
import secrets
import socket
import struct
import threading
from contextlib import closing, suppress

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_rdma import (
    BufferGone,
    HandleRefused,
    Peer,
    RDMATimeout,
    Transport,
    TransportCapabilities,
    TransportPlugin,
)

ASK = struct.Struct("<?16sQQQ")  # write, secret, key, offset, length
OK, GONE, REFUSED = b"\0", b"\1", b"\2"


def take(stream, length):
    data = bytearray(length)
    fill(stream, memoryview(data))
    return bytes(data)


def fill(stream, view):
    while view.nbytes:
        count = stream.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        view = view[count:]


class Server:
    """Answers those who ask for what is offered."""

    checks_bounds = True

    def __init__(self):
        self.secret = secrets.token_bytes(16)
        self.exports = {}
        self.lock = threading.Lock()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = b"\0mesh-unix-" + secrets.token_hex(8).encode()
        self.socket.bind(self.name)
        self.socket.listen()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            stream, _ = self.socket.accept()
            threading.Thread(target=self.serve, args=(stream,), daemon=True).start()

    def serve(self, stream):
        with stream, suppress(OSError):
            while True:
                write, secret, key, offset, length = ASK.unpack(take(stream, ASK.size))
                data = take(stream, length) if write and length <= 1 << 30 else b""
                # One at a time: what is withdrawn is not in use.
                with self.lock:
                    answer, payload = self.work(write, secret, self.exports.get(key), (offset, length), data)
                stream.sendall(answer + payload)

    def work(self, write, secret, export, window, data):
        offset, length = window
        if not secrets.compare_digest(secret, self.secret):
            return REFUSED, b""
        if export is None:
            return GONE, b""
        if self.checks_bounds and (offset + length > export.nbytes or (write and not export.writable)):
            return REFUSED, b""
        # Slow, and short: through a copy of all of it.
        if write:
            at = 0
            for piece in export.memory:
                for here in range(piece.nbytes):
                    if offset <= at < offset + length:
                        piece[here] = data[at - offset]
                    at += 1
            return OK, b""
        return OK, b"".join(export.memory)[offset : offset + length].ljust(length, b"?")


class Connected(Peer):
    """An owner, asked over a new connection each time."""

    def __init__(self, name):
        self.name = name

    def run(self, copies, watch):
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as stream:
            stream.settimeout(watch.left)
            try:
                stream.connect(self.name)
                for copy in copies:
                    watch.check()
                    self.one(stream, copy)
            except TimeoutError:
                raise RDMATimeout("the owner did not answer in time") from None
            except ConnectionError as error:
                raise BufferGone(f"the owner has ended ({error})") from None

    def one(self, stream, copy):
        secret, key = copy.section[:16], int.from_bytes(copy.section[16:24], "little")
        stream.sendall(ASK.pack(copy.write, secret, key, copy.offset, copy.nbytes))
        if copy.write:
            stream.sendall(b"".join(copy.memory))
        answer = take(stream, 1)
        if answer == GONE:
            raise BufferGone("the buffer was dropped by its owner")
        if answer != OK:
            raise HandleRefused("the owner refuses")
        if not copy.write:
            for piece in copy.memory:
                fill(stream, piece)


class UnixTransport(Transport):
    """The transport."""

    def __init__(self):
        self.lock = threading.Lock()
        self.server = None

    def offer(self, export):
        with self.lock:
            self.server = self.server or self.make_server()
        self.server.exports[export.key] = export
        return self.server.secret + export.key.to_bytes(8, "little") + self.server.name

    def make_server(self):
        return Server()

    def withdraw(self, export):
        with self.server.lock:
            del self.server.exports[export.key]

    def reach(self, section, owner, watch):
        return Connected(section[24:])


class CarelessServer(Server):
    """Believes what handles say."""

    checks_bounds = False


class CarelessTransport(UnixTransport):
    """Reads what was dropped, and more than is offered."""

    def make_server(self):
        return CarelessServer()

    def withdraw(self, export):
        pass


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


def probe():
    return ProbeResult.yes(TransportCapabilities(copies=True, atomics=False, remote=False, one_sided=False))


def probe_without():
    return ProbeResult.no("there is no such device", remedy="buy one")


def create_wrong():
    return object()


KINDS = {
    "good": UnixTransport,
    "careless": CarelessTransport,
    "hoarding": HoardingTransport,
    "wrong": create_wrong,
}
KIND = os.environ.get("MESH_TEST_UNIX", "good")
UNIX = TransportPlugin(
    name="unix",
    api_version=1,
    create=KINDS.get(KIND, UnixTransport),
    probe=probe_without if KIND == "absent" else probe,
    summary="a Unix socket",
)


@hookimpl
def mesh_register_transports():
    yield UNIX
