"""TCP ports of workers, reached from elsewhere."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from core_processes import Watch
from core_sandboxes import wait_until

from mesh_core import Actor, PortForwarder, ProcMesh, ValueMesh, current_rank, endpoint, this_host, this_proc
from mesh_core._blocks.forwarding import MOST

pytestmark = pytest.mark.usefixtures("runtime")

SOON = 30.0
LARGE = bytes(range(256)) * (32 * 1024)


class Service(Actor):
    """Answers each connection with its rank, then with what it gets, and at its end with how much that was."""

    def __init__(self) -> None:
        self.rank = b"%d:" % current_rank().rank
        self.server = socket.create_server(("127.0.0.1", 0))
        self.ended: list[str] = []
        self.end = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        how, size = "orderly", 0
        with connection:
            try:
                connection.sendall(self.rank)
                while data := connection.recv(1 << 16):
                    size += len(data)
                    connection.sendall(data)
                connection.sendall(b"%d" % size)
            except OSError:
                how = "reset"
        with self.end:
            self.ended.append(how)
            self.end.notify_all()

    @endpoint
    def port(self) -> int:
        return int(self.server.getsockname()[1])

    @endpoint
    def first_end(self) -> str:
        with self.end:
            assert self.end.wait_for(lambda: self.ended, SOON)
            return self.ended[0]

    async def __cleanup__(self, _error: BaseException | None) -> None:
        self.server.close()


@pytest.fixture(scope="module", autouse=True)
def warm(runtime: None) -> None:
    """The event loops of this process's coroutine actors run, and stay."""
    ports: Any = this_proc().spawn("ports", PortForwarder)
    ports.forward.call_one(this_proc(), 1).get(timeout=SOON)
    ports.stop().get(timeout=SOON)


@pytest.fixture
def ports() -> Iterator[Any]:
    ports = this_proc().spawn("ports", PortForwarder)
    yield ports
    ports.stop().get(timeout=SOON)


@pytest.fixture
def services(procs: ProcMesh) -> Iterator[Any]:
    services = procs.spawn("services", Service)
    yield services
    services.stop().get(timeout=SOON)


def forwarded(ports: Any, procs: ProcMesh, services: Any, *where: Any) -> ValueMesh[str]:
    numbers = services.port.call().get(timeout=SOON).values()
    addresses: ValueMesh[str] = ports.forward.call_one(procs, lambda place: numbers[place.rank], *where).get(
        timeout=SOON
    )
    return addresses


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SOON)


