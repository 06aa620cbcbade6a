"""Which parts of which senders make up what a reader wants."""

import random

import pytest

from mesh_rdma._publication._boxes import Box, cover, grid

np = pytest.importorskip("numpy")


def cut(dice, start, stop, depth=0):
    """Cut a box into some that cover it."""
    if depth == 3 or dice.random() < 0.3:
        return [Box(tuple(start), tuple(stop))]
    dim = dice.randrange(len(start))
    at = dice.randint(start[dim], stop[dim])
    low, high = list(stop), list(start)
    low[dim] = high[dim] = at
    return cut(dice, start, low, depth + 1) + cut(dice, high, stop, depth + 1)


@pytest.mark.parametrize("seed", range(40))
def test_parts_make_up_what_is_wanted_and_nothing_twice(seed):
    dice = random.Random(seed)
    shape = [dice.randint(1, 7) for _ in range(dice.randint(1, 3))]
    whole = np.arange(np.prod(shape)).reshape(shape)
    offers = cut(dice, [0] * len(shape), shape)
    # Some are there twice, as replicas are.
    offers += dice.choices(offers, k=2)
    dice.shuffle(offers)
    for wanted in cut(dice, [0] * len(shape), shape):
        parts, missing = cover(wanted, offers, dice.randrange(20))
        assert not missing
        found = np.full(whole.shape, -1)
        for at, box in parts:
            assert not box.is_empty and box.meet(offers[at]) == box
            place = tuple(map(slice, box.start, box.stop))
            assert (found[place] == -1).all()
            found[place] = whole[place]
        place = tuple(map(slice, wanted.start, wanted.stop))
        assert np.array_equal(found[place], whole[place])
        assert (found != -1).sum() == whole[place].size


def test_what_nobody_offers_is_named():
    parts, missing = cover(Box((0, 0), (4, 4)), [Box((0, 0), (2, 4)), Box((2, 0), (4, 3))])
    assert len(parts) == 2
    assert missing == [Box((2, 3), (4, 4))]


@pytest.mark.parametrize("seed", range(40))
def test_the_pieces_of_a_grid_are_the_bytes_of_the_box_in_order(seed):
    dice = random.Random(seed)
    shape = [dice.randint(1, 5) for _ in range(dice.randint(0, 4))]
    start = [dice.randint(0, size) for size in shape]
    box = Box(tuple(start), tuple(dice.randint(low, size) for low, size in zip(start, shape, strict=True)))
    if box.is_empty:
        return
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    data = whole.tobytes()
    lies = grid(shape, box, 4)
    starts = [lies.offset]
    for count, step in zip(lies.counts, lies.steps, strict=True):
        starts = [at + n * step for at in starts for n in range(count)]
    found = b"".join(data[at : at + lies.run] for at in starts)
    assert found == whole[tuple(map(slice, box.start, box.stop))].tobytes()


def test_whole_rows_are_one_piece():
    assert grid((8, 16, 4), Box((2, 0, 0), (6, 16, 4)), 4) == (512, [], [], 1024)
    assert grid((8, 16, 4), Box((2, 0, 0), (6, 16, 2)), 4) == (512, [4, 16], [256, 16], 8)
    assert grid((8, 16, 4), Box((2, 3, 0), (3, 4, 4)), 4) == (560, [], [], 16)
