"""What a user is told when hosts cannot be attached: who, why, and what next."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_hosts import free_address

import mesh_core
from mesh_core import (
    Actor,
    AuthenticationError,
    Credentials,
    MeshError,
    SpawnError,
    SupervisionError,
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
    hosts = attach_to_workers(workers, credentials=credentials, timeout=0)
    error = hosts.initialized.exception(timeout=30)
    assert error is not None
    return error


def test_an_address_where_nobody_listens(cluster: LocalCluster) -> None:
    address = free_address()
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
    error = refusal(cluster.addresses, folder)
    assert isinstance(error, AuthenticationError)
    assert "holds no credentials of a controller; give the folder that" in str(error)


def test_invalid_addresses_and_credentials(cluster: LocalCluster) -> None:
    with pytest.raises(
        TypeError, match=r"a list of addresses, got 'tcp://b7:7411'. Write \['tcp://b7:7411'\] for one"
    ):
        attach_to_workers("tcp://b7:7411", credentials=cluster.credentials)
    with pytest.raises(TypeError, match=r"the folder that `mesh credentials new` has made.*, got None"):
        attach_to_workers(cluster.addresses, credentials=None)  # type: ignore[arg-type]


def test_another_jobs_credentials_for_hosts_that_dial(cluster: LocalCluster, tmp_path: Path) -> None:
    attach_to_workers(cluster.addresses, credentials=cluster.credentials).initialized.get(timeout=30)
    other = Credentials.new(tmp_path / "other").path
    hosts = attach_to_workers(listen="127.0.0.1:0", expect=1, credentials=other)
    with pytest.raises(
        AuthenticationError, match=r"all hosts of one job must use the same ones. .*`shutdown\(\)`"
    ):
        hosts.initialized.get(timeout=30)


def test_a_folder_is_the_same_one_by_any_path(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cluster.credentials)
    refusal(["127.0.0.1:1"], tmp_path / "link")
    attach_to_workers(cluster.addresses, credentials=cluster.credentials).initialized.get(timeout=30)


def test_hosts_dial_one_address_for_several_attachments(
    cluster: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    address = free_address()
    first = attach_to_workers(listen=address, expect=1, credentials=cluster.credentials)
    second = attach_to_workers(listen=address, expect=1, credentials=cluster.credentials)
    agents = []
    try:
        for hosts, name in ((first, "d1"), (second, "d2")):
            # Somebody who only checks whether the address can be reached is no host, and not worth a line.
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", int(address.partition(":")[2]))).close()
                    break
            command = ["--credentials", f"{cluster.credentials}/host", "--dial", address, "--name", name]
            agents.append(subprocess.Popen([sys.executable, "-m", "mesh_core.cli", "host", *command]))
            hosts.initialized.get(timeout=30)
            assert hosts.names == [name]
        assert first.join(second).spawn_procs().sizes == {"hosts": 2}
        assert "was refused" not in capfd.readouterr().err
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()


def test_a_spawn_before_hosts_have_dialed_spoils_nothing_but_itself(cluster: LocalCluster) -> None:
    address = free_address()
    hosts = attach_to_workers(listen=address, expect=1, credentials=cluster.credentials)
    early = hosts.spawn_procs().initialized.exception(timeout=30)
    assert isinstance(early, SpawnError)
    assert "died on host 1: host 1 has not dialed this script yet; wait for the `initialized`" in str(early)
    command = ["--credentials", f"{cluster.credentials}/host", "--dial", address, "--name", "d1"]
    with subprocess.Popen([sys.executable, "-m", "mesh_core.cli", "host", *command]) as agent:
        try:
            hosts.initialized.get(timeout=30)
            assert hosts.names == ["d1"]
            hosts.spawn_procs().initialized.get(timeout=60)
        finally:
            agent.terminate()


def test_an_invalid_address_to_dial(cluster: LocalCluster) -> None:
    command = [sys.executable, "-m", "mesh_core.cli", "host", "--dial", "b7"]
    run = subprocess.run(
        [*command, "--credentials", f"{cluster.credentials}/host"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1 and '"b7" is not an address' in run.stderr
    assert "offers itself" not in run.stderr


def test_a_program_that_a_host_cannot_start_is_named(cluster: LocalCluster) -> None:
    hosts = attach_to_workers(cluster.addresses, credentials=cluster.credentials)
    for asked, said in (
        (
            {"start": "exec", "python": "/no/python"},
            "python='/no/python' is not a program that can be run on this host",
        ),
        ({"proc_bind": [[9999]]}, "proc_bind names the CPUs [9999], and this host has ["),
    ):
        procs = hosts.spawn_procs(supervise=lambda _: True, **asked)  # type: ignore[arg-type]
        error = procs.initialized.exception(timeout=60)
        assert isinstance(error, SpawnError) and said in str(error)


def test_misuse_of_a_cluster_leaves_it_as_it_was(cluster: LocalCluster) -> None:
    with pytest.raises(MeshError, match="is started already"):
        cluster.start()
    with pytest.raises(IndexError, match="number must be from 0 to 0, got 1"):
        cluster.kill(1)
    with pytest.raises(MeshError, match="is not started"):
        LocalCluster(hosts=1).log(0)
    attach_to_workers(cluster.addresses, credentials=cluster.credentials).initialized.get(timeout=30)


def test_an_agent_outside_of_the_main_thread_is_refused(cluster: LocalCluster) -> None:
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            mesh_core.run_worker_loop_forever("127.0.0.1:0", credentials=f"{cluster.credentials}/host")
        except MeshError as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert len(failed) == 1 and "must run in the main thread" in str(failed[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_an_agent_in_order(tmp_path: Path, number: signal.Signals) -> None:
    credentials = Credentials.new(tmp_path / "job")
    command = [sys.executable, "-m", "mesh_core.cli", "host", "--listen", "127.0.0.1:0", "--credentials"]
    with subprocess.Popen(
        ["env", "--default-signal=HUP", *command, str(credentials.host_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdout is not None and agent.stderr is not None
        hosts = attach_to_workers([agent.stdout.readline().strip()], credentials=credentials)
        hosts.initialized.get(timeout=30)
        agent.send_signal(number)
        assert agent.wait(30) == 0
        assert f"ends by {number.name}" in agent.stderr.read()
    error = hosts.spawn_procs(supervise=lambda _: True).initialized.exception(timeout=30)
    assert isinstance(error, SpawnError) and "its agent was stopped" in str(error)


@pytest.mark.full
def test_missing_credentials_are_reported_once(tmp_path: Path) -> None:
    script = """
