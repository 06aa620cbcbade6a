"""A parameter server: workers fetch weights and push gradients at their own pace, nobody waits for the slowest.

The server is one actor; the workers hold a reference to it. Its messages come one at a time, so that its state needs
no lock. Data and weights are numpy arrays, which travel beside the message without being copied into it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mesh_core import Actor, current_rank, endpoint, this_host

Array = npt.NDArray[np.float64]

WORKERS = 3
FEATURES = 50
STEPS = 200
TRUTH: Array = np.linspace(-1.0, 1.0, FEATURES)


class Server(Actor):
    """Holds the weights."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.weights: Array = np.zeros(FEATURES)
        self.version = 0

    @endpoint
    def pull(self) -> Array:
        return self.weights

    @endpoint
    def push(self, gradient: Array) -> int:
        """Take a step; returns the number of steps taken so far."""
        self.weights -= self.rate * gradient
        self.version += 1
        return self.version


class Worker(Actor):
    """Computes gradients from data of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        rng = np.random.default_rng(current_rank().rank)
        self.inputs = rng.normal(size=(400, FEATURES))
        self.targets = self.inputs @ TRUTH + rng.normal(0.0, 0.01, 400)

    @endpoint
    def train(self, steps: int) -> int:
        """Pull, compute, push; returns the last version of the weights that this worker has seen."""
        version = 0
        for _ in range(steps):
            weights = self.server.pull.call_one().get(timeout=30)
            gradient = self.inputs.T @ (self.inputs @ weights - self.targets) / len(self.targets)
            version = self.server.push.call_one(gradient).get(timeout=30)
        return version


def main() -> None:
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    hosts = this_host()
    per_host = {"procs": -(-(1 + WORKERS) // len(hosts))}
    with hosts.spawn_procs(per_host, env=one_thread, preload=["numpy"]).flatten("worker") as seats:
        server = seats.slice(worker=0).spawn("server", Server, 0.1)
        workers = seats.slice(worker=slice(1, 1 + WORKERS)).spawn("workers", Worker, server)

        for finished, version in enumerate(workers.train.stream(STEPS), start=1):
            print(f"{finished} of {WORKERS} workers done, weights at version {version.get(timeout=60)}")
        weights = server.pull.call_one().get(timeout=30)
        print(
            f"distance to the truth: {np.linalg.norm(TRUTH):.3f} before, {np.linalg.norm(weights - TRUTH):.3f} after"
        )


if __name__ == "__main__":
    main()
