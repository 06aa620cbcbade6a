"""Memory of one host that others read and write: encrypted, by members of the job only, and without waiting for the dead."""

import socket
import struct
import subprocess

import pytest
from agents import Site
from cluster import wait_until
from relay import Relay

pytest.importorskip("mesh_rdma", reason="mesh-rdma is not installed here")

pytestmark = [pytest.mark.network, pytest.mark.slow]

MIB = 1 << 20
MBIT = 1_000_000
CONTROLLER = -1
STRANGER = """
import sys
from mesh_rdma import RDMABuffer, TransportUnavailable
make, _ = RDMABuffer(bytearray(1)).__reduce__()
try:
    make(bytes.fromhex(sys.argv[1])).read_into(bytearray(8)).get(timeout=30)
except TransportUnavailable as error:
    print(error)
"""


def addresses(handle):
    """Where in a handle the addresses of the owner's host are, and which (IPv4 only)."""
    data = bytes.fromhex(handle)
    at = data.index(b"\x04\x0a\x4d")
    return at, socket.inet_ntoa(data[at + 1 : at + 5]), *struct.unpack("<H", data[at + 5 : at + 7])


@pytest.fixture
def site(network, tmp_path):
    """Agents on two of three machines."""
    site = Site(network(3), tmp_path, window=6)
    site.start(1, 2)
    return site


def test_memory_of_other_hosts_is_read_and_written_where_packets_are_lost(site):
    site.network.wire.lose(site.hosts, site.hosts, 0.01)
    job = site.job(0, program="memory.py")
    for owner, user in ((0, 1), (CONTROLLER, 0), (1, CONTROLLER)):
        offered = job.ask("offer", host=owner, name="data", size=9 * MIB + 7)
        said = job.ask("act", host=user, work="explain", name="data")
        assert said["candidates"] == ["tcp"] and said["backend"] == "tcp", said
        assert "another pid namespace" in said["passed"]["shm"], said
        assert job.ask("act", host=user, work="read", name="data") == {"is": offered["is"]}
        written = job.ask("act", host=user, work="write", name="data")
        assert written["is"] != offered["is"]
        assert job.ask("ask", host=owner, work="look", name="data") == written["is"]
        first = job.ask("act", host=user, work="count", name="data")
        assert job.ask("act", host=user, work="count", name="data") == {"was": first["was"] + 1}
        job.ask("ask", host=owner, work="forget", name="data")
        gone = job.ask("act", host=user, work="read", handle=offered["handle"])
        assert gone["error"] == "BufferGone" and "dropped by its owner" in gone["text"], gone
    assert job.end() == 0


def test_a_long_way_is_as_good_as_a_short_one(site):
    job = site.job(0, program="memory.py")
    offered = job.ask("offer", host=0, name="data", size=6 * MIB)
    at, address, port = addresses(offered["handle"])
    with Relay((address, port), host=site.hosts[2], seed=3) as relay:
        relay.impair(delay=0.02, jitter=0.005)
        handle = bytearray.fromhex(offered["handle"])
        handle[at + 1 : at + 7] = socket.inet_aton(relay.address[0]) + struct.pack("<H", relay.address[1])
        assert job.ask("act", host=1, work="read", handle=handle.hex()) == {"is": offered["is"]}
        written = job.ask("act", host=1, work="write", handle=handle.hex())
        assert job.ask("ask", host=0, work="look", name="data") == written["is"]
        # Connections that the network ends in the middle are made again.
        relay.impair(rate=3e6)
        job.ask("ask", host=1, work="clear")
        reading = job.begin("act", host=1, work="read", handle=handle.hex())
        wait_until(lambda: job.ask("ask", host=1, work="begun"), "nothing is read")
        assert relay.reset() > 0
        relay.heal()
        assert reading.result() == {"is": written["is"]}
        assert relay.stats()["up"] > 6 * MIB
    assert job.end() == 0


def test_a_death_in_the_middle_is_reported_to_the_other_end(network, tmp_path):
    site = Site(network(4), tmp_path, window=6)
    site.start(1, 2, 3)
    site.network.wire.limit(site.hosts[1], up=100 * MBIT)
    job = site.job(0, program="memory.py")
    job.ask("offer", host=0, name="first", size=64 * MIB)
    job.begin("act", host=1, work="read", name="first")
    wait_until(lambda: job.ask("ask", host=1, work="begun"), "nothing is read")
    job.ask("ask", host=0, work="forget", name="first")
    job.ask("kill", host=1)
    wait_until(lambda: job.ask("ask", host=0, work="is_freed", name="first"), "its memory is kept", 20)
    offered = job.ask("offer", host=0, name="second", size=64 * MIB)
    reading = job.begin("act", host=2, work="read", name="second")
    wait_until(lambda: job.ask("ask", host=2, work="begun"), "nothing is read")
    job.ask("kill", host=0)
    outcome = reading.result()
    assert outcome["error"] == "BufferGone" and "has ended" in outcome["text"], outcome
    # Who never reached it hears the same.
    outcome = job.ask("act", host=CONTROLLER, work="read", handle=offered["handle"])
    assert outcome["error"] == "BufferGone", outcome
    assert job.end() == 0


