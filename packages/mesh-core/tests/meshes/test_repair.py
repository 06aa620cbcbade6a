"""Repaired meshes: the same mesh, ranks and references, with other processes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from core_owners import suspend
from core_processes import family, fork_servers
from core_repair import WITHIN, Asker, Counter, Keeper, Losses, await_loss, ranks

from mesh_core import (
    DeviceMeshError,
    MeshError,
    MeshFailure,
    Point,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    gather,
    inspect,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def losses() -> Losses:
    return Losses()


@pytest.fixture
def procs(losses: Losses) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 4}, name="workers", supervise=losses) as procs:
        yield procs


def spawn(procs: ProcMesh, start: int = 0) -> Any:
    return procs.spawn("counters", Counter, start, supervise=lambda failure: True)


def who(mesh: Any) -> list[tuple[int, int, int, int]]:
    told: list[tuple[int, int, int, int]] = mesh.who.call().get(timeout=WITHIN).values()
    return told


# Processes.


def test_earlier_references_and_slices_refer_to_the_new_process(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs, 5)
    part, one = counters.slice(gpus=slice(1, 3)), counters.slice(gpus=1)
    before = [pid for *_, pid in who(counters)]
    with this_host().spawn_procs() as others:
        asker = others.spawn("asker", Asker, counters)
        assert [pid for *_, pid in asker.who.call_one().get(timeout=WITHIN)] == before
        losses.slay(procs, 1)
        assert (ranks(procs.failed()), ranks(procs.alive())) == ([1], [0, 2, 3])
        procs.respawn().get(timeout=WITHIN)
        assert (procs.failed(), ranks(counters.failed())) == ([], [1]), "processes live, actors do not"
        counters.respawn().get(timeout=WITHIN)
        told = who(counters)
        assert [(rank, size, place) for rank, size, place, _ in told] == [
            (rank, 4, rank) for rank in range(4)
        ]
        now = [pid for *_, pid in told]
        assert now[1] == procs.pids[1] != before[1]
        assert now[0::2] == before[0::2] and now[3] == before[3]
        assert who(part) == [(1, 4, 0, now[1]), (2, 4, 1, now[2])]
        assert one.who.call_one().get(timeout=WITHIN) == (1, 4, 0, now[1])
        assert one.begun_with.call_one().get(timeout=WITHIN) == 5
        assert asker.who.call_one().get(timeout=WITHIN) == told
        assert procs.incarnations == [0, 1, 0, 0]


def test_messages_to_the_old_process_are_not_handled_by_the_new_one(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    counters.initialized.get(timeout=WITHIN)
    pid = procs.pids[2]
    assert pid is not None
    suspend(pid)
    waiting = [counters.slice(gpus=2).hear.call_one(n) for n in range(5)]
    losses.slay(procs, 2)
    for call in waiting:
        with pytest.raises(SupervisionError):
            call.get(timeout=WITHIN)
    procs.respawn([2]).get(timeout=WITHIN)
    counters.respawn([2]).get(timeout=WITHIN)
    assert counters.slice(gpus=2).all.call_one().get(timeout=WITHIN) == []
    assert counters.hear.call(9).get(timeout=WITHIN).values() == [1, 1, 1, 1]


def test_survivors_get_every_message_once_and_in_order_across_repairs(
    procs: ProcMesh, losses: Losses
) -> None:
    counters = spawn(procs)
    for n in range(90):
        if n % 30 == 10:
            losses.slay(procs, 1 + n // 30)
        if n % 30 == 20:
            procs.respawn().get(timeout=WITHIN)
            counters.respawn().get(timeout=WITHIN)
        counters.hear.broadcast(n)
        counters.slice(gpus=0).hear.broadcast(-n)
    first, *_ = counters.all.call().get(timeout=WITHIN).values()
    assert first == [number for n in range(90) for number in (n, -n)]
    assert counters.slice(gpus=3).all.call_one().get(timeout=WITHIN) == list(range(80, 90))


def test_a_rank_can_die_and_be_respawned_many_times(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    failures = []
    for life in range(1, 6):
        failures.append(losses.slay(procs, 3))
        procs.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert procs.incarnations == [0, 0, 0, life]
        assert counters.slice(gpus=3).hear.call_one(1).get(timeout=WITHIN) == 1
    assert len({failure.id for failure in failures}) == 5, "each is a failure of its own"
    assert {(failure.rank, failure.signal) for failure in failures} == {(3, signal.SIGKILL)}


def test_a_death_reported_during_a_restart_is_not_the_last_one_reported(losses: Losses) -> None:
    made, told = threading.Event(), threading.Event()

    def env(point: Point) -> dict[str, str | None]:
        if made.is_set():
            told.set()  # by now the rank is being respawned
            losses.wait()
        return {}

    def hold(failure: MeshFailure) -> bool:
        return told.wait(WITHIN)  # and so is whatever is reported after it

    host = this_host()
    with host.spawn_procs(supervise=hold) as other, host.spawn_procs(env=env, supervise=losses) as procs:
        for mesh in (other, procs):
            mesh.initialized.get(timeout=WITHIN)
        for mesh in (other, procs):
            pid = mesh.pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await_loss(mesh)
        made.set()
        procs.respawn().get(timeout=WITHIN)
        made.clear()
        assert losses.next().rank == 0
        assert losses.slay(procs, 0).rank == 0
        procs.respawn().get(timeout=WITHIN)


def test_a_stop_beside_a_repair_leaves_no_process(losses: Losses) -> None:
    for _ in range(10):
        procs = this_host().spawn_procs({"gpus": 2}, supervise=losses)
        losses.slay(procs, 1)
        repairs: list[Any] = []

        def repair(procs: ProcMesh = procs, repairs: list[Any] = repairs) -> None:
            with contextlib.suppress(MeshError):
                repairs.append(procs.respawn())

        thread = threading.Thread(target=repair)
        thread.start()
        procs.stop().get(timeout=WITHIN)
        thread.join()
        assert procs.pids == [None, None]


def test_all_ranks_can_be_respawned_and_are_still_owned(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    for rank in range(4):
        losses.slay(procs, rank)
    assert ranks(procs.failed()) == [0, 1, 2, 3]
    procs.respawn().get(timeout=WITHIN)
    counters.respawn().get(timeout=WITHIN)
    assert [rank for rank, *_ in who(counters)] == [0, 1, 2, 3]
    assert losses.slay(procs, 0).rank == 0


def test_nothing_is_left_when_a_repaired_mesh_has_stopped(losses: Losses) -> None:
    fork_servers_before = fork_servers(family())
    with this_host().spawn_procs({"gpus": 2}, supervise=losses) as procs:
        losses.slay(procs, 0)
        procs.respawn().get(timeout=WITHIN)
        pids = [pid for pid in procs.pids if pid is not None]
        assert len(pids) == 2
    running = family()
    assert not set(pids) & running.keys()
    assert fork_servers(running) <= max(1, fork_servers_before)


def test_a_stopped_part_is_no_failure_and_can_be_respawned(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    counters.initialized.get(timeout=WITHIN)
    procs.slice(gpus=slice(1, 3)).stop().get(timeout=WITHIN)
    assert ranks(procs.failed()) == [1, 2]
    assert losses.none()
    with pytest.raises(Undeliverable):
        counters.slice(gpus=1).hear.call_one(1).get(timeout=WITHIN)
    procs.respawn().get(timeout=WITHIN)
    counters.respawn().get(timeout=WITHIN)
    assert [rank for rank, *_ in who(counters)] == [0, 1, 2, 3]


def test_new_processes_start_like_the_first_ones(losses: Losses) -> None:
    marks = {"COLOUR": "blue"}
    host = this_host()
    with host.spawn_procs(
        {"gpus": 3},
        env=lambda point: {**marks, "PLACE": str(point["gpus"])},
        supervise=losses,
        torch_env=True,
    ) as procs:
        counters = spawn(procs)
        names = ("COLOUR", "PLACE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        before = [counters.slice(gpus=2).env.call_one(name).get(timeout=WITHIN) for name in names]
        assert before[:5] == ["blue", "2", "2", "2", "3"]
        losses.slay(procs, 2)
        procs.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert [counters.slice(gpus=2).env.call_one(name).get(timeout=WITHIN) for name in names] == before


def test_the_bootstrap_runs_in_new_processes_and_its_error_is_raised(losses: Losses, tmp_path: Any) -> None:
    path = str(tmp_path / "broken")

    def bootstrap() -> None:
        os.environ["BOOTED"] = str(os.getpid())
        if os.path.exists(path):  # noqa: PTH110
            raise RuntimeError("the disk is gone")

    with this_host().spawn_procs({"gpus": 2}, bootstrap=bootstrap, supervise=losses) as procs:
        counters = spawn(procs)
        losses.slay(procs, 1)
        procs.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert counters.slice(gpus=1).env.call_one("BOOTED").get(timeout=WITHIN) == str(procs.pids[1])
        losses.slay(procs, 1)
        (tmp_path / "broken").touch()
        with pytest.raises(MeshError, match="the disk is gone"):
            procs.respawn().get(timeout=WITHIN)
        (tmp_path / "broken").unlink()
        await_loss(procs)
        procs.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert [rank for rank, *_ in who(counters)] == [0, 1]


def test_a_process_that_dies_during_its_start_is_reported_and_can_be_restarted(
    procs: ProcMesh, losses: Losses
) -> None:
    losses.slay(procs, 0)
    for _ in range(5):
        procs.respawn()
        losses.slay(procs, 0)
    procs.respawn().get(timeout=WITHIN)
    assert procs.incarnations[0] == 6
    assert [rank for rank, *_ in who(spawn(procs))] == [0, 1, 2, 3]


def test_what_cannot_be_respawned_says_why(procs: ProcMesh, losses: Losses) -> None:
    with pytest.raises(ValueError, match=r"cannot respawn rank 1 of .*workers.*: its process is running"):
        procs.respawn([1])
    with pytest.raises(IndexError, match=r"rank must be between 0 and 3 for .*, got 4"):
        procs.respawn(4)
    with pytest.raises(TypeError, match="ranks must be numbers or points"):
        procs.respawn("1")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="is not a point of"):
        procs.respawn(Point(0, procs.slice(gpus=slice(0, 2)).extent))
    losses.slay(procs, 1)
    with pytest.raises(TypeError, match="on= must be a HostMesh"):
        procs.respawn(on="b7")  # type: ignore[arg-type]  # on purpose
    assert procs.respawn([]).get(timeout=WITHIN) is None
    procs.stop().get(timeout=WITHIN)
    with pytest.raises(MeshError, match="'workers' has been stopped; spawn a new mesh"):
        procs.respawn([1])


def test_ranks_are_those_of_the_mesh_that_is_asked(procs: ProcMesh, losses: Losses) -> None:
    losses.slay(procs, 2)
    part = procs.slice(gpus=slice(2, 4))
    (point,) = part.failed()
    assert (point.rank, dict(point)) == (0, {"gpus": 0})
    part.respawn([point]).get(timeout=WITHIN)
    assert procs.incarnations == [0, 0, 1, 0]


# Actors.


def test_a_failed_actor_is_restarted_in_its_process(procs: ProcMesh) -> None:
    failures = Losses()
    counters = procs.spawn("counters", Counter, 3, supervise=failures)
    before = [pid for *_, pid in who(counters)]
    counters.hear.call(1).get(timeout=WITHIN)
    counters.slice(gpus=1).fail.broadcast()
    assert failures.next().rank == 1
    assert (ranks(counters.failed()), ranks(counters.alive())) == ([1], [0, 2, 3])
    with pytest.raises(SupervisionError):
        counters.slice(gpus=1).hear.call_one(2).get(timeout=WITHIN)
    counters.respawn().get(timeout=WITHIN)
    assert counters.failed() == []
    assert [pid for *_, pid in who(counters)] == before
    assert counters.hear.call(2).get(timeout=WITHIN).values() == [2, 1, 2, 2]
    counters.slice(gpus=1).fail.broadcast()
    assert failures.next().rank == 1, "told again"


def test_a_living_actor_is_not_restarted(procs: ProcMesh) -> None:
    counters = spawn(procs)
    with pytest.raises(MeshError, match=r"cannot respawn actor 'counters'.*: it is running"):
        counters.respawn([2]).get(timeout=WITHIN)
    assert counters.hear.call(1).get(timeout=WITHIN).values() == [1] * 4


def test_actors_are_restarted_by_their_owner_on_living_processes(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    losses.slay(procs, 1)
    with pytest.raises(
        MeshError, match=r"the process of rank 1 .* has ended; respawn the mesh of processes first"
    ):
        counters.respawn([1])
    procs.respawn().get(timeout=WITHIN)
    with pytest.raises(Undeliverable, match="respawn"):
        counters.slice(gpus=1).hear.call_one(1).get(timeout=WITHIN)
    with pytest.raises(MeshError, match="only the process that spawned the actors can do that"):
        _reference(counters).respawn([1])
    with pytest.raises(MeshError, match="only the process that spawned it can do that"):
        _reference(procs).respawn([1])
    counters.stop().get(timeout=WITHIN)
    with pytest.raises(MeshError, match="'counters' has been stopped; spawn the actors again"):
        counters.respawn([1])


def _reference(mesh: Any) -> Any:
    """How another process sees it."""
    import pickle

    return pickle.loads(pickle.dumps(mesh))


def test_an_actor_whose_constructor_failed_is_restarted_once_possible(procs: ProcMesh, tmp_path: Any) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    class Fragile(Counter):
        def __init__(self) -> None:
            super().__init__()
            if broken.exists():
                raise RuntimeError("not yet")

    fragile = procs.spawn("fragile", Fragile)
    with pytest.raises(RuntimeError, match="not yet"):
        fragile.initialized.get(timeout=WITHIN)
    with pytest.raises(RuntimeError, match="not yet"):
        fragile.respawn(range(4)).get(timeout=WITHIN)
    broken.unlink()
    fragile.respawn(range(4)).get(timeout=WITHIN)
    assert fragile.hear.call(1).get(timeout=WITHIN).values() == [1] * 4


def test_the_arguments_are_dropped_when_the_actors_are_stopped(procs: ProcMesh) -> None:
    class Large:
        pass

    class Taker(Counter):
        def __init__(self, large: Any) -> None:
            super().__init__()

    large = Large()
    gone = weakref.ref(large)
    taker = procs.spawn("taker", Taker, large)
    taker.initialized.get(timeout=WITHIN)
    del large
    assert gone() is not None
    taker.stop().get(timeout=WITHIN)
    gc.collect()
    assert gone() is None


# All adverbs.


def test_every_adverb_works_across_repaired_ranks(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    losses.slay(procs, 1)
    losses.slay(procs, 2)
    procs.respawn().get(timeout=WITHIN)
    counters.respawn().get(timeout=WITHIN)
    data = bytes(range(256)) * 4096
    assert counters.echo.call(data).get(timeout=WITHIN).values() == [data] * 4
    assert sorted(future.get(timeout=WITHIN) for future in counters.begun_with.stream()) == [0] * 4
    assert counters.listed.with_options(reduce="concat").call().get(timeout=WITHIN) == [0, 1, 2, 3]
    assert (
        counters.slice(gpus=slice(1, 3)).begun_with.with_options(reduce="sum").call().get(timeout=WITHIN) == 0
    )
    assert counters.begun_with.choose().get(timeout=WITHIN) == 0
    assert gather(*(counters.slice(gpus=n).hear.call_one(n) for n in range(4))).get(timeout=WITHIN) == [1] * 4
    assert counters.hear.with_options(timeout=WITHIN).call(0).get().values() == [2] * 4
    assert counters.flatten("all").who.call().get(timeout=WITHIN).get(2)[:3] == (2, 4, 2)


def test_a_reduced_call_begun_before_a_repair_ends(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    total = counters.listed.with_options(reduce="concat")
    assert total.call().get(timeout=WITHIN) == [0, 1, 2, 3]
    losses.slay(procs, 2)
    with pytest.raises((SupervisionError, Undeliverable)):
        total.call().get(timeout=WITHIN)
    procs.respawn().get(timeout=WITHIN)
    counters.respawn().get(timeout=WITHIN)
    assert total.call().get(timeout=WITHIN) == [0, 1, 2, 3]


def test_a_failure_of_one_rank_names_that_rank(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    losses.slay(procs, 0)
    procs.respawn().get(timeout=WITHIN)
    counters.respawn().get(timeout=WITHIN)
    failure = losses.slay(procs, 0)
    assert failure.headline().startswith("rank 0 (gpus=0) of mesh 'workers' died on host ")
    with pytest.raises(SupervisionError, match=r"rank 0 \(gpus=0\) of mesh 'counters' died"):
        counters.hear.call(1).get(timeout=WITHIN)


# Owners that are actors.


def test_an_actor_repairs_what_it_owns_and_others_see_it() -> None:
    host = this_host()
    with host.spawn_procs(name="keepers") as keepers, host.spawn_procs(name="askers") as askers:
        keeper = keepers.spawn("keeper", Keeper)
        counters = keeper.mesh.call_one().get(timeout=WITHIN)
        asker = askers.spawn("asker", Asker, counters)
        before = asker.who.call_one().get(timeout=WITHIN)
        assert keeper.lose_and_repair.call_one(1).get(timeout=WITHIN) == [0, 1, 0]
        assert keeper.lose_and_repair.call_one(1).get(timeout=WITHIN) == [0, 2, 0]
        now = asker.who.call_one().get(timeout=WITHIN)
        assert [rank for rank, *_ in now] == [0, 1, 2]
        assert (now[0], now[2]) == (before[0], before[2])
        assert now[1] != before[1]
        assert who(counters) == now
        # A process that starts later knows it too, although its reference is older.
        with host.spawn_procs() as late:
            assert late.spawn("late", Asker, counters).who.call_one().get(timeout=WITHIN) == now


# What is visible from outside.


def test_a_late_call_reports_that_a_new_process_is_suspended(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    losses.slay(procs, 1)
    procs.respawn().get(timeout=WITHIN)
    counters.respawn().get(timeout=WITHIN)
    pid = procs.pids[1]
    assert pid is not None
    suspend(pid)
    try:
        with pytest.raises(TimeoutError, match=f"process {pid} of rank 1 is stopped by a signal"):
            counters.all.call().get(timeout=0.2)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_snapshot_shows_ranks_and_lives(procs: ProcMesh, losses: Losses) -> None:
    spawn(procs).initialized.get(timeout=WITHIN)
    losses.slay(procs, 2)
    procs.respawn().get(timeout=WITHIN)
    found = [
        (proc.name, proc.rank, proc.incarnation)
        for proc in inspect.snapshot().procs
        if proc.rank or "[" in proc.name
    ]
    assert [each for each in found if each[0].startswith("workers")] == [
        ("workers[0]", 0, 0),
        ("workers[1]", 1, 0),
        ("workers[2]", 2, 1),
        ("workers[3]", 3, 0),
    ]
    assert inspect.stacks(procs).get(2).proc == "workers[2]"


def test_the_error_of_a_mesh_that_has_lost_ranks_names_their_points(procs: ProcMesh, losses: Losses) -> None:
    counters = spawn(procs)
    losses.slay(procs, 1)
    losses.slay(procs, 3)
    error = DeviceMeshError.of(counters)
    assert isinstance(error, SupervisionError)
    assert error.coordinates == ({"gpus": 1}, {"gpus": 3})
    assert str(error).startswith("mesh 'counters' has lost 2 of its 4 ranks: gpus=1; gpus=3; respawn them")
    copy = _reference(error)
    assert (copy.coordinates, copy.mesh_name, str(copy)) == (error.coordinates, "counters", str(error))


# Growing and shrinking.


def test_a_mesh_grows_and_shrinks(losses: Losses) -> None:
    with this_host().spawn_procs(
        {"gpus": 2}, env=lambda point: {"AT": str(point["gpus"])}, supervise=losses
    ) as procs:
        counters = spawn(procs)
        grown = procs.grow(gpus=2)
        assert (grown.sizes, procs.sizes) == ({"gpus": 4}, {"gpus": 2})
        grown.initialized.get(timeout=WITHIN)
        more = spawn(grown)
        assert [(rank, size) for rank, size, *_ in who(more)] == [(rank, 4) for rank in range(4)]
        assert more.env.call("AT").get(timeout=WITHIN).values() == ["0", "1", "2", "3"]
        assert grown.pids[:2] == procs.pids
        assert losses.slay(grown, 3).rank == 3, "the owner hears of new ranks as of others"
        grown.respawn().get(timeout=WITHIN)
        assert grown.incarnations == [0, 0, 0, 1]
        smaller = grown.shrink(gpus=3)
        assert smaller.sizes == {"gpus": 1}
        smaller.initialized.get(timeout=WITHIN)
        assert (ranks(grown.failed()), smaller.failed()) == ([1, 2, 3], [])
        assert counters.slice(gpus=0).hear.call_one(1).get(timeout=WITHIN) == 1
        again = smaller.grow(gpus=1)
        again.initialized.get(timeout=WITHIN)
        assert [rank for rank, *_ in who(spawn(again))] == [0, 1]
        assert losses.none(), "what was taken away is no failure"


def test_a_mesh_that_has_grown_or_shrunk_since_neither_grows_nor_shrinks(losses: Losses) -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=losses) as procs:
        grown = procs.grow(gpus=1)
        grown.initialized.get(timeout=WITHIN)
        before = grown.pids
        with pytest.raises(ValueError, match="now has gpus=3; grow the mesh that the last"):
            procs.grow(gpus=1)
        with pytest.raises(ValueError, match="now has gpus=3; shrink the mesh that the last"):
            procs.shrink(gpus=1)
        assert grown.pids == before, "nobody has taken the place of a process that lives"


def test_deaths_are_reported_after_lost_ranks_were_removed(procs: ProcMesh, losses: Losses) -> None:
    losses.slay(procs, 3)
    smaller = procs.shrink(gpus=2)
    smaller.initialized.get(timeout=WITHIN)
    assert [losses.slay(smaller, rank).rank for rank in (0, 1)] == [0, 1]


def test_restarted_ranks_stop_with_the_others(procs: ProcMesh) -> None:
    smaller = procs.shrink(gpus=2)
    smaller.initialized.get(timeout=WITHIN)
    procs.respawn().get(timeout=WITHIN)
    assert procs.failed() == []
    smaller.stop().get(timeout=WITHIN)
    assert procs.pids == [None] * 4


def test_what_cannot_grow_or_shrink_says_why(procs: ProcMesh) -> None:
    with pytest.raises(
        ValueError,
        match=r"grow\(\) must be given a number of places of the first dimension, 'gpus', got tpus=1",
    ):
        procs.grow(tpus=1)
    with pytest.raises(ValueError, match="gpus must be a whole number of at least 1, got 0"):
        procs.grow(gpus=0)
    with pytest.raises(ValueError, match=r"removing 4 would leave none; stop\(\) ends the whole mesh"):
        procs.shrink(gpus=4)
    with pytest.raises(ValueError, match="gpus must be a whole number of at least 1, got 0"):
        procs.shrink(gpus=0)
    with pytest.raises(ValueError, match="cannot grow a part of a mesh"):
        procs.slice(gpus=slice(0, 2)).grow(gpus=1)
    with (
        this_host().spawn_procs() as single,
        pytest.raises(ValueError, match="it has no dimensions"),
    ):
        single.grow()


def test_new_processes_log_as_the_others_do(losses: Losses, capfd: pytest.CaptureFixture[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="speakers", supervise=losses) as procs:
        procs.logging_option(stream_to_client=False)
        counters = spawn(procs)
        losses.slay(procs, 1)
        procs.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        counters.say.call("nobody sees this").get(timeout=WITHIN)
        procs.logging_option(aggregate_window_sec=None)
        counters.say.call("all see this").get(timeout=WITHIN)
    shown = capfd.readouterr().out
    assert "nobody sees this" not in shown
    assert sorted(line for line in shown.splitlines() if "all see this" in line) == [
        f"[counters gpus={rank}] all see this" for rank in range(2)
    ]
