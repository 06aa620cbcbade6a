"""What a fully sharded step takes of a process's memory, and how long it takes: `python benchmarks/sharded.py [--models 3x512,8x1024] [--json FILE]`.

The GPT of `eager.py`, `FullyShard` of the global view beside FSDP2 (`fully_shard`) under torchrun, each in two processes of its own with one thread each, with
and without resharding after the forward pass, eager and captured. The memory is the most that a process has had resident in steps after the first ones
(`VmHWM`), minus what it had before the model was made, when it had made some steps of a tiny one. The C library maps each tensor apart and gives it
back at once (`MALLOC_MMAP_THRESHOLD_`), on both sides: so these are the bytes of the tensors alive at the peak, those of collectives included, whoever frees them.
With `--plain` it does what it does by itself.

It needs mesh-core, mesh-tensor and PyTorch in its environment.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from eager import GPT, LENGTH, batch

STEPS = 6
ROUNDS = 3
ROWS = {512: 8, 1024: 2}
"""Of a batch, over both processes."""
MIB = 1 << 20
APART = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Has the C library map each larger piece of memory by itself."""
Figures = dict[str, float]


def resident(what: str) -> int:
    """Return the bytes that this process has resident now (`VmRSS`), or has had at the most (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"this system does not say {what}")


def forget() -> None:
    """Let the most so far be what there is now."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(steps: int, step: Callable[[], None], do: Callable[[Callable[[], Any]], Any]) -> Figures:
    """Make steps, and measure; `do` carries something out in all processes and returns the most."""
    for _ in range(steps):
        step()
    do(forget)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    most = do(lambda: resident("VmHWM") - torch._mesh_before)  # type: ignore[attr-defined]  # noqa: SLF001 - as `remember` says
    return {"ms": statistics.median(times), "MiB": most / MIB}


def remember() -> None:
    """Note what this process has resident now, as an attribute of PyTorch's module: the functions of a script travel by value."""
    gc.collect()
    torch._mesh_before = resident("VmRSS")  # type: ignore[attr-defined]  # noqa: SLF001


