"""Memory of numpy and PyTorch, contiguous and not, and of whatever else says where it is."""

import array
from types import SimpleNamespace

import pytest

from mesh_rdma import InvalidTransfer, RDMABuffer
from mesh_rdma._memory import memory_of

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.beside


@pytest.fixture(params=["shm", "tcp"], scope="module")
def transport(request):
    return request.param


def layouts():
    base = np.arange(4 * 6 * 10, dtype=np.int32).reshape(4, 6, 10)
    return {
        "contiguous": base,
        "columns": base[:, :, 3:7],
        "reversed": base[::-1, ::2, ::-3],
        "transposed": base.transpose(2, 0, 1),
        "fortran": np.asfortranarray(base),
        "one": base[1:2, 2:3, 3],
        "none": base[:, 0:0],
        "scalar": np.array(7.5),
    }


@pytest.mark.parametrize("name", layouts())
def test_reads_from_and_into_any_layout(transport, name):
    source = layouts()[name]
    buffer = RDMABuffer(source)
    assert buffer.size() == source.nbytes
    for target in (np.zeros_like(source), np.zeros(source.shape, source.dtype)):
        buffer.read_into(target, transport=transport).get(timeout=30)
        assert np.array_equal(target, source)


@pytest.mark.parametrize("name", layouts())
def test_writes_to_any_layout_and_nowhere_else(transport, name):
    target = layouts()[name].copy(order="K") if name == "scalar" else layouts()[name]
    base = target if target.base is None else target.base
    expected = np.full_like(np.ascontiguousarray(target), 99)
    others = base.sum() - target.sum()
    RDMABuffer(target).write_from(expected, transport=transport).get(timeout=30)
    assert np.array_equal(target, expected.reshape(target.shape))
    assert base.sum() - target.sum() == others


@pytest.mark.slow
def test_one_operation_over_very_many_pieces(shared, transport):
    square = np.arange(3000 * 3000, dtype=np.int8).reshape(3000, 3000)
    column = square[:, ::2]
    data = np.random.default_rng(1).integers(0, 100, column.shape, dtype=np.int8)
    buffer = shared.offer("data", data.tobytes())
    before = square[:, 1::2].copy()
    view = column[:300]
    buffer[: view.size].read_into(view, transport=transport).get(timeout=60)
    assert np.array_equal(view, data[:300])
    assert np.array_equal(square[:, 1::2], before)


def test_too_many_pieces_are_refused_with_a_way_out():
    with pytest.raises(InvalidTransfer, match="contiguous copy"):
        RDMABuffer(np.zeros((1 << 21, 2), np.int8)[:, 0])


def test_arrays_without_a_buffer():
    dates = np.array(["2026-01-01", "2026-02-02"], dtype="M8[s]")
    copy = np.zeros_like(dates)
    RDMABuffer(dates).read_into(copy).get(timeout=30)
    assert np.array_equal(copy, dates)
    told = SimpleNamespace(__array_interface__=np.arange(6).reshape(2, 3).T.__array_interface__)
    assert memory_of(told).pieces == 6


def test_memory_that_is_not_plain_is_refused():
    constant = np.arange(3)
    constant.flags.writeable = False
    assert not RDMABuffer(constant).writable
    with pytest.raises(InvalidTransfer, match="writable"):
        RDMABuffer(bytearray(24)).read_into(constant)
    with pytest.raises(InvalidTransfer, match="objects"):
        RDMABuffer(SimpleNamespace(__array_interface__=np.array([object()]).__array_interface__))
    with pytest.raises(InvalidTransfer, match="objects"):
        RDMABuffer(np.array([object()]))
    with pytest.raises(InvalidTransfer, match="objects"):
        RDMABuffer(np.zeros(2, dtype=[("x", "i4"), ("y", "O")]))
    RDMABuffer(np.zeros(2, dtype=[("O", "i4")]))
    with pytest.raises(InvalidTransfer):
        RDMABuffer(3.5)


def test_arrays_of_the_standard_library():
    numbers = array.array("d", [1.0, 2.0])
    copy = array.array("d", [0.0, 0.0])
    RDMABuffer(numbers).read_into(copy).get(timeout=30)
    assert copy == numbers
    offered = RDMABuffer(numbers)
    with pytest.raises(BufferError):
        numbers.append(3.0)
    offered.drop()


def test_tensors(transport):
    torch = pytest.importorskip("torch")
    source = torch.arange(60, dtype=torch.bfloat16).reshape(6, 10)
    for tensor in (source, source.T, source[::2, 1:5], torch.nn.Parameter(source[3])):
        copy = torch.zeros(tensor.shape, dtype=tensor.dtype)
        RDMABuffer(tensor).read_into(copy, transport=transport).get(timeout=30)
        assert torch.equal(copy, tensor.detach())
    with pytest.raises(InvalidTransfer, match="dense"):
        RDMABuffer(torch.eye(3).to_sparse())
    with pytest.raises(InvalidTransfer, match="meta"):
        RDMABuffer(torch.zeros(3, device="meta"))
