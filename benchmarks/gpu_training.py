"""A step of a transformer on one GPU: PyTorch alone, DDP with NCCL, and both views, eager and captured: `python benchmarks/gpu_training.py`.

All run the same model with the same fused AdamW on one process, from the same values, and must end at about the same loss. They take turns, and are
not there at the same time. With MESH_GPU_REHEARSAL set they run on the CPU, with small sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

REHEARSAL = "MESH_GPU_REHEARSAL" in os.environ
DEVICE = "cpu" if REHEARSAL else "cuda"
STEPS, WARM, ROUNDS = (3, 3, 1) if REHEARSAL else (30, 5, 3)


@dataclass(frozen=True)
class Size:
    """Of a model and its batches."""

    layers: int
    width: int
    heads: int
    places: int
    batch: int = 8
    words: int = 512


SIZES = {
    "small": Size(layers=3, width=64, heads=4, places=32),
    "wide": Size(layers=1, width=64, heads=2, places=16)
    if REHEARSAL
    else Size(layers=6, width=1024, heads=16, places=512),
}


class Block(nn.Module):
    """Attention, and a layer of features for each place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        parts = (self.query(normed), self.key(normed), self.value(normed))
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = self.down(functional.gelu(self.up(self.second_norm(x))))
        return x + found


def transformer(size: Size) -> nn.Module:
    """Make it, with the same values each time."""
    torch.manual_seed(0)
    blocks = [Block(size) for _ in range(size.layers)]
    return nn.Sequential(nn.Embedding(size.words, size.width), *blocks, nn.Linear(size.width, size.words))


def batch_of(size: Size) -> Tensor:
    """Make a batch, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, size.words, (size.batch, size.places + 1), generator=generator)


def step_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def timed(step: Callable[[], Tensor], value: Callable[[Tensor], float]) -> dict[str, float]:
    """Milliseconds of a step, of which the script is busy for some, and the last loss."""
    for _ in range(WARM):
        value(step())
    took, issuing = [], []
    last = 0.0
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        loss = step()
        for _ in range(STEPS - 1):
            loss = step()
        issuing.append((time.perf_counter() - begun) / STEPS * 1e3)
        last = value(loss)
        took.append((time.perf_counter() - begun) / STEPS * 1e3)
    return {"ms": statistics.median(took), "script ms": statistics.median(issuing), "loss": last}


def alone(size: Size) -> dict[str, float]:
    model, batch = transformer(size).to(DEVICE), batch_of(size).to(DEVICE)
    step = step_of(model)
    return timed(lambda: step(batch[:, :-1], batch[:, 1:]), float)


def ddp(size: Size) -> dict[str, float]:
    """The same under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        __file__,
        "--ddp",
    ]
    done = subprocess.run([*command, json.dumps(vars(size))], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"torchrun exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    told: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def under_torchrun(size: Size) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo" if REHEARSAL else "nccl")
    model = DistributedDataParallel(transformer(size).to(DEVICE))
    batch, step = batch_of(size).to(DEVICE), step_of(model)
    print(json.dumps(timed(lambda: step(batch[:, :-1], batch[:, 1:]), float)))
    dist.destroy_process_group()


def per_rank(size: Size, how: Callable[[Any], Any]) -> dict[str, float]:
    """In the per-rank view, on one process."""
    from mesh_core import this_host
    from mesh_tensor import activate, fetch_shard, share

    model, batch = transformer(size), batch_of(size)
    with this_host().spawn_procs({"gpus": 1}, preload=["torch"]) as procs, activate(procs, device=DEVICE):
        there = share(batch, procs).to(DEVICE)
        copied = transformer(size)
        with torch.no_grad():
            for each, values in zip(copied.parameters(), model.parameters(), strict=True):
                each.copy_(share(values, procs).to(DEVICE))
        step = how(step_of(copied))
        return timed(lambda: step(there[:, :-1], there[:, 1:]), lambda loss: float(fetch_shard(loss)))


def global_view(size: Size, how: Callable[[Any], Any]) -> dict[str, float]:
    """In the global view, on one process."""
    from mesh_tensor import Mesh, activate, distribute, fetch, module_to_mesh

    with Mesh((1,), ("data",), device=DEVICE) as mesh:
        model = module_to_mesh(transformer(size), mesh)
        batch = distribute(batch_of(size), mesh, ["data", None])
        with activate(mesh):
            step = how(step_of(model))
            return timed(
                lambda: step(batch[:, :-1], batch[:, 1:]), lambda loss: float(cast("Tensor", fetch(loss)))
            )


def eager(step: Any) -> Any:
    return step


def captured(step: Any) -> Any:
    from mesh_tensor import capture

    return capture(step)


def compiled(step: Any) -> Any:
    from mesh_tensor import capture

    # Inductor would take a processor minutes.
    return capture(step, compile="eager" if REHEARSAL else True)


RUNS: dict[str, Callable[[Size], dict[str, float]]] = {
    "PyTorch alone": alone,
    "DDP, one rank": ddp,
    "per rank, eager": lambda size: per_rank(size, eager),
    "per rank, captured": lambda size: per_rank(size, captured),
    "global, eager": lambda size: global_view(size, eager),
    "global, captured": lambda size: global_view(size, captured),
    "per rank, captured and compiled": lambda size: per_rank(size, compiled),
}


def main() -> None:
    if sys.argv[1:2] == ["--ddp"]:
        under_torchrun(Size(**json.loads(sys.argv[2])))
        return
    wrong = False
    for name, size in SIZES.items():
        print(
            f"\n{name}: {size}\n\n| step | ms | of which the script issues | times DDP | last loss |\n| --- | ---: | ---: | ---: | ---: |"
        )
        found: dict[str, dict[str, float]] = {}
        problems: list[str] = []
        for what, run in RUNS.items():
            if name != "small" and "compiled" in what:
                continue  # for want of time
            try:
                told = found[what] = run(size)
            except Exception as error:  # noqa: BLE001 - the others are worth knowing
                if "needs PyTorch" in str(error):
                    print(f"| {what} | refused: {error} | | | |", flush=True)
                    continue
                problems.append(f"{what}: {''.join(traceback.format_exception(error))[-3000:]}")
                print(f"| {what} | {type(error).__name__} | | | |", flush=True)
                continue
            beside = found.get("DDP, one rank", {}).get("ms", float("nan"))
            print(
                f"| {what} | {told['ms']:.2f} | {told['script ms']:.2f} | {told['ms'] / beside:.2f} | {told['loss']:.4f} |",
                flush=True,
            )
        base = found.get("DDP, one rank") or found.get("PyTorch alone")
        if base is not None:
            shown = [
                f"{what} {told['ms'] / base['ms']:.2f}"
                for what, told in found.items()
                if what not in {"PyTorch alone", "DDP, one rank"}
            ]
            print(f"in short: {name}, × DDP: {', '.join(shown)}")
            apart = [
                what
                for what, told in found.items()
                if abs(told["loss"] - base["loss"]) > 0.02 * abs(base["loss"]) + 1e-2
            ]
            if apart:
                problems.append(f"other losses than DDP's: {', '.join(apart)}")
        for each in problems:
            print(f"\n{each}", flush=True)
        wrong = wrong or bool(problems)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