def as_rank(layers: int, width: int, file: Path, *, steps: int, is_freed: bool) -> None:
    """FSDP2, on each rank of torchrun."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))

    def made(layers: int, width: int) -> Callable[[], None]:
        torch.manual_seed(0)
        model: Any = GPT(width, layers)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=is_freed)
        fully_shard(model, mesh=mesh, reshard_after_forward=is_freed)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        generator = torch.Generator().manual_seed(distributed.get_rank())

        def step() -> None:
            x, y = batch(ROWS.get(width, 2) // 2, generator)
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            loss.detach().item()

        return step

    def do(what: Callable[[], Any]) -> float:
        found = torch.tensor(float(what() or 0), dtype=torch.float64)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return found.item()

    tiny = made(1, 64)
    for _ in range(steps):
        tiny()
    del tiny
    do(remember)
    found = measured(steps, made(layers, width), do)
    if distributed.get_rank() == 0:
        file.write_text(json.dumps(found))
    distributed.destroy_process_group()


def _environment(*, is_plain: bool) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **({} if is_plain else APART)}


def fsdp2(layers: int, width: int, *, steps: int, is_freed: bool, is_plain: bool) -> Figures:
    """FSDP2 under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            __file__,
        ]
        command += ["--models", f"{layers}x{width}", "--steps", str(steps), "--as-rank", str(file)]
        command += ["--freed"] if is_freed else []
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **_environment(is_plain=is_plain)},
        )
        if done.returncode:
            raise RuntimeError(f"torchrun exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        found: Figures = json.loads(file.read_text())
    return found


def ours(
    layers: int,
    width: int,
    *,
    steps: int,
    is_freed: bool,
    is_plain: bool,
    is_captured: bool,
    compiles: str | None = None,
) -> Figures:
    """The global view."""
    from mesh_core import this_host
    from mesh_tensor import FullyShard, Mesh, activate, capture, distribute, fetch_shard, module_to_mesh

    def made(layers: int, width: int) -> Callable[[], None]:
        torch.manual_seed(0)
        model = module_to_mesh(
            GPT(width, layers), mesh, {"*": FullyShard("data", reshard_after_forward=is_freed)}
        )
        with activate(mesh):
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def train(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        work: Any = train
        if is_captured:
            work = capture(train) if compiles is None else capture(compile=compiles)(train)
        generator = torch.Generator().manual_seed(0)

        def step() -> None:
            x, y = (distribute(each, mesh, ["data", None]) for each in batch(ROWS.get(width, 2), generator))
            with activate(mesh):
                loss = work(x, y)
            fetch_shard(loss)

        return step

    def do(what: Callable[[], Any]) -> float:
        def on_each() -> Any:
            from torch.distributed.tensor import DTensor, Shard

            there = torch.tensor([float(what() or 0)], dtype=torch.float64)
            return DTensor.from_local(there, torch._mesh_of, [Shard(0)])  # type: ignore[attr-defined]  # noqa: SLF001

        def as_told(x: Any) -> Any:
            torch._mesh_of = x.device_mesh  # type: ignore[attr-defined]  # noqa: SLF001
            return on_each()

        found: Any = mesh.execute(as_told, torch.zeros(2))
        return float(found.full_tensor().max())

    with (
        this_host().spawn_procs(
            {"data": 2}, preload=["torch.distributed.tensor"], env=_environment(is_plain=is_plain)
        ) as procs,
        Mesh((2,), ("data",), procs) as mesh,
    ):
        tiny = made(1, 64)
        for _ in range(steps):
            tiny()
        del tiny
        do(remember)
        return measured(steps, made(layers, width), do)


KINDS: dict[str, tuple[Callable[..., Figures], dict[str, Any]]] = {
    "FSDP2": (fsdp2, {"is_freed": False}),
    "eager": (ours, {"is_freed": False, "is_captured": False}),
    "captured": (ours, {"is_freed": False, "is_captured": True}),
    "FSDP2-freed": (fsdp2, {"is_freed": True}),
    "eager-freed": (ours, {"is_freed": True, "is_captured": False}),
    "captured-freed": (ours, {"is_freed": True, "is_captured": True}),
    "compiled": (ours, {"is_freed": False, "is_captured": True, "compiles": "eager"}),
}
"""`freed`: with resharding after the forward pass."""


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="3x512,8x1024", help="blocks and width of each")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--plain", action="store_true", help="leave the C library as it is")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--freed", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    models = []
    for each in asked.models.split(","):
        layers, width = map(int, each.split("x"))
        models.append((layers, width))
    if asked.as_rank is not None:
        layers, width = models[0]
        as_rank(layers, width, asked.as_rank, steps=asked.steps, is_freed=asked.freed)
        return
    found: dict[str, Any] = {"torch": torch.__version__, "length": LENGTH, "load before": os.getloadavg()[0]}
    for layers, width in models:
        rounds: dict[str, list[Figures]] = {}
        for _ in range(asked.rounds):
            for name in asked.kinds.split(","):
                work, how = KINDS[name]
                one = work(layers, width, steps=asked.steps, is_plain=asked.plain, **how)
                print(f"{layers} blocks of width {width}, {name}, once: {one}", flush=True)
                rounds.setdefault(name, []).append(one)
        for name, figures in rounds.items():
            middle = {what: statistics.median(each[what] for each in figures) for what in figures[0]}
            other = "FSDP2-freed" if KINDS[name][1]["is_freed"] else "FSDP2"
            if other in rounds and name != other:
                for what in figures[0]:
                    ratios = [a[what] / b[what] for a, b in zip(figures, rounds[other], strict=True)]
                    middle[f"{what}, ratio"] = statistics.median(ratios)
            found[f"{layers} blocks of width {width}, {name}"] = middle
            told = ", ".join(f"{what} {value:.4g}" for what, value in middle.items())
            print(f"{layers} blocks of width {width}, {name}: {told}", flush=True)
    found["load after"] = os.getloadavg()[0]
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
