"""Reinforcement learning in the shape of GRPO: prompts, a pool of generators, a queue of references, a trainer.

For each prompt a generator draws a group of answers and scores them. Groups stay where they were made: what passes the
queue are references. The trainer compares each answer with its group, and moves the weights towards the better ones. The
"model" is a table of logits, one row per prompt, and an answer is right if it is the prompt's number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mesh_core import Actor, Pool, Queue, Ref, current_rank, endpoint, put, this_host

Array = npt.NDArray[np.float64]

PROMPTS, ANSWERS, GROUP = 8, 8, 512
ROUNDS, RATE = 20, 2.0


class Group(NamedTuple):
    """The answers to one prompt."""

    prompt: int
    answers: npt.NDArray[np.int64]
    rewards: Array


def softmax(logits: Array) -> Array:
    """Probabilities of answers."""
    powers: Array = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


class Generator(Actor):
    """Draws groups of answers."""

    def __init__(self, groups: Queue[Ref[Group]]) -> None:
        self.groups = groups
        self.random = np.random.default_rng(current_rank().rank)

    @endpoint
    def generate(self, prompt: int, weights: Array) -> None:
        """Answer a prompt; the weights have come as a reference."""
        answers = self.random.choice(ANSWERS, size=GROUP, p=softmax(weights[prompt]))
        rewards = (answers == prompt).astype(float)
        self.groups.put(put(Group(prompt, answers, rewards))).get()


class Trainer(Actor):
    """Has the weights."""

    def __init__(self) -> None:
        self.weights: Array = np.zeros((PROMPTS, ANSWERS))

    @endpoint
    def latest(self) -> Ref[Array]:
        """The weights, for all generators."""
        return put(self.weights)

    @endpoint
    def train(self, groups: Queue[Ref[Group]], count: int) -> float:
        """Take so many groups; return the mean reward."""
        total = 0.0
        for _ in range(count):
            group = groups.take().get().get()
            rewards = group.rewards
            total += float(rewards.mean())
            # Relative to the group: no other model says how good an answer was to be expected.
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            row = self.weights[group.prompt]
            gradient = np.zeros(ANSWERS)
            np.add.at(gradient, group.answers, advantages)
            row += RATE * (gradient - advantages.sum() * softmax(row)) / GROUP
        return total / count


def main() -> None:
    """Train for some rounds."""
    hosts = this_host()
    with Queue[Ref[Group]](max_items=PROMPTS) as groups, hosts.spawn_procs({"gpus": 3}) as procs:
        ranks = procs.flatten("ranks")
        generators = ranks.slice(ranks=slice(1, None)).spawn("generators", Generator, groups)
        trainer = ranks.slice(ranks=0).spawn("trainer", Trainer)
        with Pool(generators) as pool:
            for step in range(ROUNDS):
                weights = trainer.latest.call_one().get()
                trained = trainer.train.call_one(groups, PROMPTS)
                list(pool.map(generators.generate, range(PROMPTS), [weights] * PROMPTS))
                reward = trained.get()
                if step % 5 == 4 or step == 0:
                    print(f"round {step + 1}: mean reward {reward:.2f}")


if __name__ == "__main__":
    main()
