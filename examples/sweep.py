"""A sweep with early stopping: successive halving over a pool.

A trial trains for as many steps as it is told to, reports its loss through a port, and waits for more. When all that are left
have come so far, the worse half is cancelled, and the better half is told to train for twice as long.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mesh_core import Actor, Channel, Future, Pool, Port, PortReceiver, endpoint, this_host

TRIALS, REPLICAS, FIRST_STEPS = 16, 4, 4


@dataclass(frozen=True)
class Settings:
    trial: int
    rate: float
    momentum: float


@dataclass(frozen=True)
class Report:
    trial: int
    loss: float
    more: Port[int]
    """How many steps the trial is to make now; with none it ends."""


class Trainer(Actor):
    """Fits a quadratic: rates that are too small creep, and those that are too large diverge."""

    @endpoint(concurrent=True)
    async def train(self, settings: Settings, steps: int, reports: Port[Report]) -> float:
        weight, speed = 1.0, 0.0
        more, told = Channel[int].open()
        while steps:
            for _ in range(steps):
                speed = settings.momentum * speed - settings.rate * 2 * weight
                weight += speed
            reports.send(Report(settings.trial, weight * weight, more))
            steps = await told.recv()  # where a cancellation comes in
        return weight * weight


def settings_of(trial: int) -> Settings:
    luck = random.Random(trial)
    return Settings(trial, rate=10 ** luck.uniform(-3, 0.2), momentum=luck.uniform(0, 0.9))


def halve(running: dict[int, Future[float]], reports: PortReceiver[Report]) -> None:
    """Cancel the worse half of the trials after each round, until one is left; have that end."""
    steps = FIRST_STEPS
    while True:
        ranking = sorted((reports.recv().get(timeout=60) for _ in running), key=lambda report: report.loss)
        if len(ranking) == 1:
            ranking[0].more.send(0)
            return
        half = len(ranking) // 2
        for report in ranking[half:]:
            running.pop(report.trial).cancel()
        for report in ranking[:half]:
            report.more.send(steps)
        steps *= 2
        print(f"{half} of {len(ranking)} go on to step {steps}; the best has a loss of {ranking[0].loss:.1g}")


def main() -> None:
    hosts = this_host()
    with hosts.spawn_procs({"replicas": -(-REPLICAS // len(hosts))}) as procs:
        trainers = procs.spawn("trainers", Trainer)
        # A round needs all of its trials at the same time: while one waits, its replica trains others.
        with Pool(trainers, per_rank=-(-TRIALS // len(procs))) as pool:
            port, reports = Channel[Report].open()
            running = {}
            for trial in range(TRIALS):
                running[trial] = pool.submit(trainers.train, settings_of(trial), FIRST_STEPS, port)
            halve(running, reports)
            ((best, future),) = running.items()
            found, loss = settings_of(best), future.get(timeout=60)
            print(
                f"trial {best} is the best: rate {found.rate:.2f}, momentum {found.momentum:.2f}, loss {loss:.1g}"
            )
        print(f"{pool.progress.done} was trained to the end, {pool.progress.failed} were stopped early")


if __name__ == "__main__":
    main()
