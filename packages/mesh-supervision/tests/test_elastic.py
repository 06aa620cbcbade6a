"""Meshes whose members come and go: ELA-1 to ELA-4. Without PyTorch."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healing import Replica
from supervised import WITHIN

from mesh_core import Actor, ActorError, DeviceMeshError, MeshError, current_rank, endpoint, inspect
from mesh_core.extensions import uninstall
from mesh_core.testing import LocalCluster
from mesh_supervision import Change, ElasticMesh, _elastic, leaving, whole

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    for name in ("supervision.snapshots", "supervision.notices"):
        with contextlib.suppress(MeshError):
            uninstall(name)


class Trainer(Actor):
    """Counts steps, each rank by a number of its own."""

    def __init__(self, by: int = 1) -> None:
        self.done = 0
        self.by = by

    def __snapshot__(self) -> tuple[int, int]:
        return self.done, self.by

    def __restore__(self, state: tuple[int, int]) -> None:
        self.done, self.by = state

    @endpoint
    def step(self) -> int:
        self.done += self.by
        return self.done

    @endpoint
    def step_by(self, by: int) -> None:
        self.by = by

    @endpoint
    def who(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    def leave(self, grace: float) -> None:
        leaving(grace, "the machine is wanted")

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def step(mesh: Any) -> list[int]:
    values: list[int] = mesh.step.call().get(timeout=WITHIN).values()
    return values


def pids(mesh: Any) -> list[int]:
    return [pid for _, pid in mesh.who.call().get(timeout=WITHIN).values()]


def test_members_come_and_go_at_safe_points_and_have_one_state() -> None:
    """ELA-1, ELA-2."""
    heard: list[Change] = []
    with ElasticMesh(Trainer, minimum=1, maximum=3, members=2, on_change=heard.append) as elastic:
        mesh = elastic.safe_point()
        assert mesh.sizes == {"members": 2}
        assert step(mesh) == [1, 1]
        first = pids(mesh)
        assert elastic.is_settled
        assert elastic.safe_point() is mesh
        elastic.resize(3)
        assert not elastic.is_settled
        assert step(mesh) == [2, 2], "nothing changes before the safe point"
        mesh = elastic.safe_point()
        assert step(mesh) == [3, 3, 3]
        assert pids(mesh)[:2] == first
        assert [rank for rank, _ in mesh.who.call().get(timeout=WITHIN).values()] == [0, 1, 2]
        elastic.resize(1)
        mesh = elastic.safe_point()
        assert step(mesh) == [4]
        assert pids(mesh) == first[:1]
        assert [(each.size, len(each.joined), len(each.left), each.lost) for each in elastic.changes] == [
            (2, 2, 0, ()),
            (3, 1, 0, ()),
            (1, 0, 2, ()),
        ]
        assert heard == elastic.changes


def test_the_lost_are_replaced_by_the_next_safe_point() -> None:
    with ElasticMesh(Trainer, minimum=2, maximum=3) as elastic:
        mesh = elastic.safe_point()
        assert step(mesh) == [1, 1, 1]
        with pytest.raises(DeviceMeshError), whole(mesh):
            mesh.slice(members=1).die.call_one().get(timeout=WITHIN)
        survivors = [pids(mesh.slice(members=each))[0] for each in (0, 2)]
        mesh = elastic.safe_point()
        assert step(mesh) == [2, 2, 2]
        assert pids(mesh)[:2] == survivors
        assert (len(elastic.changes[-1].joined), len(elastic.changes[-1].lost)) == (1, 1)


def test_each_process_of_a_member_has_the_state_of_its_place() -> None:
    with ElasticMesh(Trainer, minimum=1, maximum=2, members=1, sizes={"gpus": 2}) as elastic:
        mesh = elastic.safe_point()
        assert mesh.sizes == {"members": 1, "gpus": 2}
        mesh.slice(gpus=1).step_by.call(10).get(timeout=WITHIN)
        assert step(mesh) == [1, 10]
        elastic.resize(2)
        mesh = elastic.safe_point()
        assert mesh.sizes == {"members": 2, "gpus": 2}
        assert step(mesh) == [2, 20, 2, 20]


def test_a_host_that_is_about_to_go_loses_its_members_before_it_does() -> None:
    """ELA-3: no step is lost."""
    with LocalCluster(hosts=3) as cluster, cluster.attach() as hosts:
        hosts.initialized.get(timeout=WITHIN)
        with ElasticMesh(Trainer, minimum=1, maximum=2, hosts=hosts, per_host=1) as elastic:
            mesh = elastic.safe_point()
            assert step(mesh) == [1, 1]
            assert elastic.changes[0].joined == ("host-0", "host-1")
            mesh.slice(members=1).leave.call_one(30.0).get(timeout=WITHIN)
            while not elastic.notices:
                pass
            (notice,) = elastic.notices
            assert (notice.host, notice.reason) == ("host-1", "the machine is wanted")
            mesh = elastic.safe_point()
            change = elastic.changes[-1]
            assert (change.joined, change.left, change.lost) == (("host-2",), ("host-1",), ())
            cluster.kill(1)
            assert step(elastic.safe_point()) == [2, 2]
            # With one host fewer than members: fewer of them, and again as many once it is back.
            elastic.notice(hosts.slice(hosts=2))
            assert step(elastic.safe_point()) == [3]
            elastic.add_hosts(hosts.slice(hosts=2))
            assert step(elastic.safe_point()) == [4, 4]


def test_a_host_whose_agent_gets_sigterm_is_left_before_it_goes_and_no_step_is_lost() -> None:
    """ELA-3, with real agents: one is told to end while steps are under way, and ends once its members have left."""
    with (
        LocalCluster(hosts=3, env={"MESH_PREEMPTION_GRACE": "30"}) as cluster,
        cluster.attach() as hosts,
        inspect.events(actors=False) as happening,
    ):
        hosts.initialized.get(timeout=WITHIN)
        with ElasticMesh(Trainer, minimum=1, maximum=2, hosts=hosts, per_host=1) as elastic:
            done = [step(elastic.safe_point())]
            os.kill(cluster.pids[1], signal.SIGTERM)
            while len(elastic.changes) == 1:
                done.append(step(elastic.safe_point()))
            notice = next(each for each in happening if each.kind == "host_leaving")
            assert (notice.host, notice.grace) == ("host-1", 30.0)
            gone = next(each for each in happening if each.kind == "host_died")
            assert gone.host == "host-1"
            assert "nothing runs here any more" in cluster.log(1)
            done += [step(elastic.safe_point()) for _ in range(3)]
            assert done == [[each, each] for each in range(1, len(done) + 1)], (
                "no step is lost, and none done twice"
            )
            change = elastic.changes[-1]
            assert (change.joined, change.left, change.lost) == (("host-2",), ("host-1",), ())
            # One that is made later knows too.
            with ElasticMesh(Trainer, minimum=1, maximum=3, hosts=hosts, per_host=1) as other:
                assert other.safe_point().sizes == {"members": 2}
                assert other.changes[0].joined == ("host-0", "host-2")


def test_spare_hosts_are_kept_warm_for_members_to_come() -> None:
    with (
        LocalCluster(hosts=3) as cluster,
        cluster.attach() as hosts,
        inspect.events(actors=False) as happening,
    ):
        hosts.initialized.get(timeout=WITHIN)
        with ElasticMesh(Trainer, maximum=2, hosts=hosts, per_host=1, warm=True) as elastic:
            assert step(elastic.safe_point()) == [1, 1]
            # A process has come and gone there: what has forked it waits for the next.
            assert next(each for each in happening if each.kind == "proc_stopped").host == "host-2"
            elastic.notice(hosts.slice(hosts=1))
            assert step(elastic.safe_point()) == [2, 2]
            assert elastic.changes[-1].joined == ("host-2",)


def test_the_state_waits_for_hosts_where_all_go() -> None:
    with LocalCluster(hosts=2) as cluster, cluster.attach() as hosts:
        hosts.initialized.get(timeout=WITHIN)
        first, second = hosts.slice(hosts=0), hosts.slice(hosts=1)
        with ElasticMesh(Trainer, minimum=1, maximum=2, hosts=first, per_host=1) as elastic:
            assert step(elastic.safe_point()) == [1]
            elastic.notice(first, 30.0, "too expensive")
            with pytest.raises(MeshError, match=r"0 members and needs 1.*host-0 \(too expensive\)"):
                elastic.safe_point(timeout=0.2)
            waiting = threading.Thread(target=elastic.add_hosts, args=(second,))
            waiting.start()
            assert step(elastic.safe_point(timeout=WITHIN)) == [2]
            waiting.join()
            assert elastic.changes[-1].joined == ("host-1",)


def test_a_dead_host_gets_no_members() -> None:
    with LocalCluster(hosts=2) as cluster, cluster.attach() as hosts:
        hosts.initialized.get(timeout=WITHIN)
        with ElasticMesh(Trainer, minimum=1, maximum=2, hosts=hosts) as elastic:
            mesh = elastic.safe_point()
            assert step(mesh) == [1, 1]
            cluster.kill(0)
            with pytest.raises(DeviceMeshError), whole(mesh):
                mesh.step.call().get(timeout=WITHIN)
            mesh = elastic.safe_point()
            assert {*elastic.changes[-1].joined} == {"host-1"}
            assert len(set(step(mesh))) == 1


class Picky(Actor):
    def __init__(self, count: Any) -> None:
        count.send(os.getpid())
        raise ValueError("not today")


def test_a_constructor_that_raises_is_told_once_and_what_was_there_is_kept() -> None:
    from mesh_core import Channel

    port, receiver = Channel.open()
    with ElasticMesh(Picky, port, minimum=1, maximum=2, members=1) as elastic:
        with pytest.raises(ActorError, match="not today"):
            elastic.safe_point()
        receiver.recv().get(timeout=WITHIN)
        assert not receiver.recv().done(), "one try"
        assert elastic.size == 0
        assert elastic.changes == []


def test_what_makes_no_sense_is_refused() -> None:
    for minimum, maximum in ((3, 2), (0, 2)):
        with pytest.raises(ValueError, match=r"1 <= minimum <= maximum must hold"):
            ElasticMesh(Trainer, minimum=minimum, maximum=maximum)
    with pytest.raises(ValueError, match="give another dim"):
        ElasticMesh(Trainer, maximum=2, sizes={"members": 2})
    with ElasticMesh(Trainer, minimum=2, maximum=3) as elastic:
        for members in (1, 4):
            with pytest.raises(ValueError, match=f"{members} members are not"):
                elastic.resize(members)
    with pytest.raises(MeshError, match="was stopped"):
        elastic.safe_point()


def test_those_that_die_while_members_change_are_replaced_too(tmp_path: Path) -> None:
    """ELA-1: whoever takes the state first kills others, the one that gave it among them."""
    victims = tmp_path / "victims"
    with ElasticMesh(Replica, victims, minimum=1, maximum=4, members=3) as elastic:
        mesh = elastic.safe_point()
        mesh.step.call(5).get(timeout=WITHIN)
        found = [pid for _, pid, _ in mesh.told.call().get(timeout=WITHIN).values()]
        victims.write_text(f"{found[0]} {found[2]}")
        elastic.resize(4)
        mesh = elastic.safe_point()
        assert mesh.step.call(1).get(timeout=WITHIN).values() == [6] * 4
        assert not victims.exists()


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_deaths_notices_and_wishes_loses_no_step(seed: int) -> None:
    """ELA-1..3 on a random schedule."""
    chance = random.Random(seed)
    with LocalCluster(hosts=3) as cluster, cluster.attach() as hosts:
        hosts.initialized.get(timeout=WITHIN)
        each_host = [one for _, one in hosts]
        with ElasticMesh(Trainer, minimum=1, maximum=4, members=2, hosts=hosts) as elastic:
            for done in range(1, 16):
                match chance.choice(["resize", "notice", "back", "kill", "none"]):
                    case "resize":
                        elastic.resize(chance.randint(1, 4))
                    case "notice":
                        # One stays, so that there is room.
                        elastic.notice(chance.choice(each_host[1:]))
                    case "back":
                        elastic.add_hosts(chance.choice(each_host[1:]))
                    case "kill" if elastic.size > 1:
                        mesh = elastic.safe_point()
                        if elastic.size > 1:
                            victim = mesh.slice(members=chance.randrange(elastic.size))
                            with pytest.raises(DeviceMeshError), whole(mesh):
                                victim.die.call_one().get(timeout=WITHIN)
                mesh = elastic.safe_point()
                assert step(mesh) == [done] * elastic.size


def fails_at_first(folder: Path, times: int = 1) -> None:
    """Fail in the first processes that are started, and in no others."""
    for at in range(times):
        try:
            (folder / f"failed{at or ''}").mkdir()
        except FileExistsError:
            continue
        raise RuntimeError("this one was too slow")


def test_a_host_on_which_one_start_has_failed_is_tried_again(tmp_path: Path) -> None:
    """ELA-4: it is the only one, and its other member stays."""
    with ElasticMesh(
        Trainer,
        minimum=1,
        maximum=2,
        members=1,
        spawn={"bootstrap": functools.partial(fails_at_first, tmp_path)},
    ) as elastic:
        mesh = elastic.safe_point()
        assert step(mesh) == [1]
        assert (tmp_path / "failed").exists()
        assert elastic.notices == []
        (tmp_path / "failed").rmdir()
        elastic.resize(2)
        # It goes on with the member that it has until the host is tried again.
        sizes = []
        while (size := len(elastic.safe_point())) == 1:
            sizes.append(size)
        assert size == 2 and sizes
        assert step(elastic.safe_point()) == [2, 2]


@pytest.mark.full
def test_a_mesh_without_its_least_members_does_not_wait_longer_after_each_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ELA-4: seven failures in a row would set the host aside for a minute."""
    monkeypatch.setattr(_elastic, "_LONGEST_HALT_S", 0.1)
    with ElasticMesh(
        Trainer, minimum=1, maximum=1, spawn={"bootstrap": functools.partial(fails_at_first, tmp_path, 7)}
    ) as elastic:
        assert step(elastic.safe_point(timeout=WITHIN)) == [1]
    assert (tmp_path / "failed6").exists()


