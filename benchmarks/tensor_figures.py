"""All figures that mesh-tensor is held to, each beside its peer in one run: `python benchmarks/tensor_figures.py [--only NAME ...] [--json FILE]`.

It needs mesh-core, mesh-tensor and PyTorch in its environment, and takes five minutes on a quiet machine with two cores. Both sides of a figure take
turns, several rounds; medians and their ratio are printed. Figures that are times of the script are of its processor, the others of the clock. The load of the
machine and the time of a plain operator stand beside each figure, to tell how quiet it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HOME = Path(__file__).resolve().parent
sys.path.insert(0, str(HOME))

import captured  # noqa: E402
import moving  # noqa: E402
import tensors  # noqa: E402

from mesh_core import endpoint, this_host  # noqa: E402
from mesh_tensor import (  # noqa: E402
    Mesh,
    capture,
    distribute,
    fetch,
    fetch_shard,
    module_to_mesh,
    reduce,
    share,
    spmd,
)

Figures = dict[str, Any]
ENV = {"OMP_NUM_THREADS": "1"}
ROUNDS = 5
DIM, HEADS, LAYERS, WORDS, PLACES, BATCH = 256, 4, 4, 1000, 64, 16
"""Of the transformer."""
STEPS = 6
"""In a turn of one side."""


def in_turn(works: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Medians of what each of these returns, in turn, after a round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            found[name].append(work())
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def clock(work: Callable[[], object]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def operators() -> Figures:
    """Elementwise operators a second, issued and carried out, beside a loop of plain ones."""
    found: Figures = {}
    for count, least in ((1, 100_000), (2, 75_000)):
        with this_host().spawn_procs({"gpus": count}, preload=["torch"], env=ENV) as procs:
            for differentiate in (False, True):
                name = f"{count} process(es)" + (", autograd" if differentiate else "")
                each = tensors.issue(procs, differentiate=differentiate)
                found[name] = {**each, "asked 1/s": 70_000 if differentiate else least, "asked script us": 8}
    return found


def captured_step() -> Figures:
    """A captured training step, beside the same under torchrun with DDP."""
    found: Figures = {}
    for size in ("small", "medium"):
        rounds = [(captured.torchrun(size), captured.captured(size, 2)) for _ in range(3)]
        found[size] = {
            "torchrun ms": (there := statistics.median(one for one, _ in rounds)),
            "captured ms": (here := statistics.median(other["ms"] for _, other in rounds)),
            "ratio": here / there,
            "asked ratio": 1.05,
            "script us": statistics.median(other["script us"] for _, other in rounds),
            "asked script us": 100,
        }
    return found


def flatness() -> Figures:
    """The script's time for a captured step, by the number of processes."""
    costs = {count: captured.captured("small", count, 50)["script us"] for count in (2, 8, 32)}
    return {"script us": costs, "32 / 2": costs[32] / costs[2], "asked": "flat"}


class Block(nn.Module):
    """Attention and two layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.queries, self.keys, self.values = (nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)

        def heads(layer: nn.Module) -> torch.Tensor:
            whole: torch.Tensor = layer(y)
            return whole.view(whole.shape[0], PLACES, HEADS, DIM // HEADS).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            heads(self.queries), heads(self.keys), heads(self.values), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        changed: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return changed


def transformer() -> nn.Module:
    """A small one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, DIM), *(Block() for _ in range(LAYERS)), nn.LayerNorm(DIM), nn.Linear(DIM, WORDS)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and those that follow them."""
    words = torch.randint(WORDS, (BATCH, PLACES + 1), generator=torch.Generator().manual_seed(1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> Any:
    """One step, as everybody writes it."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach()


class Trainers(spmd.SPMDActor):
    """The same step as an SPMD program has it."""

    def __init__(self) -> None:
        super().__init__()
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        torch.set_num_threads(1)
        rank, half = distributed.get_rank(), BATCH // 2
        self._model = DistributedDataParallel(transformer())
        self._given = [each[rank * half : (rank + 1) * half] for each in batch()]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)

    @endpoint
    def steps(self, count: int) -> float:
        """Milliseconds of a step."""
        begin = time.perf_counter()
        for _ in range(count - 1):
            train_step(self._model, self._optimizer, *self._given)
        train_step(self._model, self._optimizer, *self._given).item()
        return (time.perf_counter() - begin) / count * 1e3


