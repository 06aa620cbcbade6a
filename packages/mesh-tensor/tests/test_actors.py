"""Tensors of a mesh and actors on its processes: as arguments of endpoints, and as their results."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import Actor, ActorError, MeshError, ProcMesh, SerializationError, endpoint, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    CaptureError,
    Mesh,
    RemoteException,
    capture,
    distribute,
    fetch,
    rank_tensor,
    reduce,
    remote,
    share,
    slice_mesh,
    usage,
)

# Importing PyTorch takes a busy machine its time.
pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(180)]


class Model(Actor):
    """Has plain endpoints, which run on a thread of its own, and coroutines."""

    def __init__(self, given: Any = None) -> None:
        self.bias = 0.0

    @endpoint
    def total(self, x: Any) -> tuple[str, float]:
        return type(x).__name__, float(x.sum()) + self.bias

    @endpoint
    async def later_total(self, x: Any) -> tuple[str, float]:
        return type(x).__name__, float(x.sum()) + self.bias

    @endpoint
    def nested(self, batch: dict[str, Any]) -> float:
        return float(batch["x"][0].sum()) * float(batch["scale"])

    @endpoint
    def change(self, x: Any) -> float:
        x += 100
        return float(x.sum())

    @endpoint
    def set_bias(self, bias: float) -> None:
        self.bias = bias

    @endpoint
    def shift(self, x: Any, by: float = 1.0) -> dict[str, Any]:
        return {"moved": x + by + self.bias, "by": by}

    @endpoint
    async def gated_shift(self, x: Any, gate: str) -> Any:
        import asyncio

        await asyncio.to_thread(_pass, gate)
        return x + 1

    @endpoint
    async def bystand(self) -> str:
        return "free"

    @endpoint
    def fail(self, x: Any) -> Any:
        raise ValueError("the actor does not like it")

    @endpoint
    def die(self, x: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Namesakes(Model):
    """Has endpoints called like what a mesh has."""

    @endpoint
    def class_name(self, x: Any) -> Any:
        return x + 1

    @endpoint
    def failed(self, x: Any) -> Any:
        return x + 2

    @endpoint
    def mesh(self, x: Any) -> Any:
        return x + 3

    @endpoint
    def name(self, x: Any) -> Any:
        return x + 4


class Only(Actor):
    @endpoint
    async def total(self, x: Any) -> float:
        return float(x.sum())

    @endpoint
    async def bystand(self) -> str:
        return "free"


def _pass(gate: str) -> None:
    """Wait until the test lets one more through."""
    with Path(gate).open("rb", buffering=0) as file:
        file.read(1)


@remote(propagate=lambda x, gate: x)
def passed(x: Any, gate: str) -> Any:
    _pass(gate)
    return x


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "gate"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # so that neither end waits for the other
    yield str(path)
    os.close(held)


def unlock(gate: str, times: int) -> None:
    """Let as many processes through as wait, or will."""
    Path(gate).write_bytes(bytes(times))


@pytest.fixture
def models(procs: ProcMesh) -> Iterator[Any]:
    models = procs.spawn("models", Model)
    yield models
    models.stop().get(timeout=30)


@pytest.mark.parametrize("name", ["total", "later_total"])
def test_a_tensor_arrives_as_what_the_actors_own_process_has(procs: ProcMesh, models: Any, name: str) -> None:
    x = rank_tensor(procs, "gpus") + torch.tensor(1.0)
    found = getattr(models, name).call(x).get(timeout=60).values()
    assert found == [("Tensor", 1.0), ("Tensor", 2.0)]


def test_tensors_within_other_arguments_arrive_too(procs: ProcMesh, models: Any) -> None:
    x = rank_tensor(procs, "gpus").view(1).float()
    batch = {"x": [x + 1, x], "scale": share(torch.tensor(3.0), procs)}
    assert models.nested.call(batch).get(timeout=60).values() == [3.0, 6.0]


def test_an_actor_sees_what_was_issued_before_and_nothing_of_what_came_after(
    procs: ProcMesh, models: Any
) -> None:
    """TAR-1."""
    x = share(torch.zeros(3), procs)
    before = models.total.call(x)
    x += 1
    after = models.total.call(x)
    del x  # the actor's copy is its own
    assert before.get(timeout=60).values() == [("Tensor", 0.0)] * 2
    assert after.get(timeout=60).values() == [("Tensor", 3.0)] * 2


def test_what_an_actor_does_to_its_tensor_is_its_own_affair(procs: ProcMesh, models: Any) -> None:
    x = share(torch.zeros(3), procs)
    assert models.change.call(x).get(timeout=60).values() == [300.0] * 2
    assert fetch(x).item(gpus=0).tolist() == [0.0] * 3


def test_the_script_does_not_wait_for_a_tensor_that_it_passes_on(
    procs: ProcMesh, models: Any, gate: str
) -> None:
    late = passed(share(torch.ones(2), procs), gate)
    found = models.total.call(late)
    assert not found.done()
    unlock(gate, 2)
    assert found.get(timeout=60).values() == [("Tensor", 2.0)] * 2


def test_coroutines_of_other_actors_run_while_one_waits_for_a_tensor(procs: ProcMesh, gate: str) -> None:
    waiting, other = procs.spawn("waiting", Only), procs.spawn("other", Only)
    late = passed(share(torch.ones(2), procs), gate)
    found = waiting.total.call(late)
    assert other.bystand.call().get(timeout=60).values() == ["free"] * 2
    assert not found.done()
    unlock(gate, 2)
    assert found.get(timeout=60).values() == [2.0] * 2


def test_nothing_is_kept_of_tensors_that_were_passed_on(procs: ProcMesh, models: Any) -> None:
    """Also not on processes whose actors were not called."""
    from mesh_core.extensions import find
    from mesh_tensor._arrivals import Arrivals

    x = share(torch.ones(3), procs)
    tensors = usage(procs).values()
    for _ in range(3):
        models.total.call(x).get(timeout=60)
        assert models.slice(gpus=1).total.call_one(x).get(timeout=60) == ("Tensor", 3.0)
    here = find(Arrivals)
    assert here is not None
    here.call(procs, ("kept",)).get(timeout=60)
    usage(procs)  # behind what the controller has said
    assert here.call(procs, ("kept",)).get(timeout=60).values() == [0, 0]
    assert usage(procs).values() == tensors


def test_a_tensor_that_has_failed_is_an_error_of_the_call(procs: ProcMesh, models: Any) -> None:
    bad = share(torch.ones(3), procs)[share(torch.tensor([7]), procs)]  # the wrong line
    with pytest.raises(RemoteException, match="index 7 is out of bounds") as caught:
        models.total.call(bad).get(timeout=60)
    assert "# the wrong line" in str(caught.value)
    assert models.total.call(share(torch.ones(1), procs)).get(timeout=60).values() == [("Tensor", 1.0)] * 2


def test_an_actor_elsewhere_cannot_have_it(procs: ProcMesh, preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="others") as others:
        elsewhere = others.spawn("models", Model)
        x = share(torch.ones(3), procs)  # the line that made it
        for call in (elsewhere.total, elsewhere.later_total):
            with pytest.raises(MeshError, match=r"to_mesh\(\), or fetch\(\)") as caught:
                call.call(x).get(timeout=60)
            said = str(caught.value)
            assert "(3,) of float32" in said
            assert "'pair'" in said
            assert "# the line that made it" in said
        with pytest.raises(ValueError, match=r"'others'.*# the line that made it.*to_mesh"):
            remote(elsewhere.shift)(x)


def test_a_part_of_a_mesh(procs: ProcMesh, models: Any) -> None:
    last = slice_mesh(rank_tensor(procs, "gpus"), gpus=slice(1, 2))
    assert models.slice(gpus=1).total.call_one(last + 4).get(timeout=60) == ("Tensor", 5.0)
    with pytest.raises(MeshError, match="none of its processes"):
        models.slice(gpus=0).total.call_one(last).get(timeout=60)


class Made(Actor):
    def __init__(self, x: Any) -> None:
        self.x = x

    @endpoint
    def total(self) -> tuple[str, float]:
        return type(self.x).__name__, float(self.x.sum())


class MadeOnLoop(Actor):
    def __init__(self, x: Any) -> None:
        self.x = x

    @endpoint
    async def total(self) -> tuple[str, float]:
        return type(self.x).__name__, float(self.x.sum())


@pytest.mark.parametrize("cls", [Made, MadeOnLoop])
def test_a_constructor_gets_its_processs_part(procs: ProcMesh, cls: Any, gate: str) -> None:
    """TAR-1"""
    x = passed(rank_tensor(procs, "gpus") + 1, gate)
    made: Any = procs.spawn("made", cls, x)
    del x
    total = made.total.call()
    bystanders: Any = procs.spawn("bystanders", Only)
    assert bystanders.bystand.call().get(timeout=60).values() == ["free"] * 2, "the tensor is not there yet"
    unlock(gate, 2)
    assert total.get(timeout=60).values() == [("Tensor", 1.0), ("Tensor", 2.0)]
    part: Any = procs.slice(gpus=1).spawn("part", cls, rank_tensor(procs, "gpus") + 5)
    assert part.total.call_one().get(timeout=60) == ("Tensor", 6.0)
    with this_host().spawn_procs() as others:
        wrong: Any = others.spawn("wrong", cls, share(torch.ones(2), procs))
        with pytest.raises(MeshError, match="none of its processes"):
            wrong.initialized.get(timeout=60)
    for each in (made, bystanders, part):
        each.stop().get(timeout=60)


def test_other_ways_out_of_the_mesh(procs: ProcMesh) -> None:
    x = share(torch.ones(3), procs)  # the line that made it
    with pytest.raises(TypeError, match=r"(?s)'pair'.*# the line that made it.*fetch\(\)"):
        pickle.dumps(x)
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(x.requires_grad_() * 2)
    y = x.detach()
    with pytest.raises(SerializationError, match=r"(?s)cannot send.*pass it as an argument"):
        remote(lambda z: z + y, propagate=lambda z: z)(share(torch.ones(3), procs))
    assert fetch(y).item(gpus=0).tolist() == [1.0] * 3


def test_a_captured_step_calls_no_actors(procs: ProcMesh, models: Any) -> None:
    @capture
    def step(x: Any) -> Any:
        models.total.call(x)
        return x + 1

    with pytest.raises(CaptureError, match="give a tensor to an actor"):
        step(share(torch.ones(3), procs))


def test_the_global_view_gives_an_actor_its_shard(procs: ProcMesh, models: Any) -> None:
    with Mesh((2,), ("gpus",), procs) as mesh:
        x = distribute(torch.arange(4.0), mesh, ["gpus"])
        assert models.total.call(x * 2).get(timeout=60).values() == [("Tensor", 2.0), ("Tensor", 10.0)]
        assert fetch(x).tolist() == [0.0, 1.0, 2.0, 3.0]


# Results.


def test_results_are_tensors_of_the_mesh(procs: ProcMesh, models: Any) -> None:
    x = rank_tensor(procs, "gpus").float()
    found: Any = remote(models.shift)(x, by=2.0)
    assert found["by"] == 2.0
    assert fetch(reduce(found["moved"] * 10)).values() == [torch.tensor(50.0)] * 2


def test_results_whose_form_is_known_are_not_waited_for(procs: ProcMesh, models: Any, gate: str) -> None:
    def forms(x: Any, gate: str) -> Any:
        return torch.empty_like(x)

    step = remote(models.gated_shift, propagate=forms)
    found = step(step(share(torch.ones(2), procs), gate) * 2, gate)
    assert found.shape == (2,)
    unlock(gate, 4)
    assert fetch(found).item(gpus=1).tolist() == [5.0, 5.0]


def test_calls_of_actors_are_done_in_the_order_of_the_script(procs: ProcMesh, models: Any) -> None:
    x = share(torch.zeros(()), procs)
    step = remote(models.shift, propagate=lambda x, by=1.0: {"moved": torch.empty_like(x), "by": by})
    found = []
    for bias in range(5):
        models.set_bias.broadcast(float(bias))
        x = step(x)["moved"]
        found.append(x)
    assert [float(fetch(each).item(gpus=0)) for each in found] == [1.0, 3.0, 6.0, 10.0, 15.0]


def test_a_result_of_another_number_of_tensors(procs: ProcMesh, models: Any) -> None:
    step = remote(models.shift, propagate=lambda x: (x, x))
    first, _ = step(share(torch.ones(()), procs))
    with pytest.raises(RemoteException, match="1 tensors here, and 2"):
        fetch(first)


def test_an_endpoint_that_raises_poisons_its_results(procs: ProcMesh, models: Any) -> None:
    x = share(torch.ones(()), procs)
    bad = remote(models.fail, propagate=lambda x: x)(x)  # the line that called it
    with pytest.raises(RemoteException, match="the actor does not like it") as caught:
        fetch(bad + 1)
    assert "Model.fail failed" in str(caught.value)
    assert "# the line that called it" in str(caught.value)
    assert float(fetch(x + 1).item(gpus=0)) == 2.0


def test_no_gradient_flows_through_an_endpoint(procs: ProcMesh, models: Any) -> None:
    x = share(torch.ones(()), procs).requires_grad_()
    with pytest.raises(ValueError, match=r"no gradient flows through Model\.shift"):
        remote(models.shift)(x)
    with torch.no_grad():
        assert float(fetch(remote(models.shift)(x)["moved"]).item(gpus=0)) == 2.0


def test_an_actor_that_dies_with_its_process_leaves_nobody_waiting(preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="mortal") as procs:
        models = procs.spawn("models", Model)
        x = share(torch.ones(()), procs)
        with pytest.raises((MeshError, ActorError)):
            models.slice(gpus=1).die.call_one(x).get(timeout=60)
        procs.respawn().get(timeout=150)
        again = procs.spawn("again", Model)
        x = share(torch.ones(()), procs)
        assert again.total.call(x).get(timeout=60).values() == [("Tensor", 1.0)] * 2
        assert float(fetch(remote(again.shift)(x)["moved"]).item(gpus=1)) == 2.0


def test_endpoints_may_be_called_like_what_a_mesh_has(procs: ProcMesh) -> None:
    """END-1"""
    namesakes: Any = procs.spawn("namesakes", Namesakes)
    x = share(torch.zeros(2), procs)
    for number, name in enumerate(("class_name", "failed", "mesh", "name"), 1):
        endpoint = getattr(namesakes, name)
        assert f"Namesakes.{name}" in repr(remote(endpoint))
        moved = remote(endpoint, propagate=lambda x: x)(x)
        assert [each.tolist() for each in fetch(moved).values()] == [[float(number)] * 2] * len(procs)
        assert [each.tolist() for each in endpoint.call(x).get(timeout=60).values()] == [
            [float(number)] * 2
        ] * len(procs)
    namesakes.stop().get(timeout=30)