def test_a_host_that_never_starts_a_member_is_named(tmp_path: Path) -> None:
    """ELA-4: with the reason, and not given up until the time is over."""

    def never() -> None:
        raise RuntimeError("there is no GPU")

    with (
        ElasticMesh(Trainer, minimum=1, maximum=1, spawn={"bootstrap": never}) as elastic,
        pytest.raises(
            MeshError,
            # The time may be over while the host waits for its next try, or in the middle of one.
            match=r"(has 0 members and needs 1, .* could not start a member|within 1.5 s: .* earlier tries): .*there is no GPU",
        ),
    ):
        elastic.safe_point(timeout=1.5)


class Slow(Actor):
    """Is constructed when it may be."""

    def __init__(self, folder: str) -> None:
        while not (Path(folder) / "go").exists():
            pass

    @endpoint
    def ready(self) -> bool:
        return True


@pytest.mark.full
def test_a_safe_point_that_takes_too_long_says_what_it_waits_for_and_can_be_called_again(
    tmp_path: Path,
) -> None:
    with ElasticMesh(Slow, str(tmp_path), minimum=1, maximum=1) as elastic:
        with pytest.raises(
            MeshError,
            match=r"within 2 s: constructing the new members' actors took too long .*call safe_point\(\) again",
        ):
            elastic.safe_point(timeout=2.0)
        (tmp_path / "go").touch()
        assert elastic.safe_point().ready.call().get(timeout=WITHIN).values() == [True]


