"""Trainings in process groups that lose ranks: GRP-1, GRP-2. Needs PyTorch.

The last test kills a process every second for three seconds. `./dev test --all`, or MESH_HEALING_SECONDS=180, has it kill one every
three seconds for three minutes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from healing import Trainer
from supervised import WITHIN

from levels import by_level
from mesh_core import DeviceMeshError, MeshError, ProcMesh, this_host
from mesh_core.extensions import uninstall
from mesh_supervision import ElasticMesh, Ignore, form_group, heal_mesh, keep_snapshots, whole

pytest.importorskip("torch", reason="torch is not installed: mesh-supervision does without")

RANKS = 4
STARTING = 110.0
LONG = float(os.environ.get("MESH_HEALING_SECONDS") or by_level(quick=0, full=0, everything=180))

pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(120 + 4 * LONG)]

Slay = Callable[[ProcMesh, int], int]


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    keep_snapshots()
    # Processes that are made again come from the same fork server only in the same environment; PyTorch is imported once.
    env = {"OMP_NUM_THREADS": "1", "PYTEST_CURRENT_TEST": None}
    with this_host().spawn_procs(
        {"gpus": RANKS}, env=env, preload=["torch", "torch._dynamo"], supervise=Ignore()
    ) as procs:
        procs.initialized.get(timeout=STARTING)
        form_group(procs)
        yield procs
    for name in ("snapshots", "groups", "aborts", "meeting", "healed"):
        with contextlib.suppress(MeshError):
            uninstall(f"supervision.{name}")


@pytest.fixture
def trainers(procs: ProcMesh) -> Iterator[Any]:
    heal_mesh(procs)
    trainers: Any = procs.spawn("trainers", Trainer, supervise=Ignore())
    yield trainers
    trainers.stop().get(timeout=WITHIN)


def train(
    trainers: Any, steps: int, kills: dict[int, int] | None = None, mode: Any = "replace"
) -> tuple[Any, int]:
    """The loop that users write; returns the mesh that is left, and how often it was healed."""
    kills, done, healed = dict(kills or {}), -1, 0
    while done < steps:
        try:
            with whole(trainers):
                if done < 0:
                    done = trainers.slice(gpus=0).done.call_one().get(timeout=WITHIN)
                    continue
                done = trainers.step.call(RANKS, kills.pop(done, -1)).get(timeout=WITHIN).values()[0]
        except DeviceMeshError:
            trainers, healed = heal_mesh(trainers, mode), healed + 1
    return trainers, healed


def test_a_healed_training_learns_what_an_undisturbed_one_does(procs: ProcMesh, trainers: Any) -> None:
    steps, chance = 14, random.Random(14)
    others: Any = procs.spawn("others", Trainer, supervise=Ignore())
    train(others, steps)
    undisturbed = others.result.call().get(timeout=WITHIN).values()
    others.stop().get(timeout=WITHIN)
    assert undisturbed == undisturbed[:1] * RANKS
    assert undisturbed[0][0][-1] < undisturbed[0][0][0] / 2, "it learns"

    kills = {step: chance.randrange(RANKS) for step in chance.sample(range(1, steps), 3)}
    same, healed = train(trainers, steps, kills)
    assert same is trainers
    assert healed == 3
    assert trainers.result.call().get(timeout=WITHIN).values() == undisturbed, "to the last bit"
    assert sum(procs.incarnations) >= 3


def test_a_smaller_group_goes_on(procs: ProcMesh, trainers: Any) -> None:
    left, healed = train(trainers, 8, {2: 1, 5: 0}, "shrink")
    assert healed == 2
    assert left.sizes == {"gpus": 2}
    assert left.where.call().get(timeout=WITHIN).values() == [(0, 0, 2), (1, 1, 2)]
    heal_mesh(procs)
    others: Any = procs.spawn("others", Trainer, supervise=Ignore())
    train(others, 8)
    losses, weights = others.result.call().get(timeout=WITHIN).values()[0]
    for found in left.result.call().get(timeout=WITHIN).values():
        assert found[0] == pytest.approx(losses, rel=1e-4)
        assert found[1] == pytest.approx(weights, rel=1e-4)
    others.stop().get(timeout=WITHIN)


def test_survivors_leave_a_collective_at_once(procs: ProcMesh, trainers: Any, slay: Slay) -> None:
    """GRP-1: rank 0 waits for one that lives, whose connection says nothing of the death."""
    trainers.sum_up.call().get(timeout=WITHIN)
    waiting = [trainers.slice(gpus=0).wait_for.call_one(1), trainers.slice(gpus=2).wait_for.call_one(0)]
    # A message behind it tells that nothing of it is done: it would be answered only after.
    slay(procs, 3)
    for each in waiting:
        error = each.exception(timeout=WITHIN)
        assert isinstance(error, RuntimeError)
        assert "timed out" not in str(error).lower(), "nobody has left it, but its time was over"
    heal_mesh(trainers)
    assert trainers.sum_up.call().get(timeout=WITHIN).values() == [4.0] * RANKS


def test_a_group_is_formed_again_without_leaks(procs: ProcMesh, trainers: Any, slay: Slay) -> None:
    """GRP-2."""
    counts = []
    for number in range(4):
        group = form_group(procs)
        assert trainers.sum_up.call().get(timeout=WITHIN).values() == [4.0] * RANKS
        counts.append(trainers.descriptors.call().get(timeout=WITHIN).values())
        if number % 2:
            group.abort()
            heal_mesh(trainers)
            assert trainers.sum_up.call().get(timeout=WITHIN).values() == [4.0] * RANKS
    # There were three groups in between, each with a connection to every other rank.
    for before, after in zip(counts[1], counts[3], strict=True):
        assert len(after) < len(before) + RANKS, (before, after)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nobody_waits_for_one_that_dies_while_a_group_is_formed(
    procs: ProcMesh, trainers: Any, when: str
) -> None:
    """GRP-1: the others would connect for half an hour to what is not there any more.

    And the next group is one of those that could not join this one and of one that knows nothing of it.
    """
    trainers.slice(gpus=3).die_while_joining.call_one(when).get(timeout=WITHIN)
    with pytest.raises(MeshError) as caught:
        form_group(procs)
    assert "timed out" not in str(caught.value).lower(), "nobody was told, but the time was over"
    heal_mesh(trainers)
    assert trainers.sum_up.call().get(timeout=WITHIN).values() == [4.0] * RANKS


@pytest.mark.full
def test_those_killed_at_any_moment_are_healed(procs: ProcMesh, trainers: Any) -> None:
    chance = random.Random(2026)
    seconds, every = (LONG, 3.0) if LONG else (3.0, 1.0)
    over, killed = threading.Event(), []

    def killer() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over.wait(every * chance.uniform(0.8, 1.2)):
            pid = chance.choice([each for each in procs.pids if each is not None])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=killer)
    thread.start()
    healed = steps = 0
    try:
        while thread.is_alive():
            steps += 1
            _, more = train(trainers, steps)
            healed += more
    finally:
        over.set()
        thread.join()
    trainers = heal_mesh(trainers)
    # Nobody may know of the last death yet. A step, in which all take part, finds it. There may be one more where all had done
    # the last step, and the answer was lost with a process; so this goes beyond both.
    steps += 2
    train(trainers, steps)
    assert trainers.slice(gpus=0).done.call_one().get(timeout=WITHIN) == steps
    others: Any = procs.spawn("others", Trainer, supervise=Ignore())
    train(others, steps)
    undisturbed = others.result.call().get(timeout=WITHIN).values()
    others.stop().get(timeout=WITHIN)
    assert trainers.result.call().get(timeout=WITHIN).values() == undisturbed
    assert killed
    logging.getLogger(__name__).info(
        "%g s: %d steps, %d processes killed, healed %d times", seconds, steps, len(killed), healed
    )


@pytest.mark.full
def test_a_training_of_more_and_fewer_members_has_the_losses_of_one(procs: ProcMesh) -> None:
    """ELA-2, with a group that is formed anew by each change."""
    shares, steps = 6, 12
    spawn = {
        "env": {"OMP_NUM_THREADS": "1", "PYTEST_CURRENT_TEST": None},
        "preload": ["torch", "torch._dynamo"],
    }

    def trained(sizes: dict[int, int], kills: dict[int, int]) -> list[float]:
        with ElasticMesh(Trainer, minimum=1, maximum=3, members=sizes[0], group=True, spawn=spawn) as elastic:
            done = 0
            while done < steps:
                elastic.resize(sizes.get(done, sizes[0]))
                trainers = elastic.safe_point()
                with contextlib.suppress(DeviceMeshError), whole(trainers):
                    done = trainers.step.call(shares, kills.pop(done, -1)).get(timeout=WITHIN).values()[0]
            losses: list[list[float]] = [
                each for each, _ in trainers.result.call().get(timeout=WITHIN).values()
            ]
            assert all(each == losses[0] for each in losses)
            return losses[0]

    alone = trained({0: 1}, {})
    changing = dict(enumerate([2, 2, 3, 3, 1, 1, 2, 3, 3, 1, 2, 2]))
    assert trained(changing, {1: 1, 3: 2, 7: 0}) == pytest.approx(alone, rel=1e-4)
