"""Programs in which PyTorch makes tensors by itself, or the script small ones: the mesh is given copies of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mesh_tensor import Mesh, activate, distribute, fetch, module_to_mesh, share  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]

X = torch.tensor([[3.0, 1.0, 2.0], [5.0, 0.0, 4.0], [1.0, 7.0, 6.0], [2.0, 2.0, 9.0]])
SMALL = 1 << 20
F = torch.nn.functional


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2,), ("data",), procs) as mesh:
        yield mesh


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_train(mesh: Mesh, kind: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    layer, batch = kind(3, 5, batch_first=True), torch.randn(4, 6, 3)
    want, _ = layer(batch)
    want.square().sum().backward()
    gradients = [each.grad.clone() for each in layer.parameters()]
    layer.zero_grad()
    layer = module_to_mesh(layer, mesh)
    got, _ = layer(distribute(batch, mesh, ["data", None, None]))
    got.square().sum().backward()
    torch.testing.assert_close(fetch(got), want)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(fetch(parameter.grad), gradient, atol=1e-4, rtol=1e-4)


def test_an_lstm_in_the_per_rank_view_trains(procs: ProcMesh) -> None:
    torch.manual_seed(0)
    layer, batch = torch.nn.LSTM(3, 5, batch_first=True), torch.randn(2, 6, 3)
    layer(batch)[0].sum().backward()
    want = layer.weight_ih_l0.grad.clone()
    layer.zero_grad()
    for parameter in layer.parameters():
        parameter.grad = None
    held = {name: share(each.detach(), procs).requires_grad_() for name, each in layer.named_parameters()}
    torch.func.functional_call(layer, held, (share(batch, procs),))[0].sum().backward()
    for each in fetch(held["weight_ih_l0"].grad).values():
        torch.testing.assert_close(each, want)


# PyTorch's forward-mode derivatives import what it says is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.quantile(0.5),
        lambda x: x.nanquantile(0.3, dim=0),
        lambda x: torch.autograd.grad(x.prod(0).sum(), x)[0],
        lambda x: F.one_hot(x.detach().long(), 10),
        lambda x: F.cosine_embedding_loss(x, x.flip(0), torch.tensor([1, -1, 1, -1])),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 0]), weight=torch.ones(3), label_smoothing=0.1),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 3), pos_weight=torch.ones(3)),
        lambda x: x[[0, 2]],
        lambda x: torch.func.jvp(lambda y: (y * y).sum(1), (x.detach(),), (x.detach(),))[1],
        lambda x: torch.func.hessian(lambda y: (y**3).sum())(x.detach()),
    ],
    ids=[
        "quantile",
        "nanquantile",
        "prod backward",
        "one_hot",
        "cosine_embedding_loss",
        "cross_entropy",
        "bce",
        "index list",
        "jvp",
        "hessian",
    ],
)
def test_tensors_that_pytorch_makes(mesh: Mesh, work: Callable[[Any], Any]) -> None:
    got = work(distribute(X, mesh, ["data", None]).requires_grad_())
    torch.testing.assert_close(fetch(got), work(X.clone().requires_grad_()))


@pytest.mark.parametrize("index", [[0, 2], torch.tensor([0, 2])], ids=["list", "tensor"])
def test_an_index_of_the_script_in_the_per_rank_view(procs: ProcMesh, index: Any) -> None:
    for each in fetch(share(X, procs)[index]).values():
        assert each.equal(X[index])


def test_grad_scaler_skips_steps_that_overflow(mesh: Mesh) -> None:
    model = module_to_mesh(torch.nn.Linear(3, 2), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(distribute(X * factor, mesh, ["data", None])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0]
    assert fetch(model.weight.detach()).isfinite().all()


def test_a_tensor_of_the_script_is_copied_up_to_a_size(mesh: Mesh, procs: ProcMesh) -> None:
    one, more = torch.ones(SMALL // 4), torch.ones(SMALL // 4 + 1)
    x, y = distribute(one, mesh, ["data"]), share(more, procs)
    assert fetch((x + one).sum()) == SMALL // 2
    with pytest.raises(
        ValueError, match=r"1,048,580 bytes, and only up to 1,048,576 .*distribute\(\).* made at "
    ):
        distribute(more, mesh) + more
    with pytest.raises(ValueError, match=r"1,048,580 bytes, and only up to 1,048,576 .*share\(\)"):
        y + more


def test_a_tensor_whose_gradient_would_be_lost_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"has a gradient here, which would not come back: .*distribute\(\)"):
        distribute(X, mesh) * X.clone().requires_grad_()


def test_a_shape_error_is_raised_without_a_log(
    mesh: Mesh, procs: ProcMesh, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match="Attempting to broadcast"):
        share(X, procs) + share(torch.ones(7), procs)
    assert not [each for each in caplog.records if each.name.startswith("torch")]
    assert "failed while attempting to run meta" not in capfd.readouterr().err


def test_a_mode_around_activate_sees_its_operators(mesh: Mesh) -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    x = distribute(X, mesh, ["data", None])
    with Seen() as seen, activate(mesh):
        y = x * 2
    assert seen.names == ["aten::mul.Tensor"]
    assert fetch(y).equal(X * 2)