class Learner(Actor):
    """Trains: each step's result depends on all steps before, to the last bit."""

    def __init__(self) -> None:
        self.done = 0
        self.weight = 0.5

    def __snapshot__(self) -> tuple[int, float]:
        return self.done, self.weight

    def __restore__(self, state: tuple[int, float]) -> None:
        self.done, self.weight = state

    @endpoint
    def step(self, n: int) -> tuple[int, float]:
        # One that is asked again after a failure has done it already.
        if n == self.done:
            self.weight = 3.9 * self.weight * (1 - self.weight)
            self.done += 1
        return self.done, self.weight

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("members", [1, 3])
def test_a_training_goes_on_under_constant_kills(members: int) -> None:
    """ELA-2: a member is killed every three seconds; it ends as one that nobody has disturbed."""
    kills, over = 8, threading.Event()
    chosen = random.Random(7)
    alive: list[int] = []

    def kill() -> None:
        for _ in range(kills):
            if over.wait(3.0):
                return
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(chosen.choice(alive), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    with ElasticMesh(Learner, minimum=members, maximum=members) as elastic:
        killer.start()
        try:
            done, weight = 0, 0.5
            while killer.is_alive() or done < 100:
                try:
                    mesh = elastic.safe_point()
                    alive[:] = mesh.pid.call().get(timeout=WITHIN).values()
                    with whole(mesh):
                        results = mesh.step.call(done).get(timeout=WITHIN).values()
                except (MeshError, ConnectionError):
                    continue
                assert len(set(results)) == 1, results
                done, weight = results[0]
        finally:
            over.set()
            killer.join()
        lost = sum(len(each.lost) for each in elastic.changes)
    assert lost >= kills // 2
    expected = 0.5
    for _ in range(done):
        expected = 3.9 * expected * (1 - expected)
    assert weight == expected