import ctypes, os, pathlib, sys
from mesh_core.testing import LocalCluster
with LocalCluster(hosts=1) as cluster:
    hosts = cluster.attach()
    hosts.initialized.get(timeout=30)
    folder = pathlib.Path(cluster.credentials)
    (folder / "controller.key").rename(sys.argv[1])
    libc = ctypes.CDLL(None)
    looks = libc.inotify_init1(os.O_CLOEXEC)
    IN_OPEN = 0x20
    libc.inotify_add_watch(looks, bytes(folder / "ca.pem"), IN_OPEN)
    # Each look opens what is still there once, and one event has 16 bytes.
    for _ in range(3):
        os.read(looks, 16)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "key")], capture_output=True, text=True, timeout=60
    )
    assert (run.stdout + run.stderr).count("failed to read the credentials again") == 1


class Late(Actor):
    @endpoint
    def ready(self) -> bool:
        return True


def test_a_host_without_descriptors_says_so_to_whoever_calls(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    command = (
        f"ulimit -n 40; exec {sys.executable} -m mesh_core.cli host --listen 127.0.0.1:0 --credentials $0"
    )
    with subprocess.Popen(
        ["bash", "-c", command, str(credentials.host_path)], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        try:
            hosts = attach_to_workers([agent.stdout.readline().strip()], credentials=credentials)
            procs = hosts.spawn_procs({"gpus": 8}, supervise=lambda _: True)
            # At once: the calls are made as soon as the spawn has failed, or before.
            error = procs.spawn("late", Late, supervise=lambda _: True).ready.call().exception(timeout=30)
            assert isinstance(error, SpawnError | SupervisionError)
            assert "ulimit -n" in str(error)
        finally:
            agent.terminate()


def test_certificates_that_have_run_out(cluster: LocalCluster, tmp_path: Path) -> None:
    own = Credentials.new(tmp_path / "short", lifetime=0.001)
    deadline = time.monotonic() + 20
    # Certificates expire at full seconds.
    while own.certificates[0].remaining.total_seconds() > -1.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    error = refusal(cluster.addresses, own.path)
    assert isinstance(error, AuthenticationError)
    assert "has expired: `mesh credentials renew` makes another" in str(error)


def test_one_address_twice(cluster: LocalCluster) -> None:
    with pytest.raises(ValueError, match="more than once; attach each host once"):
        attach_to_workers(cluster.addresses * 2, credentials=cluster.credentials)


def test_one_host_by_two_addresses(cluster: LocalCluster) -> None:
    (address,) = cluster.addresses
    error = refusal([address, address.replace("127.0.0.1", "localhost")], cluster.credentials)
    assert "of this job already, and cannot be host" in str(error)


@pytest.mark.parametrize("address", ["http://x:1", "b7", "b7:65536", ""])
def test_a_malformed_address_is_refused_where_it_is_given(cluster: LocalCluster, address: str) -> None:
    with pytest.raises(ValueError, match="is not an address: write"):
        attach_to_workers([*cluster.addresses, address], credentials=cluster.credentials)
    with pytest.raises(ValueError, match="is not an address: write"):
        attach_to_workers(listen=address, expect=1, credentials=cluster.credentials)


def test_a_missing_folder_is_reported_as_missing(cluster: LocalCluster, tmp_path: Path) -> None:
    hosts = attach_to_workers(cluster.addresses, credentials=tmp_path / "trane")
    with pytest.raises(AuthenticationError, match=r"folder .*trane does not exist; give the folder that"):
        hosts.initialized.get(timeout=30)
    with pytest.raises(AuthenticationError, match="does not exist"):
        hosts.spawn_procs().spawn("late", Late).ready.call().get(timeout=30)


def test_an_invalid_time_to_wait(cluster: LocalCluster) -> None:
    for timeout in (-1e-300, "5", float("nan")):
        with pytest.raises(ValueError, match="timeout= must be a number of seconds"):
            attach_to_workers(cluster.addresses, credentials=cluster.credentials, timeout=timeout)  # type: ignore[arg-type]
    for hold in (-1e-300, "5", float("nan"), float("inf")):
        with pytest.raises(ValueError, match="hold= must be a number of seconds"):
            attach_to_workers(cluster.addresses, credentials=cluster.credentials, hold=hold)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give listen= and how many to expect="):
        attach_to_workers(listen="127.0.0.1:0", expect=0, credentials=cluster.credentials)


def test_the_first_call_says_that_a_host_could_not_be_attached(cluster: LocalCluster, tmp_path: Path) -> None:
    address = free_address()
    late = attach_to_workers([address], credentials=cluster.credentials, timeout=0).spawn_procs()
    mesh = late.spawn("late", Late)
    with pytest.raises(SpawnError, match=r"was never started: .*no `mesh host` listens there") as nobody:
        mesh.ready.call().get(timeout=30)
    assert "is dead" not in str(nobody.value)
    with pytest.raises(SpawnError, match="no `mesh host` listens there"):
        mesh.ready.call().get(timeout=30)
    shutdown()
    other = Credentials.new(tmp_path / "other").path
    foreign = attach_to_workers(cluster.addresses, credentials=other).spawn_procs()
    with pytest.raises(AuthenticationError, match="its certificate is another job's") as refused:
        foreign.spawn("late", Late).ready.call().get(timeout=30)
    assert "mesh credentials show" in refused.value.remedy
    with pytest.raises(AuthenticationError, match="its certificate is another job's"):
        foreign.initialized.get(timeout=30)


class Neighbour(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, other: Neighbour) -> int:
        return other.pid.call_one().get(timeout=30)


def test_hosts_that_dialed_out_reach_one_another(cluster: LocalCluster) -> None:
    address = free_address()
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
            pass  # the script has released its port
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


@pytest.mark.full
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
        script.send_signal(signal.SIGSTOP)  # its connections stay open and silent
        silent = time.monotonic()
        while cluster.log(0).count("could not be reached") == before:
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
