"""Messages of many small tensors and arrays: what arrives is what was sent, each with memory of its own, and all of it comes back."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_samples import Echo

from mesh_core import Actor, ProcMesh, Promise, Queue, SerializationError, endpoint, put, this_host
from mesh_core._common.current import current

numpy: Any = pytest.importorskip("numpy", reason="numpy is not installed: mesh-core does without")
torch: Any = pytest.importorskip("torch", reason="torch is not installed: mesh-core does without")

pytestmark = [pytest.mark.beside, pytest.mark.usefixtures("runtime", "started")]

KIB, MIB = 1 << 10, 1 << 20
DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16", "complex64",
    "complex128", "float8_e5m2", "uint16",
]  # fmt: skip
RECORD = [("a", "<f4"), ("b", "<i2", (3,)), ("c", "S5")]


@dataclasses.dataclass
class Layer:
    weight: Any
    rest: Any


def a_tensor(dice: random.Random) -> Any:
    size = dice.choice([0, 1, 7, 30, 300, 2000, 9000, 9000, 40_000])
    shape = dice.choice([(size,), (size, 1), (2, size // 2), (size // 8, 2, 4), (1, size, 1), ()])
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(dice.getrandbits(32)))
    tensor = made.to(getattr(torch, dice.choice(DTYPES)))
    kind = dice.randrange(12)
    if kind == 0 and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    if kind == 1 and tensor.dim():
        return tensor[::2]
    if kind == 2 and tensor.is_complex():
        return tensor.conj()
    if kind == 3 and tensor.is_floating_point():
        return torch.nn.Parameter(tensor, requires_grad=dice.random() < 0.5)
    if kind == 4 and tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.requires_grad_()
    if kind == 5:
        tensor.tag = {"of": [dice.random()]}
    if kind == 6 and tensor.dtype is torch.float32:
        return tensor.to_sparse() if tensor.dim() else tensor
    return tensor


def an_array(dice: random.Random) -> Any:
    size = dice.choice([0, 1, 5, 50, 700, 3000, 20_000])
    dtype = dice.choice(["f4", "f8", "i8", "u1", "?", "c8", "M8[s]", "m8[ms]", "U3", "S2", ">i4", RECORD])
    array = numpy.zeros(size, dtype) if dtype is RECORD else numpy.arange(size).astype("i4").astype(dtype)
    kind = dice.randrange(8)
    if kind == 0:
        return array[::3]
    if kind == 1 and size % 5 == 0:
        return numpy.asfortranarray(array.reshape(5, -1))
    if kind == 2:
        array.flags.writeable = False
    if kind == 3:
        return numpy.array([{"x": size}, None], dtype=object)
    return array


def a_value(dice: random.Random, depth: int = 0) -> Any:
    """Nested structures of tensors and arrays."""
    kind = dice.randrange(10 if depth < 3 else 5)
    if kind < 3:
        return a_tensor(dice)
    if kind < 5:
        return an_array(dice)
    several = [a_value(dice, depth + 1) for _ in range(dice.choice([0, 1, 3, 8, 20]))]
    if kind == 5:
        return several
    if kind == 6:
        return {f"key.{number}": each for number, each in enumerate(several)}
    if kind == 7:
        return collections.OrderedDict((number, each) for number, each in enumerate(several))
    if kind == 8:
        return (*several, *several[:1], "text", b"bytes", 1.5)
    return Layer(a_tensor(dice), several)


def same(ours: Any, theirs: Any) -> None:
    """Check that a value arrived as it was sent."""
    assert type(theirs) is type(ours)
    if isinstance(ours, torch.Tensor):
        assert (theirs.dtype, theirs.shape, theirs.layout) == (ours.dtype, ours.shape, ours.layout)
        assert theirs.requires_grad == (ours.requires_grad and ours.is_leaf)
        assert getattr(theirs, "tag", None) == getattr(ours, "tag", None)
        if ours.layout is torch.strided:
            assert theirs.untyped_storage().nbytes() == ours.nbytes, "others' memory is in its storage"
            assert theirs.is_contiguous() == ours.is_contiguous() or not ours.is_contiguous()
            value, back = ours.detach().resolve_conj(), theirs.detach()
            assert (
                torch.equal(value.float(), back.float())
                if value.element_size() == 1
                else torch.equal(value, back)
            )
        else:
            assert torch.equal(ours.to_dense(), theirs.to_dense())
    elif isinstance(ours, numpy.ndarray):
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
        assert (
            theirs.tobytes() == ours.tobytes()
            if not ours.dtype.hasobject
            else theirs.tolist() == ours.tolist()
        )
        assert theirs.flags.writeable
        assert theirs.flags.f_contiguous == ours.copy("K").flags.f_contiguous
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key, each in ours.items():
            same(each, theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other)
    elif isinstance(ours, Layer):
        same(ours.weight, theirs.weight)
        same(ours.rest, theirs.rest)
    else:
        assert theirs == ours


def state(count: int, size: int) -> dict[str, Any]:
    """A state dict whose tensors all differ."""
    return {f"layers.{number}.weight": torch.full((size,), float(number)) for number in range(count)}


def names_of_memory() -> set[str]:
    """The files of shared memory of this user that could be Mesh's, of this process or its workers."""
    return {each.name for each in Path("/dev/shm").glob(f"*mesh*{os.getpid()}*")}


