"""The command `./dev gpu`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_run import page, wheels
from gpu_run.running import LIMIT_S, REHEARSAL, Found, run
from gpu_run.steps import STEPS, Step

PAGE = Path("benchmarks/results/gpu.md")
WHEELS = Path("gpu-wheels")
NO_GPU = "no GPU here"
SLOWER = 4
"""How much longer each step of a rehearsal may take."""
_HAS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_HAS_MESH = "import mesh_core, mesh_rdma, mesh_tensor, pytest, pytest_timeout"


def main(root: Path, uv: Callable[[], str], arguments: list[str]) -> int:
    """Do what the command line asks for; `uv` returns the program, which only building wheels needs."""
    parser = argparse.ArgumentParser(
        prog="./dev gpu", description="Everything that a single GPU can prove, in at most eight minutes."
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        nargs="?",
        const=WHEELS,
        metavar="FOLDER",
        help="build what a machine with a GPU needs",
    )
    parser.add_argument(
        "--profile", default="release", help="the profile of Cargo.toml that --wheels builds with"
    )
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="FOLDER", help="take Mesh from these wheels"
    )
    parser.add_argument("--rehearse", action="store_true", help="run every step's program on the CPU")
    parser.add_argument("--page", type=Path, metavar="FILE", help=f"write the page there, not to {PAGE}")
    parser.add_argument("--only", metavar="WORDS", help="only the steps whose names have these words")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all steps")
    asked = parser.parse_args(arguments)
    if asked.wheels is not None:
        return wheels.bring(root, uv(), asked.wheels, asked.profile)
    with tempfile.TemporaryDirectory(prefix="mesh-gpu-") as scratch:
        return _run(root, Path(scratch), asked)


def _run(root: Path, scratch: Path, asked: argparse.Namespace) -> int:
    begun = time.monotonic()
    # What takes a GPU seconds may take a processor minutes, beside other work.
    slower = SLOWER if asked.rehearse else 1
    environment = _environment(root, asked.rehearse)
    source = asked.source or (root / WHEELS if (root / WHEELS).is_dir() else None)
    if source is not None:
        if lacks := wheels.problem(source):
            return _refused(lacks)
        wheels.unpacked(source, scratch / "site")
        environment["PYTHONPATH"] = os.pathsep.join([str(scratch / "site"), environment["PYTHONPATH"]])
    if not _succeeds(_HAS_MESH, environment):
        return _refused(f"{sys.executable} has not all of Mesh, pytest and pytest-timeout")
    if not _succeeds("import torch", environment):
        return _refused(
            f"{sys.executable} has no PyTorch; start ./dev with the Python that has it first on PATH"
        )
    has_gpu = not asked.rehearse and _succeeds(_HAS_GPU, environment)
    chosen = [step for step in STEPS if (asked.only or "") in step.name]
    found: list[Found] = []
    for step in chosen:
        if not has_gpu and not asked.rehearse and step.needs_gpu:
            found.append(Found(step, "not run", NO_GPU))
        else:
            folder = scratch / str(len(found))
            folder.mkdir()
            more = {**environment, **_stand_in(step, scratch, asked.rehearse)}
            found.append(run(step, folder, more, asked.limit * slower - (time.monotonic() - begun), slower))
        print(f"dev: {found[-1].step.name}: {found[-1].state}, {found[-1].short}", flush=True)
        _write(root, asked, found, chosen, has_gpu=has_gpu)
    print(f"\n{page.table(found)}\n\nIn {time.monotonic() - begun:.0f} s.")
    return 1 if any(each.state in {"failed", "out of time"} for each in found) else 0


def _write(
    root: Path, asked: argparse.Namespace, found: Sequence[Found], chosen: Sequence[Step], *, has_gpu: bool
) -> None:
    """Write the page after each step: what is found is kept even if this program is ended."""
    # What was found on a GPU is not replaced by what a machine without one says.
    target = asked.page or (root / PAGE if has_gpu else None)
    if target is not None:
        rest = [Found(step, page.NOT_YET, "") for step in chosen[len(found) :]]
        where = found[0].short if found and found[0].step is STEPS[0] else ""
        page.write(target, page.page([*found, *rest], where=where, rehearsed=asked.rehearse))


def _environment(root: Path, rehearse: bool) -> dict[str, str]:
    tools = os.pathsep.join(map(str, (root / "tools", *filter(None, [os.environ.get("PYTHONPATH")]))))
    made = {
        **os.environ,
        "PYTHONPATH": tools,
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # The global view is tried with whatever release is there.
        "MESH_TENSOR_ANY_RELEASE": "1",
        # Programs that PyTorch compiles belong to this run.
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "mesh-gpu-inductor"),
    }
    return {**made, REHEARSAL: "1"} if rehearse else made


def _stand_in(step: Step, scratch: Path, rehearse: bool) -> dict[str, str]:
    if not rehearse or not step.stands_in:
        return {}
    import cuda_stand_in

    if cuda_stand_in.missing():
        return {}
    return {"MESH_RDMA_CUDA_LIBRARY": str(cuda_stand_in.build(scratch))}


def _succeeds(code: str, environment: dict[str, str]) -> bool:
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _refused(why: str) -> int:
    print(
        f"dev: {why}. Build the wheels on a machine with a network and a Rust toolchain, with ./dev gpu --wheels {WHEELS}, bring them "
        f"here in the checkout, and run ./dev gpu --from {WHEELS}",
        file=sys.stderr,
    )
    return 1
