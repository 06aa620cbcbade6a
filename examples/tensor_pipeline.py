"""A pipeline as a plain loop: the layers of a network lie on two meshes, and micro-batches go through them one behind the other.

Nothing waits for anything but the values it needs: while the second stage computes with one micro-batch, the first has the next. `to_mesh`
hands on activations, and their gradients on the way back. As many micro-batches are under way as there are stages (1F1B), so that the first
stage keeps the activations of so many only. Each stage is two processes, which share each micro-batch. The losses are those of one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mesh_core import ProcMesh, this_host
from mesh_tensor import activate, fetch_shard, rank_tensor, reduce, share, to_mesh

STEPS, STAGES, REPLICAS, MICRO, ROWS, WIDTH = 8, 2, 2, 4, 16, 32


def layers() -> list[nn.Module]:
    """Return the parts of a network, one for each stage."""
    first = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh())
    return [first, nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))]


def placed(part: nn.Module, stage: ProcMesh, n: int) -> nn.Module:
    """Return the same part with its weights on the processes of a stage."""
    with activate(stage):
        there = layers()[n]
    with torch.no_grad():
        for mine, its in zip(part.parameters(), there.parameters(), strict=True):
            its.copy_(share(mine.detach(), stage))
    return there


def scattered(batch: Tensor, stage: ProcMesh) -> tuple[Tensor, ...]:
    """Return micro-batches, of which each process of a stage has its rows."""
    whole = share(batch.view(MICRO, REPLICAS, ROWS // REPLICAS, -1), stage)
    own = whole.index_select(1, rank_tensor(stage, "replica").view(1)).squeeze(1)
    return own.unbind(0)


def step(parts: list[nn.Module], stages: list[ProcMesh], inputs: Tensor, targets: Tensor) -> Tensor:
    """Take all micro-batches through the stages, forward and backward; return the mean of their losses."""
    x, y = scattered(inputs, stages[0]), scattered(targets, stages[-1])
    losses: list[Tensor] = []
    for n in range(MICRO + STAGES - 1):
        if n < MICRO:
            found = x[n]
            for part, stage in zip(parts, stages, strict=True):
                found = part(to_mesh(found, stage))
            losses.append(nn.functional.mse_loss(found, y[n]) / MICRO)
        if n >= STAGES - 1:
            losses[n - STAGES + 1].backward()  # type: ignore[no-untyped-call]
    for part in parts:
        for each in part.parameters():
            each.grad = reduce(each.grad, "replica", "avg") if each.grad is not None else None
    return reduce(torch.stack([loss.detach() for loss in losses]).sum(), "replica", "avg")


def main() -> None:
    torch.manual_seed(0)
    alone = layers()
    batches = [torch.randn(MICRO * ROWS, WIDTH) for _ in range(STEPS)]
    sizes = {"stage": STAGES, "replica": REPLICAS}
    with this_host().spawn_procs(sizes, preload=["torch"], env={"OMP_NUM_THREADS": "1"}) as procs:
        stages = [procs.slice(stage=n) for n in range(STAGES)]
        parts = [placed(part, stage, n) for n, (part, stage) in enumerate(zip(alone, stages, strict=True))]
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (*alone, *parts)]
        for n, batch in enumerate(batches):
            targets = batch[:, :2].sum(1, keepdim=True)
            for each in optimizers:
                each.zero_grad()
            loss = nn.functional.mse_loss(nn.Sequential(*alone)(batch), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            found = step(parts, stages, batch, targets)
            for each in optimizers:
                each.step()
            if n % 4 == 3 or n == 0:
                print(f"step {n + 1}: loss {loss.item():.4f}, in the pipeline {fetch_shard(found):.4f}")


if __name__ == "__main__":
    main()
