"""PyTorch's own database of operators, run on meshes and compared with PyTorch here.

    python tools/operator_database.py [PROCESSES ...] [--global] [--layout first] [--dtype float32] [--samples 4] [--in-place]
                                      [--one-in 1] [--only NAME ...] [--seed 0] [--times 1] [--results FILE] [--page FILE]

prints which operators give something else, which are refused, and of how many all samples are right, on a mesh of each of these sizes.
With `--global` tensors are split over the mesh: by their first dimension, their last, or one by its first, the next by its second and so
on (`mixed`). Of an operator's samples so many are drawn, by seed, or all of them for `--samples 0`; of the operators one in so many, or those of `--only`.
`--in-place` compares the variants that change their argument. `--times 3` runs each sample so often on one mesh: workers keep what DTensor decided,
note how the second time, and carry that out from the third; where the environment has `MESH_TENSOR_BOTH_ROADS=1` they do both and compare. `--results` writes a line of JSON for each operator as soon as it is known,
and goes on where an earlier run with the same file has ended; `tools/operator_table.py` makes a table of such files, and `--page` a page of
this run.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast, get_args
from unittest.mock import patch

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import late_device
import operator_page
from mesh_core import ProcMesh, this_host
from mesh_tensor import GlobalTensor, Mesh, MeshTensor, activate, distribute, fetch, manual_seed, share

SECONDS = 60
# What is in their results is nowhere said.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


Layout = Literal["first", "last", "mixed"]
Outcome = Literal["same", "rounded", "refused", "different"]
Said = dict[str, str | None]
"""What went wrong with an operator on meshes of so many processes, by that number."""


@dataclass(frozen=True)
class Comparison:
    """What of an operator is compared."""

    dtype: torch.dtype = torch.float32
    layout: Layout = "first"
    """Which dimension of a tensor is split, in the global view."""
    samples: int = 4
    """How many are drawn; 0 for all."""
    in_place: bool = False
    """Its variant that changes its argument."""
    seed: int = 0

    def function(self, operator: Any) -> Callable[..., Any]:
        """What is called: in place, on a copy, as a leaf of autograd must not change."""
        if not self.in_place:
            return operator  # type: ignore[no-any-return]
        variant = operator.inplace_variant

        def changed(given: Any, *args: Any, **kwargs: Any) -> Any:
            given = given.clone()
            return given, variant(given, *args, **kwargs)

        return changed

    def drawn(self, operator: Any, differentiate: bool) -> list[Any]:
        """Samples of the operator."""
        torch.manual_seed(self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(operator.sample_inputs("cpu", self.dtype, requires_grad=differentiate))
        if self.in_place:
            found = [each for each in found if not each.broadcasts_input]
        if not self.samples or len(found) <= self.samples:
            return found
        return random.Random(f"{self.seed} {operator.formatted_name}").sample(found, self.samples)


def operators(comparison: Comparison = Comparison()) -> list[Any]:
    """Those that work on a CPU with numbers of this kind, and give the same each time."""
    chosen = [each for each in op_db if comparison.dtype in each.supported_dtypes("cpu")]  # type: ignore[no-untyped-call]
    if comparison.in_place:
        chosen = [each for each in chosen if each.inplace_variant is not None]
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


def given_to(procs: ProcMesh | Mesh, layout: Layout) -> Callable[[Any], Any]:
    """Return what gives tensors to the mesh, one after the other."""
    places = count()

    def give(value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return value
        if not isinstance(procs, Mesh):
            return share(value, procs).requires_grad_(value.requires_grad)
        sharding: list[str | None] = [None] * value.dim()
        if value.dim():
            sharding[{"first": 0, "last": -1, "mixed": next(places) % value.dim()}[layout]] = (
                procs.mesh_dim_names[0]
            )
        return distribute(value, procs, sharding)

    return give


def here(value: Any) -> Any:
    """A tensor of a mesh as it is in this process."""
    if isinstance(value, GlobalTensor):
        return fetch(value, timeout=None)
    if not isinstance(value, MeshTensor):
        return value
    first, *rest = fetch(value, timeout=None).values()
    for each in rest:
        torch.testing.assert_close(each, first, rtol=0, atol=0, equal_nan=True)
    return first


def snapshot(value: Any) -> Any:
    """A copy of a tensor."""
    if type(value) is not torch.Tensor:
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


KNOWN = {
    "as_strided_partial_views": "what lies beside a view in its memory is not shared with it",
    "sparse_mm_reduce": "sparse tensors have no strides",
    "sparse_sampled_addmm": "sparse tensors have no strides",
    "tensor_split": "it reads a tensor of indices where it is called",
}
"""Operators that give something else in the per-rank view, and why."""
KNOWN_GLOBAL = {
    **KNOWN,
    "cov": "rounding: sums of weights of 32 bits nearly cancel, and both results are wrong by 2e-5 of themselves",
    "ldexp": "rounding: the gradient of a number is summed in another order, and differs by 2e-6 of itself",
    "linalg_pinv_singular": "rounding: of a product of split matrices, which has no inverse, and whose rank it decides about",
    "trapezoid": "after certain other operators, PyTorch's DTensor refuses to subtract a number",
    "trapz": "after certain other operators, PyTorch's DTensor refuses to subtract a number",
    "pca_lowrank": "rounding: products of split matrices are summed in another order, and differ by 7e-6 of themselves",
}
"""The same in the global view."""


Case = tuple[Any, Any, bool]
"""What an operator is given, what PyTorch makes of it here, and whether that is of its gradients."""


class Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has each random operator draw from a seed of its own, which the generator gives, as in the global view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or "scaled_dot_product" in func.name():
            return func(*args, **(kwargs or {}))
        self.has_drawn = True
        seed = int(torch.empty((), dtype=torch.int64).random_())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return func(*args, **(kwargs or {}))


def cases(operator: Any, mode: Seeded | None = None, comparison: Comparison = Comparison()) -> list[Case]:
    """Samples of an operator, and what they give without a mesh; both the results and, where it has them, their gradients."""
    found: list[Case] = []
    has_gradients = operator.supports_autograd and (
        comparison.dtype.is_floating_point or comparison.dtype.is_complex
    )
    function = comparison.function(operator)
    for differentiate in (False, True)[: 1 + has_gradients]:
        for sample in comparison.drawn(operator, differentiate):
            asked = (sample.input, sample.args, sample.kwargs)
            # Some operators write to what they are given.
            kept = tree_map(snapshot, asked)
            torch.manual_seed(5)
            # Of some samples PyTorch itself says that they do not work.
            with suppress(Exception):
                # On copies: the mesh gets no others, and of what samples share gradients differ.
                want = outcome(function, tree_map(snapshot, kept), differentiate)
                if mode is not None:
                    # Only for random operators: within any mode, PyTorch computes some others wrongly, such as linalg.polar.
                    mode.has_drawn = False
                    torch.manual_seed(5)
                    with mode:
                        seeded = outcome(function, tree_map(snapshot, kept), differentiate)
                    want = seeded if mode.has_drawn else want
                found.append((kept, want, differentiate))
    return found


def check(
    operator: Any,
    procs: ProcMesh | Mesh,
    known: list[Case] | None = None,
    seconds: int = SECONDS,
    comparison: Comparison = Comparison(),
    *,
    times: int = 1,
) -> str | None:
    """Run samples of an operator so many times, in the global view where a mesh of that is given; what went wrong."""
    function = comparison.function(operator)

    def run() -> None:
        found = known or cases(operator, Seeded() if isinstance(procs, Mesh) else None, comparison)
        for asked, want, differentiate in found * times:
            given = tree_map(given_to(procs, comparison.layout), asked)
            # Some operators' samples begin with a seed of their own.
            seed_mesh: Any = torch.manual_seed
            if not isinstance(procs, Mesh):
                seed_mesh = partial(manual_seed, procs=procs, shared=True)
            seed_mesh(5)
            with activate(procs), patch.object(torch, "manual_seed", seed_mesh):
                got = outcome(function, given, differentiate)
            compare(tree_map(here, got), want)

    try:
        with limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Exception as error:  # noqa: BLE001 - said
        return f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"
    return None


class SomethingElse(Exception):
    """An operator has given something else; all other errors say that it was refused."""


class Rounding(Exception):
    """The same numbers, rounded in another order: sums over split tensors are."""


def compare(got: Any, want: Any) -> None:
    """Raise if the two are not the same, as PyTorch's tests have it."""
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError as error:
        for one, other in zip(tree_leaves(got), tree_leaves(want), strict=True):
            if isinstance(other, torch.Tensor) and other.numel() and other.is_floating_point():
                unit = 64 * torch.finfo(other.dtype).eps
                largest = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max())
                with suppress(AssertionError):
                    torch.testing.assert_close(one, other, rtol=unit, atol=unit * largest, equal_nan=True)
                    continue
            raise SomethingElse(str(error)) from None
        raise Rounding(str(error)) from None


