"""Gradients are averaged on a stream of their own while the backward pass goes on with the layers below.

As soon as the gradient of a parameter is there, the stream "comm" borrows it and averages it over the processes; the default stream computes the next
one meanwhile, and waits only before the optimizer changes the parameters. The weights are those of a program that averages after the backward pass. It pays
where processes wait for each other or for the network in the collective, as their processors are then free for the backward pass.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from mesh_core import ProcMesh, this_host
from mesh_tensor import Borrow, Stream, activate, fetch_shard, manual_seed, rank_tensor, reduce

STEPS, LAYERS, WIDTH, ROWS = 6, 6, 256, 128


def network() -> nn.Sequential:
    """Return some layers; the same weights on each process."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])


def train(procs: ProcMesh, comm: Stream | None) -> tuple[Tensor, float]:
    """Take some steps; returns a weight, and how long a step takes."""
    pending: list[Borrow] = []

    def average(parameter: Tensor) -> None:
        """Begin to average a gradient, on the other stream."""
        assert comm is not None
        assert parameter.grad is not None
        grad, borrow = comm.borrow(parameter.grad, mutable=True)
        with comm.activate():
            grad.copy_(reduce(grad, op="avg"))
        pending.append(borrow)

    with activate(procs):
        manual_seed(0, procs, shared=True)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(ROWS, WIDTH) * (rank_tensor(procs, "gpus") + 1.0)
        if comm is not None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
        begun = time.perf_counter()
        for step in range(STEPS):
            if step == 1:
                fetch_shard(next(model.parameters()).detach()[0])  # what is done once is done
                begun = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if comm is None:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = reduce(parameter.grad, op="avg")
            for borrow in pending:
                borrow.drop()
            pending.clear()
            optimizer.step()
        weight = fetch_shard(next(model.parameters()).detach())
    return weight, (time.perf_counter() - begun) / (STEPS - 1)


def main() -> None:
    """Train in both ways."""
    with this_host().spawn_procs({"gpus": 2}, preload=["torch"], env={"OMP_NUM_THREADS": "1"}) as procs:
        after, one_by_one = train(procs, None)
        meanwhile, overlapped = train(procs, Stream("comm"))
        torch.testing.assert_close(after, meanwhile)
        print("the same weights")
        print(f"averaged after the backward pass: {one_by_one * 1e3:.1f} ms a step")
        print(f"averaged during it: {overlapped * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
