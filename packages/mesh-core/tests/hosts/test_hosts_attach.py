"""attach_to_workers never waits: what is slow or never arrives is reported to those who wait for the hosts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_hosts import cluster, end_job  # noqa: F401 - a fixture
from hosts_samples import SOON, Member

from mesh_core import (
    AuthenticationError,
    MeshError,
    Promise,
    SpawnError,
    SupervisionError,
    attach_to_workers,
    shutdown,
)
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def job(cluster: LocalCluster) -> Iterator[None]:  # noqa: F811
    """A job of its own for each test."""
    shutdown()
    yield
    end_job(cluster)


def test_a_future_of_an_address_is_not_waited_for(cluster: LocalCluster) -> None:  # noqa: F811
    late = concurrent.futures.Future[str]()
    hosts = attach_to_workers(
        [cluster.addresses[0], late, cluster.addresses[2]], credentials=cluster.credentials
    )
    # What is known already can be used meanwhile, and spawns on the rest are allowed.
    first: Any = hosts.slice(hosts=0).spawn_procs().spawn("members", Member)
    assert first.echo.call_one(1).get(timeout=SOON) == (0, 1)
    members: Any = hosts.spawn_procs().spawn("members", Member)
    told = members.echo.call(2)
    assert not hosts.initialized.done() and not told.done()
    late.set_result(cluster.addresses[1])
    assert told.get(timeout=SOON).values() == [(n, 2) for n in range(3)]
    hosts.initialized.get(timeout=SOON)
    assert hosts.names == ["host-0", "host-1", "host-2"] and hosts.addresses == cluster.addresses


def test_hosts_are_joined_before_their_addresses_are_known(cluster: LocalCluster) -> None:  # noqa: F811
    addresses = [concurrent.futures.Future[str]() for _ in range(2)]
    first, second = [attach_to_workers([each], credentials=cluster.credentials) for each in addresses]
    both = first.join(second)
    procs = both.spawn_procs({"gpus": 1})
    for address, known in zip(addresses, cluster.addresses, strict=False):
        address.set_result(known)
    procs.initialized.get(timeout=SOON)
    assert both.names == [*first.names, *second.names]
    assert both.slice(hosts=1).names == second.names


def test_a_tree_of_hosts_waits_for_the_addresses_of_those_below(cluster: LocalCluster) -> None:  # noqa: F811
    """ATT-1."""
    promises = [Promise[str]() for _ in cluster.addresses]
    hosts = attach_to_workers([each.future for each in promises], credentials=cluster.credentials, fan_out=1)
    for promise, address in reversed(list(zip(promises, cluster.addresses, strict=True))):
        assert not hosts.initialized.done()
        promise.set_result(address)
    hosts.initialized.get(timeout=SOON)
    assert hosts.names == ["host-0", "host-1", "host-2"]


def test_a_relay_without_an_address_is_bypassed(cluster: LocalCluster) -> None:  # noqa: F811
    relay = Promise[str]()
    hosts = attach_to_workers(
        [relay.future, *cluster.addresses[1:]], credentials=cluster.credentials, fan_out=1
    )
    relay.set_exception(LookupError("no node is free"))
    error = hosts.initialized.exception(timeout=SOON)
    assert isinstance(error, SpawnError)
    assert "1 of 3 hosts cannot be used" in str(error) and "LookupError: no node is free" in str(error)
    members: Any = hosts.slice(hosts=slice(1, 3)).spawn_procs().spawn("members", Member)
    assert members.echo.call(3).get(timeout=SOON).values() == [(0, 3), (1, 3)]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (7, "a future must give an address such as 'tcp://b7:7411', and gave 7"),
        ("b7", "is not an address: write"),
        ("KNOWN", "is already the address of host 0 of this mesh"),
    ],
)
def test_a_future_of_something_else_fails_its_host_alone(
    cluster: LocalCluster,  # noqa: F811
    result: Any,
    said: str,
) -> None:
    wrong = concurrent.futures.Future[Any]()
    wrong.set_result(cluster.addresses[0] if result == "KNOWN" else result)
    hosts = attach_to_workers([cluster.addresses[0], wrong], credentials=cluster.credentials)
    error = hosts.initialized.exception(timeout=SOON)
    assert isinstance(error, SpawnError) and "1 of 2 hosts cannot be used" in str(error)
    assert said in str(error)
    hosts.slice(hosts=0).spawn_procs().initialized.get(timeout=SOON)


def test_addresses_of_this_very_loop(cluster: LocalCluster) -> None:  # noqa: F811
    async def find(address: str) -> str:
        await asyncio.sleep(0)
        return address

    async def work() -> list[Any]:
        hosts = attach_to_workers([find(each) for each in cluster.addresses], credentials=cluster.credentials)
        await hosts
        procs = hosts.spawn_procs()
        return list((await procs.spawn("members", Member).echo.call(1)).values())

    assert asyncio.run(work()) == [(n, 1) for n in range(3)]


def test_a_shutdown_ends_attempts_to_connect(cluster: LocalCluster) -> None:  # noqa: F811
    """To a machine that accepts a connection and says nothing; the attempt alone would take longer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        attach_to_workers([address], credentials=cluster.credentials)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)
            shutdown()
            connection.settimeout(3)
            while connection.recv(4096):
                pass


