"""What tensors of a mesh cost, beside PyTorch without one: `python benchmarks/tensors.py [--json FILE]`.

It needs mesh-core, mesh-tensor and PyTorch in its environment. Times of the script are of its processor (`thread_time`), so that what else runs on
the machine does not count; rates are of the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mesh_core import ProcMesh, this_host
from mesh_tensor import activate, fetch, fetch_shard, reduce, share

OPERATORS = 30_000
ROUNDS = 5


def median(work: Callable[[], float]) -> float:
    """The median of some runs, after one that does not count."""
    work()
    return statistics.median(work() for _ in range(ROUNDS))


def plain() -> float:
    """Microseconds of an operator on 64 numbers."""
    x, y = torch.ones(8, 8), torch.full((8, 8), 1e-6)
    begin = time.thread_time()
    for _ in range(OPERATORS):
        x = x + y
    return (time.thread_time() - begin) / OPERATORS * 1e6


def issue(procs: ProcMesh, *, differentiate: bool = False) -> dict[str, float]:
    """The same on a mesh: issued, and carried out."""
    figures: dict[str, list[float]] = {"script us": [], "issued 1/s": [], "done 1/s": [], "times plain": []}
    x: torch.Tensor = share(torch.ones(8, 8), procs)
    y = share(torch.full((8, 8), 1e-6), procs)
    if differentiate:
        y.requires_grad_()
    fetch((x + y).detach())
    for _ in range(ROUNDS):
        beside = plain()
        z = x
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(OPERATORS):
            z = z + y
        issued, spent = time.perf_counter() - wall, time.thread_time() - cpu
        fetch(z.detach())
        done = time.perf_counter() - wall
        spent = spent / OPERATORS * 1e6
        for name, value in zip(
            figures, (spent, OPERATORS / issued, OPERATORS / done, spent / beside), strict=True
        ):
            figures[name].append(value)
    return {name: statistics.median(values) for name, values in figures.items()}


def training(procs: ProcMesh) -> dict[str, float]:
    """A step of a small network: the script's time, and the same step without a mesh."""

    def network() -> tuple[Callable[[], Any], Any]:
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 8),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(32, 64)

        def step() -> Any:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, batch

    def timed(step: Callable[[], Any], end: Callable[[Any], Any]) -> tuple[float, float]:
        loss = step()
        end(loss)
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(100):
            loss = step()
        spent = time.thread_time() - cpu
        end(loss)
        return spent * 10, (time.perf_counter() - wall) * 10

    with activate(procs):
        step, _ = network()
    there = timed(step, fetch_shard)
    here = timed(network()[0], lambda loss: loss)
    return {"script ms": there[0], "step ms": there[1], "without a mesh ms": here[1]}


def copies(procs: ProcMesh) -> dict[str, float]:
    """GB/s of 64 MiB, as they come and with a look at each number: pages are mapped when they are first read."""
    size = 64 << 20
    x = share(torch.zeros(size // 4), procs)
    source, target = torch.zeros(size // 4), torch.zeros(size // 4)

    def clock(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return size / (time.perf_counter() - begin) / 1e9

    got = median(lambda: clock(lambda: fetch_shard(x, gpus=0)))
    copied = median(lambda: clock(lambda: target.copy_(source)))
    seen = median(lambda: clock(lambda: fetch_shard(x, gpus=0).sum()))
    copied_and_seen = median(lambda: clock(lambda: target.copy_(source).sum()))
    return {
        "fetch GB/s": got,
        "copy GB/s": copied,
        "ratio": got / copied,
        "fetch and sum GB/s": seen,
        "copy and sum GB/s": copied_and_seen,
    }


def collectives(procs: ProcMesh) -> dict[str, float]:
    """Milliseconds of a sum of 64 MiB over all processes, through instructions, each waited for."""
    x = share(torch.zeros(16 << 20), procs)
    one = share(torch.zeros(1), procs)

    def clock(tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        fetch_shard(reduce(tensor).view(-1)[:1])
        return (time.perf_counter() - begin) * 1e3

    return {"reduce 64 MiB ms": median(lambda: clock(x)), "reduce 4 bytes ms": median(lambda: clock(one))}


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"plain operator us": median(plain)}
    for count in (1, 2):
        with this_host().spawn_procs({"gpus": count}, preload=["torch"]) as procs:
            found[f"{count} process(es)"] = issue(procs)
            found[f"{count} process(es), recorded by autograd"] = issue(procs, differentiate=True)
            found[f"{count} process(es), a training step"] = training(procs)
            if count == 1:
                found["copies"] = copies(procs)
            else:
                found["collectives of 2"] = collectives(procs)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