def read(connection: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (data := connection.recv(1 << 20)):
        got += data
    return bytes(got)


def test_each_rank_is_reached_at_an_address_of_its_own(procs: ProcMesh, ports: Any, services: Any) -> None:
    addresses = forwarded(ports, procs, services)
    assert addresses.sizes == procs.sizes
    for place, address in addresses:
        with connect(address) as connection:
            assert read(connection, 2) == b"%d:" % place.rank


def test_both_directions_carry_everything_and_end_by_themselves(
    procs: ProcMesh, ports: Any, services: Any
) -> None:
    address = forwarded(ports, procs, services).values()[1]
    with connect(address) as connection:

        def write() -> None:
            connection.sendall(LARGE)
            connection.shutdown(socket.SHUT_WR)

        writing = threading.Thread(target=write)
        writing.start()
        expected = b"1:" + LARGE + b"%d" % len(LARGE)
        assert read(connection, len(expected) + 1) == expected
        writing.join()
    assert services.slice(hosts=0, gpus=1).first_end.call_one().get(timeout=SOON) == "orderly"


def test_a_service_notices_that_its_client_was_reset(procs: ProcMesh, ports: Any, services: Any) -> None:
    address = forwarded(ports, procs, services).values()[1]
    connection = connect(address)
    read(connection, 2)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert services.slice(hosts=0, gpus=1).first_end.call_one().get(timeout=SOON) == "reset"


def test_processes_listen_for_those_at_the_same_place(procs: ProcMesh, ports: Any, services: Any) -> None:
    with this_host().spawn_procs(dict(procs.sizes), name="elsewhere") as elsewhere:
        addresses = forwarded(ports, procs, services, elsewhere, lambda place: "127.0.0.1:0")
        for place, address in addresses:
            with connect(address) as connection:
                assert read(connection, 2) == b"%d:" % place.rank
        elsewhere.stop().get(timeout=SOON)
        with pytest.raises(ConnectionRefusedError):
            connect(address)


def test_a_death_resets_connections_and_leaves_other_ranks_alone(ports: Any) -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        services = procs.spawn("services", Service, supervise=lambda failure: True)
        addresses = forwarded(ports, procs, services)
        with connect(addresses.item(gpus=0)) as living, connect(addresses.item(gpus=1)) as dying:
            assert (read(living, 2), read(dying, 2)) == (b"0:", b"1:")
            pid = procs.pids[1]
            assert pid is not None
            ended = Watch([pid])
            os.kill(pid, signal.SIGKILL)
            assert not ended.wait()
            with pytest.raises(ConnectionResetError):
                read(dying, 1)
            living.sendall(b"on")
            assert read(living, 2) == b"on"
        with connect(addresses.item(gpus=1)) as late, pytest.raises(ConnectionResetError):
            read(late, 1)


def test_a_port_at_which_nobody_listens_is_named(
    procs: ProcMesh, ports: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused = server.getsockname()[1]
    address = ports.forward.call_one(procs.slice(gpus=0), unused).get(timeout=SOON).values()[0]
    with caplog.at_level(logging.WARNING, "mesh"):
        with connect(address) as connection, pytest.raises(ConnectionResetError):
            read(connection, 1)
        assert f"cannot connect to port {unused} of " in caplog.text


def test_a_forward_ends_with_its_forwarder(procs: ProcMesh, services: Any) -> None:
    ports = this_proc().spawn("ports", PortForwarder)
    address = forwarded(ports, procs, services).values()[0]
    with connect(address) as connection:
        read(connection, 2)
        ports.stop().get(timeout=SOON)
        with pytest.raises(ConnectionResetError):
            read(connection, 1)
    with pytest.raises(ConnectionRefusedError):
        connect(address)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "dst_port must be a port number from 1 to 65535, got 0"),
        (("6006",), "dst_port must be a port number from 1 to 65535, got '6006'"),
        ((6006, None, "6006"), "src_address must be an address such as '127.0.0.1:6006', got '6006'"),
        (
            (6006, None, "here:70000"),
            "the port of src_address must be a port number from 0 to 65535, got 70000",
        ),
        ((lambda place: -1,), "dst_port must be a port number from 1 to 65535, got -1"),
    ],
)
def test_wrong_addresses_are_refused(procs: ProcMesh, ports: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ports.forward.call_one(procs, *arguments).get(timeout=SOON)


def test_meshes_must_fit(procs: ProcMesh, ports: Any, services: Any) -> None:
    with pytest.raises(ValueError, match="src_proc_mesh must have the shape of dst_proc_mesh"):
        ports.forward.call_one(procs, 6006, procs.slice(gpus=0)).get(timeout=SOON)
    with pytest.raises(TypeError, match="pass the processes on which the actors were spawned"):
        ports.forward.call_one(services, 6006).get(timeout=SOON)


def test_however_many_connect_a_port_takes_so_many_descriptors(
    procs: ProcMesh, services: Any, ports: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """FWD-1: every user of the machine can connect."""
    address = forwarded(ports, procs, services).values()[0]
    clients = [connect(address) for _ in range(MOST)]
    assert {read(each, 2) for each in clients} == {b"0:"}
    with caplog.at_level(logging.WARNING, "mesh"):
        for _ in range(2):
            with connect(address) as one_more, suppress(ConnectionResetError):
                assert read(one_more, 2) == b""
    assert caplog.text.count("which is the limit: further ones are closed") == 1
    clients.pop().close()

    def admitted() -> bool:
        with connect(address) as again, suppress(ConnectionResetError):
            return read(again, 2) == b"0:"
        return False

    wait_until(admitted)
    for each in clients:
        each.close()
