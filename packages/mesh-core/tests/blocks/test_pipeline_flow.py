"""What a pipeline may do next: bounded, without deadlock, and in order. Random schedules of the decision alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from mesh_core._blocks.pipeline.flow import Flow, Item

pytestmark = pytest.mark.python

SIZES = (1, 5, 40, 300)


@dataclass
class Job:
    item: Item[str]
    yields: int | None
    """How many values its generator yields; None for a plain stage."""
    fails: bool
    n: int = 0


class Schedule:
    """Runs a flow with a random order of events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ordered = self.random.random() < 0.5
        self.max_bytes = self.random.choice([1, 10, 100, 1000])
        self.replicas = [self.random.randint(1, 3) for _ in range(self.random.randint(1, 4))]
        self.generators = [self.random.random() < 0.4 for _ in self.replicas]
        self.flow: Flow[str] = Flow(len(self.replicas), self.max_bytes, ordered=self.ordered)
        self.retries = self.random.random() < 0.5
        self.left = self.random.randint(0, 30)
        self.number = 0
        self.jobs: list[list[Job]] = [[] for _ in self.replicas]
        self.taken: list[tuple[int, ...]] = []
        self.expected: set[tuple[int, ...]] = set()

    def size(self) -> int:
        return self.random.choice(SIZES)

    def made(self, stage: int, key: tuple[int, ...]) -> None:
        if stage == len(self.replicas) - 1:
            self.expected.add(key)

    def steps(self) -> list[str]:
        """What can happen next. The loop over the results may be slow, too."""
        flow = self.flow
        found = ["take"] if flow.ready else []
        if self.left and flow.wants(4):
            found.append("source")
        for stage, jobs in enumerate(self.jobs):
            last = self.generators[stage] and len(jobs) + 1 == self.replicas[stage]
            if len(jobs) < self.replicas[stage] and (item := flow.begin(stage, last=last)) is not None:
                self.begin(stage, item)
            full = len(jobs) == self.replicas[stage]
            for place, job in enumerate(jobs):
                blocked = job.yields is not None and job.n < job.yields and not job.fails
                if not blocked or flow.may_read(stage, job.item, job.n, full=full):
                    found.append(f"{stage} {place}")
        return found

    def begin(self, stage: int, item: Item[str]) -> None:
        yields = self.random.randint(0, 12) if self.generators[stage] else None
        self.jobs[stage].append(Job(item, yields, self.random.random() < 0.1))
        if yields is not None:
            self.flow.opened(stage, item)

    def step(self, what: str) -> None:
        if what == "take":
            self.taken.append(self.flow.take().key)
        elif what == "source":
            self.left -= 1
            self.flow.add(Item((self.number,), self.size(), ""))
            self.number += 1
        else:
            stage, place = map(int, what.split())
            self.work(stage, place)

    def work(self, stage: int, place: int) -> None:
        job = self.jobs[stage][place]
        opened = job.yields is not None
        if job.fails:
            job.fails = False
            del self.jobs[stage][place]
            if self.retries and job.n == 0 and self.random.random() < 0.5:
                self.flow.again(stage, job.item, opened=opened)
            else:
                self.flow.over(stage, job.item, job.n if opened else None)
        elif job.yields is None:
            del self.jobs[stage][place]
            self.made(stage, job.item.key)
            self.flow.passed(stage, job.item, self.size(), "")
        elif job.n == job.yields:
            del self.jobs[stage][place]
            self.flow.over(stage, job.item, job.n)
        else:
            self.made(stage, (*job.item.key, job.n))
            self.flow.read(stage, job.item, job.n, self.size(), "")
            job.n += 1

    def run(self) -> None:
        while True:
            steps = self.steps()
            if not steps:
                break
            self.step(self.random.choice(steps))
            # PIP-1: the budget, an output of each replica, and one item that is always allowed.
            if not (self.ordered and self.retries):
                assert self.flow.held <= self.max_bytes + (sum(self.replicas) + 1) * max(SIZES)
            assert self.flow.held == sum(self.flow.bytes)
        # PIP-3, PIP-5: it ends only when nothing is left.
        assert not self.left
        assert self.flow.is_empty
        assert self.flow.held == 0
        assert sorted(self.taken) == sorted(self.expected)
        if self.ordered:
            assert self.taken == sorted(self.taken), "PIP-4"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_random_schedules_end_within_their_budget(block: int) -> None:
    for seed in range(block * 60, (block + 1) * 60):
        Schedule(seed).run()


def test_the_source_is_not_read_while_nobody_takes_results() -> None:
    flow: Flow[str] = Flow(1, 100, ordered=False)
    number = 0
    while flow.wants(4):
        flow.add(Item((number,), 10, ""))
        number += 1
        while (item := flow.begin(0)) is not None:
            flow.passed(0, item, 10, "")
    assert 5 <= number <= 10
    flow.take()
    for _ in range(5):
        if flow.ready:
            flow.take()
    assert flow.wants(4)


def test_a_generator_is_read_only_as_far_as_there_is_room() -> None:
    """PIP-2: up to the limit of its own stage, which is lower than that of the next."""
    flow: Flow[str] = Flow(2, 90, ordered=False)
    flow.add(Item((0,), 1, ""))
    item = flow.begin(0)
    assert item is not None
    flow.opened(0, item)
    n = 0
    while flow.may_read(0, item, n):
        flow.read(0, item, n, 10, "")
        n += 1
    assert n == 6
    second = flow.begin(1)
    assert second is not None
    flow.passed(1, second, 10, "")
    assert not flow.may_read(0, item, n)
    flow.take()
    assert flow.may_read(0, item, n)


def flow_with_a_younger_item_ahead() -> tuple[Flow[str], Item[str]]:
    """A plain stage before a stage of generators; item 1 has left the first, which still works on item 0."""
    flow: Flow[str] = Flow(2, 30, ordered=True)
    for number in range(2):
        flow.add(Item((number,), 1, ""))
    older, younger = flow.begin(0), flow.begin(0)
    assert older is not None
    assert younger is not None
    flow.passed(0, younger, 1, "")
    return flow, older


def test_last_turn_of_generators_is_kept_for_the_oldest_item() -> None:
    """PIP-5: no turn while something older may come."""
    flow, older = flow_with_a_younger_item_ahead()
    assert flow.begin(1, last=True) is None
    flow.passed(0, older, 1, "")
    item = flow.begin(1, last=True)
    assert item is not None
    assert item.key == (0,)


def test_a_generator_that_blocks_the_oldest_item_is_read() -> None:
    """PIP-5: however much is held, if all turns are taken."""
    flow, older = flow_with_a_younger_item_ahead()
    item = flow.begin(1)
    assert item is not None
    flow.opened(1, item)
    flow.passed(0, older, 100, "")
    assert not flow.may_read(1, item, 0)
    assert flow.may_read(1, item, 0, full=True)
