"""Tensors of a whole mesh give what they give in one process, wherever their parts lie."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402

from mesh_tensor import (  # noqa: E402
    GlobalTensor,
    Mesh,
    activate,
    distribute,
    fetch,
    fetch_shard,
    reduce,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]

SHARDINGS = [
    None,
    ["data", None],
    [None, "model"],
    ["data", "model"],
    ["model", "data"],
    [("data", "model"), None],
]
A = torch.arange(21.0).view(7, 3) / 7 - 1


@pytest.fixture(scope="module")
def mesh(grid: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2, 2), ("data", "model"), grid) as mesh:
        yield mesh


FEWER = [pytest.param(count, marks=pytest.mark.sampled(4)) for count in (1, 2)]


# All on four; of what repeats it on fewer a run draws some.
@pytest.fixture(scope="module", params=[4, *FEWER])
def meshes(request: pytest.FixtureRequest, grid: ProcMesh) -> Iterator[Mesh]:
    """Meshes of one, two and four of the same processes."""
    shape = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[request.param]
    with Mesh(shape, ("data", "model"), grid.slice(data=slice(shape[0]), model=slice(shape[1]))) as mesh:
        yield mesh


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_uneven_parts_of_parts(mesh: Mesh, rows: int) -> None:
    a = torch.arange(rows * 2.0).view(rows, 2)
    x = distribute(a, mesh, [("data", "model"), None])
    assert fetch(x).equal(a)
    torch.testing.assert_close(fetch((x * 2).redistribute([None, "model"]).T + 1), a.T * 2 + 1)
    assert fetch(x.view(-1)).equal(a.view(-1))


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_a_tensor_comes_back_as_it_was_given(meshes: Mesh, sharding: Any) -> None:
    x = distribute(A, meshes, sharding)
    assert isinstance(x, GlobalTensor)
    assert (x.shape, x.dtype) == (A.shape, A.dtype)
    assert fetch(x).equal(A)


def test_shards_are_where_the_sharding_says(mesh: Mesh) -> None:
    x = distribute(A, mesh, ["data", None])
    assert x.placements == (Shard(0), Replicate())
    assert fetch_shard(x, data=0, model=1).equal(A[:4])
    assert fetch_shard(x, data=1).equal(A[4:])
    assert distribute(A, mesh, [Replicate(), Shard(-1)]).placements == (Replicate(), Shard(1))
    assert distribute(A, mesh, {"model": Shard(0)}).placements == (Replicate(), Shard(0))
    parts = distribute(A, mesh, [Partial(), Replicate()])
    assert fetch(parts).equal(A)
    assert not fetch_shard(parts, data=1).any()


@pytest.mark.parametrize(
    "work",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y.T,
        lambda x, y: torch.relu(x * y - 1).sum(),
        lambda x, y: x.view(-1)[3:],
        lambda x, y: x.T.reshape(7, 3) + y,
        lambda x, y: torch.cat([x, y]).softmax(0),
        lambda x, y: torch.stack(x.unbind(0)[::2]).mean(1),
        lambda x, y: torch.cumsum(x, 0).sort(descending=True).values,
        lambda x, y: torch.linalg.svdvals(x) + y.norm(),
        lambda x, y: torch.einsum("ij,kj->ik", x, y),
        lambda x, y: x.argmax(0),
        lambda x, y: torch.nn.functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
        lambda x, y: torch.nn.functional.conv1d(x[:, None], y[:2, None]),
        lambda x, y: x.short(),
        lambda x, y: x.scatter_reduce(0, (y > 0).long(), y, "prod"),
        lambda x, y: x[y > 0],
        lambda x, y: torch.nn.functional.layer_norm(x, (3,)),
        lambda x, y: x.index_select(0, torch.nonzero(y[:, 0] > 0).flatten()),
    ],
)
@pytest.mark.parametrize("sharding", SHARDINGS[:4], ids=str)
def test_operators_give_what_they_give_here(
    meshes: Mesh, work: Callable[[Any, Any], Any], sharding: Any
) -> None:
    b = A.flip(0) * 2
    got = work(distribute(A, meshes, sharding), distribute(b, meshes, SHARDINGS[1]))
    torch.testing.assert_close(fetch(got), work(A, b))


@pytest.mark.parametrize(
    "work",
    [
        # Sums over split rows are summands on the processes until they are needed.
        lambda x: x.sum(0).fill_(2),
        lambda x: torch.ones_like(x.sum(0)),
        lambda x: 1 - x.sum(0),
        lambda x: x.sum(0).copy_(x.amax(0)),
        lambda x: x.sum(0).add_(x.amax(0)),
        # Indices of another size than what they are into.
        lambda x: x.gather(1, x[:4].argsort(1)),
        lambda x: x.scatter(1, x[:4].argsort(1), 2.0),
        lambda x: x.scatter_add(1, x[:4].argsort(1), x),
        lambda x: torch.polar(x, x).real,
        lambda x: torch.ops.aten.view_copy(x, [3, 7]),
        # The divisor is a sum, and has more dimensions.
        lambda x: x[0, 0] / x.sum(0),
        # The second process finds what is not a number, and gloo's extremes forget it.
        lambda x: x.masked_fill(x == x.amax(0), torch.nan).amax(0),
        lambda x: x.masked_fill(x == x.amax(0), torch.nan).amin(0),
        lambda x: x.T.masked_fill(x.max() == x.T, torch.nan).max(),
    ],
)
def test_operators_that_dtensor_gets_wrong(mesh: Mesh, work: Callable[[Any], Any]) -> None:
    got = work(distribute(A, mesh, ["data", None]))
    torch.testing.assert_close(fetch(got), work(A), equal_nan=True)


def test_a_gradient_of_zeros_without_memory(mesh: Mesh) -> None:
    x = distribute(A, mesh, ["data", None]).requires_grad_()
    with activate(mesh):
        x.sgn().sum().backward()
    assert not fetch(x.grad).any()


def test_attention_with_a_mask_that_is_split(mesh: Mesh) -> None:
    x, mask = torch.randn(2, 2, 4, 8), torch.ones(4, 4).tril().bool()
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
    y = distribute(x, mesh, ["data", None, None, None])
    got = torch.nn.functional.scaled_dot_product_attention(y, y, y, distribute(mask, mesh, ["data", None]))
    torch.testing.assert_close(fetch(got), want)


def test_gradients(meshes: Mesh) -> None:
    def loss(x: Any, w: Any) -> Any:
        return (x @ w).relu().square().mean() + w.norm()

    w = torch.linspace(-1, 1, 6).view(3, 2)
    x, v = distribute(A, meshes, ["data", None]), distribute(w, meshes, [None, "model"]).requires_grad_()
    loss(x, v).backward()
    w.requires_grad_()
    loss(A, w).backward()
    torch.testing.assert_close(fetch(v.grad), w.grad)


@pytest.mark.parametrize(
    "loss",
    ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "l1_loss"],
)
def test_gradients_of_means(mesh: Mesh, loss: str) -> None:
    work = getattr(torch.nn.functional, loss)
    a, b = A.sigmoid(), A.flip(0).sigmoid()
    x = distribute(a, mesh, ["data", None]).requires_grad_()
    work(x, distribute(b, mesh, ["data", None])).backward()
    a.requires_grad_()
    work(a, b).backward()
    torch.testing.assert_close(fetch(x.grad), a.grad)


def test_attention_where_some_process_has_no_batch(mesh: Mesh) -> None:
    x = torch.randn(1, 2, 4, 8)
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    y = distribute(x, mesh, ["data", None, None, None]).requires_grad_()
    got = torch.nn.functional.scaled_dot_product_attention(y, y, y)
    torch.testing.assert_close(fetch(got.detach()), want)
    got.sum().backward()
    assert fetch(y.grad).isfinite().all()


def test_layouts_are_changed_and_gradients_flow_through(mesh: Mesh) -> None:
    x = distribute(A, mesh, ["data", None]).requires_grad_()
    y = x.redistribute([None, "model"])
    assert y.placements == (Replicate(), Shard(1))
    z = distribute(y, mesh)
    assert z.placements == (Replicate(), Replicate())
    assert y.detach().redistribute([Partial(), Replicate()]).full_tensor().equal(A)
    (z * z).sum().backward()
    torch.testing.assert_close(fetch(x.grad), 2 * A)


def test_values_are_those_of_the_whole(mesh: Mesh) -> None:
    x = distribute(A, mesh, ["data", "model"])
    assert x.sum().item() == pytest.approx(A.sum().item())
    assert bool((x > -2).all())
    assert torch.equal(x, distribute(A, mesh))
    assert torch.equal(x, distribute(A, mesh) + 1) is False
    assert x[0].tolist() == A[0].tolist()


def test_changes_in_place(meshes: Mesh) -> None:
    x = distribute(A, meshes, ["data", None])
    x += 1
    x.mul_(distribute(A, meshes, [None, "model"]))
    x.t_()
    assert x.shape == (3, 7)
    torch.testing.assert_close(fetch(x), ((A + 1) * A).T)


def test_factories_make_tensors_of_the_whole_mesh(mesh: Mesh) -> None:
    with activate(mesh):
        x = torch.arange(5) * torch.full((5,), 2)
        y = torch.tensor([1.0, 2.0])
    assert isinstance(x, GlobalTensor)
    assert fetch(x + y.sum()).tolist() == [3.0, 5.0, 7.0, 9.0, 11.0]


def test_random_numbers_come_again_with_the_seed_of_this_process(mesh: Mesh) -> None:
    def draw() -> list[Any]:
        torch.manual_seed(3)
        x = distribute(torch.ones(7, 4), mesh, ["data", None])
        with activate(mesh):
            noise = torch.randn(4)
        dropped = torch.nn.functional.dropout(x, 0.5)
        assert dropped.placements == (Shard(0), Replicate())
        return [fetch(each) for each in (noise, dropped, torch.rand_like(x), x.clone().normal_())]

    first, again = draw(), draw()
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert set(first[1].unique().tolist()) == {0.0, 2.0}
    assert first[2].unique().numel() == 28


def test_tensors_that_do_not_mix_are_an_error(mesh: Mesh, grid: ProcMesh) -> None:
    x = distribute(A, mesh)
    assert fetch(x + torch.tensor(1.0)).equal(A + 1)
    assert fetch(x + A).equal(A + A)
    with pytest.raises(
        ValueError, match=r"a tensor of this process, \(7, 3\) .* meets tensors of Mesh\(data=2, model=2\)"
    ):
        x + A.clone().requires_grad_()
    with pytest.raises(ValueError, match="of the per-rank view"):
        x + share(A, grid)
    with pytest.raises(TypeError, match="global view"):
        reduce(x)
    with Mesh((4,), procs=grid) as other:
        with pytest.raises(ValueError, match="an operator works on one mesh"):
            x + distribute(A, other)
        with pytest.raises(ValueError, match=r"over another one, Mesh\(dim_0=4\)"):
            distribute(x, other)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(x)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        x + x[:3]


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (["data"], "1 entries and the tensor 2 dimensions"),
        (["dta", None], "no dimension 'dta'; it has 'data', 'model'"),
        (["data", "data"], "splits two dimensions"),
        ([("model", "data"), None], "another order"),
        ([Shard(0)], "1 placements, and the mesh has 2"),
        ([Shard(2), Replicate()], "a tensor with 2 dimensions"),
        ({"rows": Shard(0)}, "no dimension 'rows'"),
    ],
)
def test_shardings_that_are_wrong(mesh: Mesh, sharding: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distribute(A, mesh, sharding)


def test_meshes_that_are_wrong(grid: ProcMesh) -> None:
    with pytest.raises(ValueError, match="give as many"):
        Mesh((3,), procs=grid)
    with pytest.raises(ValueError, match="positive"):
        Mesh((2, 0))
    with pytest.raises(ValueError, match="1 names"):
        Mesh((2, 2), ("a",))
    with pytest.raises(ValueError, match="must differ"):
        Mesh((2, 2), ("a", "a"))


@pytest.mark.parametrize("sharding", [None, ["data", None], ["model", "data"]], ids=str)
@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[2],
        lambda x: x[1:6:2, 0],
        lambda x: x.view(-1)[4:9],
        lambda x: x.split(3)[1],
        lambda x: x.T[1],
    ],
)
def test_views_and_what_they_are_views_of_stay_one(
    mesh: Mesh, sharding: Any, take: Callable[[Any], Any]
) -> None:
    """VWS-1."""

    def work(x: Any) -> list[Any]:
        early = take(x)
        late = take(x)
        early += 1
        x *= 2
        inner = late[..., 0] if late.dim() > 1 else late[1:]
        inner.fill_(9)
        x[0] = 4
        return [x, early, late, inner]

    for got, want in zip(work(distribute(A, mesh, sharding)), work(A.clone()), strict=True):
        torch.testing.assert_close(fetch(got), want)
