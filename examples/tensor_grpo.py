"""Reinforcement learning in the shape of GRPO on tensors: one mesh generates and scores answers, another one learns from them.

Answers go from the generators to the trainers with `to_mesh`, without passing the script. New weights go back through memory that generators read
where it lies (`Publication` of mesh-rdma), or, where that is not installed, with `to_mesh` as well. The "model" is a table of logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mesh_core import Actor, ProcMesh, endpoint, this_host
from mesh_tensor import activate, fetch_shard, manual_seed, reduce, remote, share, to_mesh

try:
    from mesh_rdma import Publication, PublicationReader
except ImportError:
    Publication = None  # type: ignore[assignment,misc]

PROMPTS, ANSWERS, GROUP, ROUNDS, RATE = 8, 8, 256, 30, 4.0


class Publisher(Actor):
    """Publishes weights that it is given."""

    def __init__(self) -> None:
        self.weights = torch.zeros(PROMPTS, ANSWERS)
        self.publication = Publication({"weights": self.weights}, start=1)

    @endpoint
    def reader(self) -> PublicationReader:
        return self.publication.reader()

    @endpoint
    def publish(self, weights: Tensor) -> None:
        self.weights.copy_(weights)
        self.publication.publish()


class Reader(Actor):
    """Reads what was published; its results become tensors of the mesh."""

    def __init__(self, reader: PublicationReader) -> None:
        self.reader = reader

    @endpoint
    def read(self, version: int) -> Tensor:
        with self.reader.use(min_version=version) as weights:
            return torch.as_tensor(weights["weights"]).clone()


def road(trainers: ProcMesh, generators: ProcMesh) -> Callable[[Tensor], Tensor]:
    """Return what brings weights to the generators."""
    if Publication is None:
        return lambda weights: to_mesh(weights, generators)
    publisher = trainers.slice(gpus=0).spawn("publisher", Publisher)
    readers = generators.spawn("readers", Reader, publisher.reader.call_one().get())
    read: Any = remote(readers.read, propagate=lambda _: torch.empty(PROMPTS, ANSWERS))
    versions = itertools.count(1)

    def bring(weights: Tensor) -> Any:
        publisher.publish.broadcast(weights)
        return read(next(versions))

    return bring


def generate(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a group of answers to each prompt, of which its number is right; return them, their advantages, and the mean reward."""
    answers = weights.softmax(1).multinomial(GROUP, replacement=True)
    rewards = (answers == torch.arange(PROMPTS)[:, None]).float()
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    return answers, advantages, rewards.mean()


def main() -> None:
    with this_host().spawn_procs({"role": 2, "gpus": 2}, preload=["torch"]) as procs:
        trainers, generators = procs.slice(role=0), procs.slice(role=1)
        manual_seed(0, generators)
        bring = road(trainers, generators)
        weights = share(torch.zeros(PROMPTS, ANSWERS), trainers).requires_grad_()
        for n in range(ROUNDS):
            with activate(generators):
                made = generate(bring(weights.detach()))
            answers, advantages, reward = to_mesh(made, trainers)
            loss = -(weights.log_softmax(1).gather(1, answers) * advantages).mean() * PROMPTS
            (gradient,) = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                weights -= RATE * reduce(gradient, "gpus", "avg") / PROMPTS
            if n % 10 == 9 or n == 0:
                print(f"round {n + 1}: mean reward {fetch_shard(reduce(reward, 'gpus', 'avg')):.2f}")


if __name__ == "__main__":
    main()
