"""A captured step does what it does without capture, or says why it cannot."""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mesh_core import Actor, DeviceMeshError, ProcMesh, SupervisionError, endpoint, this_host

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from mesh_tensor import (  # noqa: E402
    CaptureError,
    Mesh,
    MeshTensor,
    RemoteException,
    activate,
    all_gather,
    capture,
    distribute,
    fetch,
    fetch_shard,
    manual_seed,
    rank_tensor,
    reduce,
    share,
    slice_mesh,
    usage,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def values(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(step: Any) -> Any:
    return step


def network(procs: ProcMesh) -> Any:
    manual_seed(3, procs, shared=True)
    with activate(procs):
        return torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)
        )


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "adam": (torch.optim.Adam, {}),
    "adam-foreach": (torch.optim.Adam, {"foreach": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
}


def train(
    procs: ProcMesh, kind: str, wrap: Callable[[Any], Any], *, schedule: bool, within: bool, last: bool
) -> tuple[list[Any], Any]:
    """Twenty steps; losses, gradients, parameters and the state of the optimizer, and the step."""
    model = network(procs)
    make, options = OPTIMIZERS[kind]
    optimizer = make(model.parameters(), lr=0.05, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedule else None

    def step(x: Any, y: Any) -> Any:
        if not last:
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if last:
            optimizer.zero_grad()
        return loss.detach()

    step = wrap(step)
    found = []
    for n in range(20):
        x, y = share(values(6, 5, seed=n), procs), share(torch.arange(6) % 3, procs)
        if within:
            with activate(procs):
                found.append(step(x, y))
        else:
            found.append(step(x, y))
        if scheduler is not None:
            scheduler.step()
    found += [each.grad for each in model.parameters() if each.grad is not None]
    found += [each.detach() for each in model.parameters()]
    found += [each for state in optimizer.state.values() for each in state.values()]
    return [fetch_shard(each, gpus=1) if isinstance(each, MeshTensor) else each for each in found], step


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize(
    ("kind", "schedule", "within", "last"),
    [
        ("sgd", False, True, True),
        ("sgd-foreach", True, False, False),
        ("adam", False, True, False),
        ("adam-foreach", False, False, True),
        ("adamw", True, False, True),
        ("adamw-foreach", False, True, False),
        ("adamw-fused", False, True, True),
        ("adamw-fused", True, True, False),
    ],
)
def test_training_gives_what_it_gives_without_capture(
    procs: ProcMesh, kind: str, schedule: bool, within: bool, last: bool
) -> None:
    """REC-1: also in the calls that are recorded."""
    want, _ = train(procs, kind, plain, schedule=schedule, within=within, last=last)
    got, step = train(procs, kind, capture, schedule=schedule, within=within, last=last)
    assert step.replays >= 16, step.reasons
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_call_is_one_message(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(procs)
    x = share(values(4, 5), procs)
    with activate(procs):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        @capture
        def step(x: Any) -> Any:
            optimizer.zero_grad()
            gradients = reduce([each.grad for each in backward(x)], "gpus", "avg")
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        def backward(x: Any) -> Any:
            model(x).square().mean().backward()
            return list(model.parameters())

        for _ in range(4):
            step(x)
        stream = x.descriptor.stream
        said: list[Any] = []
        stream.flush()
        # The thread that flushes may still have been woken for the steps before. From here on, this one alone flushes.
        flush, this = stream.flush, threading.current_thread()
        monkeypatch.setattr(stream, "flush", lambda: flush() if threading.current_thread() is this else None)
        monkeypatch.setattr(stream, "send", lambda messages: said.append([kind for kind, *_ in messages]))
        stream.told = 0.0  # as if nothing had been sent for long
        step(x)
        assert said == [["replay"]]
        monkeypatch.setattr(stream.tensors.flusher, "wake", lambda _: None)
        stream.told = math.inf
        for _ in range(3):
            step(x)
    share(torch.ones(1), procs)
    monkeypatch.undo()
    assert said == [["replay"], ["replay", "replay", "replay", "put"]]


def results(value: Any) -> Any:
    if isinstance(value, MeshTensor):
        return fetch_shard(value.detach(), gpus=1)
    if isinstance(value, (list, tuple)):
        return [results(each) for each in value]
    return value


def test_results_of_all_kinds(procs: ProcMesh) -> None:
    weight = share(torch.ones(2), procs)

    @capture
    def step(x: Any, *, name: str) -> Any:
        y = x * 2
        with torch.no_grad():
            weight.add_(1)
        return {"twice": (y, y), "input": x, "weight": weight, "name": name, "view": x[1:]}

    for n in range(4):
        x = share(torch.tensor([n, n + 0.5]), procs)
        found = step(x, name="here")
        assert found["twice"][0] is found["twice"][1]
        assert found["input"] is x
        assert found["weight"] is weight
        assert found["name"] == "here"
        assert fetch_shard(found["twice"][0]).tolist() == [2.0 * n, 2.0 * n + 1]
        assert fetch_shard(weight).tolist() == [n + 2.0] * 2
        found["view"].zero_()
        assert fetch_shard(x).tolist() == [n, 0.0]
    assert step.replays == 3


def test_tensors_of_its_own_start_over_in_each_replay(procs: ProcMesh) -> None:
    @capture
    def step(x: Any) -> Any:
        total = torch.tensor([0.0, 1.0])
        for _ in range(3):
            total += x
        return total

    given = [share(torch.full((2,), n), procs) for n in (1.0, 2.0, 3.0)]
    with activate(procs):
        found = [fetch_shard(step(each)).tolist() for each in given]
    assert found == [[3.0, 4.0], [6.0, 7.0], [9.0, 10.0]]
    assert step.replays == 2


def test_random_numbers_go_on(procs: ProcMesh) -> None:
    def step(x: Any) -> Any:
        return functional.dropout(x, 0.5) + torch.randn(4)

    def draw(step: Any) -> list[Any]:
        manual_seed(5, procs)
        with activate(procs):
            x = torch.ones(4)
            return [each for _ in range(5) for each in fetch(step(x)).values()]

    assert all(map(torch.equal, draw(capture(step)), draw(step)))


def test_collectives(procs: ProcMesh) -> None:
    @capture
    def step(x: Any) -> Any:
        own = x + rank_tensor(procs, "gpus")
        return reduce(own, "gpus", "avg"), all_gather(own), reduce(own, scatter=True)

    for n in range(3):
        average, both, part = step(share(torch.arange(2.0) + n, procs))
        assert fetch_shard(average).tolist() == [n + 0.5, n + 1.5]
        assert fetch_shard(both, gpus=1).tolist() == [[n, n + 1], [n + 1, n + 2]]
        assert fetch_shard(part, gpus=1).tolist() == [2.0 * n + 3]
    assert step.replays == 2


factor = 2.0


def test_changes_are_noticed_and_reported(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(procs).eval()
    scale = 1.0

    @capture
    def step(x: Any, power: float = 1.0, **more: Any) -> Any:
        return (model(x) ** power).sum() * scale * factor

    def last(*args: Any, **kwargs: Any) -> str:
        before = len(step.reasons)
        want, got = step.__wrapped__(*args, **kwargs), step(*args, **kwargs)
        again = step(*args, **kwargs)
        for each in (got, again):
            assert torch.equal(results(each), results(want))
        assert len(step.reasons) == before + 1
        reason: str = step.reasons[-1]
        return reason

    x = share(values(2, 5), procs)
    assert last(x) == "the first call"
    assert last(share(values(3, 5), procs)).startswith("argument 'x' was (2, 5) of float32")
    last(x, 2.0)
    assert last(x, 3.0) == "argument 'power' was 2.0, is 3.0"
    assert "in other lists" in last(x, more=True)
    scale = 3.0
    assert last(x) == "'scale' was 1.0, is 3.0"
    monkeypatch.setitem(globals(), "factor", 5.0)
    assert last(x) == "'factor' was 2.0, is 5.0"
    model.eval()[2].p = 0.0
    assert last(x) == "p of a Dropout was 0.2, is 0.0"
    model[0].bias.requires_grad_(False)
    assert last(x) == "requires_grad of a tensor that it uses was changed"
    model[0].bias = torch.nn.Parameter(share(values(8), procs))
    assert last(x).startswith(("bias of a Linear", "a tensor that it uses is gone"))
    with torch.no_grad():
        assert last(x) == "grad mode was True, is False"
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in last(x)
    # What was recorded before is there again.
    model.train()
    model.eval()
    before = list(step.reasons)
    step(x, 3.0)
    assert step.reasons[:-1] == before or step.reasons == before


def test_the_limit_says_why(procs: ProcMesh) -> None:
    @capture(limit=3)
    def step(x: Any, n: int) -> Any:
        return x * n

    x = share(torch.ones(1), procs)
    for n in range(3):
        step(x, n)
    with pytest.raises(
        CaptureError, match=r"step was recorded 3 times(?s:.*)argument 'n' was 1, is 2"
    ) as caught:
        step(x, 3)
    assert "argument 'n' was 2, is 3" in str(caught.value)
    assert fetch_shard(step(x, 2)).tolist() == [2.0]


def replaced_by_itself(x: Any, weight: Any) -> Callable[[], Any]:
    held = [weight]

    def step() -> None:
        held[0] = held[0] * x

    return capture(step)


def counts(x: Any, weight: Any) -> Callable[[], Any]:
    n = 0

    def step() -> Any:
        nonlocal n
        n += 1
        return x * n

    return capture(step)


def schedules(x: Any, weight: Any) -> Callable[[], Any]:
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step() -> None:
        scheduler.step()
        optimizer.zero_grad()
        (x * weight).sum().backward()
        optimizer.step()

    return capture(step)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (replaced_by_itself, "has itself changed 'held'"),
        (counts, "has itself changed 'n'"),
        (schedules, "has itself changed .*lr"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_steps_that_are_never_alike_are_refused(procs: ProcMesh, make: Any, told: str) -> None:
    x, weight = share(torch.ones(2), procs), share(torch.ones(2), procs).requires_grad_()
    call = make(x, weight)
    with pytest.raises(CaptureError, match=told):  # noqa: PT012 - which of the calls it is does not matter
        for _ in range(20):
            call()


def test_gradients_that_add_up(procs: ProcMesh) -> None:
    weight = torch.nn.Parameter(share(torch.ones(2), procs))

    @capture
    def step(x: Any) -> None:
        (x * weight).sum().backward()

    for _ in range(6):
        step(share(torch.ones(2), procs))
    assert fetch_shard(weight.grad).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("zero", ["inside", "outside", "never", "now and then"])
def test_gradients_of_batches_of_two_sizes(procs: ProcMesh, zero: str) -> None:
    def run(wrap: Any) -> list[Any]:
        weight = torch.nn.Parameter(share(torch.ones(2), procs))

        def step(x: Any) -> None:
            if zero == "inside":
                weight.grad = None
            (x * weight).sum().backward()

        step = wrap(step)
        found = []
        for n in range(18):
            step(share(torch.full((2 + n % 3 // 2, 2), float(n)), procs))
            assert weight.grad is not None
            found.append(fetch_shard(weight.grad.clone()).tolist())
            if zero == "outside" or (zero == "now and then" and n % 4 == 3):
                weight.grad = None
        if wrap is capture:
            assert step.replays >= 8, step.reasons
        return found

    assert run(capture) == run(plain)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "item": (lambda x: x.sum().item(), "cannot wait for a value"),
    "control flow": (lambda x: x if x.sum() > 0 else -x, "cannot wait for a value"),
    "shapes": (lambda x: x[x > 0], "cannot wait for a value"),
    "fetch": (fetch, "cannot wait for a value"),
    "swallowed": (lambda x: [x + 1, swallowed(x)], "cannot wait for a value"),
    "share": (lambda x: x + share(torch.ones(2), x.procs), "share"),
    "other mesh": (lambda x: slice_mesh(x + 1, gpus=0) + 1, "works on one mesh"),
    "nothing": (lambda x: 3, "has done nothing on a mesh"),
    "local": (lambda x: [x + 1, torch.ones(2)], "returns a tensor of this process"),
    "in place": (lambda x: x.unsqueeze_(0) + 1, "changes the shape of its argument"),
}


def swallowed(x: Any) -> Any:
    try:
        return x.sum().item()
    except CaptureError:
        return None


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_captured_is_refused(procs: ProcMesh, what: str) -> None:
    function, told = REFUSED[what]
    step = capture(function)
    with pytest.raises(CaptureError, match=told) as caught:
        step(share(torch.ones(2), procs))
    if "wait" in told:
        assert "test_capture.py:" in str(caught.value)
    # Nothing is left of it.
    assert fetch_shard(share(torch.ones(2), procs) + 1).tolist() == [2.0, 2.0]


def test_arguments_and_functions_that_are_refused(procs: ProcMesh) -> None:
    step = capture(lambda x, more=None: x * 2)
    x = share(torch.ones(2), procs)
    with pytest.raises(TypeError, match=r"argument 'x' of .* is a tensor of this process"):
        step(torch.ones(2))
    with pytest.raises(TypeError, match=r"argument 'more'\['a'\] of .* is a set"):
        step(x, more={"a": {1}})
    with pytest.raises(CaptureError, match=r"argument 'x' .* was computed with gradients"):
        step(share(torch.ones(2), procs).requires_grad_() * 2)

    async def later() -> None: ...

    def many() -> Any:
        yield 1

    for each in (later, many):
        with pytest.raises(TypeError, match="a coroutine or a generator"):
            capture(each)
    with pytest.raises(TypeError, match="returned a coroutine"):
        capture(lambda x: [x + 1, closed(later())][1])(x)
    with pytest.raises(TypeError, match="takes a function"):
        capture(3)
    with pytest.raises(ValueError, match="limit must be a positive number"):
        capture(step, limit=0)


def closed(coroutine: Any) -> Any:
    coroutine.close()
    return coroutine


def test_an_exception_leaves_what_it_leaves_without_capture(procs: ProcMesh) -> None:
    total = share(torch.zeros(1), procs)
    broken = True

    @capture
    def step(x: Any) -> Any:
        total.add_(x)
        if broken:
            raise KeyError("mine")
        return total * 2

    x = share(torch.ones(1), procs)
    with pytest.raises(KeyError, match="mine"):
        step(x)
    broken = False
    assert [fetch_shard(step(x)).tolist() for _ in range(3)] == [[4.0], [6.0], [8.0]]
    assert step.replays == 2


def test_a_captured_step_in_another_is_part_of_it(procs: ProcMesh) -> None:
    inner = capture(lambda x: x + 1)
    outer = capture(lambda x: inner(inner(x)) * 2)
    x = share(torch.ones(1), procs)
    assert [fetch_shard(outer(x)).tolist() for _ in range(3)] == [[6.0]] * 3
    assert (inner.replays, inner.reasons, outer.replays) == (0, [], 2)


def test_threads(procs: ProcMesh) -> None:
    step = capture(lambda x: (x * 2 + 1).sum())
    begun, go = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        y = x + 1
        begun.set()
        go.wait(30)
        return y * 2

    held = capture(slow)
    x = share(torch.ones(1), procs)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(fetch_shard(held(x)).tolist()))
    other.start()
    begun.wait(30)
    # What this thread issues meanwhile is not part of what the other records.
    assert [fetch_shard(step(x)).item() for _ in range(3)] == [3.0] * 3
    go.set()
    other.join(30)
    assert found == [[4.0]]
    assert fetch_shard(held(x)).tolist() == [4.0]
    assert (step.replays, held.replays) == (2, 1)


def test_two_steps_that_share_state(procs: ProcMesh) -> None:
    weight = share(torch.ones(1), procs)
    add = capture(lambda x: weight.add_(x).sum())
    double = capture(lambda: weight.mul_(2).sum())
    x = share(torch.ones(1), procs)
    found = [(fetch_shard(add(x)).item(), fetch_shard(double()).item()) for _ in range(3)]
    assert found == [(2.0, 4.0), (5.0, 10.0), (11.0, 22.0)]
    assert (add.replays, double.replays) == (2, 2)


class Machine:
    def __init__(self, procs: ProcMesh) -> None:
        self.weight = share(torch.ones(1), procs)
        self.scale = 2.0

    @capture
    def step(self, x: Any) -> Any:
        return self.weight * x * self.scale


def test_methods(procs: ProcMesh) -> None:
    one, other = Machine(procs), Machine(procs)
    x = share(torch.ones(1), procs)
    for _ in range(3):
        assert fetch_shard(one.step(x)).item() == 2.0
    one.scale = 3.0
    assert fetch_shard(one.step(x)).item() == 3.0
    assert one.step.reasons[-1] == "'self.scale' was 2.0, is 3.0"
    assert fetch_shard(other.step(x)).item() == 2.0
    assert other.step.replays == 0
    one.weight = share(torch.full((1,), 5.0), procs)
    assert fetch_shard(one.step(x)).item() == 15.0


def test_state_that_is_made_in_the_first_call(procs: ProcMesh) -> None:
    state: dict[str, Any] = {}

    @capture
    def step(x: Any) -> Any:
        if "sum" not in state:
            state["sum"] = torch.zeros_like(x)
        state["sum"].add_(x)
        return state["sum"].clone()

    x = share(torch.ones(1), procs)
    assert [fetch_shard(step(x)).item() for _ in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert step.replays == 3
    # Dropped: it is noticed, and made anew.
    state.clear()
    assert [fetch_shard(step(x)).item() for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert any("a tensor that it uses is gone: the one of" in each for each in step.reasons)


def test_a_failure_in_a_replay(procs: ProcMesh) -> None:
    """PRG-1: it fails as the instructions do one by one."""
    total = share(torch.zeros(2), procs)

    @capture
    def step(x: Any, at: Any) -> Any:
        fine = x + 1
        picked = x[at]  # the recorded line
        total.add_(picked)
        return fine, picked * 2

    x = share(torch.tensor([1.0, 2.0]), procs)
    good, bad = share(torch.tensor([0, 1]), procs), share(torch.tensor([0, 7]), procs)
    where = good + rank_tensor(procs, "gpus") * 0
    step(x, where)
    step(x, where)
    fine, picked = step(x, bad)  # the replay
    assert step.replays == 2
    assert fetch_shard(fine).tolist() == [2.0, 3.0]
    for each in (picked, total):
        with pytest.raises(RemoteException, match="index 7 is out of bounds") as caught:
            fetch(each)
        assert "# the recorded line" in str(caught.value)
        assert "# the replay" in str(caught.value)
    # A replay with what has failed fails likewise, and leaves the rest.
    fine, picked = step(x, good)
    assert fetch_shard(picked).tolist() == [2.0, 4.0]
    with pytest.raises(RemoteException, match="index 7"):
        fetch(total)


class Looking(Actor):
    @endpoint
    def programs(self) -> int:
        from mesh_core.extensions import find
        from mesh_tensor._extension import Tensors

        return sum(len(bench.programs) for bench in find(Tensors)._benches.values())  # noqa: SLF001 - nothing else tells


def test_what_was_recorded_is_freed(procs: ProcMesh) -> None:
    looking = procs.spawn("looking", Looking)

    def programs() -> int:
        gc.collect()
        usage(procs)
        fetch(share(torch.ones(1), procs) + 1)
        return max(looking.programs.call().get(timeout=30).values())

    gc.collect()
    before, tensors = programs(), [each.tensors for each in usage(procs).values()]
    model = network(procs)
    kept: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    del model

    @capture
    def step(x: Any) -> Any:
        kept["optimizer"].zero_grad()
        loss = kept["model"](x).square().sum() + torch.tensor(1.0)
        loss.backward()
        kept["optimizer"].step()
        return loss.detach()

    for _ in range(5):
        loss = step(share(values(2, 5), procs))
    fetch(loss)
    assert step.replays == 3
    assert programs() == before + 2
    kept.clear()
    del step, loss
    assert programs() == before
    assert [each.tensors for each in usage(procs).values()] == tensors


def test_on_a_part_of_the_mesh(procs: ProcMesh) -> None:
    part = procs.slice(gpus=slice(1, 2))
    weight = slice_mesh(rank_tensor(procs, "gpus"), gpus=slice(1, 2))

    @capture
    def step(x: Any) -> Any:
        return reduce(x + weight)

    for n in range(3):
        assert fetch(step(share(torch.tensor(n), part))).item().item() == n + 1
    assert step.replays == 2


class Victim(Actor):
    @endpoint
    def end(self) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_restarted(preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="mortal") as procs:
        kept: dict[str, Any] = {"weight": share(torch.ones(1), procs)}

        @capture
        def step(x: Any) -> Any:
            return reduce(x * kept["weight"])

        x = share(torch.ones(1), procs)
        assert [fetch_shard(step(x)).item() for _ in range(3)] == [2.0] * 3
        victim = procs.slice(gpus=1).spawn("victim", Victim)
        with pytest.raises(SupervisionError):
            victim.end.call().get(timeout=30)
        with pytest.raises(DeviceMeshError, match="gpus=1"):
            fetch(step(x))
        procs.respawn().get(timeout=60)
        kept["weight"] = share(torch.full((1,), 3.0), procs)
        x = share(torch.ones(1), procs)
        before = step.replays
        assert [fetch_shard(step(x), gpus=1).item() for _ in range(3)] == [6.0] * 3
        assert step.replays == before + 2


def test_the_global_view(procs: ProcMesh) -> None:
    def run(mesh: Mesh, wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        whole = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 2))
        model = copy.deepcopy(whole)
        for module, spec in ((model[0], [None, None]), (model[2], [None, "model"])):
            module.weight = torch.nn.Parameter(distribute(module.weight.detach(), mesh, spec))
            module.bias = torch.nn.Parameter(distribute(module.bias.detach(), mesh))
        with activate(mesh):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        found = []
        for n in range(6):
            with activate(mesh):
                found.append(step(distribute(values(4, 4, seed=n), mesh, ["model", None])))
        if wrap is capture:
            assert step.replays >= 3, step.reasons
        return [fetch(each) for each in [*found, *(each.detach() for each in model.parameters())]]

    with Mesh((2,), ("model",), procs) as mesh:
        assert all(map(torch.equal, run(mesh, capture), run(mesh, plain)))


STEPS: list[Callable[[random.Random, list[Any]], Any]] = [
    lambda chance, pool: chance.choice(pool) + chance.choice(pool),
    lambda chance, pool: chance.choice(pool) * chance.uniform(-1, 1),
    lambda chance, pool: chance.choice(pool).t(),
    lambda chance, pool: chance.choice(pool)[chance.randrange(3)].expand(3, 3).clone(),
    lambda chance, pool: chance.choice(pool).tanh_(),
    lambda chance, pool: chance.choice(pool)[1:].copy_(chance.choice(pool)[:2].clone()),
    lambda chance, pool: torch.cat(chance.choice(pool).split(chance.randint(1, 3))),
    lambda chance, pool: chance.choice(pool) @ chance.choice(pool).clamp(-1, 1),
    lambda chance, pool: chance.choice(pool).sort(chance.randrange(2))[0],
    lambda chance, pool: chance.choice(pool) + torch.randn_like(chance.choice(pool)),
    lambda chance, pool: torch.stack(torch._foreach_mul(list(chance.choice(pool).unbind()), 0.5)),  # noqa: SLF001
    lambda chance, pool: pool.pop(chance.randrange(len(pool))).contiguous(),
]


def random_step(seed: int, kept: list[Any]) -> Callable[..., Any]:
    """Operators, views and changes in place of arguments and of what is kept, as the seed has it."""

    def step(*given: Any) -> Any:
        chance = random.Random(seed)
        pool = [*kept, *given]
        for _ in range(25):
            made = chance.choice(STEPS)(chance, pool)
            if made.shape == (3, 3):
                pool.append(made if chance.random() < 0.5 else made.clone())
            if len(pool) > 6:
                del pool[chance.randrange(len(pool))]
        return pool[-3:]

    return step


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", range(12))
def test_random_steps(procs: ProcMesh, seed: int) -> None:
    """PRG-1."""

    def run(wrap: Any) -> list[Any]:
        manual_seed(seed, procs)
        kept = [share(values(3, 3, seed=n), procs) for n in range(2)]
        step = wrap(random_step(seed, kept))
        found: list[Any] = []
        for n in range(4):
            found += step(*(share(values(3, 3, seed=n * 7 + m), procs) for m in range(2)))
        if wrap is capture:
            assert step.replays == 3, step.reasons
        return [results(each) for each in [*found, *kept]]

    for a, b in zip(run(capture), run(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
