"""Copying a version into tensors of this process: planned once, from what is published and what is wanted."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mesh_rdma._action import RDMAAction, carry_out
from mesh_rdma._errors import InvalidTransfer
from mesh_rdma._memory import memory_of, writable_memory_of
from mesh_rdma._native import Boxes, Memory
from mesh_rdma._publication._boxes import Box, Grid, cover, grid
from mesh_rdma._publication._layout import Entry, Layout, Part, Piece, is_elsewhere
from mesh_rdma._publication._weights import map_lease, map_slot, view_of

if TYPE_CHECKING:
    from mesh_rdma._publication._reader import Lease
_MOST_PIECES = 1 << 20
"""Beyond this number of targets, the engine lists none."""


class Load:
    """What is copied from where, and what does it.

    A part that lies in one piece is read by the engine, by one action for each slot. One that lies in several, such as columns of
    a matrix, is copied out of the slot as it is mapped here: 0.1 us a piece, where the kernel's calls take 1 us, and numpy 0.4.
    """

    def __init__(
        self, layouts: Sequence[Layout], sources: Sequence[str], parts: Sequence[Part], cast: bool
    ) -> None:
        self._layouts, self._given, self._cast = list(layouts), parts, cast
        self._copies: list[list[tuple[int, Any]]] = [[] for _ in layouts]
        """By source: the byte to begin at, and the memory to fill."""
        self._casts: list[list[tuple[Entry, tuple[slice, ...], Any]]] = [[] for _ in layouts]
        self._pieces: list[list[tuple[Grid, Any]]] = [[] for _ in layouts]
        """By source: what lies in several pieces, and the memory to fill."""
        self._boxes: list[Boxes | None] = [None for _ in layouts]
        self._actions: dict[bytes, RDMAAction] = {}
        self._mapped: dict[bytes, Memory] = {}
        """Slots, mapped once: the faults of 1 GiB take longer than its copy."""
        # Readers that have equal neighbours do not all take it from the first.
        first = os.getpid()
        for part in parts:
            self._plan(part, sources, first)

    def _plan(self, part: Part, sources: Sequence[str], first: int) -> None:
        name, value, kind, piece = part
        found = [
            (at, layout.entries[name]) for at, layout in enumerate(self._layouts) if name in layout.entries
        ]
        if not found:
            raise InvalidTransfer(f"'{name}' is not published by {' or '.join(sources)}")
        for _, entry in found:
            if entry.piece.whole != piece.whole:
                raise InvalidTransfer(
                    f"'{name}' is published with the shape {entry.piece.whole}, and wanted with {piece.whole}"
                )
            if not self._cast and (entry.dtype, entry.item) != (kind.dtype, kind.item):
                raise InvalidTransfer(
                    f"'{name}' is published as {entry.dtype}, and wanted as {kind.dtype}. Allow the conversion by cast=True."
                )
        offers = [_box(entry.piece) for _, entry in found]
        covered, missing = cover(_box(piece), offers, first)
        if missing:
            raise InvalidTransfer(
                f"'{name}' is published in pieces that lack the part from {missing[0].start} to {missing[0].stop}"
            )
        for index, box in covered:
            at, entry = found[index]
            here, there = box.within(piece.start), box.within(entry.piece.start)
            target = _part(value, here, kind.shape)
            if (entry.dtype, entry.item) != (kind.dtype, kind.item) or is_elsewhere(value):
                self._casts[at].append((entry, _slices(there), target))
                continue
            lies = grid(entry.piece.shape, there, entry.item)
            lies = lies._replace(offset=entry.offset + lies.offset)
            if math.prod(lies.counts) > _MOST_PIECES and entry.library:
                self._casts[at].append((entry, _slices(there), target))
            elif not lies.counts:
                self._copies[at].append((lies.offset, target))
            elif lies.run:
                self._pieces[at].append((lies, target))

    def fits(self, layouts: Sequence[Layout], parts: Sequence[Part], cast: bool) -> bool:
        """Whether it is of these layouts and tensors."""
        return (
            cast == self._cast
            and parts is self._given
            and all(one is other for one, other in zip(layouts, self._layouts, strict=True))
        )

    def run(self, leases: Sequence[Lease], timeout: float | None) -> None:
        """Copy the version of these leases."""

        def convert() -> None:
            for at, lease in enumerate(leases):
                if self._pieces[at]:
                    self._gather(at, lease)
                if self._casts[at]:
                    self._convert(self._casts[at], lease)

        # Until it is over, the tensors are written to, and the leases are needed.
        carry_out(
            (self._action(at, lease) for at, lease in enumerate(leases) if self._copies[at]), timeout, convert
        )

    def _action(self, at: int, lease: Lease) -> RDMAAction:
        action = self._actions.get(lease.handle)
        if action is None:
            action = RDMAAction()
            for offset, target in self._copies[at]:
                action.read_remote(target, lease.buffer, offset=offset)
            self._actions[lease.handle] = action
        return action

    def _gather(self, at: int, lease: Lease) -> None:
        boxes = self._boxes[at]
        if boxes is None:
            boxes = self._boxes[at] = Boxes(
                [(*lies, writable_memory_of(target)) for lies, target in self._pieces[at]]
            )
        mapped = self._mapped.get(lease.handle)
        if mapped is None:
            mapped = self._mapped[lease.handle] = memory_of(map_slot(lease)[0])
        boxes.copy(mapped)

    @staticmethod
    def _convert(casts: list[tuple[Entry, tuple[slice, ...], Any]], lease: Lease) -> None:
        for library in ("numpy", "torch"):
            some = [each for each in casts if each[0].library == library]
            if not some:
                continue
            memory, _ = map_lease(lease, writable=library == "torch")
            for entry, slices, target in some:
                _copy(view_of(entry, memory)[slices], target)


def _copy(source: Any, target: Any) -> None:
    if hasattr(target, "copy_"):
        import torch

        target.copy_(source if isinstance(source, torch.Tensor) else torch.as_tensor(source.copy()))
    elif hasattr(source, "numpy"):
        try:
            target[...] = source.numpy()
        except TypeError:
            # numpy has no such type, as bfloat16 and the 8-bit ones; float32 has all their values.
            target[...] = source.float().numpy()
    else:
        target[...] = source


def _box(piece: Piece) -> Box:
    return Box(piece.start, tuple(at + size for at, size in zip(piece.start, piece.shape, strict=True)))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))


def _part(value: Any, box: Box, shape: tuple[int, ...]) -> Any:
    """Return a part of an array, as a view."""
    if box.shape == shape:
        return value
    slices = _slices(box)
    return (
        memoryview(value).cast("B")[slices[0]]
        if isinstance(value, (bytearray, memoryview))
        else value[slices]
    )
