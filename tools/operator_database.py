"""PyTorch's own database of operators, run on a mesh and compared with PyTorch here.

    python tools/operator_database.py [PROCESSES] [--global] [--some]

prints which operators give something else, and of how many all samples are right. With `--global` tensors are split over the mesh by their first dimension; with `--some` a fifth of the
operators is run, by seed.
"""

from __future__ import annotations

import random
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from mesh_core import ProcMesh, this_host
from mesh_tensor import GlobalTensor, Mesh, MeshTensor, activate, distribute, fetch, manual_seed, share

SAMPLES = 4
SECONDS = 60
# What is in their results is nowhere said.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def operators() -> list[Any]:
    """Those that work on a CPU with numbers of 32 bits, and give the same each time."""
    chosen = [each for each in op_db if torch.float32 in each.supported_dtypes("cpu")]  # type: ignore[no-untyped-call]
    return [each for each in chosen if each.name not in UNINITIALIZED]


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def given_to(procs: ProcMesh | Mesh, value: Any) -> Any:
    """A tensor as the mesh has it."""
    if type(value) is not torch.Tensor:
        return value
    if isinstance(procs, Mesh):
        rows = [procs.mesh_dim_names[0], *[None] * (value.dim() - 1)] if value.dim() else []
        return distribute(value, procs, rows)
    return share(value, procs).requires_grad_(value.requires_grad)


def here(value: Any) -> Any:
    """A tensor of a mesh as it is in this process."""
    if isinstance(value, GlobalTensor):
        return fetch(value, timeout=SECONDS)
    if not isinstance(value, MeshTensor):
        return value
    first, *rest = fetch(value, timeout=SECONDS).values()
    for each in rest:
        torch.testing.assert_close(each, first, rtol=0, atol=0, equal_nan=True)
    return first


def check(operator: Any, procs: ProcMesh | Mesh) -> str | None:
    """Run samples of an operator, in the global view where a mesh of that is given; what went wrong."""

    def run(differentiate: bool) -> None:
        samples = operator.sample_inputs("cpu", torch.float32, requires_grad=differentiate)
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            asked = (sample.input, sample.args, sample.kwargs)
            given = tree_map(partial(given_to, procs), asked)
            torch.manual_seed(5)
            try:
                want = outcome(operator, asked, differentiate)
            except Exception:  # noqa: BLE001 - some samples are no samples of what works
                continue
            # Some operators' samples begin with a seed of their own.
            seed_mesh: Any = torch.manual_seed
            if not isinstance(procs, Mesh):
                seed_mesh = partial(manual_seed, procs=procs, shared=True)
            seed_mesh(5)
            with activate(procs), patch.object(torch, "manual_seed", seed_mesh):
                got = outcome(operator, given, differentiate)
            torch.testing.assert_close(tree_map(here, got), want, equal_nan=True)

    try:
        with limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(differentiate=False)
            if operator.supports_autograd:
                run(differentiate=True)
    except Exception as error:  # noqa: BLE001 - said
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
    return None


def outcome(operator: Any, asked: Any, differentiate: bool) -> Any:
    """What an operator gives, or the gradients of that."""
    given, args, kwargs = asked
    result = operator(given, *args, **kwargs)
    if not differentiate:
        return result
    leaves = [each for each in tree_leaves(asked) if isinstance(each, torch.Tensor) and each.requires_grad]
    ends = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not leaves or not ends:
        return None
    total = torch.stack([each.abs().sum() if each.is_complex() else each.sum() for each in ends]).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True)


def main() -> None:
    """Run all of them."""
    torch.set_num_threads(1)
    counts = [int(each) for each in sys.argv[1:] if each.isdigit()]
    chosen = operators()
    if "--some" in sys.argv:
        chosen = random.Random(13).sample(chosen, len(chosen) // 5)
    with this_host().spawn_procs(
        {"gpus": counts[0] if counts else 1}, preload=["torch.distributed.tensor"]
    ) as procs:
        mesh = Mesh((len(procs),), ("gpus",), procs) if "--global" in sys.argv else procs
        wrong = {}
        for each in chosen:
            said = check(each, mesh)
            if said is not None:
                wrong[each.formatted_name] = said
                print(f"{each.formatted_name}: {said}", flush=True)
    total = len(chosen)
    print(f"\n{total - len(wrong)} of {total} operators, {100 * (1 - len(wrong) / total):.1f} %; wrong:\n")
    for name, said in sorted(wrong.items()):
        print(f"- `{name}`: {said}")


if __name__ == "__main__":
    main()
