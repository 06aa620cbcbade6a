"""Where tensors lie, and who carries their collectives: as far as can be told without a GPU.

The tests in `on_gpu/` are for where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_core import MeshError, ProcMesh, this_host
from mesh_tensor._bench import Bench
from mesh_tensor._streams._handover import Handover

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mesh_tensor import (  # noqa: E402
    Mesh,
    Stream,
    StreamError,
    activate,
    distribute,
    fetch,
    fetch_shard,
    module_to_mesh,
    rank_tensor,
    reduce,
    share,
    use_backend,
)
from mesh_tensor import _devices as devices  # noqa: E402
from mesh_tensor import _special as special  # noqa: E402
from mesh_tensor._groups import Group  # noqa: E402
from mesh_tensor._propagate import Issuer  # noqa: E402
from mesh_tensor._streams import _worker as handing  # noqa: E402
from mesh_tensor._tensor import issuer_of  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]
has_gpu = torch.cuda.is_available()


@pytest.fixture(scope="module")
def procs(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Two processes that have imported no more than these tests need."""
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="pair") as procs:
        yield procs


class Noted(devices.Device):
    """A kind of device that notes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def count(self) -> int:
        return 3

    def choose(self, index: int, *, own_queue: bool) -> str:
        self.asked.append(("choose", index, own_queue))
        return f"device {index}"

    def mark(self) -> Any:
        self.asked.append(("mark", threading.current_thread().name))
        return f"mark of {threading.current_thread().name}"

    def wait(self, event: Any) -> None:
        self.asked.append(("wait", threading.current_thread().name, event))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    found = Noted()
    monkeypatch.setitem(devices.DEVICES, "noted", found)
    monkeypatch.setenv("LOCAL_RANK", "4")
    return found


def on_thread(name: str, work: Any) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(30)
    if raised:
        raise raised[0]


def test_a_process_chooses_by_its_local_rank(noted: Noted) -> None:
    def work() -> None:
        _, name, has_backend = devices.enter("noted", own_queue=True)
        assert (name, has_backend) == ("device 1", False)
        assert devices.enter("noted", own_queue=True)[1] == "device 1"

    on_thread("side", work)
    # Once for each thread, as PyTorch's choice is the thread's.
    assert noted.asked == [("choose", 1, True)]


def test_streams_of_a_device_wait_for_each_others_events(noted: Noted) -> None:
    controller, handover = (9, 9, 9), Handover()
    owner = Bench((1, 1, 1), controller, handover)
    borrower = Bench((1, 1, 1), controller, handover, is_side=True)
    owner.env[1] = torch.ones(2)

    def first() -> None:
        devices.enter("noted", own_queue=False)
        handing.give(owner, 0, 10, 1, 5, False)

    def second() -> None:
        devices.enter("noted", own_queue=True)
        handing.take(borrower, 0, 10, 2, 5)
        borrower.env[2].add_(1)
        handing.give_back(borrower, 1, 11, 2, 6)

    def third() -> None:
        devices.enter("noted", own_queue=False)
        handing.have_back(owner, 1, 11, 1, 6, True)

    on_thread("owner", first)
    on_thread("borrower", second)
    on_thread("owner again", third)
    assert [each for each in noted.asked if each[0] != "choose"] == [
        ("mark", "owner"),
        ("wait", "borrower", "mark of owner"),
        ("mark", "borrower"),
        ("wait", "owner again", "mark of borrower"),
    ]
    assert owner.env[1].tolist() == [2.0, 2.0]
    assert 2 not in borrower.env


def test_gloo_gets_tensors_of_a_device_by_way_of_the_cpu() -> None:
    seen: list[Any] = []

    @contextmanager
    def together() -> Iterator[Any]:
        yield lambda what, *args: seen.append((what, args))

    for backend, kind in (("gloo", "cpu"), ("nccl", "cuda")):
        group: Any = Group.__new__(Group)
        group.rank, group.size, group.backend = 0, 2, backend
        group.together = together
        bench: Any = SimpleNamespace(groups={1: group})
        with FakeTensorMode():
            x = torch.empty(4, device="cuda")
            results = [
                special.reduce(bench, x, "avg", 1),
                *special.reduce_all(bench, "sum", 1, x, x),
                special.all_gather(bench, x, 1),
                special.all_to_all(bench, x, 1),
                special.reduce_scatter(bench, x, "sum", 1),
            ]
        assert {each.device.type for each in results} == {"cuda"}
        given = [args[0] for _, args in seen]
        flat = [each[0] if isinstance(each, list) else each for each in given]
        flat = [each[0] if isinstance(each, list) else each for each in flat]
        assert {each.device.type for each in flat} == {kind}
        seen.clear()


@pytest.mark.parametrize(
    ("told", "backend"),
    [
        ([("a", "0", True), ("a", "1", True)], "nccl"),
        ([("a", "0", True), ("b", "0", True)], "nccl"),
        ([("a", "0", True), ("a", "0", True)], "gloo"),
        ([("a", "0", True), ("a", "1", False)], "gloo"),
    ],
)
def test_the_device_chooses_who_carries_collectives(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch, told: Any, backend: str
) -> None:
    groups = issuer_of(procs).stream.groups
    monkeypatch.setattr(Issuer, "use_device", lambda *_: told)
    assert (groups.backend("cuda"), groups.backend("cpu")) == (backend, "gloo")
    use_backend(procs, "Mine", "cuda")
    assert (groups.backend("cuda"), groups.backend("cpu")) == ("mine", "gloo")
    use_backend(procs, None, "cuda")
    assert groups.backend("cuda") == backend


def register_fake() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - what registers it


def test_a_registered_backend_is_taken_by_its_name(preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=preload, bootstrap=register_fake) as procs:
        x = rank_tensor(procs, "gpus") + 1
        use_backend(procs, "fake")
        # Which it really is: nothing is carried anywhere.
        assert [each.item() for each in fetch(reduce(x)).values()] == [1, 2]
        assert [each.item() for each in fetch(reduce([x])[0]).values()] == [1, 2]
        use_backend(procs, None)
        assert [each.item() for each in fetch(reduce(x)).values()] == [3, 3]
        use_backend(procs, "nobody's")
        with pytest.raises(
            Exception, match=r'(?s)no backend "nobody.s" is registered in this process.*bootstrap='
        ):
            reduce(x)
        use_backend(procs, "gloo")
        assert [each.item() for each in fetch(reduce(x)).values()] == [3, 3]
    with pytest.raises(TypeError, match="must be a text"):
        use_backend(procs, "")


@pytest.mark.skipif(has_gpu, reason="for where there is no GPU")
def test_a_process_without_the_device_is_an_error(procs: ProcMesh) -> None:
    with (
        pytest.raises(MeshError, match=r"gpus=0.* cannot have tensors on 'cuda'.*no device of kind 'cuda'"),
        activate(procs, device="cuda"),
    ):
        pass
    x = share(torch.ones(2), procs)
    with pytest.raises(MeshError, match="cannot have tensors on 'cuda'"):
        x.to("cuda")
    with pytest.raises(MeshError, match="cannot have tensors on 'cuda'"), activate(procs):
        torch.ones(2, device="cuda")
    assert fetch_shard(x).tolist() == [1.0, 1.0]


@pytest.mark.skipif(has_gpu, reason="for where there is no GPU")
def test_a_mesh_whose_processes_have_no_device_is_an_error(procs: ProcMesh) -> None:
    with pytest.raises(MeshError, match=r"gpus=0.* cannot have tensors on 'cuda'.*no device of kind 'cuda'"):
        Mesh((2,), ("gpus",), procs, device="cuda")
    with pytest.raises(ValueError, match="the device of a mesh must have values, got 'meta'"):
        Mesh((2,), ("gpus",), procs, device="meta")
    with Mesh((2,), ("gpus",), procs) as mesh:
        assert mesh.device == torch.device("cpu")
        x = distribute(torch.ones(2), mesh, ["gpus"])
        assert x.cpu() is x
        with pytest.raises(ValueError, match=r"where its mesh has its tensors, on 'cpu', got 'cuda'"):
            x.to("cuda")


def take_another_release() -> None:
    import torch

    torch.__version__ = "2.9.1"


def test_another_release_of_pytorch_in_the_processes_is_named(preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=preload, bootstrap=take_another_release) as procs:
        said = r"gpus=0.* has PyTorch 2\.9\.1, and this process has .*Install the same release"
        with pytest.raises(MeshError, match=said):
            rank_tensor(procs, "gpus")
        with pytest.raises(MeshError, match=said):
            Mesh((2,), ("gpus",), procs)


def test_nothing_is_offloaded_from_cpus(procs: ProcMesh) -> None:
    with (
        Mesh((2,), ("gpus",), procs) as mesh,
        pytest.raises(ValueError, match="offload='state' is for a mesh on other devices than CPUs"),
    ):
        module_to_mesh(torch.nn.Linear(2, 2), mesh, offload="state")


@pytest.mark.skipif(has_gpu, reason="for where there is no GPU")
def test_the_script_needs_no_device_for_tensors_of_one(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms, gradients and autocast, with processes that cannot follow."""
    monkeypatch.setattr(Issuer, "use_device", lambda *_: [("a", "0", True), ("a", "1", True)])
    with activate(procs, device="cuda"):
        layer = torch.nn.Linear(3, 2)
        x = torch.tensor([[1.0, 2.0, 3.0]])
        assert {layer.weight.device, x.device} == {torch.device("cuda")}
        y = layer(x)
        assert "cuda" in repr(y)
        y.sum().backward()
        assert layer.weight.grad.device.type == "cuda"
        # PyTorch turns autocast off in a script without the device; it is on for these tensors where it has one.
        assert "AutocastCUDA" in str(torch._C._dispatch_keys(x))  # noqa: SLF001 - nothing else tells
    with activate(procs):
        named = torch.zeros(2, device="cuda:0")
        here = torch.ones(2, requires_grad=True)
        with pytest.raises(ValueError, match="each process of a mesh has one device of a kind"):
            torch.zeros(2, device="cuda:1")
    assert (named.device, named.is_cuda, here.is_cuda) == (torch.device("cuda"), True, False)
    there = here.cuda()
    assert there.to("cuda") is there
    assert there.half().device.type == "cuda"
    assert there.cpu().device.type == "cpu"
    there.sum().backward()
    assert here.grad.device.type == "cpu"
    with pytest.raises(RuntimeError, match="device"):
        here.detach() + there
    moved = torch.nn.Linear(2, 2)
    with activate(procs):
        moved = torch.nn.Linear(2, 2)
    weight = moved.weight
    assert moved.to("cuda").weight is weight
    assert weight.device.type == "cuda"
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"), torch.no_grad():
        torch.ones(1, device="cuda")