def outcome(function: Callable[..., Any], asked: Any, differentiate: bool) -> Any:
    """What an operator gives, or the gradients of that."""
    given, args, kwargs = asked
    result = function(given, *args, **kwargs)
    if not differentiate:
        return result
    leaves = [each for each in tree_leaves(asked) if isinstance(each, torch.Tensor) and each.requires_grad]
    ends = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not leaves or not ends:
        return None
    total = torch.stack([each.abs().sum() if each.is_complex() else each.sum() for each in ends]).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True)


class Meshes:
    """The meshes that operators are run on; new ones where a process has died, or does not come back."""

    def __init__(
        self, counts: list[int], *, is_global: bool, comparison: Comparison, times: int, device: str = "cpu"
    ) -> None:
        self._device = device
        self._counts = counts
        self._times = times
        self._comparison = comparison
        self._is_global = is_global
        self._procs: ProcMesh | None = None
        self._parts: dict[int, ProcMesh | Mesh] = {}

    def check(self, operator: Any, count: int, known: list[Case], seconds: int) -> str | None:
        """Run an operator on so many processes; what went wrong."""
        if self._procs is None:
            self._procs = this_host().spawn_procs(
                {"gpus": max(self._counts)},
                preload=["torch.distributed.tensor"],
                env={"OMP_NUM_THREADS": "1"},
                bootstrap=late_device.load if self._device == late_device.NAME else None,
            )
            self._parts = {each: self._procs.slice(gpus=slice(0, each)) for each in self._counts}
            if self._is_global:
                self._parts = {
                    each: Mesh((each,), ("gpus",), cast("ProcMesh", part), device=self._device)
                    for each, part in self._parts.items()
                }
        what = check(operator, self._parts[count], known, seconds, self._comparison, times=self._times)
        if what is not None and what.startswith(("TimeoutError", "DeviceMeshError")):
            self.stop()
        return what

    def stop(self) -> None:
        """End them."""
        if self._procs is not None:
            self._procs.stop("an operator did not come back").get()
            self._procs = None


