"""The flood of garbage is what it says: to a plain server of TLS, and to one that is badly made."""

import asyncio
import collections
import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import garbage
import pytest
from garbage import KINDS, client_hello, flood

# Python forgets to close the socket that it wraps, where the other side has reset it before.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")]

PATIENCE = 0.3


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate that signs itself, with its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
               "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=host", "-days", "1"]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl here to make a certificate with")
    return certificate, key


class Server:
    """A TLS server on threads of its own, which answers what good clients say and waits for nobody long."""

    def __init__(self, certificate, *, mutual, patience=PATIENCE):
        self.patience = patience
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.load_cert_chain(*certificate)
        if mutual:
            self.context.load_verify_locations(certificate[0])
            self.context.verify_mode = ssl.CERT_REQUIRED
        self.received = 0
        self.handshakes = 0

    def __enter__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = self.listener.getsockname()
        self.lock = threading.Lock()
        self.accepting = threading.Thread(target=self._accept)
        self.accepting.start()
        return self

    def __exit__(self, *_):
        # Wakes the thread; closing alone does not.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.accepting.join()
        self.listener.close()

    def _accept(self):
        threads = []
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=self._serve, args=(link,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, link):
        with link, contextlib.suppress(OSError):
            link.settimeout(self.patience)
            with self.context.wrap_socket(link, server_side=True, do_handshake_on_connect=False) as secure:
                secure.do_handshake()
                secure.settimeout(10 * PATIENCE)
                with self.lock:
                    self.handshakes += 1
                while data := secure.recv(1 << 16):
                    with self.lock:
                        self.received += len(data)
                    secure.sendall(data[:1])


def test_a_flood_is_the_same_for_the_same_seed_and_of_all_kinds():
    def sent(seed):
        found = collections.defaultdict(list)

        class Recorder(garbage.Throw):
            async def send(self, *pieces, **how):
                found["send"].append((b"".join(pieces), tuple(how)))
                return "closed", b""

            async def shake_hands(self, *pieces):
                found["shake"].append(b"".join(pieces))
                return "closed", b""

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(garbage, "Throw", Recorder)
            report = flood(("127.0.0.1", 1), connections=300, seed=seed)
        return dict(found), report.outcomes

    first, again, other = sent(1), sent(1), sent(2)
    assert first == again
    assert first[0]["send"] != other[0]["send"]
    assert set(first[1]) == {kind.__name__.replace("_", " ") for kind in KINDS}


def test_the_handshake_it_begins_is_a_good_one(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    incoming.write(client_hello(garbage.random.Random(3)))
    # It wants the second flight: with the first it found nothing wrong.
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    answer = outgoing.read()
    assert answer[0] == 22 and garbage.alert(answer) is None


def test_a_server_that_wants_certificates_lets_no_garbage_in(certificate):
    with Server(certificate, mutual=True) as server:
        report = flood(server.address, connections=1000, seed=7, patience=PATIENCE * 10)
    assert report.connections == 1000
    text = str(report)
    assert server.received == 0, text
    assert server.handshakes == 0
    # The server had enough of each, long before the flood had.
    assert report.total("left") == 0, text
    for kind in ("oversized record", "other protocol", "random bytes", "half hello", "nothing"):
        assert "answered" not in report.outcomes[kind], text
    for kind in ("immediate close", "immediate reset", "hello then reset"):
        assert set(report.outcomes[kind]) <= {"gone", "reset"}, text
    # It says what it wants, unless its word is overtaken by the reset that unread bytes cause.
    refusals = report.outcomes["no certificate"]
    assert set(refusals) <= {"alert TLSV13_ALERT_CERTIFICATE_REQUIRED", "closed", "reset"}, text
    # Who begins a good handshake is answered.
    assert report.outcomes["hello then silence"]["answered"] > 0, text
    assert report.received > 0


def test_with_a_certificate_the_garbage_is_behind_the_handshake(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate[0])
    context.load_cert_chain(*certificate)
    context.check_hostname = False
    with Server(certificate, mutual=True, patience=20) as server:
        report = flood(
            server.address, connections=20, seed=7, patience=20, context=context,
            kinds=[garbage.no_certificate, garbage.oversized_frame],
        )  # fmt: skip
    assert server.handshakes == 20
    assert server.received > 1 << 20
    assert report.total("answered") == 20, str(report)


def test_it_tells_when_connections_are_kept_open_or_refused():
    async def keep(kinds):
        async def hold(reader, writer):
            held.append(writer)
            with contextlib.suppress(OSError):
                await reader.read(-1)

        held = []
        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        report = await garbage.flood_async(address, connections=10, patience=PATIENCE, kinds=kinds)
        server.close()
        for writer in held:
            writer.close()
        await server.wait_closed()
        return address, report

    address, report = asyncio.run(keep([garbage.nothing, garbage.oversized_record, garbage.no_certificate]))
    assert report.total("left") == 10, str(report)
    assert report.longest >= PATIENCE
    assert flood(address, connections=10, kinds=[garbage.nothing]).total("refused") == 10


def test_it_is_a_command(certificate):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with Server(certificate, mutual=True) as server:
        address = f"127.0.0.1:{server.address[1]}"
        command = [sys.executable, garbage.__file__, address, "--connections", "30", "--seed", "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("30 connections, ")
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert Path(garbage.__file__).name == "garbage.py"
