"""Actors lose their processes, and find their states again."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mesh_snapshots
import pytest
from mesh_snapshots import Owner, Snapshot, SnapshotError, Snapshots, WriterCapabilities, WriterPlugin
from mesh_snapshots._native_writer import NativeWriter
from mesh_snapshots._saver import Job, Saver

from mesh_core import (
    Actor,
    Future,
    MeshError,
    ProcMesh,
    Promise,
    SupervisionError,
    endpoint,
    gather,
    set_fault_handler,
    this_host,
)
from mesh_core.extensions import find, uninstall
from mesh_core.plugins import ProbeResult
from mesh_core.testing import LocalCluster, installed_plugins

SOON = 30.0


class Counter(Actor):
    """Counts, and saves as it goes."""

    def __init__(self) -> None:
        self.count: int = mesh_snapshots.here().restore(0).get(timeout=SOON)

    @endpoint
    def add(self, n: int) -> int:
        self.count += n
        mesh_snapshots.here().save(self.count).get(timeout=SOON)
        return self.count

    @endpoint
    def add_each(self, numbers: list[int]) -> list[int]:
        """Saves again before the last snapshot is taken."""
        futures = []
        for n in numbers:
            self.count += n
            futures.append(mesh_snapshots.here().save(self.count))
        return [snapshot.number for snapshot in gather(*futures).get(timeout=SOON)]

    @endpoint
    def save_and_go(self, n: int) -> None:
        """Wait for nothing."""
        self.count = n
        self.unfinished = mesh_snapshots.here().save(n)

    @endpoint
    def get(self) -> tuple[int, int]:
        return self.count, os.getpid()


class AsyncCounter(Actor):
    """The same, in coroutines."""

    count: int | None = None

    @endpoint
    async def add(self, n: int) -> int:
        if self.count is None:
            self.count = await mesh_snapshots.here().restore(0)
        self.count += n
        await mesh_snapshots.here().save(self.count)
        return self.count


class Reader(Actor):
    """Holds a reference."""

    def __init__(self, counters: Any) -> None:
        self.counters = counters

    @endpoint
    def read(self) -> list[int]:
        return [count for count, _ in self.counters.get.call().get(timeout=SOON).values()]


@pytest.fixture
def snapshots(tmp_path: Path) -> Iterator[Snapshots]:
    yield mesh_snapshots.enable(tmp_path / "snapshots")
    if find(Snapshots) is not None:  # hosts that are attached take the runtime along when they are let go
        uninstall("snapshots")


def kill(procs: ProcMesh, rank: int) -> None:
    """Kill a process, and wait until a policy has made it and its actors again."""
    pid, life = procs.pids[rank], procs.incarnations[rank]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while procs.incarnations[rank] == life:
        os.sched_yield()


def until_up(mesh: Any) -> None:
    while mesh.failed():
        os.sched_yield()


def test_a_killed_counter_goes_on_and_references_mean_the_new_one(snapshots: Snapshots) -> None:
    with (
        this_host().spawn_procs({"gpus": 3}, name="workers", supervise="revive-procs") as procs,
        this_host().spawn_procs(name="others") as others,
    ):
        counters: Any = procs.spawn("counters", Counter, supervise="revive")
        assert counters.add.call(5).get(timeout=SOON).values() == [5, 5, 5]
        assert counters.slice(gpus=1).add.call_one(2).get(timeout=SOON) == 7
        reader: Any = others.spawn("reader", Reader, counters)
        assert reader.read.call_one().get(timeout=SOON) == [5, 7, 5]
        before = counters.get.call().get(timeout=SOON).values()
        for life in (1, 2):
            kill(procs, 1)
            until_up(counters)
            assert reader.read.call_one().get(timeout=SOON) == [5, 7, 5]
            assert procs.incarnations == [0, life, 0]
        now = counters.get.call().get(timeout=SOON).values()
        assert [old == new for old, new in zip(before, now, strict=True)] == [True, False, True]
        assert counters.add.call(1).get(timeout=SOON).values() == [6, 8, 6]
        assert {owner.rank: each.number for owner, each in snapshots.latest().items()} == {0: 2, 1: 3, 2: 2}


def test_a_counter_that_raises_is_restarted_in_its_process(snapshots: Snapshots) -> None:
    with this_host().spawn_procs(name="workers") as procs:
        counter: Any = procs.spawn("counter", Counter, supervise="revive")
        assert counter.add.call_one(3).get(timeout=SOON) == 3
        _, pid = counter.get.call_one().get(timeout=SOON)
        counter.add.broadcast("three")  # nobody waits, so that the actor fails
        while True:
            try:
                now = counter.get.call_one().get(timeout=SOON)
                break
            except MeshError:
                continue  # what comes before it is made again is refused
        assert now == (3, pid)
        assert counter.add.call_one(1).get(timeout=SOON) == 4


def test_the_fourth_failure_within_a_minute_is_passed_on(snapshots: Snapshots) -> None:
    told: list[Any] = []
    heard = threading.Event()

    def note(failure: Any) -> None:
        told.append(failure)
        heard.set()

    set_fault_handler(note)
    try:
        with this_host().spawn_procs(name="workers", supervise=lambda failure: True) as procs:
            counter: Any = procs.spawn("counter", Counter, supervise="revive")
            counter.initialized.get(timeout=SOON)
            for _ in range(3):
                kill(procs, 0)
                until_up(counter)
                counter.get.call_one().get(timeout=SOON)
            pid = procs.pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert heard.wait(SOON)
            assert told[0].chain == ("the policy of 'counter': 4 failures within 60 s, 3 is revived",)
    finally:
        set_fault_handler(None)


def test_snapshots_are_taken_in_order_and_two_are_kept(snapshots: Snapshots, tmp_path: Path) -> None:
    with this_host().spawn_procs(name="workers", supervise="revive-procs") as procs:
        counter: Any = procs.spawn("counter", Counter, supervise="revive")
        assert counter.add_each.call_one([1] * 20).get(timeout=SOON) == list(range(1, 21))
        owner = Owner("workers", 0, "counter")
        latest = snapshots.latest()[owner]
        assert (latest.number, Path(latest.path).parent) == (20, tmp_path / "snapshots")
        kill(procs, 0)
        until_up(counter)
        assert counter.add.call_one(0).get(timeout=SOON) == 20
        numbers = sorted(int(path.name.split("+")[3]) for path in (tmp_path / "snapshots").iterdir())
        assert numbers == [20, 21]


def test_two_actors_of_a_process_have_states_of_their_own(snapshots: Snapshots) -> None:
    with this_host().spawn_procs(name="workers/of + all.", supervise="revive-procs") as procs:
        first: Any = procs.spawn("first ../x", Counter, supervise="revive")
        second: Any = procs.spawn("second", Counter, supervise="revive")
        first.add.call_one(1).get(timeout=SOON)
        second.add.call_one(2).get(timeout=SOON)
        kill(procs, 0)
        until_up(first)
        until_up(second)
        assert [each.get.call_one().get(timeout=SOON)[0] for each in (first, second)] == [1, 2]


def test_a_run_of_the_script_finds_what_the_last_one_has_left(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        mesh_snapshots.enable(tmp_path)
        with this_host().spawn_procs({"gpus": 2}, name="workers") as procs:
            counters: Any = procs.spawn("counters", Counter)
            assert counters.add.call(1).get(timeout=SOON).values() == [run, run]
        uninstall("snapshots")


def test_states_move_to_another_host_with_their_processes(snapshots: Snapshots) -> None:
    with LocalCluster(hosts=2) as cluster, cluster.attach() as hosts:
        procs = hosts.slice(hosts=0).spawn_procs(name="workers", supervise=lambda failure: True)
        counter: Any = procs.spawn("counter", AsyncCounter, supervise=lambda failure: True)
        assert [counter.add.call_one(n).get(timeout=SOON) for n in (1, 2)] == [1, 3]
        cluster.kill(0)
        while not procs.failed():
            os.sched_yield()
        procs.respawn(on=hosts.slice(hosts=1)).get(timeout=SOON)
        counter.respawn().get(timeout=SOON)
        assert counter.add.call_one(1).get(timeout=SOON) == 4
        assert snapshots.latest()[Owner("workers", 0, "counter")].number == 3


# When something is wrong.


def test_a_write_that_fails_is_an_os_error_and_the_next_succeeds(
    snapshots: Snapshots, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshots"
    with this_host().spawn_procs(name="workers") as procs:
        counter: Any = procs.spawn("counter", Counter)
        assert counter.add.call_one(1).get(timeout=SOON) == 1
        folder.rename(tmp_path / "away")
        with pytest.raises(OSError, match="No such file or directory"):
            counter.add.call_one(1).get(timeout=SOON)
        (tmp_path / "away").rename(folder)
        assert counter.add.call_one(1).get(timeout=SOON) == 3
        assert snapshots.latest()[Owner("workers", 0, "counter")].number == 2


def test_what_cannot_be_pickled_is_refused_at_once(snapshots: Snapshots) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        snapshots.save(threading.Lock(), name="script")


def test_a_damaged_file_is_left_out(
    snapshots: Snapshots, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (snapshots.save(n, name="script").get(timeout=SOON) for n in (1, 2))
    assert snapshots.restore(0, name="script").get(timeout=SOON) == 2
    whole = Path(second.path).read_bytes()
    for damaged in (b"", b"garbage" * 100, whole[:-1], whole[:-1] + b"!", whole + b"!"):
        caplog.clear()
        Path(second.path).write_bytes(damaged)
        assert snapshots.restore(0, name="script").get(timeout=SOON) == 1
        assert "snapshot 2 of 'script' on rank 0 of 'controller' is left out" in caplog.text
    Path(first.path).unlink()
    with pytest.raises(
        SnapshotError, match=r"no snapshot of 'script' .* can be read; the newest is .*controller"
    ):
        snapshots.restore(0, name="script").get(timeout=SOON)


def test_other_files_in_the_folder_do_no_harm(tmp_path: Path) -> None:
    names = [
        "notes",
        "a.snapshot",
        "a+b+c+d+e.snapshot",
        "a+1+b+2.snapshot",
        "controller+0+script+7+0-0-0.snapshot.part",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"garbage")
    snapshots = mesh_snapshots.enable(tmp_path)
    try:
        assert snapshots.latest() == {}
        assert snapshots.restore("new", name="script").get(timeout=SOON) == "new"
        assert snapshots.save(1, name="script").get(timeout=SOON).number == 1
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {*names[:-1], "controller+0+script+1+0-0-0.snapshot"}
    finally:
        uninstall("snapshots")


class HalfWriter:
    """Writes as the native one, until it is to write a state with the word `half`: of that it writes half, and no more."""

    def write(self, path: str, data: bytes) -> Future[None]:
        if b"half" not in data:
            return NativeWriter().write(path, data)
        Path(path + ".part").write_bytes(data[: len(data) // 2])
        Path(path).parent.with_name("half").touch()
        self.promise = Promise[None]("half")
        return self.promise.future


HALF = WriterPlugin(
    name="half",
    api_version=1,
    create=HalfWriter,
    probe=lambda: ProbeResult.yes(WriterCapabilities(durable=False, takes_lock=True)),
    summary="writes halves",
)


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Path]:
    """Snapshots by a writer that hangs in the middle; the file is there once it does."""
    with installed_plugins(HALF):
        mesh_snapshots.enable(tmp_path / "snapshots", writer="half")
    yield tmp_path / "half"
    uninstall("snapshots")


def test_a_process_that_dies_while_it_writes_goes_on_from_the_snapshot_before(
    halves: Path, tmp_path: Path
) -> None:
    with this_host().spawn_procs(name="workers", supervise="revive-procs") as procs:
        counter: Any = procs.spawn("counter", Counter, supervise="revive")
        assert counter.add.call_one(5).get(timeout=SOON) == 5
        waiting = counter.save_and_go.call_one("half")
        while not halves.exists():
            os.sched_yield()
        waiting.get(timeout=SOON)
        dying = counter.add.call_one("?")  # its snapshot is behind the one that hangs
        kill(procs, 0)
        with pytest.raises(SupervisionError):
            dying.get(timeout=SOON)
        until_up(counter)
        # Its host cleans up behind it, before the next life saves anything.
        while any(path.suffix == ".part" for path in (tmp_path / "snapshots").iterdir()):
            os.sched_yield()
        assert counter.add.call_one(1).get(timeout=SOON) == 6
        names = sorted(path.name.split("+")[3:] for path in (tmp_path / "snapshots").iterdir())
        assert [name[0] for name in names] == ["1", "2"] and not names[1][1].endswith(".part")


def test_a_writer_that_cannot_work_here_says_why(tmp_path: Path) -> None:
    tape = WriterPlugin(
        name="tape",
        api_version=1,
        create=HalfWriter,
        probe=lambda: ProbeResult.no("there is no tape drive", remedy="buy one"),
    )
    with installed_plugins(tape), pytest.raises(SnapshotError, match=r"no tape drive\. Try: buy one"):
        mesh_snapshots.enable(tmp_path, writer="tape")
    with pytest.raises(MeshError, match=r"no snapshot writer is called 'nativ'; did you mean 'native'\?"):
        mesh_snapshots.enable(tmp_path, writer="nativ")


def test_a_process_without_snapshots_is_an_error(tmp_path: Path) -> None:
    with this_host().spawn_procs(name="early") as early:
        counter: Any = early.spawn("counter", Counter)
        with pytest.raises(
            SnapshotError, match=r"early\[0\] takes no snapshots: call mesh_snapshots\.enable"
        ):
            counter.get.call_one().get(timeout=SOON)


def test_only_the_keeper_knows_all_and_answers(snapshots: Snapshots) -> None:
    with this_host().spawn_procs(name="workers") as procs:
        with pytest.raises(SnapshotError, match=r"workers\[0\] keeps no snapshots; controller does"):
            snapshots.call(procs, "latest").get(timeout=SOON)
        with pytest.raises(TypeError, match="Find, Begin and Saved"):
            snapshots.call(snapshots.proc, "latest").get(timeout=SOON)


def test_two_meshes_of_one_name_are_an_error(snapshots: Snapshots) -> None:
    with (
        this_host().spawn_procs(name="workers") as first,
        this_host().spawn_procs(name="workers") as second,
    ):
        one, other = (each.spawn("counter", Counter) for each in (first, second))
        assert one.add.call_one(1).get(timeout=SOON) == 1
        assert other.add.call_one(10).get(timeout=SOON) in (10, 11)
        with pytest.raises(SnapshotError, match="another process takes the snapshots of 'counter' on rank 0"):
            one.add.call_one(1).get(timeout=SOON)


def test_a_failure_of_something_else_is_not_taken_for_one_of_a_snapshot(snapshots: Snapshots) -> None:
    with this_host().spawn_procs(name="unguarded") as procs:
        counter: Any = procs.spawn("counter", Counter)
        counter.initialized.get(timeout=SOON)
        pid = procs.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while not procs.failed():
            os.sched_yield()
        saving = [snapshots.save(n, name="script") for n in range(5)]
        assert [each.exception(timeout=SOON) for each in saving] == [None] * 5
        with pytest.raises(SupervisionError):
            this_host().spawn_procs().initialized.get(timeout=SOON)


# The end.


def test_what_is_not_written_yet_is_written_before_a_process_ends(snapshots: Snapshots) -> None:
    with this_host().spawn_procs(name="workers") as procs:
        counter: Any = procs.spawn("counter", Counter)
        for n in range(20):
            counter.save_and_go.broadcast(n)
        procs.stop().get(timeout=SOON)
    assert snapshots.latest()[Owner("workers", 0, "counter")].number == 20


def test_uninstalling_finishes_what_was_begun_and_leaves_no_thread(tmp_path: Path) -> None:
    snapshots = mesh_snapshots.enable(tmp_path)
    saving = [snapshots.save(n, name="script") for n in range(20)]
    uninstall("snapshots")
    taken: list[Snapshot] = gather(*saving).get(timeout=SOON)
    assert [snapshot.number for snapshot in taken] == list(range(1, 21))
    assert [each.name for each in threading.enumerate() if "snapshots" in each.name] == []
    with pytest.raises(SnapshotError, match="snapshots were stopped in this process"):
        snapshots.save(1, name="script")


def test_what_hangs_at_the_end_fails_and_what_was_given_up_is_not_taken(tmp_path: Path) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    taken: list[bytes] = []

    def save(job: Job) -> Snapshot:
        taken.append(job.data)
        hangs.set()
        goes_on.wait(SOON)
        return Snapshot(job.owner, len(taken), "")

    saver = Saver(save)
    owner = Owner("workers", 0, "counter")
    jobs = [Job(owner, data, Promise[Snapshot]()) for data in (b"first", b"given up", b"last")]
    for job in jobs:
        saver.put(job)
    jobs[1].promise.future.cancel()
    assert hangs.wait(SOON)
    (thread,) = (each for each in threading.enumerate() if each.name == "mesh-snapshots")
    saver.close(seconds=0.0)
    for job in (jobs[0], jobs[2]):
        with pytest.raises(SnapshotError, match=r"no snapshot of 'counter' .* within 0 s: its process ends"):
            job.promise.future.get(timeout=SOON)
    goes_on.set()
    thread.join(SOON)
    assert not thread.is_alive() and taken == [b"first"]


def test_a_future_that_is_given_up_before_its_turn_writes_nothing(tmp_path: Path) -> None:
    writer = HalfWriter()
    with installed_plugins(replace(HALF, create=lambda: writer)):
        snapshots = mesh_snapshots.enable(tmp_path / "snapshots", writer="half")
    try:
        first = snapshots.save("half", name="script")
        while not (tmp_path / "half").exists():
            os.sched_yield()
        second, third = snapshots.save(2, name="script"), snapshots.save(3, name="script")
        assert second.cancel()
        while not hasattr(writer, "promise"):
            os.sched_yield()
        writer.promise.set_exception(OSError("the disk is gone"))
        with pytest.raises(OSError, match="the disk is gone"):
            first.get(timeout=SOON)
        assert third.get(timeout=SOON).number == 1
        assert snapshots.restore(0, name="script").get(timeout=SOON) == 3
    finally:
        uninstall("snapshots")
