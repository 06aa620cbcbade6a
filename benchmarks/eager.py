"""What small operators and steps cost in the global view: `python benchmarks/eager.py [--widths 64,512] [--json FILE]`.

Operators on four numbers, done per second, beside the per-rank view on the same processes; and a step of a small GPT, eager and captured, beside the same under
DDP, and fully sharded beside FSDP2, in the same two processes with one thread each. What is compared takes turns within each round. The medians of the rounds' ratios are the
result: other work on the machine falls on both sides. It needs mesh-core, mesh-tensor and PyTorch in its environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mesh_core import ProcMesh, this_host
from mesh_tensor import (
    FullyShard,
    Mesh,
    activate,
    capture,
    distribute,
    fetch,
    fetch_shard,
    module_to_mesh,
    share,
    spmd,
)

OPERATORS = 4000
STEPS = 8
ROUNDS = 5
HEADS, LAYERS, WORDS, LENGTH, BATCH = 4, 3, 97, 32, 8
Figures = dict[str, float]


class Norm(nn.Module):
    """Root mean square normalisation, written plainly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * scale * self.weight


class Block(nn.Module):
    """Attention, and a gated network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = Norm(width), Norm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.before(x)
        query, key, value = (
            each(h).view(batch, length, HEADS, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        h = self.between(x)
        made: torch.Tensor = x + self.down(functional.silu(self.up(h)) * self.gate(h))
        return made


class GPT(nn.Module):
    """A small one."""

    def __init__(self, width: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(self.norm(h)).reshape(-1, WORDS), y.reshape(-1))


def batch(rows: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Some words, and those that follow them."""
    drawn = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def as_ranks(width: int, *, is_sharded: bool) -> float:
    """Milliseconds of a step under DDP or FSDP2, in a process group."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = GPT(width)
    if is_sharded:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=not is_sharded)
    generator = torch.Generator().manual_seed(distributed.get_rank())

    def step() -> None:
        x, y = batch(BATCH // 2, generator)
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        loss.detach().item()

    return timed(step)


def timed(step: Callable[[], None]) -> float:
    """The median of some steps in milliseconds, after three that do not count."""
    times = []
    for _ in range(STEPS + 3):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[3:])


def operators(procs: ProcMesh, mesh: Mesh) -> Figures:
    """Operators on four numbers, done per second, and what one costs the script within `activate`."""

    def add(x: Any, y: Any) -> Any:
        return x + y

    def add_a_number(x: Any, _: Any) -> Any:
        return x + 1

    def rate(work: Callable[[Any, Any], Any], x: Any, y: Any, end: Callable[[Any], Any]) -> float:
        begin = time.perf_counter()
        for _ in range(OPERATORS):
            x = work(x, y)
        end(x)
        return OPERATORS / (time.perf_counter() - begin)

    own = share(torch.ones(4), procs)
    split = distribute(torch.ones(4), mesh, ["data"])
    found: Figures = {}
    for work in (add, add_a_number):
        ratios, rates = [], []
        for each in range(ROUNDS + 1):
            beside = rate(work, own, own.clone(), fetch)
            there = rate(work, split, split.clone(), fetch_shard)
            if each:
                ratios.append(there / beside)
                rates.append(there)
        found[f"{work.__name__}: done per second"] = statistics.median(rates)
        found[f"{work.__name__}: of the per-rank view"] = statistics.median(ratios)
    costs = []
    x: Any = split
    for _ in range(ROUNDS):
        with activate(mesh):
            begin = time.thread_time()
            for _ in range(OPERATORS):
                x = x + split
            costs.append((time.thread_time() - begin) / OPERATORS * 1e6)
        fetch_shard(x)
    return {**found, "script us of an operator within activate": statistics.median(costs)}


def steps(mesh: Mesh, ranks: Any, width: int, *, is_sharded: bool) -> dict[str, Figures]:
    """A step in the global view, eager and captured, beside the same in a process group."""

    def made(*, is_captured: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model = module_to_mesh(GPT(width), mesh, {"*": FullyShard("data")} if is_sharded else None)
        with activate(mesh):
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def train(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        work = capture(train) if is_captured else train

        def step() -> None:
            x, y = (distribute(each, mesh, ["data", None]) for each in batch(BATCH))
            with activate(mesh):
                loss = work(x, y)
            fetch_shard(loss)

        return step

    kinds = {"eager": made(is_captured=False), "captured": made(is_captured=True)}
    for step in kinds.values():
        timed(step)
    ours: dict[str, list[float]] = {name: [] for name in kinds}
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        beside = max(ranks.run(as_ranks, width, is_sharded=is_sharded).get(timeout=600).values())
        for name, step in kinds.items():
            ours[name].append(timed(step))
            ratios[name].append(ours[name][-1] / beside)
    return {
        name: {
            "ms": statistics.median(ours[name]),
            "ratio": statistics.median(ratios[name]),
            "best ratio": min(ratios[name]),
        }
        for name in kinds
    }


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", default="64,512")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__, "load before": os.getloadavg()[0]}
    with (
        this_host().spawn_procs(
            {"data": 2}, preload=["torch.distributed.tensor"], env={"OMP_NUM_THREADS": "1"}
        ) as procs,
        Mesh((2,), ("data",), procs) as mesh,
    ):
        found["operators"] = operators(procs, mesh)
        print(json.dumps(found, indent=1), flush=True)
        ranks = spmd.setup(procs)
        for width in map(int, asked.widths.split(",")):
            for name, is_sharded in (("DDP", False), ("FSDP2", True)):
                for kind, figures in steps(mesh, ranks, width, is_sharded=is_sharded).items():
                    found[f"width {width}, {kind}, beside {name}"] = figures
                    print(f"width {width}, {kind}, beside {name}: {figures}", flush=True)
    found["load after"] = os.getloadavg()[0]
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
