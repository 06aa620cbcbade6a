"""A parameter server: workers read weights and push gradients at their own pace, nobody waits for the slowest.

The server is one actor; the workers hold a reference to it. Its messages come one at a time, so that steps need no lock. The
weights are no messages: workers copy them straight from the server's memory, whatever it is doing. A copy may have a part of the
step that is being taken, which training of this kind bears; see `weight_sync.py` for versions that are never a mixture.
Needs mesh-rdma and numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mesh_core import Actor, current_rank, endpoint, this_host
from mesh_rdma import RDMABuffer

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
        self.offered = RDMABuffer(self.weights)
        self.version = 0

    @endpoint
    def offer(self) -> RDMABuffer:
        """Say where the weights are; they stay there."""
        return self.offered

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
        """Read, compute, push; returns the last version of the weights that this worker has made."""
        version, weights = 0, np.empty(FEATURES)
        offered = self.server.offer.call_one().get(timeout=30)
        for _ in range(steps):
            offered.read_into(weights).get(timeout=30)
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
        weights = np.empty(FEATURES)
        server.offer.call_one().get(timeout=30).read_into(weights).get(timeout=30)
        print(
            f"distance to the truth: {np.linalg.norm(TRUTH):.3f} before, {np.linalg.norm(weights - TRUTH):.3f} after"
        )


if __name__ == "__main__":
    main()
