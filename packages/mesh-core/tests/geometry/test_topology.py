"""Extents, points, slices and regions as users see them."""

from __future__ import annotations

import copy
import doctest
import itertools
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mesh_core import Extent, Point, Region, Shape, Slice

MESH = Extent(["hosts", "gpus"], [2, 8])


def whole(**sizes: int) -> Region:
    return Region.whole(Extent.of(**sizes))


# --- extents


def test_an_extent_is_a_mapping_from_label_to_size() -> None:
    assert isinstance(MESH, Mapping)
    assert Extent.of(hosts=2, gpus=8) == MESH
    assert (MESH.labels, MESH.sizes, MESH.nelements) == (["hosts", "gpus"], [2, 8], 16)
    assert dict(MESH) == {"hosts": 2, "gpus": 8}
    assert (list(MESH.keys()), list(MESH.values()), list(MESH.items())) == (
        ["hosts", "gpus"],
        [2, 8],
        [("hosts", 2), ("gpus", 8)],
    )
    assert len(MESH) == 2
    assert MESH["gpus"] == MESH.size("gpus") == MESH.get("gpus") == 8
    assert MESH.get("gpu") is None
    assert MESH.get("gpu", 5) == 5
    assert "gpus" in MESH
    assert "gpu" not in MESH
    assert 3 not in MESH  # type: ignore[comparison-overlap]


def test_rank_and_point_are_inverse() -> None:
    extent = Extent.of(a=2, b=3, c=4)
    points = list(extent.points())
    assert [p.rank for p in points] == list(range(24))
    assert [tuple(p.values()) for p in points] == list(itertools.product(range(2), range(3), range(4)))
    assert [extent.rank(**p) for p in points] == list(range(24))
    assert extent.rank(c=-1, a=1, b=0) == 15


def test_extents_without_dimensions_and_without_elements() -> None:
    scalar = Extent([], [])
    assert (scalar.nelements, len(scalar), repr(scalar)) == (1, 0, "Extent()")
    assert repr(scalar.point(0)) == "Point()"
    empty = Extent.of(hosts=0, gpus=8)
    assert (empty.nelements, list(empty.points()), Region.whole(empty).ranks()) == (0, [], [])


def test_points_are_made_one_by_one() -> None:
    points = Extent.of(a=1 << 40).points()
    assert [next(points).rank for _ in range(3)] == [0, 1, 2]


# --- points


def test_a_point_is_a_mapping_from_label_to_coordinate() -> None:
    point = MESH.point(11)
    assert isinstance(point, Mapping)
    assert point == Point(11, MESH)
    assert (point.rank, point.extent, point.size("gpus")) == (11, MESH, 8)
    assert dict(point) == {"hosts": 1, "gpus": 3}
    assert (point["gpus"], point.get("gpus"), point.get("x"), point.get("x", 0)) == (3, 3, None, 0)
    assert "hosts" in point
    assert None not in point
    match point:
        case {"hosts": host, "gpus": gpu}:
            assert (host, gpu) == (1, 3)
        case _:
            pytest.fail("a point matches a mapping pattern")


def test_points_equal_mappings_with_the_same_items() -> None:
    point = MESH.point(11)
    assert point == {"gpus": 3, "hosts": 1}
    assert point != {"gpus": 3}
    assert point != {"gpus": 3, "hosts": 0}
    assert point != MESH.point(10)
    assert point != Extent.of(hosts=3, gpus=8).point(11), "the same coordinates in another mesh"
    assert point != 11


# --- slices


def test_a_slice_is_a_strided_view() -> None:
    view = Slice(offset=1, sizes=[2, 3], strides=[8, 2])
    assert list(view) == [1, 3, 5, 9, 11, 13]
    assert [view[i] for i in range(-6, 6)] == list(view) * 2
    assert (len(view), view.ndim, view.offset, view.sizes, view.strides) == (6, 2, 1, [2, 3], [8, 2])
    assert (view.position(11), view.coordinates(11)) == (4, [1, 1])
    assert 11 in view
    assert 2 not in view
    assert -1 not in view
    assert "11" not in view
    assert Slice(0, [2, 3]).strides == [3, 1]


