"""Whatever an operator is given, and wherever its parts lie: each process has the part that the layout says, or the operator is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Shard  # noqa: E402

from mesh_tensor import Mesh, distribute, fetch, module_to_mesh  # noqa: E402
from mesh_tensor._errors import RemoteException  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]

LAYOUTS = [["data", None], [None, "data"]]
A = torch.arange(48.0).view(8, 6)


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2,), ("data",), procs) as mesh:
        yield mesh


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["index_add_", "index_copy_", "index_fill_"])
def test_in_place_by_indices(mesh: Mesh, name: str, dim: int, layout: Any) -> None:
    index = torch.tensor([0, 5])
    source = -torch.ones(2, 6) if dim == 0 else -torch.ones(8, 2)
    rest: list[Any] = [7.0] if name == "index_fill_" else [source]
    want = getattr(A.clone(), name)(dim, index, *rest)
    x = distribute(A, mesh, layout)
    given = [distribute(each, mesh) if isinstance(each, torch.Tensor) else each for each in (index, *rest)]
    getattr(x, name)(dim, *given)
    assert x.placements == (Shard(layout.index("data")),)
    assert fetch(x).equal(want)
    assert fetch(x.sum()).equal(want.sum())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_in_place_to_another_shape(mesh: Mesh, layout: Any) -> None:
    x = distribute(A, mesh, layout)
    assert x.transpose_(0, 1).shape == (6, 8)
    assert fetch(x.swapaxes_(0, 1).unsqueeze_(1)).equal(A.unsqueeze(1))
    gru = torch.nn.GRU(6, 3, batch_first=True)
    want = gru(A[:, None])[0]
    start = distribute(torch.zeros(1, 8, 3), mesh)
    assert torch.allclose(fetch(module_to_mesh(gru, mesh)(x, start)[0]), want, atol=1e-6)


@pytest.mark.parametrize("at", [0, 6], ids=["first process", "last process"])
@pytest.mark.parametrize(
    "of", [torch.amax, torch.amin, lambda x: x.norm(float("inf")), lambda x: (x / x.abs().amax()).sum()]
)
def test_gradient_of_an_extreme(mesh: Mesh, of: Callable[[Any], Any], at: int) -> None:
    values = torch.arange(7.0) + 1
    values[at] = 9.0 if of is not torch.amin else -9.0
    here = values.clone().requires_grad_()
    of(here).backward()
    x = distribute(values, mesh, ["data"]).requires_grad_()
    of(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(fetch(x.grad), here.grad)


def test_no_dimension_stands_for_all(mesh: Mesh) -> None:
    x = distribute(A, mesh, ["data", None])
    for of in (torch.sum, torch.mean, torch.nansum, torch.amax, torch.var, torch.std, torch.count_nonzero):
        torch.testing.assert_close(fetch(of(x, dim=[])), of(A, dim=[]))
    assert fetch(torch.any(x, dim=[])).equal(torch.any(A, dim=[]))


def test_data_replaces_the_values(mesh: Mesh) -> None:
    x = distribute(A, mesh, ["data", None])
    x.data = x * 2
    assert fetch(x).equal(A * 2)
    linear = torch.nn.Linear(6, 3).double()
    want = linear(A.double())
    model = module_to_mesh(linear.float(), mesh, {"weight": ["data", None]}).double()
    torch.testing.assert_close(fetch(model(distribute(A.double(), mesh))), want)
    assert fetch(model.to(torch.bfloat16).weight.detach()).dtype is torch.bfloat16


def test_what_is_assigned_must_be_on_the_mesh(mesh: Mesh) -> None:
    x = distribute(A, mesh).requires_grad_()
    with pytest.raises(
        TypeError, match=r"\.data of a tensor of a mesh .*distribute\(\).* made at .*test_layouts"
    ):
        x.data = A
    with pytest.raises(TypeError, match=r"\.grad of a tensor of a mesh .*distribute\(\)"):
        x.grad = A
    x.grad = x.detach() * 2
    assert fetch(x.grad).equal(A * 2)
    x.grad = None
    assert x.grad is None


@pytest.mark.parametrize("wrong", [6, -1])
def test_index_out_of_range_of_a_split_table(mesh: Mesh, wrong: int) -> None:
    index = distribute(torch.tensor([0, 5]), mesh)
    table = distribute(A[:6], mesh, ["data", None])
    assert fetch(torch.nn.functional.embedding(index, table)).equal(A[[0, 5]])
    index[1:] = wrong
    with pytest.raises(RemoteException, match=f"index {wrong} is out of bounds for dimension 0 with size 6"):
        fetch(torch.nn.functional.embedding(index, table).sum())
    line = distribute(torch.arange(6.0), mesh, ["data"])
    with pytest.raises(RemoteException, match="out of bounds"):
        fetch(line.gather(0, index))


def _lie() -> None:
    """Have PyTorch believe that an operator works part by part, which returns too few rows."""
    from torch.distributed.tensor.experimental import register_sharding

    library = torch.library.Library("mesh_tensor_tests", "FRAGMENT")
    library.define("two_rows(Tensor x) -> Tensor")
    library.impl("two_rows", lambda x: x[:2].clone(), "CPU")
    library.impl("two_rows", torch.empty_like, "Meta")
    torch.mesh_tensor_tests = library  # type: ignore[attr-defined]
    register_sharding(torch.ops.mesh_tensor_tests.two_rows.default)(lambda x: [([Shard(0)], [Shard(0)])])


def test_a_part_that_does_not_fit_its_layout_is_refused(mesh: Mesh) -> None:
    _lie()
    mesh.execute(_lie)
    x = distribute(A, mesh, ["data", None])
    y = torch.ops.mesh_tensor_tests.two_rows(x)
    assert y.shape == (8, 6)
    with pytest.raises(
        RemoteException, match=r"a part of \(2, 6\).* \(8, 6\) laid out as .*redistribute\(\)"
    ):
        fetch((y + 1).sum())
    assert fetch(x.sum()).equal(A.sum())


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh, x: mesh.execute(lambda y: y * 2, x + 1),
        lambda mesh, x: mesh.execute(lambda y: y[0] * 2, [x + 1]),
        lambda mesh, x: mesh.execute(lambda y: y * 2, y=x + 1),
        lambda mesh, x: mesh.execute(lambda y: y * 2, distribute(A + 1, mesh)),
    ],
    ids=["an expression", "in a list", "by name", "distributed there"],
)
def test_execute_with_a_tensor_that_nobody_else_keeps(mesh: Mesh, call: Callable[[Any, Any], Any]) -> None:
    assert fetch(call(mesh, distribute(A, mesh))).equal((A + 1) * 2)


def test_execute_copies_an_ordinary_tensor(mesh: Mesh) -> None:
    y = mesh.execute(lambda x: x * 2, A)
    assert fetch(y).equal(A * 2)


def test_execute_names_its_line(mesh: Mesh) -> None:
    with pytest.raises(
        RemoteException, match=r"issued at .*test_layouts\.py.*: mesh\.execute\(lambda x: x \+ None, A\)"
    ):
        mesh.execute(lambda x: x + None, A)
    (distribute(A, mesh) + 1).sum()
    with pytest.raises(
        RemoteException, match=r"issued at .*test_layouts\.py.*: mesh\.execute\(lambda: 1 / 0\)"
    ):
        mesh.execute(lambda: 1 / 0)


@pytest.mark.parametrize("layout", [["data", None], [None, "data"]], ids=str)
def test_of_equals_the_first_is_found(mesh: Mesh, layout: Any) -> None:
    equal = torch.tensor([[0, 0, 0, 9.0], [9.0, 0, 0, 9.0], [0, 9.0, 0, 0]])
    x = distribute(equal, mesh, layout)
    for dim in (None, 0, 1):
        assert fetch(x.argmax(dim)).equal(equal.argmax(dim))
        assert fetch((-x).argmin(dim)).equal((-equal).argmin(dim))


@pytest.mark.parametrize("layout", [*LAYOUTS, None], ids=str)
@pytest.mark.parametrize("split", [["data"], None], ids=str)
def test_gradients_of_a_norm_whose_weights_are_split(mesh: Mesh, layout: Any, split: Any) -> None:
    given = [A, torch.arange(6.0), torch.ones(6)]
    here = [each.clone().requires_grad_() for each in given]
    there = [
        distribute(each, mesh, how).requires_grad_()
        for each, how in zip(given, (layout, split, split), strict=True)
    ]
    want, got = (
        torch.autograd.grad(
            torch.nn.functional.layer_norm(x, (6,), weight, bias).square().sum(), (x, weight, bias)
        )
        for x, weight, bias in (here, there)
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(fetch(one), other)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2, 5, 9])], ids=["equal", "weights"])
def test_a_loss_is_averaged_by_weights(mesh: Mesh, weight: Any) -> None:
    scores, classes = A[:6, :4].sin(), torch.tensor([1, 1, 1, 0, 2, 3])
    there = distribute(scores, mesh, ["data", None]), distribute(classes, mesh, ["data"])
    weights = None if weight is None else distribute(weight, mesh)
    cross = torch.nn.functional.cross_entropy
    for ignored in (-100, 1):
        want = cross(scores, classes, weight, ignore_index=ignored)
        torch.testing.assert_close(fetch(cross(*there, weights, ignore_index=ignored)), want)


@pytest.mark.parametrize(
    "of", [lambda x: x, lambda x: x.mT, lambda x: x * 2], ids=["given", "transposed", "made"]
)
def test_writes_through_a_view_of_what_was_gathered(mesh: Mesh, of: Callable[[Any], Any]) -> None:
    here = torch.arange(25.0).view(5, 5)
    whole = of(distribute(here, mesh, [None, "data"])).redistribute(None)
    whole.view(-1)[3] = 100
    want = of(here).contiguous()
    want.view(-1)[3] = 100
    assert fetch(whole).equal(want)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.logsumexp(0, keepdim=True),
        lambda x: (
            torch.linalg.solve_triangular(torch.eye(2) * 2, x, upper=True)
            if type(x) is torch.Tensor
            else torch.linalg.solve_triangular(distribute(torch.eye(2) * 2, x.mesh), x, upper=True)
        ),
        lambda x: torch.complex(x, x).prod(),
    ],
    ids=["logsumexp", "solve_triangular", "complex prod"],
)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_operators_that_dtensor_lays_out_wrongly(mesh: Mesh, dim: int, work: Callable[[Any], Any]) -> None:
    here = torch.arange(12.0).view(3, 2, 2) / 12 + 1
    x = distribute(here, mesh, [Shard(dim)])
    torch.testing.assert_close(fetch(work(x)), work(here))


@pytest.mark.parametrize("layout", [*LAYOUTS, [None, None]], ids=str)
def test_a_view_of_nothing_comes_back(mesh: Mesh, layout: Any) -> None:
    """DTensor looks for the dimensions that belong together, here without an end."""
    there = distribute(torch.zeros(4, 0, requires_grad=True), mesh, layout)
    got = there.unflatten(1, (2, 0, 0, 0))
    assert fetch(got).shape == (4, 2, 0, 0, 0)
    (grad,) = torch.autograd.grad(got.sum(), there)
    assert fetch(grad).shape == (4, 0)


@pytest.mark.parametrize("form", [(2, 1, 3), (3, 1, 2), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize("dims", [(), (0,), (1,), (-1,)], ids=str)
def test_only_what_is_one_of_the_whole_is_squeezed(
    mesh: Mesh, form: tuple[int, ...], split: int, dims: Any
) -> None:
    here = torch.arange(1.0, 7.0)[: torch.Size(form).numel()].view(form)
    there = distribute(here.clone(), mesh, ["data" if dim == split else None for dim in range(3)])
    got, want = there.squeeze(*dims), here.squeeze(*dims)
    assert fetch(got).equal(want)
    got += 100
    assert fetch(there).equal(here + 100)
    assert fetch(got).equal(want + 100)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("index", "form"),
    [
        (([0, 2],), (2, 6)),
        (([0, 1],), (1, 6)),
        (([1, 0],), (6,)),
        ((None, [0, 1]), (4, 2)),
        (([0, 1], [1, 2]), (2,)),
        (([0, 3], [1, 5]), (2,)),
    ],
    ids=str,
)
def test_indices_refer_to_the_whole(mesh: Mesh, index: Any, form: tuple[int, ...], accumulate: bool) -> None:
    x, values = A[:4], -torch.arange(1.0, 13.0)[: torch.Size(form).numel()].view(form)
    indices = [each and torch.tensor(each) for each in index]
    put: Any = torch.ops.aten.index_put  # which takes None, unlike the function
    want = put(x, indices, values, accumulate)
    for split in (*LAYOUTS, None):
        for dim in (*range(len(form)), None):
            layout = ["data" if dim == each else None for each in range(len(form))]
            given = distribute(x, mesh, split), distribute(values, mesh, layout)
            there = [each if each is None else distribute(each, mesh) for each in indices]
            got = put(given[0], there, given[1], accumulate)
            assert fetch(got).equal(want), (split, dim)
            assert fetch(given[0]).equal(x)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dim", range(-3, 3))
def test_stacked_at_any_place(mesh: Mesh, layout: Any, dim: int) -> None:
    x, y = (distribute(each, mesh, layout) for each in (A, -A))
    assert fetch(torch.stack([x, y], dim)).equal(torch.stack([A, -A], dim))
