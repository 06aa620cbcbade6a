"""Which parts of which senders make up a part that a reader wants: arithmetic on boxes, and on the bytes of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Box:
    """A part of an array: where it begins and ends in each dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return any(stop <= start for start, stop in zip(self.start, self.stop, strict=True))

    def meet(self, other: Box) -> Box:
        """Return what both have."""
        starts = tuple(map(max, self.start, other.start))
        return Box(starts, tuple(map(max, starts, map(min, self.stop, other.stop))))

    def without(self, other: Box) -> Iterator[Box]:
        """Yield boxes of all that the other, which lies within this, does not have."""
        start, stop = list(self.start), list(self.stop)
        for dim, (low, high) in enumerate(zip(other.start, other.stop, strict=True)):
            for part in ((start[dim], low), (high, stop[dim])):
                if part[0] < part[1]:
                    yield Box(
                        (*start[:dim], part[0], *start[dim + 1 :]), (*stop[:dim], part[1], *stop[dim + 1 :])
                    )
            start[dim], stop[dim] = low, high

    def within(self, start: Sequence[int]) -> Box:
        """Return the same, counted from another place."""
        return Box(
            tuple(at - zero for at, zero in zip(self.start, start, strict=True)),
            tuple(at - zero for at, zero in zip(self.stop, start, strict=True)),
        )


def cover(wanted: Box, offered: Sequence[Box], first: int = 0) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Return which box of which offer makes up what is wanted, no byte twice, and what nobody offers.

    Offers are searched from the ``first`` on, so that readers that start at different ones share the work.
    """
    parts: list[tuple[int, Box]] = []
    missing = [wanted] if not wanted.is_empty else []
    for turn in range(len(offered)):
        at = (first + turn) % len(offered)
        rest: list[Box] = []
        for box in missing:
            common = box.meet(offered[at])
            if common.is_empty:
                rest.append(box)
            else:
                parts.append((at, common))
                rest.extend(box.without(common))
        missing = rest
        if not missing:
            break
    return parts, missing


class Grid(NamedTuple):
    """The pieces of a box, which are of one length: where the first one begins, how many in each dimension, and how far apart."""

    offset: int
    counts: list[int]
    steps: list[int]
    run: int


def grid(shape: Sequence[int], box: Box, item: int) -> Grid:
    """Return the pieces of a box that lie in one in a contiguous array, in bytes. Without counts it is one piece."""
    steps, step = [], item
    for size in reversed(shape):
        steps.append(step)
        step *= size
    steps.reverse()
    # From here on all dimensions are whole, so a piece covers them, and a part of the dimension before.
    inner = len(shape)
    while inner > 0 and box.start[inner - 1] == 0 and box.stop[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    sizes = box.shape
    run = item
    for size in sizes[inner:]:
        run *= size
    base = sum(at * step for at, step in zip(box.start, steps, strict=True))
    outer = [(size, step) for size, step in zip(sizes[:inner], steps, strict=False) if size != 1]
    return Grid(base, [size for size, _ in outer], [step for _, step in outer], run)
