"""Versions made from the one before and what has changed (DLT-1)."""

import random

import pytest

from mesh_rdma._publication._delta import apply, encode
from mesh_rdma._publication._layout import layout_of, parts_of

np = pytest.importorskip("numpy", reason="numpy is not installed here")


def made(state, rng):
    """A layout, and memory of one version."""
    layout = layout_of(list(parts_of(state, None)))
    return layout, np.frombuffer(rng.bytes(max(layout.nbytes, 1)), np.uint8).copy()


def changed(old, share, rng):
    """The same with some bytes changed."""
    new = old.copy()
    places = rng.choice(len(old), int(len(old) * share), replace=False)
    new[places] ^= rng.integers(1, 256, len(places), np.uint8)
    return new


STATES = {
    "bytes": {"a": bytearray(1000)},
    "halves": {"a": np.zeros((300, 7), np.float16), "b": np.zeros(5, np.float16)},
    "mixed": {
        "a": np.zeros(3, np.float32), "b": np.zeros(129, np.int8), "c": np.zeros((0, 4)), "d": np.zeros(33, np.float64),
        "e": np.zeros(10, np.complex128), "f": np.zeros((), np.float16),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("seed", range(20))
def test_old_and_delta_make_the_new_version(name, seed):
    rng = np.random.default_rng(seed)
    layout, old = made(STATES[name], rng)
    share = random.Random(seed).choice([0.0, 0.002, 0.02, 0.1])
    new = changed(old, share, rng)
    delta = encode(layout, memoryview(old), memoryview(new))
    if delta is None:
        assert share == 0.1
        return
    apply(layout, memoryview(delta), memoryview(old))
    assert (old == new).all()


def test_steps_over_long_distances_and_over_pieces():
    layout, old = made(
        {"a": np.zeros((1 << 23) + 5000, np.uint16), "b": np.zeros(100, np.int8)}, np.random.default_rng(1)
    )
    new = old.copy().view(np.uint16)
    for place in (0, 1, 254, 255, 256, 510, 511, 100_000, (1 << 23) - 1, 1 << 23, len(new) - 1):
        new[place] ^= 1
    delta = encode(layout, memoryview(old), memoryview(new.view(np.uint8)))
    assert delta is not None
    apply(layout, memoryview(delta), memoryview(old))
    assert (old == new.view(np.uint8)).all()


def test_two_elements_of_a_hundred_take_three_bytes_each():
    layout, old = made({"a": np.zeros(1_000_000, np.float16)}, np.random.default_rng(2))
    new = old.copy().view(np.uint16)
    new[np.random.default_rng(3).choice(len(new), len(new) // 50, replace=False)] ^= 1
    delta = encode(layout, memoryview(old), memoryview(new.view(np.uint8)))
    assert delta is not None and len(delta) < 0.032 * layout.nbytes


def test_what_has_changed_all_over_is_sent_whole():
    layout, old = made({"a": np.zeros(10_000, np.float32)}, np.random.default_rng(4))
    assert encode(layout, memoryview(old), memoryview(~old)) is None
    layout, nothing = made({"a": np.zeros(0)}, np.random.default_rng(5))
    assert encode(layout, memoryview(nothing), memoryview(nothing)) is None or layout.nbytes == 0
