"""What is done wrongly with tensors is said at once, with the tensor, its mesh, and the line that has made it."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import DeviceMeshError, ProcMesh, this_host
from mesh_core.extensions import watch

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    CaptureError,
    Mesh,
    RanksDisagree,
    activate,
    all_to_all,
    capture,
    distribute,
    fetch,
    fetch_shard,
    manual_seed,
    rank_tensor,
    reduce,
    share,
    slice_mesh,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2,), ("gpus",), procs) as mesh:
        yield mesh


PER_RANK: dict[str, tuple[Callable[[Any, ProcMesh], Any], type[Exception], str]] = {
    "another mesh": (
        lambda x, procs: x + share(torch.ones(3), procs.slice(gpus=0)),
        ValueError,
        "works on one mesh.*to_mesh",
    ),
    "a list of two meshes": (
        lambda x, procs: reduce([x, share(torch.ones(3), procs.slice(gpus=0))], "gpus"),
        ValueError,
        "works on one.*to_mesh",
    ),
    "a tensor of this process": (
        lambda x, _: x + torch.ones(3, requires_grad=True),
        ValueError,
        r"a tensor of this process, \(3,\) .* meets .*share\(\)",
    ),
    "an unknown dimension": (
        lambda x, _: reduce(x, "gpu"),
        ValueError,
        "has no dimension 'gpu'; it has 'gpus'",
    ),
    "an unknown dimension of a slice": (
        lambda x, _: slice_mesh(x, gpu=0),
        ValueError,
        "no dimension 'gpu'.*did you mean 'gpus'",
    ),
    "no such place": (lambda x, _: slice_mesh(x, gpus=5), IndexError, "5 is out of range for gpus=2"),
    "a value at no such place": (
        lambda x, _: fetch_shard(x, gpus=5),
        IndexError,
        "5 is out of range for gpus=2",
    ),
    "a value at a place of an unknown dimension": (
        lambda x, _: fetch_shard(x, gpu=0),
        ValueError,
        "no dimension 'gpu'.*did you mean 'gpus'",
    ),
    "shared twice": (share, TypeError, "is on a mesh already"),
    "uneven parts": (lambda x, _: reduce(x, "gpus", scatter=True), ValueError, "a multiple of 2 elements"),
    "uneven parts to all": (lambda x, _: all_to_all(x, "gpus"), ValueError, "a multiple of 2 elements"),
    "pickling": (lambda x, _: pickle.dumps(x), TypeError, r"cannot be pickled.*fetch\(\)"),
}


@pytest.mark.parametrize("case", PER_RANK)
def test_in_the_per_rank_view(procs: ProcMesh, case: str) -> None:
    work, kind, message = PER_RANK[case]
    x = share(torch.ones(3), procs)  # this one
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        work(x, procs)
    assert "MeshTensor((3,) of float32, mesh=<ProcMesh 'pair': gpus=2>)" in str(caught.value)
    assert re.search(r"made at .*test_bad_input\.py.*# this one", str(caught.value))


def test_values_of_which_ranks_have_others(procs: ProcMesh) -> None:
    x = rank_tensor(procs, "gpus")  # this one
    works: list[Callable[[], Any]] = [lambda: bool(x), x.item, lambda: torch.nonzero(x)]
    for work in works:
        with pytest.raises(RanksDisagree, match=r"fetch_shard\(\)") as caught:
            work()
        assert re.search(r"of MeshTensor\(\(\) of int64.*made at .*# this one", str(caught.value))


def test_within_capture(procs: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    x = share(torch.ones(3), procs)

    @capture
    def branching(x: Any) -> Any:
        return x if x.sum() > 0 else -x  # this line

    with pytest.raises(CaptureError, match=r"torch\.where") as caught:
        branching(x)
    assert "# this line" in str(caught.value)

    @capture
    def printing(x: Any) -> Any:
        y = x + 1
        print(y)  # noqa: T201 - what is tested
        return y

    for _ in range(3):
        printing(x)
    # Its form, as there are no values yet; once, as a replay runs no Python.
    printed = capsys.readouterr().out
    assert printed.count("MeshTensor((3,) of float32, mesh=<ProcMesh 'pair': gpus=2>)") == 1


def test_a_deep_copy_is_another_tensor_of_the_mesh(procs: ProcMesh, mesh: Mesh) -> None:
    for x in (share(torch.ones(3), procs), distribute(torch.ones(3), mesh, ["gpus"])):
        other = copy.deepcopy(x)
        other.add_(1)
        assert fetch_shard(x, gpus=0)[0] == 1
        assert fetch_shard(other, gpus=0)[0] == 2


GLOBAL: dict[str, tuple[Callable[[Any, Mesh], Any], type[Exception], str]] = {
    "a tensor of this process": (
        lambda x, _: x + torch.ones(5, 3, requires_grad=True),
        ValueError,
        r"a tensor of this process, \(5, 3\) .* meets .*distribute\(\)",
    ),
    "a value at no such place": (lambda x, _: fetch_shard(x, gpus=5), IndexError, "5 is out of range"),
    "a value at a place of an unknown dimension": (
        lambda x, _: fetch_shard(x, gpu=0),
        ValueError,
        "no dimension 'gpu'.*did you mean 'gpus'",
    ),
    "laid out along an unknown dimension": (
        lambda x, _: x.redistribute(["gpu", None]),
        ValueError,
        "no dimension 'gpu'; it has 'gpus'",
    ),
    "laid out with too few entries": (
        lambda x, mesh: distribute(x, mesh, ["gpus"]),
        ValueError,
        "1 entries and the tensor 2 dimensions",
    ),
    "the other view's function": (lambda x, _: reduce(x, "gpus"), TypeError, "is of the global view"),
    "pickling": (lambda x, _: pickle.dumps(x), TypeError, r"cannot be pickled.*fetch\(\)"),
}


@pytest.mark.parametrize("case", GLOBAL)
def test_in_the_global_view(mesh: Mesh, case: str) -> None:
    work, kind, message = GLOBAL[case]
    x = distribute(torch.ones(5, 3), mesh, ["gpus", None])  # this one
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        work(x, mesh)
    assert re.search(
        r"GlobalTensor\(\(5, 3\) of float32, mesh=Mesh\(gpus=2\)\), made at .*# this one", str(caught.value)
    )


def test_the_two_views_do_not_mix(procs: ProcMesh, mesh: Mesh) -> None:
    x = share(torch.ones(3), procs)  # this one
    with pytest.raises(ValueError, match=r"(?s)per-rank view.*meets tensors of the global view.*# this one"):
        distribute(torch.ones(5, 3), mesh, ["gpus", None]) + x
    with pytest.raises(TypeError, match=r"torch\.manual_seed\(\)"):
        manual_seed(0, mesh)  # type: ignore[arg-type]


def test_uneven_shards_and_shapes_that_depend_on_values_work_in_the_global_view(mesh: Mesh) -> None:
    x = distribute(torch.arange(15.0).view(5, 3), mesh, ["gpus", None])
    assert torch.equal(fetch((x * 2).sum(0)), torch.tensor([60.0, 70, 80]))
    assert torch.nonzero(x).shape == (14, 2)


def test_a_tensor_of_this_process_that_cannot_be_distributed(mesh: Mesh) -> None:
    for sharding, kind, why in (
        (["gpu"], ValueError, "no dimension 'gpu'; it has 'gpus'"),
        (["gpus", None], ValueError, "2 entries and the tensor 1 dimensions"),
        ("gpus", TypeError, "a list with an entry for each dimension"),
    ):
        with pytest.raises(kind, match=why) as caught:
            distribute(torch.ones(5), mesh, sharding)  # type: ignore[arg-type]  # this one
        assert re.search(
            r"\(5,\) of torch\.float32, was to be distributed over Mesh\(gpus=2\), at .*test_bad_input\.py.*# this one",
            str(caught.value),
        )


def test_a_mesh_that_was_stopped_with_tensors_alive(preload: list[str]) -> None:
    ended = threading.Semaphore(0)
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="passing") as procs:
        x = share(torch.ones(3), procs)
        fetch(x)
        # Told after the tensors are.
        watching = watch(procs, lambda _: ended.release())
    for _ in range(2):
        assert ended.acquire(timeout=60)
    for work in (lambda: fetch(x), lambda: x + 1, lambda: x.sum().item()):
        with pytest.raises(
            DeviceMeshError, match="<ProcMesh 'passing': gpus=2> was stopped, and its tensors are gone"
        ):
            work()
    del watching


@pytest.mark.parametrize("view", ["per rank", "global"])
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_that_an_optimizer_changes_before_their_gradients_are_computed(
    procs: ProcMesh, mesh: Mesh, view: str, fused: bool
) -> None:
    """VRS-1: PyTorch says so, as on one process."""
    weight = torch.ones(3, requires_grad=True)
    weight = (
        (share(weight, procs) if view == "per rank" else distribute(weight, mesh)).detach().requires_grad_()
    )
    weight.grad = weight.detach().clone()
    loss = (weight * weight).sum()
    torch.optim.AdamW([weight], foreach=not fused, fused=fused).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("view", ["per rank", "global"])
def test_operators_of_the_compiler_are_refused(procs: ProcMesh, mesh: Mesh, view: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(1, 2, 16, 8)
    on_mesh = share(x, procs) if view == "per rank" else distribute(x, mesh)
    with (
        activate(procs if view == "per rank" else mesh),
        pytest.raises(
            NotImplementedError, match=r"flex_attention takes functions.*scaled_dot_product_attention"
        ),
    ):
        flex_attention(on_mesh, on_mesh, on_mesh)
