"""How many small operators a second a script issues and a GPU completes, in both views: `python benchmarks/gpu_operators.py`.

With MESH_GPU_REHEARSAL set they run on the CPU, and there are few of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

REHEARSAL = "MESH_GPU_REHEARSAL" in os.environ
DEVICE = "cpu" if REHEARSAL else "cuda"
OPERATORS, ROUNDS = (200, 2) if REHEARSAL else (20_000, 3)


def rates(x: Any, y: Any, wait: Callable[[Any], object]) -> tuple[float, float]:
    """Operators a second, issued and done."""
    wait(x + y)
    issued, done = [], []
    for _ in range(ROUNDS):
        z = x
        begun = time.perf_counter()
        for _ in range(OPERATORS):
            z = z + y
        issued.append(OPERATORS / (time.perf_counter() - begun))
        wait(z)
        done.append(OPERATORS / (time.perf_counter() - begun))
    return statistics.median(issued), statistics.median(done)


def alone() -> tuple[float, float]:
    return rates(torch.ones(4, device=DEVICE), torch.full((4,), 1e-6, device=DEVICE), lambda z: z.cpu())


def per_rank() -> tuple[float, float]:
    from mesh_core import this_host
    from mesh_tensor import activate, fetch

    with this_host().spawn_procs({"gpus": 1}, preload=["torch"]) as procs, activate(procs, device=DEVICE):
        return rates(torch.ones(4), torch.full((4,), 1e-6), fetch)


def global_view() -> tuple[float, float]:
    from mesh_tensor import Mesh, activate, fetch

    with Mesh((1,), ("data",), device=DEVICE) as mesh, activate(mesh):
        return rates(torch.ones(4), torch.full((4,), 1e-6), fetch)


def main() -> None:
    print("| operators of 4 elements | issued a second | done a second |\n| --- | ---: | ---: |")
    short, problems = [], []
    for name, run in (("PyTorch alone", alone), ("per rank", per_rank), ("global view", global_view)):
        try:
            issued, done = run()
        except Exception as error:  # noqa: BLE001 - the others are worth knowing
            if "needs PyTorch" in str(error):
                print(f"| {name} | refused: {error} | |", flush=True)
                continue
            problems.append(f"{name}: {''.join(traceback.format_exception(error))[-3000:]}")
            continue
        print(f"| {name} | {issued:,.0f} | {done:,.0f} |", flush=True)
        short.append(f"{name} {done:,.0f}")
    print(f"in short: done a second: {', '.join(short)}")
    for each in problems:
        print(f"\n{each}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
