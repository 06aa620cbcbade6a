"""Transports that do one thing wrong each: what the conformance suite is there to find. Installed by the tests.

The names of those that are installed are in the environment: a handle has no room for all of them.
"""

import ctypes
import os
import secrets
import socket
import threading
from collections import deque
from contextlib import nullcontext, suppress
from typing import ClassVar

from unix_transport import Connected, Server, UnixTransport, probe

from mesh_core.plugins import hookimpl
from mesh_rdma import BufferGone, TransportPlugin
from mesh_rdma.testing import TransportConformance


def transport(peer=Connected, server=Server, **methods):
    """A Unix socket, but for that."""

    def reach(self, section, owner, watch):
        made = peer(section[24:])
        made.transport = self
        return made

    def make_server(self):
        return server()

    return type("Careless", (UnixTransport,), {"reach": reach, "make_server": make_server, **methods})


class Believing(Server):
    """Does not check where the bytes are."""

    checks_bounds = False


class Forgetting(UnixTransport):
    """Goes on to offer what was withdrawn."""

    def withdraw(self, export):
        pass


class Clinging(UnixTransport):
    """Keeps the memory of what was withdrawn."""

    kept = ()

    def withdraw(self, export):
        super().withdraw(export)
        self.kept = (*self.kept, export)


class Guessable(UnixTransport):
    """Has one secret for all that it offers, so that who may read one buffer reads all."""

    def secret(self):
        return self.server.__dict__.setdefault("one", secrets.token_bytes(16))


class Lingering(Connected):
    """Goes on with a transfer that was given up, at the address that it has noted, once there is another."""

    late: ClassVar = deque()

    def run(self, copies, watch):
        while self.late:
            ctypes.memset(self.late.pop(), 7, 1)
        places = [address(copy.memory[0]) for copy in copies if not copy.write]
        try:
            super().run(copies, watch)
        except BufferGone:
            raise
        except Exception:
            self.late.extend(places)
            raise


def address(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Patient(Connected):
    """Does not look whether anybody still wants it."""

    class Never:
        left = None

        def check(self):
            pass

    def run(self, copies, watch):
        super().run(copies, self.Never())


class Deaf(Connected):
    """Waits for the deadline where the owner has ended."""

    def run(self, copies, watch):
        while True:
            with suppress(BufferGone):
                return super().run(copies, watch)
            watch.check()
            threading.Event().wait(0.05)


class Hasty(Server):
    """Says that a write is done, and then does it."""

    def work(self, write, secret, key, window, data):
        if not write:
            return super().work(write, secret, key, window, data)
        later = threading.Timer(0.05, super().work, (write, secret, key, window, data))
        later.start()
        return b"\0", b""


class Mixing(Connected):
    """Is confused by two threads at once."""

    lock = threading.Lock()

    def run(self, copies, watch):
        alone = self.lock.acquire(blocking=False)
        super().run(copies, watch)
        if alone:
            self.lock.release()
        else:
            for copy in copies:
                for piece in copy.memory:
                    piece[:1] = bytes([piece[0] ^ 1])


class Rounding(Connected):
    """Ends at a multiple of 64 bytes, of large copies."""

    def run(self, copies, watch):
        super().run(copies, watch)
        for copy in copies:
            if not copy.write and copy.nbytes > 10_000 and copy.nbytes % 64 > 32 and copy.offset % 2:
                copy.memory[-1][-1:] = b"\0"


class Spilling(Server):
    """Writes one byte more."""

    def work(self, write, secret, key, window, data):
        offset, length = window
        if write and length > 9 and offset % 2:
            data, window = data + b"\1", (offset, length + 1)
        return super().work(write, secret, key, window, data)


class Named(Server):
    """Is found by its process's number, and shows no secret."""

    def __init__(self):
        super().__init__()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = b"\0mesh-named-%d" % os.getpid()
        self.socket.bind(self.name)
        self.socket.listen()
        threading.Thread(target=self.listen, daemon=True).start()

    def work(self, write, secret, key, window, data):
        secret = self.exports.get(key, (None, b""))[1]
        return super().work(write, secret, key, window, data)


class Brittle(Server):
    """Stops to listen at the first error."""

    def listen(self):
        with suppress(OSError):
            while True:
                stream, _ = self.socket.accept()
                # The kernel has had a descriptor at hand for this one. Is there one for the next?
                os.close(os.dup(stream.fileno()))
                threading.Thread(target=self.serve, args=(stream,), daemon=True).start()


class Leaking(Connected):
    """Closes nothing, and does not say what is missing."""

    open: ClassVar = deque()

    def connected(self):
        try:
            self.open.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError:
            raise RuntimeError("it does not work") from None
        return nullcontext(self.open[-1])


KINDS = {
    "believing": transport(server=Believing),
    "forgetting": Forgetting,
    "clinging": Clinging,
    "guessable": Guessable,
    "lingering": transport(Lingering),
    "patient": transport(Patient),
    "deaf": transport(Deaf),
    "hasty": transport(server=Hasty),
    "mixing": transport(Mixing),
    "rounding": transport(Rounding),
    "spilling": transport(server=Spilling),
    "named": transport(server=Named),
    "brittle": transport(server=Brittle),
    "leaking": transport(Leaking),
}

HERE = [name for name in os.environ.get("MESH_TEST_CARELESS", "").split(",") if name]
PLUGINS = {
    name: TransportPlugin(name=name, api_version=1, create=KINDS[name], probe=probe, summary="careless")
    for name in HERE
}
SUITES = {
    f"Test{name.title()}": type(
        f"Test{name.title()}",
        (TransportConformance,),
        {"plugin": plugin, "distribution": "mesh-unix", "patience": 2},
    )
    for name, plugin in PLUGINS.items()
}


@hookimpl
def mesh_register_transports():
    yield from PLUGINS.values()
