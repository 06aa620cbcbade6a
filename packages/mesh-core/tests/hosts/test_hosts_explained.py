"""HRS-1: failures on hosts whose ends somebody can explain."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import Actor, HostMesh, MeshFailure, SupervisionError, endpoint, set_fault_handler
from mesh_core.extensions import HostReasons
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]

WITHIN = 30.0
LONG = 1000.0


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def told() -> Iterator[queue.SimpleQueue[MeshFailure]]:
    """What the script's fault handler is told."""
    failures: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    before = set_fault_handler(failures.put)
    yield failures
    set_fault_handler(before)


@pytest.fixture
def hosts() -> Iterator[tuple[LocalCluster, HostMesh]]:
    with LocalCluster(hosts=2) as cluster, cluster.attach() as attached:
        yield cluster, attached


def begun(hosts: HostMesh) -> Any:
    workers: Any = hosts.spawn_procs({"gpus": 2}).spawn("workers", Worker)
    workers.pid.call().get(timeout=WITHIN)
    return workers


def error_of(workers: Any, host: int) -> SupervisionError:
    with pytest.raises(SupervisionError) as caught:
        workers.slice(hosts=host, gpus=0).pid.call_one().get(timeout=WITHIN)
    return caught.value


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_words_about_a_host_are_in_its_failures(
    early: bool, hosts: tuple[LocalCluster, HostMesh], told: queue.SimpleQueue[MeshFailure]
) -> None:
    cluster, attached = hosts
    workers = begun(attached)
    # So long that this test ends only if the words are what is waited for.
    reasons = HostReasons(attached, patience=LONG)
    if early:
        reasons.tell(1, "it is at its time limit")
    cluster.kill(1)
    if not early:
        until = time.monotonic() + WITHIN
        while not workers.failed() and time.monotonic() < until:
            pass
        assert told.empty(), "its owner waits for the words"
        reasons.tell(0, "this is about another host")
        assert told.empty()
        reasons.tell(1, "it is at its time limit")
    failures = [told.get(timeout=WITHIN) for _ in range(2)]
    assert {failure.rank for failure in failures} == {2, 3}
    for failure in failures:
        assert failure.reason.endswith("; it is at its time limit") and "is dead" in failure.reason
        assert failure.host_fate
    assert "it is at its time limit" in str(error_of(workers, 1))
    assert told.empty(), "each is told once"


def test_a_call_waits_for_the_words_and_for_no_longer(
    hosts: tuple[LocalCluster, HostMesh], told: queue.SimpleQueue[MeshFailure]
) -> None:
    cluster, attached = hosts
    workers = begun(attached)
    HostReasons(attached, patience=0.05)
    cluster.kill(1)
    assert "its host is dead" in str(error_of(workers, 1)), "nobody has said anything"
    assert {told.get(timeout=WITHIN).rank for _ in range(2)} == {2, 3}


def test_what_no_host_has_caused_is_told_at_once(
    hosts: tuple[LocalCluster, HostMesh], told: queue.SimpleQueue[MeshFailure]
) -> None:
    _, attached = hosts
    workers = begun(attached)
    reasons = HostReasons(attached, patience=LONG)
    reasons.tell(1, "it is at its time limit")
    os.kill(workers.slice(hosts=1, gpus=1).pid.call_one().get(timeout=WITHIN), signal.SIGKILL)
    failure = told.get(timeout=WITHIN)
    assert (failure.rank, failure.reason) == (3, "")
    # SIGTERM comes from schedulers too.
    os.kill(workers.slice(hosts=1, gpus=0).pid.call_one().get(timeout=WITHIN), signal.SIGTERM)
    failure = told.get(timeout=WITHIN)
    assert (failure.rank, failure.signal, failure.reason) == (2, signal.SIGTERM, "it is at its time limit")


def test_the_end_of_the_script_does_not_wait(script: Callable[..., Any]) -> None:
    done = script(
        """
        import os, sys
        from mesh_core import Actor, endpoint, this_host
        from mesh_core.extensions import HostReasons
        from mesh_core.testing import LocalCluster

        class Worker(Actor):
            @endpoint
            def pid(self):
                return os.getpid()

        with LocalCluster(hosts=1) as cluster:
            hosts = cluster.attach()
            workers = hosts.spawn_procs().spawn("workers", Worker)
            workers.pid.call().get(timeout=60)
            HostReasons(hosts, patience=1000.0)
            cluster.kill(0)
            while not workers.failed():
                pass
            # By now the script's owner would have heard of it.
            this_host().spawn_procs().initialized.get(timeout=60)
            print("ends", flush=True)
        """,
    )
    assert done.line() == "ends"
    _, errors = done.finish()
    assert "nobody handled this failure" in errors and "its host is dead" in errors