def owned() -> int:
    """Bytes of shared memory that this process owns, in use or kept for the next message."""
    return int(current().runtime.counts()["shm_bytes"])


@pytest.fixture(scope="module")
def started(runtime: None) -> None:
    """Start the thread that a queue notifies, which lives as long as the runtime."""
    told = threading.Event()
    promise = Promise[None]()
    promise.future.add_done_callback(lambda _: told.set())
    promise.set_result(None)
    assert told.wait(30)


@pytest.fixture
def one(echo: Any) -> Any:
    return echo.slice(hosts=0, gpus=0)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 10))]
)
def test_random_structures_arrive_as_they_were_sent(echo: Any, one: Any, seed: int) -> None:
    dice = random.Random(seed)
    value = [a_value(dice) for _ in range(12)]
    same(value, one.echo.call_one(value).get())
    for back in echo.echo.call(value).get().values():
        same(value, back)
    same(value, put(value).get())


def test_a_tensor_that_occurs_often_is_one(one: Any) -> None:
    """SER-1, though it lies in a block among others."""
    tensors = list(state(200, 2000).values())
    back = one.echo.call_one([tensors, tensors[::-1], {"last": tensors[-1]}]).get()
    assert all(first is second for first, second in zip(back[0], reversed(back[1]), strict=True))
    assert back[2]["last"] is back[0][-1]
    back[0][5].fill_(-1)
    assert [each[0].item() for each in back[0][4:7]] == [4, -1, 6]


def test_many_tiny_tensors_arrive(one: Any) -> None:
    tensors = state(70_000, 2)  # more than the parts that a message has
    back = one.echo.call_one(tensors).get()
    assert list(back) == list(tensors)
    assert torch.equal(torch.stack(list(back.values())), torch.stack(list(tensors.values())))


def test_small_tensors_share_parts_of_shared_memory(one: Any) -> None:
    one.echo.call_one(0).get()
    tensors = state(500, 4 * KIB)  # 16 KiB each
    assert one.call.call_one(total, tensors).get() == sum(range(500)) * 4 * KIB
    assert owned() >= 499 * 16 * KIB


def total(tensors: dict[str, Any]) -> float:
    return float(sum(each.sum().item() for each in tensors.values()))


def test_each_receiver_of_a_cast_may_write(echo: Any) -> None:
    tensors = state(100, 4 * KIB)
    for _ in range(2):
        assert set(echo.call.call(overwrite, tensors).get().values()) == {sum(range(100))}
    assert tensors["layers.7.weight"].unique().tolist() == [7]