def test_a_cut_cable_is_reported_at_both_ends(network, tmp_path):
    site = Site(network(3), tmp_path, window=2)
    site.start(1, 2)
    site.network.wire.limit(site.hosts[1], up=100 * MBIT)
    site.network.wire.limit(site.hosts[2], up=100 * MBIT)
    job = site.job(0, program="memory.py")
    job.ask("offer", host=0, name="data", size=64 * MIB)
    job.ask("offer", host=0, name="written", size=64 * MIB)
    reading = job.begin("act", host=1, work="read", name="data")
    writing = job.begin("act", host=1, work="write", name="written")
    wait_until(lambda: job.ask("ask", host=1, work="begun"), "nothing is read")
    wait_until(lambda: job.ask("ask", host=0, work="is_changed", name="written"), "nothing is written")
    job.ask("ask", host=0, work="forget", name="data")
    # Between the two alone: the controller hears of each what becomes of it.
    site.network.wire.partition([site.hosts[1]], [site.hosts[2]])
    for outcome in (reading.result(), writing.result()):
        assert outcome["error"] == "TransportUnavailable", outcome
        assert "the host or the network is down" in outcome["text"], outcome
    wait_until(lambda: job.ask("ask", host=0, work="is_freed", name="data"), "its memory is kept", 20)
    site.network.heal()
    assert job.end() == 0


def test_strangers_and_members_of_other_jobs_read_nothing(network, tmp_path):
    (tmp_path / "other").mkdir()
    machines = network(4)
    site, other = Site(machines, tmp_path, window=6), Site(machines, tmp_path / "other", window=6)
    site.start(1)
    other.start(3)
    job = site.job(0, program="memory.py")
    theirs = other.job(2, program="memory.py")
    offered = job.ask("offer", host=0, name="data", size=8)
    handle = offered["handle"]
    for host in (CONTROLLER, 0):
        outcome = theirs.ask("act", host=host, work="read", handle=handle)
        assert outcome["error"] == "TransportUnavailable", outcome
        assert "another job" in outcome["text"] or "job is another" in outcome["text"], outcome
        outcome = theirs.ask("act", host=host, work="write", handle=handle)
        assert outcome["error"] == "TransportUnavailable", outcome
    alone = machines.hosts[2].python("-c", STRANGER, handle, stdout=subprocess.PIPE)
    said, _ = alone.communicate(timeout=30)
    assert b"belongs to no job of several hosts" in said, said
    # Nor does it help to be in the same network, and to speak as its loopback interface wants it.
    _, address, port = addresses(handle)
    for greeting in (b"MXT\x01" + bytes(32), b"GET / HTTP/1.1\r\n\r\n", bytes(20_000)):
        with machines.hosts[2].connect((address, port)) as stream:
            stream.sendall(greeting)
            heard = b""
            try:
                while more := stream.recv(4096):
                    heard += more
            except ConnectionResetError:
                pass
            assert len(heard) < 64, heard
    assert job.ask("ask", host=0, work="look", name="data") == offered["is"]
    # Nor do many who say nothing keep members out, as one that has not been there before.
    silent = [machines.hosts[2].connect((address, port)) for _ in range(100)]
    assert job.ask("act", host=CONTROLLER, work="read", name="data") == {"is": offered["is"]}
    for stream in silent:
        stream.close()
    assert theirs.end() == 0
    assert job.end() == 0


def test_a_revoked_member_is_refused(network, tmp_path):
    site = Site(network(4), tmp_path, window=6)
    site.start(1, 2)
    job = site.job(0, program="memory.py")
    offered = job.ask("offer", host=0, name="data", size=8)
    assert job.ask("act", host=1, work="read", name="data") == {"is": offered["is"]}
    # The job of the revoked host's owner goes on elsewhere, with the handle that it had.
    stolen = tmp_path / "stolen.py"
    stolen.write_text(STOLEN)
    thief = site.hosts[3].python(
        stolen, tmp_path / "host2", handle_file(tmp_path, offered["handle"]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert thief.stdout.readline() == "read\n"
    site.credentials.revoke(tmp_path / "host2" / "host.pem")
    # What it has is not the list that was handed on to the owner's host, whose folder has the old one, too.
    said, _ = thief.communicate("", timeout=30)
    assert "revoked" in said, said
    assert job.ask("act", host=CONTROLLER, work="read", name="data") == {"is": offered["is"]}
    assert job.end() == 0


def handle_file(folder, handle):
    """A handle that a program is told in a file."""
    (folder / "handle").write_text(handle)
    return folder / "handle"


STOLEN = """
import sys
from pathlib import Path
from ipaddress import ip_address
from datetime import timedelta
from mesh_rdma import RDMAError
from mesh_rdma._buffer import _of_bytes
from mesh_rdma._here import engine

engine().join(Path(sys.argv[1]), None, [ip_address("127.0.0.1")], timedelta(seconds=2))
buffer = _of_bytes(bytes.fromhex(Path(sys.argv[2]).read_text()))
buffer.read_into(bytearray(8)).get(timeout=30)
print("read", flush=True)
try:
    while True:
        buffer.read_into(bytearray(8)).get(timeout=30)
except RDMAError as error:
    print(error, flush=True)
"""