def test_data_of_a_tensor_can_be_set(procs: ProcMesh) -> None:
    with activate(procs):
        layer = torch.nn.Linear(2, 2)
        weight = layer.weight
        layer.double()
        assert layer.weight is weight
        assert fetch_shard(weight.detach()).dtype == torch.float64
        weight.data = torch.zeros(2, 2, dtype=torch.float64)
        assert fetch_shard(weight.detach()).tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert weight.data.requires_grad is False


def test_meta_tensors_have_forms_only(procs: ProcMesh) -> None:
    side = Stream("side")
    with activate(procs, device="meta"):
        x = torch.ones(3, 4)
        assert (x.device.type, (x @ x.t()).shape) == ("meta", (3, 3))
        with side.activate():
            assert torch.ones(2).device.type == "meta"


def test_the_global_view_is_on_the_cpu_and_on_the_default_stream(procs: ProcMesh) -> None:
    with Mesh((2,), ("data",), procs) as mesh:
        with pytest.raises(ValueError, match="global view"), activate(mesh, device="cuda"):
            pass
        x = distribute(torch.ones(2), mesh, ["data"])
        side = Stream("side")
        with side.activate():
            with pytest.raises(
                StreamError, match="belongs to the default stream, and stream 'side' is active"
            ):
                x + 1
            with (
                activate(mesh),
                pytest.raises(StreamError, match="global view are on the default stream only"),
            ):
                torch.ones(2)
            with pytest.raises(TypeError, match="is of the global view"):
                side.borrow(x)
        assert (x + 1).tolist() == [2.0, 2.0]
