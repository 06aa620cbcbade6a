"""Generators feed a trainer, which sends them better policies: all of it through ports.

A port is an address to send values to, and may be sent itself. The trainer opens one for batches, and every batch
brings along the port where its generator waits for the next policy. Nobody waits for the slowest. What is learned is
which of four slot machines pays best.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

from mesh_core import Actor, Channel, Port, current_rank, endpoint, this_host

GENERATORS, BATCHES = 3, 150
PAYS = [0.2, 0.5, 0.8, 0.4]  # how likely each machine pays

Policy = list[float]


@dataclass
class Batch:
    """What a generator has tried under its policy, and where it waits for the next."""

    generator: int
    pulls: list[tuple[int, bool]]
    answer_to: Port[Policy | None]


def softmax(scores: Policy) -> list[float]:
    weights = [math.exp(score) for score in scores]
    return [weight / sum(weights) for weight in weights]


class Trainer(Actor):
    def __init__(self) -> None:
        self.port, self.batches = Channel[Batch].open()
        self.policy: Policy = [0.0] * len(PAYS)

    @endpoint
    async def inlet(self) -> Port[Batch]:
        return self.port

    @endpoint
    async def train(self) -> tuple[list[float], Counter[int]]:
        """Learn from batches as they come; return how likely each machine is chosen, and who sent how many."""
        senders: Counter[int] = Counter()
        while senders.total() < BATCHES:
            batch = await self.batches.recv()
            senders[batch.generator] += 1
            self.learn(batch.pulls)
            batch.answer_to.send(self.policy)
        for _ in range(GENERATORS):
            batch = await self.batches.recv()
            batch.answer_to.send(None)
        return softmax(self.policy), senders

    def learn(self, pulls: list[tuple[int, bool]]) -> None:
        """Prefer a machine that pays more than the batch does on average (REINFORCE)."""
        average = sum(paid for _, paid in pulls) / len(pulls)
        likely = softmax(self.policy)
        for pulled, paid in pulls:
            for machine, p in enumerate(likely):
                self.policy[machine] += 0.1 * (paid - average) * ((machine == pulled) - p)


class Generator(Actor):
    @endpoint
    def generate(self, trainer: Port[Batch]) -> None:
        """Try the machines under the newest policy, until there is none any more."""
        me = current_rank().rank
        dice = random.Random(me)
        port, policies = Channel[Policy | None].open()
        policy: Policy | None = [0.0] * len(PAYS)
        while policy is not None:
            chosen = dice.choices(range(len(PAYS)), softmax(policy), k=20)
            pulls = [(machine, dice.random() < PAYS[machine]) for machine in chosen]
            trainer.send(Batch(me, pulls, port))
            policy = policies.recv().get(timeout=30)


def main() -> None:
    hosts = this_host()
    with hosts.spawn_procs({"procs": -(-(1 + GENERATORS) // len(hosts))}).flatten("seat") as seats:
        trainer = seats.slice(seat=0).spawn("trainer", Trainer)
        generators = seats.slice(seat=slice(1, 1 + GENERATORS)).spawn("generators", Generator)
        feeding = generators.generate.call(trainer.inlet.call_one().get(timeout=30))
        likely, senders = trainer.train.call_one().get(timeout=60)
        feeding.get(timeout=30)

    for rank, batches in sorted(senders.items()):
        print(f"generator {rank} sent {batches} batches")
    print("machines are chosen", ", ".join(f"{p:.0%}" for p in likely))


if __name__ == "__main__":
    main()
