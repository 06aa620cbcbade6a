"""What meshes have in common: geometry, iteration, pickling, display."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
from core_samples import Echo, Where

from mesh_core import (
    Actor,
    ActorMesh,
    Channel,
    Extent,
    HostMesh,
    ProcMesh,
    ValueMesh,
    context,
    endpoint,
    send,
    this_host,
    this_proc,
)

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(params=["procs", "actors", "values"])
def mesh(request: pytest.FixtureRequest, procs: ProcMesh, echo: Any) -> Any:
    """Each kind of mesh, of the same shape."""
    if request.param == "procs":
        return procs
    return echo if request.param == "actors" else echo.call.call(os.getpid).get()


def identify(mesh: Any) -> list[int]:
    """Return which processes a mesh is about, whatever its kind."""
    if isinstance(mesh, ProcMesh):
        return [pid or 0 for pid in mesh.pids]
    values = mesh if isinstance(mesh, ValueMesh) else mesh.call.call(os.getpid).get()
    return list(values.values())


def test_sizes(mesh: Any) -> None:
    assert len(mesh) == 4
    assert mesh.sizes == {"hosts": 2, "gpus": 2}
    assert mesh.extent == Extent.of(hosts=2, gpus=2)
    assert (mesh.size(), mesh.size("gpus"), mesh.size(["hosts", "gpus"])) == (4, 2, 4)


def test_slice(mesh: Any, procs: ProcMesh) -> None:
    pids = procs.pids
    assert identify(mesh.slice(hosts=1)) == pids[2:]
    assert identify(mesh.slice(gpus=0)) == pids[::2]
    assert identify(mesh.slice(gpus=slice(1, 2), hosts=slice(0, 2))) == pids[1::2]
    assert mesh.slice(gpus=slice(1, 2)).sizes == {"hosts": 2, "gpus": 1}
    assert identify(mesh.slice(hosts=-1, gpus=-1)) == pids[3:]
    assert identify(mesh.slice(hosts=1).slice(gpus=1)) == pids[3:]
    assert type(mesh.slice(hosts=1)) is type(mesh)


def test_flatten_split_rename(mesh: Any, procs: ProcMesh) -> None:
    flat = mesh.flatten("rank")
    assert flat.sizes == {"rank": 4}
    assert identify(flat) == procs.pids
    assert identify(flat.slice(rank=slice(0, 4, 3))) == [procs.pids[0], procs.pids[3]]
    split = flat.split(rank=("row", "column"), column=2)
    assert split.sizes == {"row": 2, "column": 2}
    assert identify(split.slice(column=1)) == procs.pids[1::2]
    assert mesh.rename(hosts="nodes").sizes == {"nodes": 2, "gpus": 2}
    assert identify(mesh.rename(hosts="nodes").slice(nodes=1)) == procs.pids[2:]


@pytest.mark.parametrize(
    ("dims", "error", "text"),
    [
        ({"gpus": 2}, IndexError, "gpus"),
        ({"gpus": -3}, IndexError, "gpus"),
        ({"gpu": 0}, (KeyError, ValueError), "gpu"),
        ({"gpus": slice(2, 2)}, (ValueError, IndexError), "gpus"),
        ({"gpus": slice(0, 2, 0)}, ValueError, "step"),
    ],
)
def test_a_slice_that_does_not_exist(mesh: Any, dims: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        mesh.slice(**dims)


def test_iteration_gives_points_and_parts(mesh: Any, procs: ProcMesh) -> None:
    pairs = list(mesh)
    assert [dict(point) for point, _ in pairs] == [
        {"hosts": 0, "gpus": 0},
        {"hosts": 0, "gpus": 1},
        {"hosts": 1, "gpus": 0},
        {"hosts": 1, "gpus": 1},
    ]
    assert [point.rank for point, _ in pairs] == [0, 1, 2, 3]
    parts = [part if isinstance(mesh, ValueMesh) else identify(part)[0] for _, part in pairs]
    assert parts == procs.pids


def test_iteration_of_a_slice_counts_from_its_own_origin(echo: Any, procs: ProcMesh) -> None:
    pairs = list(echo.slice(hosts=1))
    assert [dict(point) for point, _ in pairs] == [{"gpus": 0}, {"gpus": 1}]
    assert [part.call.call_one(os.getpid).get() for _, part in pairs] == procs.pids[2:]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling(mesh: Any, protocol: int) -> None:
    part = mesh.slice(hosts=1)
    back = pickle.loads(pickle.dumps(part, protocol))
    assert type(back) is type(mesh)
    assert back.sizes == {"gpus": 2}
    assert identify(back) == identify(part)


def test_copying(mesh: Any) -> None:
    assert identify(copy.copy(mesh)) == identify(mesh)
    assert identify(copy.deepcopy(mesh)) == identify(mesh)


def test_hosts() -> None:
    host = this_host()
    assert isinstance(host, HostMesh)
    assert (len(host), host.sizes) == (1, {})
    back = pickle.loads(pickle.dumps(host))
    assert repr(back) == repr(host)
    assert back.sizes == {}


def test_repr(procs: ProcMesh, echo: Any) -> None:
    assert repr(procs) == "<ProcMesh 'shared': hosts=2, gpus=2>"
    assert repr(echo) == "<ActorMesh 'echo' of Echo: hosts=2, gpus=2>"
    assert repr(echo.slice(hosts=0, gpus=0)) == "<ActorMesh 'echo' of Echo: a single one>"
    assert repr(this_proc()) == "<ProcMesh 'controller': a single one>"
    assert repr(this_host()).startswith("<HostMesh '")
    assert repr(echo.slice(hosts=0).echo) == (
        "<endpoint Echo.echo(value) of <ActorMesh 'echo' of Echo: gpus=2>>"
    )


def test_html(procs: ProcMesh, echo: Any) -> None:
    table = procs._repr_html_()
    for pid in procs.pids:
        assert f"<td>{pid}</td>" in table
    assert "hosts=1, gpus=0" in table
    for name in ("call", "echo", "echo_async", "fail", "keywords"):
        assert f"<td>{name}</td>" in echo._repr_html_()
    assert "<ActorMesh" not in echo._repr_html_()


def test_names(echo: Any, procs: ProcMesh) -> None:
    assert (echo.name, echo.class_name, procs.name) == ("echo", "Echo", "shared")
    assert isinstance(echo, ActorMesh)


def test_endpoints_are_listed_for_completion(echo: Any) -> None:
    assert {"echo", "echo_async", "call", "keywords", "slice", "stop"} <= set(dir(echo))


def test_a_mesh_of_an_unspawned_actor_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError)):
        Echo().slice(gpus=0)


# What an actor knows of the mesh through which it was called.


def test_a_mesh_of_one_has_its_dimensions_for_its_own_actor(procs: ProcMesh) -> None:
    with this_host().spawn_procs({"gpus": 1}) as single:
        where = single.spawn("where", Where).place.call().get().item(gpus=0)
        assert (where["coords"], where["message_coords"], where["current_size"]) == (
            {"gpus": 0},
            {"gpus": 0},
            {"gpus": 1},
        )


def test_a_part_of_one_has_its_dimensions_too(procs: ProcMesh) -> None:
    mesh = procs.spawn("where", Where)
    where = mesh.slice(hosts=1, gpus=slice(1, 2)).place.call_one().get()
    assert where["coords"] == {"hosts": 1, "gpus": 1}
    assert (where["message_coords"], where["current_size"]) == ({"gpus": 0}, {"gpus": 1})
    # A point of a mesh has none.
    assert mesh.slice(hosts=1, gpus=1).place.call_one().get()["current_size"] == {}
    mesh.stop().get()


def test_an_answer_from_a_mesh_of_one_has_its_place(procs: ProcMesh) -> None:
    echo = procs.spawn("echo", Echo)
    port, receiver = Channel[int].open_ranked()
    send(echo.slice(hosts=0, gpus=slice(1, 2)).echo, (7,), port=port)
    place, value = receiver.recv().get(timeout=30)
    assert place is not None
    assert (dict(place), value) == ({"gpus": 0}, 7)
    echo.stop().get()


# References of actors to themselves.


class Selfish(Actor):
    """Returns references to itself."""

    def __init__(self, registry: Any = None) -> None:
        self.calls = 0
        if registry is not None:
            registry.keep.call_one(self).get(timeout=30)

    @endpoint
    def me(self) -> Any:
        return {"me": [self]}

    @endpoint
    async def me_async(self) -> Any:
        return self

    @endpoint
    def ref(self) -> Any:
        return context().actor_instance.ref

    @endpoint
    def count(self) -> int:
        self.calls += 1
        return self.calls

    @endpoint
    def checkpoint(self) -> tuple[str, int]:
        copy = pickle.loads(pickle.dumps(self))
        return type(copy).__name__, copy.calls

    @endpoint
    def keep(self, other: Any) -> None:
        self.other = other

    @endpoint
    def kept(self) -> Any:
        return self.other


@pytest.fixture
def selfish(procs: ProcMesh) -> Any:
    mesh = procs.spawn("selfish", Selfish)
    yield mesh
    mesh.stop().get()


def test_an_actor_that_returns_itself_gives_a_reference(selfish: Any) -> None:
    one = selfish.slice(hosts=1, gpus=0)
    for reference in (
        one.me.call_one().get()["me"][0],
        one.me_async.call_one().get(),
        one.ref.call_one().get(),
    ):
        assert isinstance(reference, ActorMesh)
        assert (reference.name, reference.class_name, len(reference)) == ("selfish", "Selfish", 1)
        before = one.count.call_one().get()
        assert reference.count.call_one().get() == before + 1
        assert reference.count.call_one().get() == one.count.call_one().get() - 1
    with pytest.raises(TypeError, match="takes at most 0"):
        reference.count.call_one(1)


def test_an_actor_may_register_itself_while_it_is_constructed(procs: ProcMesh, selfish: Any) -> None:
    registry = selfish.slice(hosts=0, gpus=0)
    registered = procs.slice(hosts=1, gpus=1).spawn("registered", Selfish, registry)
    registered.initialized.get(timeout=30)
    assert registry.kept.call_one().get().count.call_one().get() == 1
    assert registered.count.call_one().get() == 2
    registered.stop().get()


def test_an_actor_can_still_pickle_itself(selfish: Any) -> None:
    one = selfish.slice(hosts=0, gpus=1)
    count = one.count.call_one().get()
    assert one.checkpoint.call_one().get() == ("Selfish", count)


def test_an_object_that_is_not_an_actor_travels_as_usual(echo: Any) -> None:
    copy = echo.slice(hosts=0, gpus=0).echo.call_one(Selfish()).get()
    assert type(copy) is Selfish
