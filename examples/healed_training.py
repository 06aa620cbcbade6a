"""A training that loses processes and learns what it would have learned: `heal_mesh` brings back ranks, group and state.

Four replicas of a model average their gradients with torch.distributed. At some steps one of them is killed in the middle.
The others leave the collective at once; the lost rank is made again in its place and gets the state of one that lives.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mesh_core import Actor, DeviceMeshError, endpoint, this_host
from mesh_supervision import Ignore, form_group, heal_mesh, keep_snapshots, whole

RANKS, STEPS = 4, 30


class Trainer(Actor):
    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses: list[float] = []

    def __snapshot__(self) -> Any:
        return self.model.state_dict(), self.optimizer.state_dict(), self.losses

    def __restore__(self, state: Any) -> None:
        if not hasattr(self, "model"):
            Trainer.__init__(self)
        model, optimizer, self.losses = state
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    @endpoint
    def step(self, victim: int = -1) -> int:
        """Learn from this rank's share of the next batch; return how many steps are done."""
        inputs, targets = batch(len(self.losses), dist.get_rank())
        loss = nn.functional.mse_loss(self.model(inputs), targets) / dist.get_world_size()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        total = loss.detach().clone()
        for tensor in (total, *(each.grad for each in self.model.parameters() if each.grad is not None)):
            dist.all_reduce(tensor)
        self.optimizer.step()  # nothing can fail from here on: the state changes as a whole
        self.losses.append(total.item())
        return len(self.losses)

    @endpoint
    def curve(self) -> list[float]:
        return self.losses


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(RANKS * step + rank))
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def train(trainers: Trainer, kills: dict[int, int]) -> list[float]:
    done = 0
    while done < STEPS:
        try:
            with whole(trainers):
                done = trainers.step.call(kills.pop(done, -1)).get(timeout=60).values()[0]
        except DeviceMeshError as error:
            print(f"after step {done} rank {error.coordinates[0]['ranks']} was lost")
            trainers = heal_mesh(trainers)
    return trainers.slice(ranks=0).curve.call_one().get(timeout=60)


def main() -> None:
    keep_snapshots()
    # PyTorch's optimizers import the second when first used; here it is imported once, and the ranks are forked.
    preload = ["torch", "torch._dynamo"]
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    hosts = this_host()
    each = {"procs": -(-RANKS // len(hosts))}
    with hosts.spawn_procs(each, env=env, preload=preload, supervise=Ignore()) as procs:
        ranks = procs.flatten("ranks").slice(ranks=slice(0, RANKS))
        form_group(ranks)
        calm = train(ranks.spawn("calm", Trainer, supervise=Ignore()), {})
        healed = train(ranks.spawn("healed", Trainer, supervise=Ignore()), {5: 2, 11: 0, 23: 3})
    for step in range(0, STEPS, 10):
        print(f"step {step:2}: loss {calm[step]:.4f} undisturbed, {healed[step]:.4f} healed")
    print("the losses are the same:", calm == healed)


if __name__ == "__main__":
    main()
