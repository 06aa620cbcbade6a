"""Endpoints may be called like what a mesh has, and nothing of Mesh takes them for it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import namesakes
from mesh_core import (
    Actor,
    ActorError,
    DeviceMeshError,
    MeshError,
    MeshHandle,
    Pool,
    ProcMesh,
    as_endpoint,
    concat,
    endpoint,
    inspect,
    mesh_of,
    this_host,
)
from mesh_core._actors.actor import GIVING_WAY, RESERVED
from mesh_core.policies import Event, Failed, Policy, Restart

pytestmark = pytest.mark.usefixtures("runtime")

WITHIN = 30.0


class Namesakes(namesakes.Namesakes):
    """Does more with them."""

    @endpoint
    def square(self, n: int) -> int:
        return n * n

    @endpoint
    def die(self) -> None:
        os._exit(3)

    @endpoint
    def ask(self, other: Any) -> list[str]:
        """Call another's, by a reference."""
        return [getattr(other, name).call_one().get(WITHIN) for name in sorted(GIVING_WAY)]

    @endpoint
    def give(self, what: Any) -> Any:
        return what

    def plain(self, n: int) -> int:
        return n + 1


class Restarting:
    """A policy that restarts whatever failed."""

    def on(self, event: Event, now: float) -> tuple[Policy, list[Restart]]:
        return self, [Restart()] if isinstance(event, Failed) else []


def test_only_these_names_are_reserved() -> None:
    assert " ".join(sorted(RESERVED)) == "extent flatten initialized rename size sizes slice split stop"
    for name in RESERVED:
        with pytest.raises(TypeError, match=f"has an endpoint named '{name}'"):
            type("Bad", (Actor,), {name: endpoint(lambda self: None)})


def test_without_such_endpoints_they_are_the_meshs(runtime: None) -> None:
    class Plain(Actor):
        @endpoint
        def work(self) -> None:
            pass

    with this_host().spawn_procs({"gpus": 2}) as procs:
        plain: Any = procs.spawn("plain", Plain)
        assert (plain.name, plain.class_name, plain.mesh.name) == ("plain", Plain.__qualname__, "plain")
        assert len(plain.alive()) == 2
        assert plain.failed() == plain.mesh.failed() == []
        assert set(dir(plain)) >= GIVING_WAY
        with pytest.raises(AttributeError, match="cannot set 'name'"):
            plain.name = "another"


def test_endpoints_win(runtime: None) -> None:
    """END-1"""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        namesakes: Any = procs.spawn("namesakes", Namesakes)
        for name in GIVING_WAY:
            assert getattr(namesakes, name).call().get(WITHIN).values() == [name, name]
        handle = mesh_of(namesakes)
        assert isinstance(handle, MeshHandle)
        assert (handle.name, handle.class_name, len(handle.alive())) == ("namesakes", "Namesakes", 2)
        assert "namesakes" in repr(handle)
        assert mesh_of(procs) is procs
        with pytest.raises(TypeError, match=r"mesh_of\(\) must be given a mesh"):
            mesh_of(3)
        # References in other processes, pools, reductions and words.
        one = namesakes.slice(gpus=0)
        assert one.ask.call_one(namesakes.slice(gpus=1)).get(WITHIN) == sorted(GIVING_WAY)
        with Pool(namesakes) as pool:
            assert list(pool.map(namesakes.square, [1, 2, 3])) == [1, 4, 9]
            assert "namesakes" in repr(pool)
        assert namesakes.square.with_options(reduce="sum").call(3).get(WITHIN) == 18
        assert as_endpoint(one.plain).call_one(1).get(WITHIN) == 2
        assert "Namesakes" in repr(namesakes) + repr(one.plain) + repr(namesakes.square)
        assert "Namesakes" in namesakes._repr_html_()
        parts = [namesakes.slice(gpus=slice(place, place + 1)) for place in range(2)]
        assert concat(parts, "gpus").name.call().get(WITHIN).values() == ["name", "name"]
        with pytest.raises(TypeError, match=r"Namesakes\.square"):
            namesakes.square.call()
        with pytest.raises(ActorError):
            one.ask.call_one(3).get(WITHIN)
        actors = [actor for proc in inspect.snapshot().procs for actor in proc.actors]
        assert {actor.name for actor in actors} >= {"namesakes"}
        inspect.waits()
        assert len(inspect.stacks(namesakes)) == 2


def test_supervision_repairs_them(runtime: None) -> None:
    """END-1"""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        namesakes: Any = procs.spawn("namesakes", Namesakes, supervise=Restarting())
        pids = procs.pids
        namesakes.slice(gpus=1).die.broadcast()
        while procs.pids[1] in (None, pids[1]) or mesh_of(namesakes).failed():
            pass
        assert again(namesakes) == ["name", "name"]


def again(namesakes: Any) -> list[str]:
    """Call until the restarted one answers."""
    while True:
        try:
            found: list[str] = namesakes.name.call().get(WITHIN).values()
            return found
        except MeshError:
            pass


def test_they_can_be_respawned_by_hand(runtime: None) -> None:
    """END-1"""
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        namesakes: Any = procs.spawn("namesakes", Namesakes, supervise=lambda failure: True)
        assert namesakes.name.call().get(WITHIN).values() == ["name", "name"]
        kill(procs, 1)
        assert "mesh 'namesakes' has lost 1 of its 2 ranks: gpus=1" in str(DeviceMeshError.of(namesakes))
        with pytest.raises(MeshError, match="namesakes"):
            namesakes.slice(gpus=1).name.call_one().get(WITHIN)
        procs.respawn().get(WITHIN)
        mesh_of(namesakes).respawn().get(WITHIN)
        assert namesakes.name.call().get(WITHIN).values() == ["name", "name"]
        mesh_of(namesakes).actors.stop().get(WITHIN)


def kill(procs: ProcMesh, rank: int) -> None:
    pid = procs.pids[rank]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while not procs.failed():
        pass


def test_a_pool_respawns_them(runtime: None) -> None:
    """END-1"""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        namesakes: Any = procs.spawn("namesakes", Namesakes)
        assert namesakes.name.call().get(WITHIN).values() == ["name", "name"]
        with Pool(namesakes, retries=3, on_crash="respawn") as pool:
            results = pool.map(namesakes.square, range(200))
            pid = procs.pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert list(results) == [n * n for n in range(200)]