def eager_transformer() -> Figures:
    """An eager step in the global view, beside an SPMD program with DDP; and what capture makes of it."""
    preload = ["torch.distributed.tensor", "torch._dynamo"]
    with (
        this_host().spawn_procs({"data": 2}, preload=preload, env=ENV) as procs,
        this_host().spawn_procs({"data": 2}, preload=preload, env=ENV) as others,
        Mesh((2,), ("data",), procs) as mesh,
    ):
        spmd.setup(others)
        trainers = others.spawn("trainers", Trainers)
        model = transformer()
        module_to_mesh(model, mesh, None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        x, y = (distribute(each, mesh, ["data", None]) for each in batch())
        step = capture(train_step)
        compiled = capture(train_step, compile="eager")
        script: list[float] = []

        def there() -> float:
            return max(trainers.steps.call(STEPS).get(timeout=600).values())

        def here(step: Any) -> float:
            begin, cpu = time.perf_counter(), time.thread_time()
            for _ in range(STEPS - 1):
                step(model, optimizer, x, y)
            loss = step(model, optimizer, x, y)
            script.append((time.thread_time() - cpu) / STEPS * 1e3)
            fetch(loss)
            return (time.perf_counter() - begin) / STEPS * 1e3

        found: Figures = in_turn(
            {
                "SPMD, DDP ms": there,
                "global view ms": lambda: here(train_step),
                "global view, captured ms": lambda: here(step),
                "global view, captured and traced ms": lambda: here(compiled),
            }
        )
        found["script ms of an eager step"] = statistics.median(script[3::3])
        found["ratio"] = found["global view ms"] / found["SPMD, DDP ms"]
        found["asked ratio"] = 1.3
        trainers.stop().get(timeout=60)
    return found


class Direct(spmd.SPMDActor):
    """Calls PyTorch's gloo itself."""

    @endpoint
    def reduce(self, numbers: int) -> float:
        """Milliseconds of one sum over all ranks."""
        from torch import distributed

        if not hasattr(self, "_tensor"):
            self._tensor = torch.zeros(numbers)
        distributed.barrier()
        return clock(lambda: distributed.all_reduce(self._tensor))


def reductions() -> Figures:
    """A sum of 64 MiB over four processes, beside gloo called directly in the same processes."""
    with this_host().spawn_procs({"gpus": 4}, preload=["torch"], env=ENV) as procs:
        spmd.setup(procs)
        direct = procs.spawn("direct", Direct)
        x = share(torch.zeros(16 << 20), procs)
        one = share(torch.zeros(1), procs)

        def through(tensor: torch.Tensor) -> float:
            fetch(one)
            return clock(lambda: fetch_shard(reduce(tensor).view(-1)[:1]))

        found = in_turn(
            {
                "gloo ms": lambda: max(direct.reduce.call(16 << 20).get(timeout=600).values()),
                "reduce ms": lambda: through(x),
            },
            9,
        )
        direct.stop().get(timeout=60)
    return {**found, "ratio of speed": found["gloo ms"] / found["reduce ms"], "asked": 0.95}


def fetches() -> Figures:
    """A fetch of 64 MiB, beside a copy of as many bytes."""
    with this_host().spawn_procs({"gpus": 1}, preload=["torch"], env=ENV) as procs:
        return {**tensors.copies(procs), "asked ratio": 0.5}


def moves() -> Figures:
    """`to_mesh` of 64 MiB beside plain copies, and of one number."""
    with this_host().spawn_procs({"stage": 2}, preload=["torch"], env=ENV) as procs:
        first, second = procs.slice(stage=0), procs.slice(stage=1)
        small = moving.small(first, second)
        return {"64 MiB": moving.large(first, second), "4 bytes": {**small, "asked script us": 60}}


ALL: dict[str, Callable[[], Figures]] = {
    each.__name__: each
    for each in (operators, fetches, moves, reductions, captured_step, flatness, eager_transformer)
}


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=ALL, default=list(ALL))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in asked.only:
        begin, load, plain = time.perf_counter(), os.getloadavg()[0], captured.plain()
        found[name] = {
            **ALL[name](),
            "load before and after": [load, os.getloadavg()[0]],
            "plain operator us": plain,
            "seconds": round(time.perf_counter() - begin),
        }
        print(json.dumps({name: found[name]}, indent=1), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
