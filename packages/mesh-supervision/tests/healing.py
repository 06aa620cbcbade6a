"""Actors that are healed: replicas that count steps, and trainers in a process group."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from mesh_core import Actor, current_rank, endpoint


class Replica(Actor):
    """Counts steps; on the way back it may kill others, once."""

    def __init__(self, victims: Path | None = None) -> None:
        self.steps = 0
        self.history = ["constructed"]
        self.victims = victims

    def __snapshot__(self) -> Any:
        return self.steps, [*self.history, f"from {os.getpid()}"], self.victims

    def __restore__(self, state: Any) -> None:
        self.steps, self.history, self.victims = state
        if self.victims is not None and self.victims.exists():
            pids = self.victims.read_text().split()
            self.victims.unlink()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    @endpoint
    def step(self, n: int = 1) -> int:
        self.steps += n
        return self.steps

    @endpoint
    def told(self) -> tuple[int, int, list[str]]:
        return self.steps, os.getpid(), self.history

    @endpoint
    def fail(self) -> None:
        raise RuntimeError("out of luck")

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Fragile(Actor):
    """Counts steps, and cannot be restored while a file is there."""

    def __init__(self, broken: Path) -> None:
        self.steps, self.broken = 0, broken

    def __snapshot__(self) -> Any:
        return self.steps, self.broken

    def __restore__(self, state: Any) -> None:
        self.steps, self.broken = state
        if self.broken.exists():
            raise OSError("the disk is full")

    @endpoint
    def step(self, by: int) -> int:
        self.steps += by
        return self.steps


class Stateless(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Trainer(Actor):
    """A replica of a linear model, which learns from its share of the data; the gradients are averaged over all."""

    WIDTH = 32

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = torch.nn.Linear(self.WIDTH, 1)
        with torch.no_grad():
            self.model.weight.fill_(0.01)
            self.model.bias.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.losses: list[float] = []

    def __snapshot__(self) -> Any:
        return self.model.state_dict(), self.optimizer.state_dict(), self.losses

    def __restore__(self, state: Any) -> None:
        if not hasattr(self, "model"):
            self.__init__()
        model, optimizer, losses = state
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.losses = list(losses)

    @endpoint
    def step(self, shares: int, kill: int = -1) -> int:
        """Learn from one batch in so many shares; rank ``kill`` dies before its gradients are there."""
        import torch
        import torch.distributed as dist

        step = len(self.losses)
        rank, size = dist.get_rank(), dist.get_world_size()
        total = torch.zeros(())
        self.optimizer.zero_grad()
        # Each share has a seed of its own, so that it does not matter who computes it.
        for share in range(rank, shares, size):
            chance = torch.Generator().manual_seed(1000 * step + share)
            inputs = torch.randn(16, self.WIDTH, generator=chance)
            loss = torch.nn.functional.mse_loss(self.model(inputs), inputs.sum(dim=1, keepdim=True)) / shares
            loss.backward()
            total += loss.detach()
        if rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(total)
        # Nothing can fail from here on: the state changes as a whole.
        self.optimizer.step()
        self.losses.append(total.item())
        return len(self.losses)

    @endpoint
    def result(self) -> tuple[list[float], list[float]]:
        return self.losses, self.model.weight.detach().flatten().tolist()

    @endpoint
    def done(self) -> int:
        return len(self.losses)

    @endpoint
    def where(self) -> tuple[int, int, int]:
        import torch.distributed as dist

        return current_rank().rank, dist.get_rank(), dist.get_world_size()

    @endpoint
    def wait_for(self, rank: int) -> None:
        """Wait for what that rank never sends."""
        import torch
        import torch.distributed as dist

        dist.recv(torch.zeros(1), src=rank)

    @endpoint
    def sum_up(self) -> float:
        import torch
        import torch.distributed as dist

        value = torch.ones(())
        dist.all_reduce(value)
        return value.item()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def die_while_joining(self, when: str) -> None:
        """Die in the next group, before or after the others can know where to connect."""
        import torch.distributed as dist

        class Fatal(dist.Store):  # type: ignore[misc, name-defined]
            def __init_subclass__(cls) -> None:
                settle = cls.set

                def set_and_die(store: Any, key: str, value: Any) -> None:
                    if when == "after":
                        settle(store, key, value)
                    os.kill(os.getpid(), signal.SIGKILL)

                cls.set = set_and_die

        dist.Store = Fatal

    @endpoint
    def descriptors(self) -> list[str]:
        """What the process has open."""
        found = []
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # that of the look itself
                found.append(str(each.readlink()))
        return sorted(found)