# --- regions


def test_ints_drop_a_dimension_and_slices_keep_it() -> None:
    mesh = whole(hosts=2, gpus=8)
    assert mesh.slice(hosts=1).ranks() == list(range(8, 16))
    assert mesh.slice(hosts=1).labels == ["gpus"]
    assert mesh.slice(hosts=slice(1, 2)).labels == ["hosts", "gpus"]
    assert mesh.slice(gpus=-1).ranks() == [7, 15]
    assert mesh.slice(hosts=1, gpus=slice(None, None, -3)).ranks() == [15, 12, 9]
    assert mesh.slice() == mesh
    corner = mesh.slice(hosts=1, gpus=3)
    assert (corner.labels, corner.ranks(), len(corner), corner.offset) == ([], [11], 1, 11)


def test_slicing_agrees_with_lists() -> None:
    ends = [None, *range(-6, 7)]
    line = whole(x=4)
    for start, stop, step in itertools.product(ends, ends, [None, -3, -1, 1, 2, 9]):
        expected = list(range(4))[start:stop:step]
        if expected:
            assert line.slice(x=slice(start, stop, step)).ranks() == expected
        else:
            with pytest.raises(IndexError, match="selects nothing of x=4"):
                line.slice(x=slice(start, stop, step))


def test_ranks_of_a_region_are_those_of_the_mesh() -> None:
    region = whole(hosts=2, gpus=8).slice(hosts=1).slice(gpus=slice(2, 6))
    assert region.ranks() == list(region) == [10, 11, 12, 13]
    assert (region.offset, region.sizes, region.strides, region.extent) == (10, [4], [1], Extent.of(gpus=4))
    assert [r for r in range(16) if r in region] == [10, 11, 12, 13]
    assert -1 not in region
    assert None not in region
    assert (region.position(12), region.rank_at(2), dict(region.point_of(12))) == (2, 12, {"gpus": 2})
    assert region.ndslice == Slice(10, [4], [1])
    assert Region(["gpus"], Slice(10, [4])) == region


def test_split_flatten_rename() -> None:
    mesh = whole(hosts=4, gpus=8)
    split = mesh.split(hosts=("rack", "host"), gpus=["dp", "tp"], host=2, tp=4)
    assert split.extent == Extent.of(rack=2, host=2, dp=2, tp=4)
    assert split.ranks() == mesh.ranks()
    assert split.slice(host=0, dp=1).ranks() == [4, 5, 6, 7, 20, 21, 22, 23]
    assert mesh.flatten("all").extent == Extent.of(all=32)
    assert mesh.slice(gpus=slice(1, None, 2)).flatten("odd").ranks() == list(range(1, 32, 2))
    assert mesh.rename(hosts="gpus", gpus="hosts").labels == ["gpus", "hosts"]


def test_set_operations() -> None:
    mesh = whole(hosts=2, gpus=4)
    host, pair = mesh.slice(hosts=1), mesh.slice(gpus=slice(1, 3))
    assert host.intersection(pair) == [5, 6]
    assert host.difference(pair) == [4, 7]
    assert host.issubset(mesh)
    assert not mesh.issubset(host)
    assert mesh.slice(gpus=0).isdisjoint(pair)
    assert not host.isdisjoint(pair)


def test_shape_is_another_name_for_region() -> None:
    assert Shape is Region


# --- values: copying, hashing, showing


