"""Tensors in messages: no copies, no losses, and what is not sent with a tensor."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_core._common.errors import MeshError
from mesh_core._serialize import dump_message, dumps, loads

torch: Any = pytest.importorskip("torch", reason="torch is not installed: mesh-core does without")

pytestmark = pytest.mark.beside

BIG = 20_000


def arrive(obj: object) -> Any:
    """Send ``obj`` as the native layer does, among so much that nothing travels in the stream; then alone, as others do."""
    much = [torch.zeros(3000) for _ in range(6)]
    data, buffers = dump_message([much, obj])
    among = loads(data, [bytearray(buffer) for buffer in buffers])
    assert all(torch.equal(each, torch.zeros(3000)) for each in among[0])
    data, buffers = dumps(obj)
    loads(data, [bytearray(buffer) for buffer in buffers])
    return among[1]


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (4, 0, 2), (BIG,), (5, BIG)])
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    result = arrive(((tensor,), {}))[0][0]
    assert type(result) is torch.Tensor
    assert (result.dtype, result.shape, result.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert result.tolist() == tensor.tolist()


@pytest.mark.parametrize("size", [10, BIG])
def test_a_result_is_writable_and_keeps_its_memory(size: int) -> None:
    """SER-2."""
    data, buffers = dumps(torch.zeros(size))
    parts = [bytearray(buffer) for buffer in buffers]
    result: Any = loads(data, parts)
    del parts
    result.add_(1)
    assert result.sum().item() == size


def test_contiguous_elements_are_not_copied() -> None:
    """SER-3."""
    base = torch.arange(4.0 * BIG).reshape(4, BIG)
    images = torch.zeros(2, 3, 64, 64).to(memory_format=torch.channels_last)
    for tensor in (base, base.t(), base[1], images, base.requires_grad_(), torch.nn.Parameter(base.detach())):
        data, buffers = dumps({"t": [tensor]})
        assert len(data) < 600
        assert [buffer.nbytes for buffer in buffers] == [tensor.numel() * 4]
        seen = torch.frombuffer(buffers[0], dtype=torch.float32)
        assert seen.data_ptr() == tensor.data_ptr()
        result = arrive(tensor)
        assert torch.equal(result, tensor)
        assert result.stride() == tensor.stride()


def test_a_view_sends_its_elements_only() -> None:
    base = torch.arange(1000.0 * 1000).reshape(1000, 1000)
    for view in (base[:100], base[:, ::10], base[::7, 5:900].t(), torch.ones(300, 1).expand(300, 300)):
        _, buffers = dumps(view)
        assert [buffer.nbytes for buffer in buffers] == [view.numel() * 4]
        assert torch.equal(arrive(view), view)


def test_buffers_keep_a_temporary_copy_alive() -> None:
    data, buffers = dumps(torch.arange(100_000.0)[::2])
    junk = [torch.full((50_000,), -1.0) for _ in range(10)]
    assert torch.equal(loads(data, [bytearray(b) for b in buffers]), torch.arange(0, 100_000.0, 2))
    del junk


@pytest.mark.parametrize("size", [10, BIG])
def test_a_tensor_that_occurs_twice_is_one(size: int) -> None:
    """SER-1; two tensors with the same storage arrive as two."""
    tensor = torch.zeros(size)
    data, buffers = dumps([tensor, tensor, tensor[:]])
    first, second, other = loads(data, [bytearray(b) for b in buffers])
    assert first is second
    first.add_(1)
    assert other.sum().item() == 0


def test_leaves_keep_requires_grad_and_results_leave_their_graph() -> None:
    leaf = torch.ones(3, requires_grad=True)
    result, computed = arrive([leaf, leaf * 2])
    assert result.requires_grad
    assert result.is_leaf
    assert not computed.requires_grad
    assert computed.tolist() == [2, 2, 2]


@pytest.mark.parametrize("size", [3, BIG])
def test_parameters_and_modules(size: int) -> None:
    frozen = torch.nn.Parameter(torch.ones(size), requires_grad=False)
    frozen.tag = "mine"
    result = arrive(frozen)
    assert type(result) is torch.nn.Parameter
    assert not result.requires_grad
    assert result.tag == "mine"

    model = torch.nn.Sequential(torch.nn.Linear(size, 4), torch.nn.BatchNorm1d(4))
    model.append(torch.nn.Linear(4, 4))
    model[2].weight = torch.nn.Parameter(torch.eye(4))
    model[2].tied = model[2].weight
    copy = arrive(model)
    assert copy[2].tied is copy[2].weight
    for name, value in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value)
    copy(torch.ones(2, size)).sum().backward()
    assert copy[0].weight.grad is not None


def test_conjugates_and_negatives_are_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (value.conj(), value.conj().imag):
        result = arrive(tensor)
        assert torch.equal(result, tensor)
        assert not result.is_conj()
        assert not result.is_neg()


def test_tensors_without_plain_memory_are_pickled_by_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(arrive(sparse).to_dense(), torch.eye(3))
    assert arrive(torch.zeros(3, device="meta")).device.type == "meta"
    assert arrive([torch.float32, torch.device("cpu"), torch.Size([1])]) == [
        torch.float32,
        torch.device("cpu"),
        torch.Size([1]),
    ]


def test_tensors_in_objects_sent_by_value() -> None:
    weights = torch.arange(float(BIG))
    data, buffers = dumps(lambda: weights)
    assert [buffer.nbytes for buffer in buffers] == [BIG * 4]
    function: Any = loads(data, [bytearray(b) for b in buffers])
    assert torch.equal(function(), weights)


def test_a_device_tensor_arrives_on_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    for size in (3, BIG):
        result = arrive(torch.ones(size, device="cuda", requires_grad=True))
        assert result.device.type == "cpu"
        assert result.requires_grad
        assert result.sum().item() == size


def test_little_travels_in_the_stream_and_much_in_blocks() -> None:
    tensors = [torch.full((number % 300 + 1,), number) for number in range(5000)]
    data, buffers = dump_message(tensors)
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    assert 16_000 < sum(each.nbytes for each in tensors) - sum(sizes) <= 16 * 1024
    assert all(200 * 1024 < size <= 256 * 1024 for size in sizes[:-1])
    assert len(data) < 16 * 1024 + 40 * len(tensors)
    assert dump_message(tensors[:60])[1] == [], "a small message has no parts"
    # Others keep each large one as it is, and the rest in the stream.
    assert [buffer.nbytes for buffer in dumps([*tensors, torch.zeros(4096)])[1]] == [16 * 1024]


def test_tensors_of_a_block_have_memory_of_their_own() -> None:
    tensors = [torch.full((2000,), float(number)) for number in range(100)]
    data, buffers = dump_message(tensors)
    parts = [bytearray(buffer) for buffer in buffers]
    found: Any = loads(data, parts)
    del parts
    assert {each.untyped_storage().nbytes() for each in found} == {8000}
    versions = [each._version for each in found]
    found[50].zero_()
    assert [each._version for each in found][:50] == versions[:50]
    assert [each.sum().item() for each in found[48:52]] == [96_000, 98_000, 0, 102_000]
    found[51].requires_grad_().sum().backward()
    assert not found[52].requires_grad


def test_small_tensors_are_read_when_they_are_pickled_and_large_ones_when_they_are_sent() -> None:
    small, large = torch.zeros(10), torch.zeros(3000)
    data, buffers = dump_message([torch.zeros(4000), small, large, large.clone()])
    small.fill_(1)
    large.fill_(1)
    found: Any = loads(data, [bytearray(buffer) for buffer in buffers])
    assert (found[1].sum().item(), found[2].sum().item()) == (0, 3000)


def test_a_tensor_that_gets_other_memory_is_sent_as_it_was() -> None:
    tensor = torch.ones(3000)
    data, buffers = dump_message([torch.zeros(4000), tensor])
    tensor.data = torch.full((3000,), 2.0)
    junk = [torch.full((3000,), 3.0) for _ in range(50)]
    found: Any = loads(data, [bytearray(buffer) for buffer in buffers])
    assert found[1].unique().tolist() == [1]
    del junk


def test_damaged_messages_read_nothing_else() -> None:
    data, buffers = dump_message([torch.zeros(4000), *(torch.full((2000,), 1.5) for _ in range(10))])
    part = bytearray(buffers[0])
    for short in (b"", part[:100], part[:-1]):
        with pytest.raises(MeshError, match="its elements are not in the message"):
            loads(data, [bytearray(short), *buffers[1:]])