def test_a_shutdown_while_an_address_is_waited_for(cluster: LocalCluster) -> None:  # noqa: F811
    never = Promise[str]()
    hosts = attach_to_workers([never.future], credentials=cluster.credentials)
    (follower,) = (each for each in threading.enumerate() if each.name == "mesh-addresses")
    ready = hosts.initialized
    shutdown()
    follower.join(SOON)
    assert not follower.is_alive()
    assert isinstance(ready.exception(timeout=SOON), MeshError)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Path]:
    """A file that takes forever to open."""
    pipe = tmp_path / "stuck"
    os.mkfifo(pipe)
    yield pipe
    # Those who wait for a writer get one.
    with contextlib.suppress(OSError):
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def test_credentials_on_a_disk_that_hangs(
    cluster: LocalCluster,  # noqa: F811
    stuck: Path,
) -> None:
    folder = stuck.parent / "job"
    shutil.copytree(cluster.credentials, folder)
    (folder / "ca.pem").unlink()
    (folder / "ca.pem").symlink_to(stuck)
    hosts = attach_to_workers(cluster.addresses, credentials=folder)
    procs = hosts.spawn_procs()
    assert not hosts.initialized.done() and not procs.initialized.done()
    assert hosts.names == cluster.addresses
    # Those who finally open the file find nothing in it.
    with stuck.open("w"):
        pass
    error = hosts.initialized.exception(timeout=SOON)
    assert isinstance(error, AuthenticationError) and "3 of 3 hosts cannot be used" in str(error)
    assert str(error).count("ca.pem") == 1, "it is said once for all hosts"
    assert isinstance(procs.initialized.exception(timeout=SOON), AuthenticationError)


@pytest.mark.full
def test_a_host_that_accepts_and_says_nothing(cluster: LocalCluster) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        hosts = attach_to_workers([address], credentials=cluster.credentials, timeout=3, heartbeat_timeout=1)
        with server.accept()[0]:
            assert not hosts.initialized.done()
            error = hosts.initialized.exception(timeout=SOON)
    assert isinstance(error, SpawnError) and "waiting for its handshake" in str(error)


NAMED = """
import sys, threading
from mesh_core import attach_to_workers, shutdown
if sys.argv[2] == "dialed":
    hosts = attach_to_workers(["b7.test:7411"], credentials=sys.argv[1])
else:
    hosts = attach_to_workers(listen="b7.test:0", expect=1, credentials=sys.argv[1])
print("attached", hosts.initialized.done(), flush=True)
sys.stdin.readline()
shutdown()
print("ended", flush=True)
"""


@pytest.mark.parametrize("side", ["dialed", "listening"])
def test_a_name_whose_lookup_hangs(
    cluster: LocalCluster,  # noqa: F811
    stuck: Path,
    side: str,
) -> None:
    # The system reads this file first, and never returns.
    hosts_file = f"mount --bind {stuck} /etc/hosts"
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*unshare, hosts_file], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    script = [sys.executable, "-c", NAMED, cluster.credentials, side]
    with subprocess.Popen(
        [*unshare, hosts_file + ' && exec "$@"', "sh", *script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline() == "attached False\n"
        assert running.communicate("\n", timeout=SOON)[0] == "ended\n"


def test_an_address_that_is_in_use_fails_the_hosts_that_were_to_dial_it(cluster: LocalCluster) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        hosts = attach_to_workers(listen=address, expect=2, credentials=cluster.credentials)
        error = hosts.initialized.exception(timeout=SOON)
    assert isinstance(error, SpawnError) and "2 of 2 hosts cannot be used" in str(error)
    assert f"{address} is in use" in str(error)
    assert isinstance(hosts.spawn_procs().initialized.exception(timeout=SOON), SpawnError)


@pytest.mark.full
def test_each_attachment_has_a_window_of_its_own(cluster: LocalCluster) -> None:  # noqa: F811
    patient = attach_to_workers(
        [cluster.addresses[0]], credentials=cluster.credentials, heartbeat_timeout=120
    )
    hasty = attach_to_workers([cluster.addresses[1]], credentials=cluster.credentials, heartbeat_timeout=3)
    members: list[Any] = [each.spawn_procs().spawn("members", Member) for each in (patient, hasty)]
    # They talk to each other, and on that connection the impatient one accepts the longer time.
    for mine, other in (members, members[::-1]):
        mine.meet.call_one(other).get(timeout=SOON)
        assert mine.ask.call_one(5).get(timeout=SOON) == [(0, 5)]
    for number in (0, 1):
        cluster.kill(number, signal.SIGSTOP)
    try:
        error = members[1].echo.call_one(1).exception(timeout=SOON)
        assert isinstance(error, SupervisionError) and "nothing was heard of it for 3 s" in str(error)
        told = members[0].echo.call_one(2)
        assert not told.done()
    finally:
        for number in (0, 1):
            cluster.kill(number, signal.SIGCONT)
    assert told.get(timeout=SOON) == (0, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heartbeat_timeout": 0}, "attach_to_workers(): heartbeat_timeout must be between 0.05"),
        ({"fan_out": 0}, "attach_to_workers(): fan_out must be between 1"),
        ({"fan_out": "many"}, "attach_to_workers(): fan_out must be a whole number of hosts"),
    ],
)
def test_options_of_an_attachment_are_checked(
    cluster: LocalCluster,  # noqa: F811
    options: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        attach_to_workers(cluster.addresses, credentials=cluster.credentials, **options)
