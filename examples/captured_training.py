"""A training step that is recorded once: from then on each step is one message to the processes.

Two processes learn the same network from batches of their own and average its gradients. The first calls of `step` run as they are
written, operator by operator; once a call will be like the one before, it is replayed. The losses are those of the same step without capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mesh_core import ProcMesh, this_host
from mesh_tensor import Captured, activate, capture, fetch, manual_seed, reduce

STEPS = 60


def trainer(procs: ProcMesh) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the step of a new network, the same on all processes."""
    manual_seed(0, procs, shared=True)
    with activate(procs):
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
        # Fused, it is one instruction, and counts its steps on the processes: nothing of it changes in the script.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    parameters = list(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        averages = reduce([each.grad for each in parameters if each.grad is not None], "gpus", "avg")
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average
        optimizer.step()
        return reduce(loss.detach(), "gpus", "avg")

    return step


def learn(procs: ProcMesh, step: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[float], float]:
    """Take all steps; return the losses, and the script's time for one of the later steps in microseconds."""
    manual_seed(1, procs)  # other batches on each process
    losses = []
    spent = 0.0
    with activate(procs):
        for n in range(STEPS):
            inputs = torch.randn(32, 16)
            targets = inputs.sum(1, keepdim=True).sin()
            begin = time.thread_time()
            losses.append(step(inputs, targets))
            spent += (time.thread_time() - begin) * (n >= STEPS // 2)
        together = torch.stack(losses)
    return fetch(together).item(gpus=0).tolist(), spent / (STEPS // 2) * 1e6


def main() -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=["torch"], env={"OMP_NUM_THREADS": "1"}) as procs:
        plain, each = learn(procs, trainer(procs))
        print(f"as written: loss {plain[0]:.3f} to {plain[-1]:.3f}, {each:.0f} us of the script for a step")

        step: Captured[[Tensor, Tensor], Tensor] = capture(trainer(procs))
        captured, each = learn(procs, step)
        print(
            f"captured:   loss {captured[0]:.3f} to {captured[-1]:.3f}, {each:.0f} us of the script for a step"
        )

        print(f"{step.replays} of {STEPS} calls were replays; the others:")
        for reason in step.reasons:
            print(f"  {reason}")
        print("losses are the same" if plain == captured else "losses differ")


if __name__ == "__main__":
    main()
