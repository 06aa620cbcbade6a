"""Steps that processes compile give what they give otherwise, and say what was left out (RGN-1)."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from mesh_tensor import (  # noqa: E402
    CaptureError,
    Compilation,
    RemoteException,
    activate,
    capture,
    fetch,
    fetch_shard,
    manual_seed,
    reduce,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def train(procs: ProcMesh, backend: str | bool, steps: int = 6) -> tuple[list[Any], Any]:
    """Parameters and losses of a network after some steps, and the step."""
    manual_seed(0, procs, shared=True)
    with activate(procs):
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
        )
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        manual_seed(1, procs)
        x, y = torch.randn(4, 5), torch.randint(3, (4,))

        @capture(compile=backend)
        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            torch.autograd.backward(loss)
            averages = reduce([each.grad for each in parameters], "gpus", "avg")
            for parameter, average in zip(parameters, averages, strict=True):
                parameter.grad = average
            optimizer.step()
            return loss.detach()

        losses = [step(x, y) for _ in range(steps)]
    found = [*losses, *[each.detach() for each in parameters]]
    return [each for tensor in found for each in fetch(tensor).values()], step


def test_training_is_the_same_to_the_last_bit_with_pytorchs_own_operators(procs: ProcMesh) -> None:
    want, _ = train(procs, False)
    got, step = train(procs, "aot_eager")
    assert step.replays >= 3, step.reasons
    assert all(map(torch.equal, got, want))
    for told in step.compilation(timeout=60).values():
        assert isinstance(told, Compilation)
        # Before the collective, and the optimizer behind it; zeroing gradients may be apart.
        assert told.regions >= 1
        assert told.operators >= 15
        assert any(why.startswith("mesh_tensor.reduce_all: a collective") for why in told.reasons)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++ here"
)
def test_inductor_computes_the_same_up_to_rounding(procs: ProcMesh) -> None:
    x = share(torch.linspace(-2, 2, 40).view(4, 10), procs)

    def compute(x: Any) -> Any:
        y = functional.gelu(x) * 2 + x.sin()
        return y.softmax(-1), y.sum()

    step = capture(compute, compile=True)
    for _ in range(4):
        got = step(x)
    for mine, theirs in zip(got, compute(fetch_shard(x)), strict=True):
        torch.testing.assert_close(fetch_shard(mine, gpus=1), theirs, rtol=1e-5, atol=1e-6)
    told = step.compilation(timeout=500).item(gpus=0)
    assert (told.backend, told.regions) == ("inductor", 1), told


def test_writes_views_and_inputs_that_are_one_tensor(procs: ProcMesh) -> None:
    def run(backend: str | bool) -> list[Any]:
        state = share(torch.arange(6.0).view(2, 3), procs)

        @capture(compile=backend)
        def step(x: Any, y: Any) -> Any:
            z = x * 2 + 1
            state.add_(z)
            state[0].mul_(0.5)
            x.add_(1)
            return z, state.t(), y * 2, z.max(dim=1)

        one, other = share(torch.ones(2, 3), procs), share(torch.ones(2, 3), procs)
        found = []
        for pair in ((one, other), (one, other), (one, other), (one, one), (other, one), (one, one)):
            z, view, y, (highest, where) = step(*pair)
            with torch.no_grad():
                view[0, 0] += 1  # the view is one of the state's memory
            found += [z, view, y, highest, where, state, one, other]
            found = [fetch_shard(each, gpus=1) if hasattr(each, "descriptor") else each for each in found]
        assert step.replays >= 3
        if backend:
            assert step.compilation(timeout=60).item(gpus=0).regions >= 1
        return found

    assert all(map(torch.equal, run("aot_eager"), run(False)))


def test_random_operators_draw_the_same_numbers(procs: ProcMesh) -> None:
    def run(backend: str | bool) -> Any:
        manual_seed(3, procs)
        step = capture(lambda x: functional.dropout(x * 2 + 1, 0.5) * 3 - 1, compile=backend)
        x = share(torch.ones(10), procs)
        found = [fetch_shard(step(x)) for _ in range(5)]
        if backend:
            told = step.compilation(timeout=60).item(gpus=0)
            assert any("draws random numbers" in why for why in told.reasons)
            assert told.regions == 2
        return torch.stack(found)

    assert torch.equal(run("aot_eager"), run(False))


def test_an_operator_that_fails_in_a_compiled_region_fails_alone(procs: ProcMesh) -> None:
    @capture(compile="aot_eager")
    def step(x: Any, index: Any) -> Any:
        y = x * 2
        return y + 1, y[index] + 1

    x, good, bad = (share(each, procs) for each in (torch.ones(3), torch.tensor([1]), torch.tensor([7])))
    for _ in range(3):
        step(x, good)
    fine, broken = step(x, bad)
    assert torch.equal(fetch_shard(fine), torch.full((3,), 3.0))
    with pytest.raises(RemoteException, match=r"(?s)index.*recorded at .*y\[index\]") as caught:
        fetch(broken)
    assert caught.value.operator == "aten.index.Tensor"
    assert torch.equal(fetch_shard(step(x, good)[1]), torch.full((1,), 3.0))


def refusing(module: Any, inputs: Any) -> Any:
    """A backend that knows no sines."""
    if any(node.target is torch.ops.aten.sin.default for node in module.graph.nodes):
        raise ValueError("no sines here")
    return module.forward


def register(name: str) -> None:
    from torch._dynamo import register_backend

    register_backend(refusing, name)  # type: ignore[arg-type]


def test_what_a_backend_refuses_is_named_and_left_out(procs: ProcMesh) -> None:
    from mesh_tensor import remote

    @remote(propagate=lambda x: x)
    def known(x: Any) -> Any:
        register("refusing")
        return x

    register("refusing")
    x = known(share(torch.ones(3), procs))
    step = capture(lambda x: ((x * 2 + 1).sin() * 3 - 1).exp(), compile="refusing")
    for _ in range(6):
        y = step(x)
    told = step.compilation(timeout=60).item(gpus=1)
    assert told.regions == 2
    assert told.reasons == ["aten.sin.default: refusing cannot compile it: ValueError: no sines here"]
    assert torch.equal(fetch_shard(y), ((torch.ones(3) * 2 + 1).sin() * 3 - 1).exp())


def test_a_view_is_one_of_its_own_input_whichever_inputs_were_one_when_it_was_compiled(
    procs: ProcMesh,
) -> None:
    step = capture(lambda x, y: (x * 2 + 1, y.t()), compile="aot_eager")
    one, other = share(torch.ones(2, 3), procs), share(torch.zeros(2, 3), procs)
    for _ in range(3):
        step(one, one)
    _, view = step(one, other)
    assert torch.equal(fetch_shard(view), torch.zeros(3, 2))
    view.add_(5)
    assert torch.equal(fetch_shard(other), torch.full((2, 3), 5.0))
    assert torch.equal(fetch_shard(one), torch.ones(2, 3))
    assert step.compilation(timeout=60).item(gpus=0).regions == 1


def test_results_that_are_views_of_each_other_are_compiled_and_stay_so(procs: ProcMesh) -> None:
    def compute(x: Any) -> Any:
        y = x * 2 + 1
        return y, y.t(), y[0, 1:]

    step = capture(compute, compile="aot_eager")
    x = share(torch.arange(6.0).view(2, 3), procs)
    for _ in range(3):
        whole, turned, part = step(x)
    told = step.compilation(timeout=60).item(gpus=1)
    assert (told.regions, told.reasons) == (1, [])
    part.zero_()
    want = torch.tensor([[1.0, 0, 0], [7, 9, 11]])
    assert torch.equal(fetch_shard(whole), want)
    assert torch.equal(fetch_shard(turned), want.t())


def test_wrong_requests_are_errors_at_once() -> None:
    with pytest.raises(ValueError, match=r"one of .*inductor.*; got 'inducktor'"):
        capture(lambda x: x, compile="inducktor")
    with pytest.raises(TypeError, match="the name of a backend"):
        capture(lambda x: x, compile=3)  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match=r"capture\(compile=True\)"):
        capture(lambda x: x).compilation()
    with pytest.raises(CaptureError, match="nothing to compile yet"):
        capture(lambda x: x, compile="aot_eager").compilation()
