"""Several hosts for the tests of a module, and a wire between them that can be held up."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import random
import socket
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
from core_processes import Watch, family

from mesh_core import HostMesh, ProcMesh, shutdown, this_proc
from mesh_core.testing import LocalCluster

HOSTS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three hosts, shared by the tests of a module; they serve this process's next job as well."""
    gc.collect()
    with LocalCluster(hosts=HOSTS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hosts(cluster: LocalCluster) -> Iterator[HostMesh]:
    """The same, attached and warm: what every later test finds running has been started."""
    hosts = cluster.attach()
    with hosts.spawn_procs() as procs:
        procs.initialized.get(timeout=60)
    this_proc()
    yield hosts
    shutdown()


@pytest.fixture(scope="module")
def runtime(hosts: HostMesh) -> None:
    """It runs."""


@pytest.fixture(scope="module")
def procs(hosts: HostMesh) -> Iterator[ProcMesh]:
    """Four processes on two of the hosts, in place of those that tests share on one."""
    with hosts.slice(hosts=slice(1, None)).spawn_procs(per_host={"gpus": 2}, name="shared") as procs:
        procs.initialized.get()
        yield procs


def over_hosts(module: ModuleType, *, but: Collection[str] = ()) -> dict[str, Any]:
    """A module's own fixtures, and those of its tests that use the shared processes: what holds on one host holds over
    several. The names in ``but`` are left out.
    """
    fixtures = {
        name: value
        for name, value in vars(module).items()
        if type(value).__name__ == "FixtureFunctionDefinition"
    }
    shared = {"procs", "echo"}
    for name, value in fixtures.items():
        if shared & set(inspect.signature(inspect.unwrap(value)).parameters):
            shared.add(name)
    tests = {
        f"test_{module.__name__.removeprefix('test_')}__{name.removeprefix('test_')}": value
        for name, value in vars(module).items()
        if name.startswith("test_")
        and inspect.isfunction(value)
        and name not in but
        and shared & set(inspect.signature(value).parameters)
    }
    return {**fixtures, **tests}


def free_address() -> str:
    """Return one that nobody has, with a port that the kernel gives to nobody who wants any."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(given // 2, given)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"


def end_job(cluster: LocalCluster) -> None:
    """Shut down, and wait until the hosts have nothing left of the job."""
    there = Watch(pid for agent in cluster.pids for pid in family(agent))
    shutdown()
    assert there.wait() == [], "processes of a job that has ended"


class Wire:
    """Passes on what comes for another address, but for the connections that it holds up for the moment."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        """Where to connect instead."""
        self._changed = threading.Condition()
        self._held: set[int] = set()
        self._mute = False
        self._held_from: float = math.inf
        self.connections = 0
        """How many there have been."""
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
            except OSError:
                return
            with self._changed:
                number = self.connections
                self.connections += 1
                self._sockets += [near, far]
                self._changed.notify_all()
            for source, sink, back in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pump, args=(number, source, sink, back), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _holds(self, number: int, back: bool) -> bool:
        return (number in self._held or number >= self._held_from) and (back or not self._mute)

    def _pump(self, number: int, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._changed:
                    self._changed.wait_for(lambda: not self._holds(number, back))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def wait_for(self, count: int, limit: float = 30.0) -> int:
        """Wait until so many connections have been made; the number of the last."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.connections >= count, limit)
            return self.connections - 1

    @contextlib.contextmanager
    def hold(self, *numbers: int, later: bool = False, mute: bool = False) -> Iterator[None]:
        """Nothing passes on these connections meanwhile; with ``later``, on none that is made from now on.

        With ``mute`` what goes to the other address still does.
        """
        with self._changed:
            self._mute = mute
            self._held.update(numbers)
            if later:
                self._held_from = self.connections
        try:
            yield
        finally:
            with self._changed:
                self._held.difference_update(numbers)
                self._held_from = math.inf
                self._changed.notify_all()

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            self._held.clear()
            self._held_from = math.inf
            self._changed.notify_all()
        self._threads[0].join()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for each in self._sockets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