def overwrite(tensors: dict[str, Any]) -> int:
    before = sum(int(each[-1]) for each in tensors.values())
    for each in tensors.values():
        each.fill_(-1)
    return before


class Hoarder(Actor):
    """Keeps one tensor of each message."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @endpoint
    def keep(self, tensors: dict[str, Any], name: str) -> None:
        self.kept.append(tensors[name])

    @endpoint
    def values(self) -> list[float]:
        return [float(each[-1]) for each in self.kept]

    @endpoint
    def drop(self) -> None:
        self.kept.clear()


@pytest.fixture
def hoarder(procs: ProcMesh) -> Iterator[Any]:
    mesh: Any = procs.slice(hosts=0, gpus=0).spawn("hoarder", Hoarder)
    yield mesh
    mesh.stop().get()


@pytest.mark.parametrize(("size", "most"), [(4 * KIB, 24 * MIB), (8, 9 * MIB)])
def test_a_tensor_that_is_kept_keeps_little_else(hoarder: Any, size: int, most: int) -> None:
    """Of a message of 4 MiB, a tensor of 16 KiB keeps its block of 256 KiB, and one of 32 bytes nothing."""
    tensors = {**state(250, 4 * KIB), "mine": torch.full((size,), -1.0)}
    before = owned()
    for _ in range(20):
        hoarder.keep.call_one(tensors, "mine").get()
    assert owned() - before <= most, "messages are kept whole: that would be 80 MiB"
    assert hoarder.values.call_one().get() == [-1] * 20
    hoarder.drop.call_one().get()


def test_memory_comes_back_with_the_last_tensor(hoarder: Any) -> None:
    tensors = state(300, 4 * KIB)
    for _ in range(3):
        hoarder.keep.call_one(tensors, "layers.299.weight").get()
        hoarder.drop.call_one().get()
    before, names = owned(), names_of_memory()
    for number in range(40):
        name = f"layers.{number}.weight"
        hoarder.keep.call_one(tensors, name).get()
        # What the tensor lies in is not written while it is kept (SHM-1).
        hoarder.keep.call_one(state(300, 4 * KIB), name).get()
        assert hoarder.values.call_one().get() == [number, number]
        hoarder.drop.call_one().get()
    assert owned() - before <= 8 * MIB
    assert names_of_memory() <= names, "named memory that outlasts its processes"


@pytest.mark.full
def test_what_arrived_outlives_its_sender() -> None:
    with this_host().spawn_procs() as procs:
        back = procs.spawn("echo", Echo).echo.call_one(state(100, 4 * KIB)).get()
    assert [each[-1].item() for each in back.values()] == list(range(100))
    tensor = back["layers.3.weight"]
    del back
    gc.collect()
    tensor += 1
    assert tensor.unique().tolist() == [4]


def test_a_queue_and_references_keep_many_tensors(procs: ProcMesh, one: Any) -> None:
    tensors = {**state(300, 2 * KIB), **{f"bias.{n}": torch.ones(n % 5) for n in range(300)}}
    with Queue[Any](on=procs.slice(hosts=1, gpus=1)) as queue:
        queue.put(tensors).get()
        same(tensors, queue.take().get())
    reference = put(tensors)
    same(tensors, one.echo.call_one(reference).get())
    same(tensors, reference.get())


def test_a_tensor_whose_memory_was_freed_is_named(one: Any) -> None:
    tensors = state(5, 10)
    tensors["layers.3.weight"].untyped_storage().resize_(0)
    with pytest.raises(
        SerializationError, match=r"cannot send args\[0\]\['layers.3.weight'\].*memory has been freed"
    ):
        one.echo.call_one(tensors)


def test_what_cannot_be_sent_among_many_is_named(one: Any) -> None:
    tensors: dict[str, Any] = {"first": torch.ones(3), "lock": threading.Lock(), **state(300, 2 * KIB)}
    with pytest.raises(SerializationError, match=r"args\[0\]\['lock'\]"):
        one.echo.call_one(tensors)
