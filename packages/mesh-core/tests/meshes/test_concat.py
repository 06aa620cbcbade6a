"""Meshes joined from others."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from core_repair import WITHIN, Asker, Counter, Losses, ranks

from mesh_core import Actor, MeshError, SupervisionError, concat, endpoint, this_host

pytestmark = pytest.mark.usefixtures("runtime")


class Quitter(Actor):
    """Ends its process when it is called for the second time."""

    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def second_ends_it(self) -> int:
        self.calls += 1
        if self.calls == 2:
            os._exit(1)
        return self.calls


def who(mesh: Any) -> list[tuple[int, int, int, int]]:
    told: list[tuple[int, int, int, int]] = mesh.who.call().get(timeout=WITHIN).values()
    return told


def test_processes_are_joined_and_sliced_like_any_mesh() -> None:
    host = this_host()
    with (
        host.spawn_procs({"rows": 2, "gpus": 2}) as first,
        host.spawn_procs({"rows": 2, "gpus": 1}) as second,
    ):
        both = concat([first, second], dim="gpus")
        assert both.sizes == {"rows": 2, "gpus": 3}
        assert "rows=2, gpus=3" in repr(both)
        assert both.pids == [*first.pids[:2], second.pids[0], *first.pids[2:], second.pids[1]]
        counters = both.spawn("counters", Counter)
        told = who(counters)
        assert [(rank, size, place) for rank, size, place, _ in told] == [(n, 6, n) for n in range(6)]
        assert [pid for *_, pid in told] == both.pids
        assert who(counters.slice(gpus=2)) == [(n, 6, place, both.pids[n]) for place, n in enumerate((2, 5))]
        assert [rank for rank, *_ in who(counters.slice(rows=1, gpus=slice(0, 3, 2)))] == [3, 5]
        assert counters.listed.with_options(reduce="concat").call().get(timeout=WITHIN) == list(range(6))
        counters.stop().get(timeout=WITHIN)


def test_actors_are_joined_each_with_its_own_name_and_budget() -> None:
    host = this_host()
    with host.spawn_procs({"gpus": 2}) as first, host.spawn_procs({"gpus": 3}) as second:
        a: Any = first.spawn("a", Counter, 1)
        b: Any = second.spawn("b", Counter, 2)
        both = concat([b.slice(gpus=slice(1, 3)), a], dim="gpus")
        assert both.name == "b+a"
        assert both.begun_with.call().get(timeout=WITHIN).values() == [2, 2, 1, 1]
        assert [(rank, place) for rank, _, place, _ in who(both)] == [(1, 0), (2, 1), (0, 2), (1, 3)]
        data = bytes(300_000)
        for _ in range(20):  # more than any mailbox takes without returning credits
            both.echo.broadcast(data)
        assert both.echo.call(data).get(timeout=WITHIN).values() == [data] * 4
        for n in range(100):
            both.hear.broadcast(n)
            a.hear.broadcast(-n)
        heard = both.all.call().get(timeout=WITHIN).values()
        assert heard[:2] == [list(range(100))] * 2
        assert heard[2:] == [[number for n in range(100) for number in (n, -n)]] * 2


def test_joined_meshes_are_joined_again_and_sent() -> None:
    host = this_host()
    with host.spawn_procs({"gpus": 2}) as procs:
        singles = [concat([procs.slice(gpus=n)], dim="place") for n in (1, 0, 1)]
        assert singles[0].sizes == {"place": 1}
        nested = concat([concat(singles[:2], dim="place"), singles[2]], dim="place")
        assert nested.pids == [procs.pids[1], procs.pids[0], procs.pids[1]]
        actors: Any = procs.spawn("actors", Counter)
        turned = concat([actors.slice(gpus=1), actors.slice(gpus=0)], dim="gpus")
        with host.spawn_procs() as others:
            asker: Any = others.spawn("asker", Asker, turned)
            assert [rank for rank, *_ in asker.who.call_one().get(timeout=WITHIN)] == [1, 0]
        assert who(pickle.loads(pickle.dumps(turned))) == who(turned)


def test_actors_that_are_joined_twice_keep_their_own_names() -> None:
    host = this_host()
    with host.spawn_procs({"gpus": 2}) as first, host.spawn_procs({"gpus": 1}) as second:
        a: Any = first.spawn("a", Counter)
        b: Any = second.spawn("b", Counter)
        pair = concat([a, b], dim="gpus")
        nested = concat([pair, pair.slice(gpus=slice(2, 3))], dim="gpus")
        pids = [pid for *_, pid in who(nested)]
        assert pids == [*first.pids, *second.pids, *second.pids]


def test_a_rank_that_occurs_twice_is_lost_at_both_places() -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        actors: Any = procs.spawn("actors", Quitter, supervise=lambda failure: True)
        one = actors.slice(gpus=slice(1, 2))
        twice = concat([one, one], dim="gpus")
        outcomes = twice.second_ends_it.call().get(timeout=WITHIN, return_exceptions=True).values()
        assert (outcomes[0], type(outcomes[1])) == (1, SupervisionError)


def test_the_rest_of_a_part_is_owned_after_the_whole_has_stopped() -> None:
    told = Losses()
    host = this_host()
    with (
        host.spawn_procs({"gpus": 2}, supervise=lambda failure: True) as first,
        host.spawn_procs({"gpus": 1}) as second,
    ):
        a: Any = first.spawn("a", Counter, supervise=told)
        b: Any = second.spawn("b", Counter)
        concat([a.slice(gpus=slice(0, 1)), b], dim="gpus").stop().get(timeout=WITHIN)
        assert told.slay(first, 1).rank == 1


def test_repairs_of_parts_are_seen_and_owners_told() -> None:
    losses, told = Losses(), Losses()
    host = this_host()
    with host.spawn_procs({"gpus": 2}, supervise=losses) as first, host.spawn_procs({"gpus": 2}) as second:
        both = concat([first, second], dim="gpus")
        counters: Any = both.spawn("counters", Counter, supervise=told)
        counters.initialized.get(timeout=WITHIN)
        losses.slay(first, 1)
        failure = told.next()
        assert (failure.mesh_name, failure.rank) == ("counters", 1)
        assert ranks(both.failed()) == ranks(counters.failed()) == [1]
        first.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert [rank for rank, *_ in who(counters)] == [0, 1, 2, 3]
        assert both.incarnations == [0, 1, 0, 0]
        with pytest.raises(MeshError, match="or a mesh that was joined from others"):
            both.respawn([1])


class Other(Actor):
    @endpoint
    def hear(self, n: int) -> int:
        return n


def test_meshes_that_cannot_be_joined_say_why() -> None:
    host = this_host()
    with host.spawn_procs({"gpus": 2}) as first, host.spawn_procs({"rows": 2, "gpus": 2}) as second:
        with pytest.raises(
            ValueError,
            match="cannot join meshes along 'gpus': their other dimensions must be equal, got gpus=2 and rows=2, gpus=2",
        ):
            concat([first, second], dim="gpus")
        with pytest.raises(ValueError, match="needs at least one mesh"):
            concat([], dim="gpus")
        with pytest.raises(TypeError, match="meshes of processes, or meshes of actors, got ProcMesh, int"):
            concat([first, 3], dim="gpus")
        with pytest.raises(TypeError, match="dim must be the name of a dimension, got 0"):
            concat([first, first], dim=0)
        counters: Any = first.spawn("counters", Counter)
        other: Any = first.spawn("other", Other)
        with pytest.raises(TypeError, match="actors of one class, got Counter, Other"):
            concat([counters, other], dim="gpus")
