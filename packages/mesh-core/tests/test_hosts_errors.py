"""What a user is told when hosts cannot be attached: who, why, and what next."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mesh_core
from mesh_core import (
    Actor,
    AuthenticationError,
    Credentials,
    SpawnError,
    attach_to_workers,
    configured,
    endpoint,
    shutdown,
)
from mesh_core.testing import LocalCluster


@pytest.fixture(autouse=True)
def no_job_left() -> Iterator[None]:
    yield
    shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=1) as cluster:
        yield cluster


def refusal(workers: list[str], credentials: str | Path) -> BaseException:
    error = attach_to_workers(workers, credentials=credentials).initialized.exception(timeout=30)
    assert error is not None
    return error


def test_an_address_where_nobody_listens(cluster: LocalCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    error = refusal([*cluster.addresses, address], cluster.credentials)
    assert type(error) is SpawnError
    assert str(error) == (
        f"1 of 2 hosts cannot be used: {address} refused the connection: no `mesh host` listens there, or it has ended"
    )


def test_credentials_of_another_job(cluster: LocalCluster, tmp_path: Path) -> None:
    error = refusal(cluster.addresses, Credentials.new(tmp_path / "other").path)
    assert isinstance(error, AuthenticationError)
    assert str(error).endswith(
        f"{cluster.addresses[0]} is not authenticated: its certificate is another job's"
    )
    assert "mesh credentials show" in error.remedy
    deadline = time.monotonic() + 20
    while "did not accept this host" not in cluster.log(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cluster.log(0).count("did not accept this host") == 1, "nobody dials what was found dead"


def test_a_hosts_credentials_drive_no_job(cluster: LocalCluster) -> None:
    folder = Path(cluster.credentials) / "host"
    with pytest.raises(
        AuthenticationError, match="holds no credentials of a controller; give the folder that"
    ):
        attach_to_workers(cluster.addresses, credentials=folder)


def test_certificates_that_have_run_out(cluster: LocalCluster, tmp_path: Path) -> None:
    own = Credentials.new(tmp_path / "short", lifetime=0.001)
    deadline = time.monotonic() + 20
    # Certificates end with a second.
    while own.certificates[0].remaining.total_seconds() > -1.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(AuthenticationError, match=r"has expired: `mesh credentials renew` makes another"):
        attach_to_workers(cluster.addresses, credentials=own)


def test_one_address_twice(cluster: LocalCluster) -> None:
    with pytest.raises(ValueError, match="more than once; a host is attached once"):
        attach_to_workers(cluster.addresses * 2, credentials=cluster.credentials)


def test_one_host_by_two_calls(cluster: LocalCluster) -> None:
    attach_to_workers(cluster.addresses, credentials=cluster.credentials).initialized.get(timeout=30)
    error = refusal(cluster.addresses, cluster.credentials)
    assert str(error).endswith("refuses: it is host 1 of this job already, and cannot be host 2 too")


class Neighbour(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, other: Neighbour) -> int:
        return other.pid.call_one().get(timeout=30)


def test_hosts_that_dialed_out_reach_one_another(cluster: LocalCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    code = (
        "import sys; from mesh_core import run_worker_loop_forever; "
        "run_worker_loop_forever(dial=sys.argv[1], credentials=sys.argv[2])"
    )
    command = [sys.executable, "-c", code, address, str(Path(cluster.credentials) / "host")]
    agents = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        hosts = attach_to_workers(credentials=cluster.credentials, listen=address, expect=2)
        hosts.initialized.get(timeout=60)
        procs = hosts.spawn_procs()
        all_of = procs.spawn("neighbours", Neighbour)
        pids = all_of.pid.call().get(timeout=60).values()
        assert all_of.slice(hosts=0).ask.call_one(all_of.slice(hosts=1)).get(timeout=30) == pids[1]
        shutdown()
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass  # the script has let its port go
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(30)


SILENT = """
import sys
from mesh_core import Actor, attach_to_workers, configure, endpoint
configure(heartbeat_timeout=float(sys.argv[1]))
hosts = attach_to_workers(sys.argv[3:], credentials=sys.argv[2])
hosts.spawn_procs().initialized.get(timeout=30)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_host_ends_its_work_when_it_has_not_heard_for_one_window_and_not_for_two(
    cluster: LocalCluster,
) -> None:
    window = 4.0
    command = [sys.executable, "-c", SILENT, str(window), cluster.credentials, *cluster.addresses]
    script = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == "up\n"
        before = cluster.log(0).count("could not be reached")
        script.send_signal(signal.SIGSTOP)  # its connections stay open, and say nothing
        silent = time.monotonic()
        while cluster.log(0).count("could not be reached") == before:
            assert time.monotonic() - silent < 1.7 * window
            time.sleep(0.01)
        assert time.monotonic() - silent > 0.8 * window
    finally:
        script.kill()
        script.communicate()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    own = Credentials.new(tmp_path / "job")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(mesh_core.MeshError, match=f"{address} is in use: another `mesh host`"):
            mesh_core.run_worker_loop_forever(address, credentials=own)


def test_a_name_that_nobody_knows(cluster: LocalCluster) -> None:
    with configured(heartbeat_timeout=0.5):
        error = refusal(["no-such-host.invalid:1"], cluster.credentials)
    assert "no-such-host.invalid:1 cannot be looked up" in str(error)
