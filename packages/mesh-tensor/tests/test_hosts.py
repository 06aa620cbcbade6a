"""Tensors of processes on several hosts: what goes between them, over which addresses, and what does not without being allowed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import Actor, DeviceMeshError, MeshError, ProcMesh, endpoint, set_fault_handler
from mesh_core.extensions import current_proc
from mesh_core.testing import LocalCluster

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    Mesh,
    _network,
    allow_clear_text,
    distribute,
    fetch,
    rank_tensor,
    reduce,
    remote,
    share,
    to_mesh,
)
from mesh_tensor._network import Where, meeting_places  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(180)]


class Model(Actor):
    @endpoint
    def shift(self, x: Any) -> Any:
        return x + 1


@pytest.fixture(scope="module")
def cluster(runtime: None) -> Iterator[LocalCluster]:
    """Two hosts of this machine."""
    with LocalCluster(hosts=2) as cluster:
        yield cluster


@pytest.fixture
def spread(cluster: LocalCluster, preload: list[str]) -> Iterator[ProcMesh]:
    """A process on each, which may end."""
    # Addresses of each host's own, as on a real network.
    script = current_proc().host
    allow_clear_text({"host-0": "127.0.0.2", "host-1": "127.0.0.3", script: "127.0.0.4"})
    set_fault_handler(lambda failure: None)
    with cluster.attach().spawn_procs(per_host={"gpus": 1}, preload=preload, name="spread") as procs:
        yield procs
    set_fault_handler(None)


def values(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor).values()]


@pytest.mark.full
def test_between_hosts(spread: ProcMesh) -> None:
    x = rank_tensor(spread, "hosts") + torch.tensor(1.0)
    first, second = spread.slice(hosts=0), spread.slice(hosts=1)
    assert values(to_mesh(share(torch.ones(100_000), first), second).sum()) == [100_000.0]
    models = spread.spawn("models", Model)
    assert values(remote(models.shift)(x)) == [2.0, 3.0]
    assert values(reduce(x, "hosts")) == [3.0, 3.0]
    with Mesh((2, 1), ("hosts", "gpus"), spread) as mesh:
        whole = distribute(torch.arange(6.0).view(3, 2), mesh, ["hosts", None])
        assert torch.equal(fetch(whole.sum(0)), torch.tensor([6.0, 9.0]))

    (pid,) = second.pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match="hosts=1"):  # noqa: PT012 - whichever of them is the first to know
        while True:
            fetch(reduce(x, "hosts"))
    spread.respawn().get(timeout=150)
    again = rank_tensor(spread, "hosts") + 5
    assert values(reduce(again, "hosts")) == [11, 11]
    assert values(to_mesh(share(torch.ones(3), first), second)) == [[1.0, 1.0, 1.0]]


# Where they meet.

HERE = Where("here", ("10.0.0.1",))
THERE = Where("there", ("10.0.0.2", "192.168.0.2"))


@pytest.fixture
def on_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_network, "here", lambda: HERE)


@pytest.mark.usefixtures("on_here")
def test_nothing_goes_between_machines_that_was_not_allowed() -> None:
    """NET-1."""
    with pytest.raises(MeshError, match=r"(?s)several machines, here, there.*allow_clear_text\(\)"):
        meeting_places("the mesh", [HERE, THERE], None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_here")
def test_on_one_machine_all_meet_where_nobody_else_comes() -> None:
    local = Where("other", ())
    for allowed in (None, {}):
        assert meeting_places("", [HERE, local], allowed) == ("127.0.0.1", ["127.0.0.1"] * 2)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_here")
def test_addresses_are_the_likeliest_or_those_that_are_given() -> None:
    places = meeting_places("", [HERE, THERE], {})  # type: ignore[arg-type]
    assert places == ("10.0.0.1", ["10.0.0.1", "10.0.0.2"])
    places = meeting_places("", [HERE, THERE], {"there": "192.168.0.2"})  # type: ignore[arg-type]
    assert places == ("10.0.0.1", ["10.0.0.1", "192.168.0.2"])
    with pytest.raises(MeshError, match="not known at which address other hosts reach 'unknown'"):
        meeting_places("", [HERE, THERE, Where("unknown", ())], {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a number"):
        allow_clear_text({"there": "eth0"})
