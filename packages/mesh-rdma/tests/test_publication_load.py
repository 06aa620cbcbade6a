"""Versions copied into tensors of readers: in place, in other pieces, and of other types."""

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh_rdma import (
    InvalidTransfer,
    Piece,
    Publication,
    PublicationGone,
    PublicationReader,
    RDMATimeout,
    VersionUnavailable,
)

from .conftest import Other

np = pytest.importorskip("numpy")

PEER = Path(__file__).parent / "publication_peer.py"


def boxes(shape, parts, dim):
    """Cut a shape along a dimension, as unevenly as it comes."""
    ends = [shape[dim] * n // parts for n in range(parts + 1)]
    for low, high in pairwise(ends):
        start, size = [0] * len(shape), list(shape)
        start[dim], size[dim] = low, high - low
        yield Piece(tuple(shape), tuple(start), tuple(size))


def part_of(whole, piece):
    return whole[tuple(slice(at, at + n) for at, n in zip(piece.start, piece.shape, strict=True))]


class Ranks:
    """A publication cut into pieces, one for each of some senders of this process."""

    def __init__(self, whole, count, dims, **options):
        self.whole, self.states, self.publications = whole, [], []
        pieces = {name: list(boxes(array.shape, count, dims[name])) for name, array in whole.items()}
        for rank in range(count):
            state = {name: part_of(array, pieces[name][rank]).copy() for name, array in whole.items()}
            self.states.append(state)
            made = Publication(state, pieces={name: pieces[name][rank] for name in whole}, start=1, **options)
            self.publications.append(made)
        self.reader = PublicationReader.joined([each.reader() for each in self.publications])

    def publish(self, version):
        for each in self.publications:
            each.publish(version=version)

    def close(self):
        for each in self.publications:
            each.close()
            assert each.join(30)


@pytest.fixture
def ranks():
    whole = {
        "rows": np.arange(24 * 10, dtype=np.float32).reshape(24, 10),
        "columns": np.arange(7 * 24 * 3, dtype=np.int16).reshape(7, 24, 3),
    }
    made = Ranks(whole, 4, {"rows": 0, "columns": 1})
    yield made
    made.close()


@pytest.mark.parametrize(
    "dims", [("rows", 0, "columns", 1), ("rows", 1, "columns", 0), ("rows", 0, "columns", 2)]
)
def test_four_ranks_are_read_by_six_cut_otherwise(ranks, dims):
    ranks.publish(1)
    cut = dict(zip(dims[::2], dims[1::2], strict=True))
    for n in range(6):
        pieces = {name: list(boxes(array.shape, 6, cut[name]))[n] for name, array in ranks.whole.items()}
        target = {name: np.zeros(pieces[name].shape, array.dtype) for name, array in ranks.whole.items()}
        assert ranks.reader.load_into(target, pieces=pieces) == 1
        for name, array in ranks.whole.items():
            assert np.array_equal(target[name], part_of(array, pieces[name])), name


def test_the_plan_is_used_again_and_made_anew_for_other_tensors(ranks):
    target = {name: np.zeros_like(array) for name, array in ranks.whole.items()}
    for version in range(1, 6):
        for state in ranks.states:
            for array in state.values():
                array[...] += 1
        ranks.publish(version)
        if version == 4:
            target = {name: np.zeros_like(array) for name, array in ranks.whole.items()}
        if version == 5:
            # Only some of it, and into every other column of something larger.
            target = {"rows": np.zeros((24, 20), np.float32)[:, ::2]}
        assert ranks.reader.load_into(target) == version
        for name, array in target.items():
            assert np.array_equal(array, ranks.whole[name] + version), name


def test_a_version_is_there_when_all_have_published_it(ranks):
    target = {name: np.zeros_like(array) for name, array in ranks.whole.items()}
    ranks.publish(1)
    for each in ranks.publications[:2]:
        each.publish(version=2)
    with pytest.raises(RDMATimeout):
        ranks.reader.load_into(target, timeout=0.05)
    assert ranks.reader.load_into(target, wait=False) == 1
    with pytest.raises(VersionUnavailable):
        ranks.reader.load_into(target, version=2, wait=False)
    for each in ranks.publications[2:]:
        each.publish(version=2)
    assert ranks.reader.load_into(target) == 2


def test_one_that_is_far_ahead_is_waited_for_with_the_others(ranks, in_threads):
    for version in (1, 2, 3):
        ranks.publications[0].publish(version=version)
    for each in ranks.publications[1:]:
        each.publish(version=1)
    target = {name: np.zeros_like(array) for name, array in ranks.whole.items()}

    def work(n):
        if n == 0:
            assert ranks.reader.load_into(target, timeout=30) in {3, 4}
        else:
            for each in ranks.publications[1:]:
                for version in (2, 3):
                    each.publish(version=version)

    in_threads(work, 2)


def test_whole_tensors_are_viewed_and_pieces_say_what_to_do(ranks):
    ranks.publish(1)
    with ranks.reader.use() as weights:
        assert len(weights.incarnations) == 4
        with pytest.raises(InvalidTransfer, match=r"'rows' is published in pieces.*load_into"):
            weights["rows"]


def test_replicas_share_the_readers():
    whole = np.arange(100)
    publications = [Publication({"it": whole.copy()}, start=1) for _ in range(3)]
    reader = PublicationReader.joined([each.reader() for each in publications])
    for each in publications:
        each.publish()
    target = {"it": np.zeros(100, whole.dtype)}
    assert reader.load_into(target) == 1 and np.array_equal(target["it"], whole)
    with reader.use() as weights:
        assert np.array_equal(weights["it"], whole)
    for each in publications:
        each.close()
        assert each.join(30)


def test_types_are_converted_where_the_reader_says_so():
    state = {"it": np.linspace(-2, 2, 60, dtype=np.float32).reshape(6, 10), "same": np.arange(5)}
    with Publication(state) as publication:
        publication.publish()
        reader = publication.reader()
        target = {"it": np.zeros((6, 10), np.float16), "same": np.zeros(5, np.int64)}
        with pytest.raises(InvalidTransfer, match="published as float32, and wanted as float16"):
            reader.load_into(target)
        for _ in range(2):
            reader.load_into(target, cast=True)
            assert np.array_equal(target["it"], state["it"].astype(np.float16))
            assert np.array_equal(target["same"], state["same"])
            target["it"][...] = 0
        half = {"it": np.zeros((3, 10))}
        reader.load_into(half, cast=True, pieces={"it": Piece((6, 10), (2, 0), (3, 10))})
        assert np.array_equal(half["it"], state["it"][2:5].astype(np.float64))


def test_what_does_not_fit_is_named_and_told_at_both_ends(ranks):
    ranks.publish(1)
    with pytest.raises(InvalidTransfer, match="'other' is not published by publication"):
        ranks.reader.load_into({"other": np.zeros(3)})
    with pytest.raises(InvalidTransfer, match=r"shape \(24, 10\), and wanted with \(3,\)"):
        ranks.reader.load_into({"rows": np.zeros(3, np.float32)})
    with pytest.raises(InvalidTransfer, match="a piece must lie in the whole"):
        Piece((3,), (2,), (2,))
    with pytest.raises(InvalidTransfer, match="which the state dict does not have"):
        ranks.reader.load_into({}, pieces={"x": Piece((1,), (0,), (1,))})
    ranks.publish(2)
    for each in ranks.publications:
        # What a reader has said was heard before what it asked for after.
        each.reader().use().release()
        assert [failure.version for failure in each.failures] == [1, 1]
        assert "'other' is not published" in each.failures[0].reason


def test_a_part_that_nobody_publishes_is_named(ranks):
    alone = ranks.publications[0]
    alone.publish()
    with pytest.raises(
        InvalidTransfer, match=r"'rows' is published in pieces that lack the part from \(6, 0\) to \(24, 10\)"
    ):
        alone.reader().load_into({"rows": np.zeros((24, 10), np.float32)})


class Placement:
    """As PyTorch's."""

    def __init__(self, dim=None, partial=False):
        self.dim, self.partial = dim, partial

    def is_shard(self):
        return self.dim is not None

    def is_replicate(self):
        return self.dim is None and not self.partial

    def __repr__(self):
        return "Partial(sum)"


def dtensor(whole, sizes, coordinate, placements, local=None):
    """What a DTensor says of itself; its pieces are cut as torch.chunk cuts."""
    part = whole
    for size, at, placement in zip(sizes, coordinate, placements, strict=True):
        if placement.is_shard():
            each = -(-part.shape[placement.dim] // size)
            index = [slice(None)] * part.ndim
            index[placement.dim] = slice(each * at, each * (at + 1))
            part = part[tuple(index)]
    return SimpleNamespace(
        shape=whole.shape,
        placements=placements,
        device_mesh=SimpleNamespace(get_coordinate=lambda: coordinate, size=lambda dim: sizes[dim]),
        to_local=lambda: part if local is None else local,
    )


@pytest.mark.parametrize("placements", [(0, 1), (1, 0), (0, 0), (None, 1), (1, None)])
def test_dtensors_say_which_part_they_are(placements):
    whole = np.arange(9 * 7, dtype=np.int32).reshape(9, 7)
    placed, sizes = tuple(map(Placement, placements)), (2, 3)
    publications = [
        Publication({"it": dtensor(whole, sizes, (i, j), placed)}, start=1)
        for i in range(2)
        for j in range(3)
    ]
    for each in publications:
        each.publish()
    reader = PublicationReader.joined([each.reader() for each in publications])
    target = np.zeros_like(whole)
    reader.load_into({"it": target})
    assert np.array_equal(target, whole)
    # Into a DTensor that is placed otherwise.
    mine = np.zeros((5, 7), np.int32)
    reader.load_into({"it": dtensor(whole, (2,), (0,), (Placement(0),), local=mine)})
    assert np.array_equal(mine, whole[:5])
    for each in publications:
        each.close()
        assert each.join(30)


def test_dtensors_that_cannot_be_published_are_refused():
    whole = np.zeros((4, 4))
    with pytest.raises(InvalidTransfer, match=r"placed as Partial\(sum\)"):
        Publication({"it": dtensor(whole, (2,), (0,), (Placement(partial=True),))})
    with pytest.raises(InvalidTransfer, match="it is not in the tensor's device mesh"):
        Publication({"it": _outside(whole)})
    with pytest.raises(InvalidTransfer, match=r"should have a part of shape \(2, 4\)"):
        Publication({"it": dtensor(whole, (2,), (0,), (Placement(0),), local=whole)})


def _outside(whole):
    made = dtensor(whole, (2,), (0,), (Placement(0),))
    made.device_mesh.get_coordinate = lambda: None
    return made


@pytest.mark.slow
def test_the_death_of_the_owner_during_a_copy_is_reported(in_threads):
    owner = Other(program=PEER)
    try:
        reader = owner.publication("it", sizes=(4_000_000,), start=1)
        owner.publish("it", 1)
        target = {"tensor-0": np.zeros(4_000_000, np.int64)}
        assert reader.load_into(target) == 1
        assert set(np.unique(target["tensor-0"])) == {1}
        gone = []

        def work(n):
            if n == 1:
                owner.kill()
                return
            while not gone:
                try:
                    reader.load_into(target)
                except PublicationGone as error:
                    gone.append(error)

        in_threads(work, 2)
        assert gone
    finally:
        owner.end()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_cuts_of_random_tensors(seed):
    dice, random_numbers = random.Random(seed), np.random.default_rng(seed)
    whole = {}
    for n in range(6):
        shape = tuple(dice.randint(1, 9) for _ in range(dice.randint(1, 3)))
        whole[f"t{n}"] = random_numbers.integers(0, 1000, shape).astype(dice.choice(("f4", "i2", "u1", "f8")))
    ranks = Ranks(
        whole, dice.randint(1, 4), {name: dice.randrange(each.ndim) for name, each in whole.items()}
    )
    ranks.publish(1)
    for _ in range(5):
        count = dice.randint(1, 5)
        dims = {name: dice.randrange(each.ndim) for name, each in whole.items()}
        for n in range(count):
            pieces = {name: list(boxes(each.shape, count, dims[name]))[n] for name, each in whole.items()}
            target = {name: np.full(pieces[name].shape, 77, each.dtype) for name, each in whole.items()}
            ranks.reader.load_into(target, pieces=pieces)
            for name, each in whole.items():
                assert np.array_equal(target[name], part_of(each, pieces[name])), name
    ranks.close()


def test_the_order_of_the_state_dict_does_not_matter():
    state = {"a": np.full(100, 1), "b": np.full(7, 2), "c": np.full(30, 3)}
    with Publication(state) as publication:
        publication.publish()
        state["a"] = state.pop("a") + 10
        publication.publish()
        with publication.reader().use() as weights:
            assert {name: set(map(int, weights[name])) for name in weights} == {"a": {11}, "b": {2}, "c": {3}}
        target = {name: np.zeros_like(state[name]) for name in "cab"}
        publication.reader().load_into(target)
        assert all(np.array_equal(target[name], state[name]) for name in state)


def test_many_short_pieces():
    whole = np.arange(200 * 60, dtype=np.float32).reshape(200, 60)
    with Publication({"it": whole}) as publication:
        reader = publication.reader()
        target = {"it": np.zeros((200, 20), np.float32)}
        for _ in range(2):
            publication.publish()
            reader.load_into(target, pieces={"it": Piece((200, 60), (0, 20), (200, 20))})
            assert np.array_equal(target["it"], whole[:, 20:40])
            whole += 1


TORCH_TYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH_TYPES)
def test_types_of_torch_are_published_and_wanted(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this PyTorch has no {name}")
    values = torch.linspace(-2, 2, 600).reshape(20, 30)
    with Publication({"full": values, "short": values.to(dtype)}) as publication:
        publication.publish()
        reader = publication.reader()
        # Bit for bit as PyTorch converts them, and as they are.
        target = {"full": torch.zeros(20, 30, dtype=dtype), "short": torch.zeros(20, 30, dtype=dtype)}
        reader.load_into(target, cast=True)
        for each in target.values():
            assert torch.equal(each.view(torch.uint8), values.to(dtype).view(torch.uint8))
        with reader.use() as weights:
            assert weights["short"].dtype == dtype
            assert torch.equal(weights["short"].float(), values.to(dtype).float())
            # Written to, it is the reader's own.
            weights["full"].zero_()
        piece = Piece((20, 30), (0, 10), (20, 10))
        columns = {"full": torch.zeros(20, 10, dtype=dtype), "short": np.zeros((20, 10))}
        reader.load_into(columns, cast=True, pieces={"full": piece, "short": piece})
        assert torch.equal(columns["full"].float(), values.to(dtype).float()[:, 10:20])
        assert np.array_equal(columns["short"], values.to(dtype).float().numpy()[:, 10:20])


@pytest.mark.beside
@pytest.mark.slow
def test_a_tensor_that_gets_other_memory_is_published_from_there():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
    state = {"it": torch.ones(1000)}
    with Publication(state) as publication:
        target = {"it": torch.zeros(1000)}
        for number in range(1, 5):
            state["it"].data = torch.full((1000,), float(number))
            target["it"].data = torch.zeros(1000)
            publication.publish()
            publication.reader().load_into(target)
            assert set(target["it"].tolist()) == {number}
        state["it"].data = torch.ones(10)
        with pytest.raises(InvalidTransfer, match="'it' was torch float32"):
            publication.publish()


@pytest.mark.beside
@pytest.mark.slow
def test_tensors_on_a_gpu_are_copied_by_pytorch_alone():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here")

    class OnGpu(torch.Tensor):
        """Says that it is on a GPU, at an address where this process has nothing."""

        device = property(lambda self: torch.device("cuda", 0))

        def data_ptr(self):
            return 1 << 46

        def refuse(self, *_):
            raise AssertionError("only PyTorch may touch memory of a GPU")

        numpy = __array__ = refuse

    def on_gpu(tensor):
        return tensor.clone().as_subclass(OnGpu)

    def plain(tensor):
        return tensor.as_subclass(torch.Tensor)

    values = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    state = {
        "it": on_gpu(values),
        "turned": on_gpu(values).t(),
        "none": on_gpu(torch.zeros(0)),
        "cpu": values.clone(),
    }
    with Publication(state) as publication:
        reader = publication.reader()
        for turn in range(2):
            publication.publish()
            target = {
                name: on_gpu(torch.zeros(shape))
                for name, shape in {"it": (20, 30), "turned": (30, 20), "none": (0,), "cpu": (20, 30)}.items()
            }
            reader.load_into(target)
            assert torch.equal(plain(target["it"]), values + turn)
            assert torch.equal(plain(target["turned"]), (values + turn).t())
            assert torch.equal(plain(target["cpu"]), values)
            plain(state["it"]).add_(1)
            plain(state["turned"]).add_(1)
        with reader.use() as weights:
            assert torch.equal(weights["turned"], (values + 1).t())
        # Some columns, and of another type; and on the processor again.
        piece = Piece((20, 30), (0, 10), (20, 10))
        columns = {"it": on_gpu(torch.zeros(20, 10, dtype=torch.bfloat16)), "turned": torch.zeros(30, 20)}
        reader.load_into(columns, cast=True, pieces={"it": piece})
        assert torch.equal(plain(columns["it"]), (values + 1).bfloat16()[:, 10:20])
        assert torch.equal(columns["turned"], (values + 1).t())