def begun(results: Path, about: dict[str, Any]) -> dict[str, Said]:
    """Return what an earlier run has written; one about something else must not go on in its file."""
    if not results.exists():
        results.write_text(json.dumps({"about": about}) + "\n")
        return {}
    had, said = written(results)
    if had != about:
        raise SystemExit(f"{results} is about {had}, and this would be about {about}: name another file")
    return said


def written(results: Path) -> tuple[dict[str, Any], dict[str, Said]]:
    """Return what a file of results is about, and what it says of each operator."""
    first, *others = map(json.loads, results.read_text().splitlines())
    return first["about"], {each["operator"]: each["said"] for each in others}


def counted(said: dict[str, Said], count: str) -> dict[Outcome, dict[str, str]]:
    """Return, for each kind of outcome, the operators that ended so on so many processes, and what was said of them."""
    found: dict[Outcome, dict[str, str]] = {each: {} for each in get_args(Outcome)}
    for name, each in sorted(said.items()):
        what = each[count]
        kind: Outcome = "refused"
        if what is None:
            kind = "same"
        elif what.startswith(Rounding.__name__):
            kind = "rounded"
        elif what.startswith(SomethingElse.__name__):
            kind = "different"
        found[kind][name] = what or ""
    return found


def main() -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("processes", type=int, nargs="*", default=[1])
    parser.add_argument("--global", action="store_true", dest="is_global")
    parser.add_argument(
        "--device", default="cpu", help="of the global view: cpu, cuda, or late, which MESH_LATE_DEVICE names"
    )
    parser.add_argument("--layout", choices=get_args(Layout), default="first")
    parser.add_argument("--dtype", default="float32", help="one of PyTorch's, by name")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--one-in", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="these operators")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for one operator on one mesh")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    comparison = Comparison(
        getattr(torch, asked.dtype), asked.layout, asked.samples, asked.in_place, asked.seed
    )
    chosen = _chosen(asked, comparison)
    about = {
        "release": torch.__version__,
        "operators": len(chosen),
        **{name: value for name, value in vars(asked).items() if name not in ("results", "seconds", "page")},
    }
    said = begun(asked.results, about) if asked.results else {}
    if asked.device == late_device.NAME:
        late_device.load()
    meshes = Meshes(
        asked.processes,
        is_global=asked.is_global,
        comparison=comparison,
        times=asked.times,
        device=asked.device,
    )
    try:
        for each in chosen:
            name = each.formatted_name
            if name in said:
                continue
            with limit(asked.seconds), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                known = cases(each, Seeded() if asked.is_global else None, comparison)
            said[name] = {
                str(count): meshes.check(each, count, known, asked.seconds) for count in asked.processes
            }
            if asked.results:
                with asked.results.open("a") as file:
                    file.write(json.dumps({"operator": name, "said": said[name]}) + "\n")
            for count, what in said[name].items():
                if what is not None:
                    print(f"{name} on {count}: {what}", flush=True)
    finally:
        meshes.stop()
    for count in map(str, asked.processes):
        same, rounded, refused, different = counted(said, count).values()
        print(
            f"\n{count} process(es), {comparison}: {len(same)} of {len(said)} operators, {100 * len(same) / len(said):.1f} %; "
            f"{len(different)} give something else, {len(rounded)} are rounded in another order, {len(refused)} are refused:\n"
        )
        for name, what in sorted({**rounded, **refused, **different}.items()):
            print(f"- `{name}`: {what}")
    if asked.page:
        asked.page.write_text(operator_page.page(said, _command(asked), asked.device), encoding="utf-8")


def _chosen(asked: argparse.Namespace, comparison: Comparison) -> list[Any]:
    """Return the operators that are to be run, in an order of no meaning: what is known of the first half holds for the other."""
    chosen = operators(comparison)
    random.Random(asked.seed).shuffle(chosen)
    if asked.only:
        return [each for each in chosen if each.formatted_name in asked.only]
    return chosen[: -(-len(chosen) // asked.one_in)]


def _command(asked: argparse.Namespace) -> str:
    """Return the command that was given, but for files."""
    told = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(asked).items()
        if name in {"device", "layout", "dtype", "samples", "one_in", "seed", "times", "seconds"}
    ]
    more = [
        f"--{name}" for name, is_on in (("global", asked.is_global), ("in-place", asked.in_place)) if is_on
    ]
    return " ".join(["python tools/operator_database.py", *map(str, asked.processes), *more, *told])


if __name__ == "__main__":
    main()