VALUES = [
    MESH,
    Extent([], []),
    MESH.point(11),
    Slice(15, [2, 3], [-8, 2]),
    whole(hosts=2, gpus=8).slice(gpus=slice(None, None, -2)),
    whole(a=3).slice(a=1),
    Region.whole(Extent.of(a=0, b=3)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_survive_pickling_and_copying(value: Any) -> None:
    copies = [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in [*copies, copy.copy(value), copy.deepcopy(value)]:
        assert type(other) is type(value)
        assert other == value
        assert hash(other) == hash(value)
        assert repr(other) == repr(value)


def test_different_values_differ() -> None:
    assert len(set(VALUES)) == len(VALUES)
    assert Extent.of(a=1, b=2) != Extent.of(b=2, a=1), "order matters"
    assert whole(a=4) != whole(b=4)
    assert Slice(0, [4]) != Slice(1, [4])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (MESH, "Extent(hosts=2, gpus=8)"),
        (MESH.point(11), "Point(hosts=1, gpus=3 of 2×8)"),
        (Slice(15, [2, 3], [-8, 2]), "Slice(offset=15, sizes=[2, 3], strides=[-8, 2])"),
        (Region.whole(MESH), "Region(hosts=2, gpus=8)"),
        (Region.whole(MESH).slice(gpus=slice(1, 4)), "Region(hosts=2, gpus=3 in ranks 1 to 11)"),
        (Region.whole(MESH).slice(hosts=slice(1, 2), gpus=0), "Region(hosts=1 at rank 8)"),
        (Region.whole(MESH).slice(hosts=1, gpus=3), "Region(rank 11)"),
    ],
)
def test_values_show_what_they_are(value: object, text: str) -> None:
    assert repr(value) == text


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        MESH.labels = []  # type: ignore[misc]
    MESH.sizes.append(3)
    assert MESH.sizes == [2, 8]


@pytest.mark.parametrize("cls", [Extent, Point, Slice, Region], ids=lambda cls: cls.__name__)
def test_docstring_examples_hold(cls: type) -> None:
    names = {c.__name__: c for c in (Extent, Point, Slice, Region)}
    documented = [
        cls,
        *(vars(cls)[name] for name in dir(cls) if name in vars(cls) and not name.startswith("_")),
    ]
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    output: list[str] = []
    for item in documented:
        assert item.__doc__, f"{item} has no docstring"
        runner.run(parser.get_doctest(item.__doc__, dict(names), str(item), None, None), out=output.append)
    assert runner.tries > 0
    assert not output, "".join(output)


# --- errors


BAD = [
    (
        lambda m: m.slice(gpu=0),
        ValueError,
        "no dimension 'gpu'; this mesh has hosts=2, gpus=8 — did you mean 'gpus'?",
    ),
    (lambda m: m.slice(tensor=0), ValueError, "no dimension 'tensor'; this mesh has hosts=2, gpus=8"),
    (
        lambda m: m.slice(gpus=8),
        IndexError,
        "index 8 is out of range for gpus=8; valid are 0 to 7 and -8 to -1",
    ),
    (
        lambda m: m.slice(gpus=-9),
        IndexError,
        "index -9 is out of range for gpus=8; valid are 0 to 7 and -8 to -1",
    ),
    (
        lambda m: m.slice(gpus=slice(8, 10)),
        IndexError,
        "gpus=8:10 selects nothing of gpus=8; a slice of a mesh holds at least one element",
    ),
    (
        lambda m: m.slice(gpus=slice(None, None, 0)),
        ValueError,
        "the slice of 'gpus' has step 0; a step must not be zero",
    ),
    (lambda m: m.slice(gpus="0"), TypeError, "gpus must be an int or a slice, not str"),
    (
        lambda m: m.slice(gpus=slice("a", 2)),
        TypeError,
        "the start of gpus's slice must be an int or None, not str",
    ),
    (
        lambda m: m.size("host"),
        ValueError,
        "no dimension 'host'; this mesh has hosts=2, gpus=8 — did you mean 'hosts'?",
    ),
    (
        lambda m: m.split(gpus=("a", "b"), a=3),
        ValueError,
        "gpus=8 cannot be split into (a=3, b=?): the given sizes do not divide it",
    ),
    (
        lambda m: m.split(gpus=("a", "b")),
        ValueError,
        "gpus=8 cannot be split into (a=?, b=?): only one size can be inferred; give the others",
    ),
    (
        lambda m: m.split(gpus=("a", "b"), c=2),
        ValueError,
        "a size is given for 'c', but the split makes no such dimension; it makes: a, b",
    ),
    (lambda m: m.split(gpus=("a", "b"), a=-2), ValueError, "a is -2; it must not be negative"),
    (
        lambda m: m.split(gpus="ab"),
        TypeError,
        "gpus must be a tuple of new names, or the int size of a new dimension, not str",
    ),
    (
        lambda m: m.slice(gpus=slice(0, 4)).flatten("all"),
        ValueError,
        (
            "ranks of hosts=2, gpus=4 in ranks 0 to 11 are not evenly spaced, so they cannot form one dimension 'all'; "
            "flatten first, then slice"
        ),
    ),
    (
        lambda m: m.rename(gpus="hosts"),
        ValueError,
        "dimension 'hosts' is named twice; every dimension of a mesh needs a name of its own",
    ),
    (lambda m: m.rename(gpus=1), TypeError, "gpus must be the new name, a str, not int"),
    (
        lambda m: m.slice(hosts=1).point_of(3),
        IndexError,
        "rank 3 is not in this region (gpus=8 in ranks 8 to 15)",
    ),
    (lambda m: m.point_of(-1), IndexError, "rank -1 is not in this region (hosts=2, gpus=8)"),
    (lambda m: m.rank_at(16), IndexError, "position 16 is out of range for a mesh of 16 (hosts=2, gpus=8)"),
    (lambda m: m.extent.point(16), IndexError, "rank 16 is out of range for a mesh of 16 (hosts=2, gpus=8)"),
    (lambda m: m.extent.point(-1), IndexError, "rank -1 is out of range for a mesh of 16 (hosts=2, gpus=8)"),
    (
        lambda m: m.extent.rank(hosts=1),
        ValueError,
        "no coordinate for dimension 'gpus' of a mesh with hosts=2, gpus=8; give one for each dimension",
    ),
    (lambda m: m.extent.rank(hosts=1, gpus=1.5), TypeError, "gpus must be an int, not float"),
    (lambda m: m.ndslice[16], IndexError, "position 16 is out of range for a slice of 16 ranks"),
    (
        lambda m: Extent(["a"], [1, 2]),
        ValueError,
        "sizes has 2 entries, but there are 1 dimensions; give one for each",
    ),
    (lambda m: Extent.of(gpus=-1), ValueError, "gpus is -1; it must not be negative"),
    (
        lambda m: Extent.of(a=1 << 40, b=1 << 40),
        ValueError,
        f"sizes {1 << 40}×{1 << 40} multiply to more than {(1 << 63) - 1} elements",
    ),
    (
        lambda m: Extent([f"d{i}" for i in range(17)], [1] * 17),
        ValueError,
        "17 dimensions; a mesh has at most 16",
    ),
    (
        lambda m: Extent(["a b"], [1]),
        ValueError,
        (
            '"a b" cannot name a dimension: it contains a space or a control character '
            "(1 to 64 bytes, no spaces, commas, equals signs or control characters)"
        ),
    ),
    (
        lambda m: Slice(0, [2, 2], [1, 1]),
        ValueError,
        (
            "sizes [2, 2] with strides [1, 1] name some ranks more than once; "
            "each stride must step over the whole reach of the smaller ones"
        ),
    ),
    (
        lambda m: Slice(0, [2], [-1]),
        ValueError,
        f"offset 0 with sizes [2] and strides [-1] reaches outside ranks 0 to {(1 << 63) - 1}",
    ),
    (
        lambda m: Region(["a", "b"], Slice(0, [2])),
        ValueError,
        "labels has 2 entries, but there are 1 dimensions; give one for each",
    ),
    (
        lambda m: whole(a=1 << 50).ranks(),
        OverflowError,
        f"{1 << 50} ranks are too many to list (at most {1 << 26}); iterate over them instead",
    ),
]


@pytest.mark.parametrize(("act", "kind", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_errors_say_what_exists_and_what_to_do(
    act: Callable[[Region], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        act(Region.whole(MESH))
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_a_missing_key_is_a_key_error() -> None:
    for mapping in (MESH, MESH.point(0)):
        with pytest.raises(KeyError, match="did you mean 'gpus'"):
            mapping["gpu"]


# --- agreement with a naive model: a dict from coordinates to rank


Cells = dict[tuple[int, ...], int]


def random_step(
    rng: random.Random, region: Region, cells: Cells, names: itertools.count[int]
) -> tuple[Region, Cells]:
    """One random slice, split or flatten of both."""
    labels, sizes = region.labels, region.sizes
    axis = rng.randrange(len(labels))
    label, size = labels[axis], sizes[axis]
    match rng.choice(["int", "slice", "split", "flatten"]):
        case "int" if len(labels) > 1:
            index = rng.randrange(size)
            kept = {c[:axis] + c[axis + 1 :]: r for c, r in cells.items() if c[axis] == index}
            return region.slice(**{label: index - rng.choice([0, size])}), kept
        case "slice":
            ends = [None, *range(-size - 1, size + 2)]
            key = slice(rng.choice(ends), rng.choice(ends), rng.choice([None, -2, -1, 1, 2, 3]))
            picked = {old: new for new, old in enumerate(range(size)[key])}
            if not picked:
                return region, cells
            kept = {
                (*c[:axis], picked[c[axis]], *c[axis + 1 :]): r for c, r in cells.items() if c[axis] in picked
            }
            return region.slice(**{label: key}), kept
        case "split":
            inner = rng.choice([n for n in range(1, size + 1) if size % n == 0])
            parts = (f"d{next(names)}", f"d{next(names)}")
            split = region.split(**{label: parts}, **{parts[1]: inner})
            return split, {c[:axis] + divmod(c[axis], inner) + c[axis + 1 :]: r for c, r in cells.items()}
        case "flatten":
            ranks = [cells[c] for c in sorted(cells)]
            even = len({b - a for a, b in itertools.pairwise(ranks)}) <= 1
            if even:
                return region.flatten(f"d{next(names)}"), {(i,): r for i, r in enumerate(ranks)}
            with pytest.raises(ValueError, match="not evenly spaced"):
                region.flatten("all")
    return region, cells


@pytest.mark.parametrize("seed", range(200))
def test_regions_agree_with_a_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    names = itertools.count()
    extent = Extent.of(**{f"d{next(names)}": rng.randint(1, 5) for _ in range(rng.randint(1, 4))})
    region = Region.whole(extent)
    cells: Cells = {tuple(p.values()): p.rank for p in extent.points()}
    for _ in range(rng.randint(1, 6)):
        region, cells = random_step(rng, region, cells, names)
    ranks = [cells[c] for c in sorted(cells)]
    assert region.ranks() == list(region) == list(region.ndslice) == ranks
    assert len(region) == region.extent.nelements == len(ranks)
    assert [r for r in range(extent.nelements + 1) if r in region] == sorted(ranks)
    for position, (coords, rank) in enumerate(sorted(cells.items())):
        assert region.point_of(rank) == dict(zip(region.labels, coords, strict=True))
        assert (region.position(rank), region.rank_at(position)) == (position, rank)
    other = Region.whole(extent).slice(d0=rng.randrange(extent["d0"]))
    assert region.intersection(other) == sorted(set(ranks) & set(other))
    assert region.difference(other) == sorted(set(ranks) - set(other))
    assert pickle.loads(pickle.dumps(region)) == region
