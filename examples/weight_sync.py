"""A trainer publishes its weights at every step; generators use the newest version where it lies, and stamp it on what they make.

While the trainer learns from one batch, the next is being made: so some are a version behind, and none is made by a mixture.
Needs mesh-rdma and numpy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from mesh_core import Actor, current_rank, endpoint, shutdown, this_host
from mesh_rdma import Publication, PublicationReader

FEATURES, BATCH, STEPS = 1_000, 64, 120
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass
class Samples:
    """Inputs, what the weights made of them, and which weights these were."""

    inputs: Array
    outputs: Array
    version: int


class Generator(Actor):
    def __init__(self, reader: PublicationReader) -> None:
        self.reader = reader
        self.dice = np.random.default_rng(current_rank().rank)

    @endpoint
    def sample(self, min_version: int) -> Samples:
        inputs = self.dice.normal(size=(BATCH, FEATURES)) / FEATURES**0.5
        with self.reader.use(min_version=min_version) as weights:  # a lease: no copy, and nobody changes them
            return Samples(inputs, inputs @ weights["model"], weights.version)


def main() -> None:
    hosts = this_host()
    truth = np.random.default_rng(99).normal(size=FEATURES)
    model = np.zeros(FEATURES)
    behind: Counter[int] = Counter()
    with Publication({"model": model}, start=1, hosts=hosts) as publication:
        procs = hosts.spawn_procs({"gpus": 2}, name="generators")
        generators = procs.spawn("generators", Generator, publication.reader())
        version = publication.publish()
        under_way = generators.sample.call(version)
        for step in range(STEPS):
            batches, under_way = under_way, generators.sample.call(version)
            for samples in batches.get().values():
                behind[version - samples.version] += 1
                errors = samples.outputs - samples.inputs @ truth
                model -= 3.0 * samples.inputs.T @ errors / BATCH
            version = publication.publish()  # a snapshot: `model` may be changed at once
            if step % 30 == 29:
                print(f"version {version}: {np.abs(model - truth).mean():.3f} from the truth")
        under_way.get()
        print("batches were", ", ".join(f"{n} versions behind: {behind[n]}" for n in sorted(behind)))


if __name__ == "__main__":
    main()
    shutdown()
