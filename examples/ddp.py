"""Data-parallel training: actors set up torch.distributed, and the training loop stays what it was on one process.

`train` is plain PyTorch and knows nothing of Mesh. Here it runs once as it is, on all of the data, and once on each
rank, on a share of the data and with the model in DistributedDataParallel. Both learn the same.
"""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mesh_core import Actor, current_rank, current_size, endpoint, this_host

RANKS = 2
STEPS = 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def make_data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def train(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    """Train; return the loss at every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


class Trainer(Actor):
    """One rank of the process group."""

    def __init__(self, port: int) -> None:
        rank, size = current_rank().rank, current_size()["ranks"]
        self.share = slice(rank, None, size)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=size)

    @endpoint
    def run(self) -> list[float]:
        """Train on this rank's share of the data."""
        inputs, targets = make_data()
        model = DistributedDataParallel(make_model())
        return train(model, inputs[self.share], targets[self.share])

    def __cleanup__(self, error: BaseException | None) -> None:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def main() -> None:
    torch.set_num_threads(1)
    alone = train(make_model(), *make_data())

    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # PyTorch's optimizers import the second when first used; here it is imported once, and the ranks are forked.
    preload = ["torch", "torch._dynamo"]
    hosts = this_host()
    with hosts.spawn_procs({"procs": -(-RANKS // len(hosts))}, env=env, preload=preload) as procs:
        ranks = procs.flatten("ranks").slice(ranks=slice(0, RANKS))
        trainers = ranks.spawn("trainers", Trainer, free_port())
        shares = trainers.run.call().get(timeout=60).values()
    together = [sum(losses) / RANKS for losses in zip(*shares, strict=True)]

    for step in range(0, STEPS, 5):
        print(f"step {step:2}: loss {alone[step]:.4f} on one process, {together[step]:.4f} on {RANKS}")
    furthest = max(abs(a - b) for a, b in zip(alone, together, strict=True))
    print("the losses agree:", furthest < 1e-4)


if __name__ == "__main__":
    main()
