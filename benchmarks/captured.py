"""What a captured training step costs, beside the same step under torchrun with DDP: `python benchmarks/captured.py [--json FILE]`.

It needs mesh-core, mesh-tensor and PyTorch in its environment. Both sides are two processes with one thread each that average gradients with gloo
and step the same fused AdamW; they take turns, several rounds, and are not there at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

SIZES = {"small": (64, 128, 10), "medium": (256, 512, 64), "large": (1024, 1024, 128)}
"""Inputs, width of the layers, outputs."""
BATCH = 64
STEPS = 200
ROUNDS = 5


def network(size: str) -> torch.nn.Module:
    """Three layers."""
    inputs, width, outputs = SIZES[size]
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, outputs),
    )


def script(size: str) -> None:
    """The same as torchrun runs it, on each rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(network(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, _, outputs = SIZES[size]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(BATCH, inputs, generator=generator)
    y = torch.randint(outputs, (BATCH,), generator=generator)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    loss = step()
    for _ in range(20):
        loss = step()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    loss.item()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"ms": (time.perf_counter() - begin) / STEPS * 1e3}))
    dist.destroy_process_group()


def torchrun(size: str) -> float:
    """Milliseconds of a step under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        "--script",
        size,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"torchrun exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    figure: float = json.loads(done.stdout.strip().splitlines()[-1])["ms"]
    return figure


def captured(size: str, count: int, steps: int = STEPS) -> dict[str, float]:
    """Milliseconds of a captured step on so many processes, and microseconds of the script's own time."""
    from mesh_core import this_host
    from mesh_tensor import activate, capture, fetch_shard, manual_seed, reduce

    with (
        this_host().spawn_procs({"gpus": count}, preload=["torch"], env={"OMP_NUM_THREADS": "1"}) as procs,
        activate(procs),
    ):
        inputs, _, outputs = SIZES[size]
        manual_seed(0, procs, shared=True)
        model = network(size)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        manual_seed(1, procs)
        x, y = torch.randn(BATCH, inputs), torch.randint(outputs, (BATCH,))

        @capture
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            torch.autograd.backward(loss)
            gradients = reduce([each.grad for each in parameters if each.grad is not None], "gpus", "avg")
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            return loss.detach()

        loss = step(x, y)
        for _ in range(20):
            loss = step(x, y)
        fetch_shard(loss)
        begin, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            loss = step(x, y)
        spent = time.thread_time() - cpu
        fetch_shard(loss)
        done = time.perf_counter() - begin
        assert step.replays > steps, step.reasons
    return {"ms": done / steps * 1e3, "script us": spent / steps * 1e6}


def plain() -> float:
    """Microseconds of an operator on 64 numbers, which is 1.0 where the machine has nothing else to do."""
    x = torch.ones(8, 8)
    begin = time.thread_time()
    for _ in range(20_000):
        x + x
    return (time.thread_time() - begin) / 20_000 * 1e6


def beside(size: str) -> dict[str, float]:
    """Both in turn."""
    rounds = [(torchrun(size), captured(size, 2)) for _ in range(ROUNDS)]
    there = statistics.median(one for one, _ in rounds)
    here = statistics.median(other["ms"] for _, other in rounds)
    return {
        "torchrun ms": there,
        "captured ms": here,
        "ratio": here / there,
        "script us": statistics.median(other["script us"] for _, other in rounds),
    }


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--script")
    parser.add_argument("--only", choices=SIZES)
    asked = parser.parse_args()
    if asked.script:
        script(asked.script)
        return
    torch.set_num_threads(1)
    found: dict[str, Any] = {size: beside(size) for size in ([asked.only] if asked.only else SIZES)}
    found["plain operator us"] = plain()
    found["script us by number of processes"] = {
        count: captured("small", count, 50)["script us"] for count in (2, 4, 8, 16, 32)
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
