"""Where in a version each tensor lies, what it is, and which part of a larger one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq, is_, methodcaller
from typing import Any

from mesh_rdma._errors import InvalidTransfer

LINE = 64
"""Tensors begin at multiples of this."""


@dataclass(frozen=True)
class Piece:
    """Which part of a whole tensor a process has.

    >>> from mesh_rdma import Piece
    >>> Piece(whole=(8, 4), start=(2, 0), shape=(2, 4))  # rows 2 and 3 of 8
    Piece(whole=(8, 4), start=(2, 0), shape=(2, 4))
    """

    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    start: tuple[int, ...]
    """Where the part begins, in each dimension."""
    shape: tuple[int, ...]
    """The shape of the part."""

    def __post_init__(self) -> None:
        for field in ("whole", "start", "shape"):
            object.__setattr__(self, field, tuple(int(size) for size in getattr(self, field)))
        if not len(self.whole) == len(self.start) == len(self.shape):
            raise InvalidTransfer(
                f"whole, start and shape of a piece must be of one length, got {self.whole}, {self.start}, {self.shape}"
            )
        for size, start, length in zip(self.whole, self.start, self.shape, strict=True):
            if start < 0 or length < 0 or start + length > size:
                raise InvalidTransfer(
                    f"a piece must lie in the whole, got start {self.start} and shape {self.shape} of {self.whole}"
                )


@dataclass(frozen=True)
class Entry:
    """One tensor in a version."""

    name: str
    library: str
    """What makes it from bytes: ``numpy``, ``torch``, or ``None`` for plain bytes."""
    dtype: str
    item: int
    offset: int
    piece: Piece

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        count = self.item
        for size in self.piece.shape:
            count *= size
        return count

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.piece.shape == self.piece.whole


class Layout:
    """All of them, by name."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.nbytes = max((entry.offset + entry.nbytes for entry in entries), default=0)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def encode(self) -> bytes:
        """Return it as bytes."""
        rows = [
            (
                (each.name, each.library, each.dtype, each.item, each.offset),
                (each.piece.whole, each.piece.start, each.piece.shape),
            )
            for each in self
        ]
        return json.dumps(rows).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Return what was encoded."""
        return cls(
            [
                Entry(name, library, dtype, item, offset, Piece(*piece))
                for (name, library, dtype, item, offset), piece in json.loads(data)
            ]
        )


@dataclass(frozen=True)
class Kind:
    """What an array or tensor is."""

    library: str
    dtype: str
    item: int
    shape: tuple[int, ...]


def kind_of(name: str, value: Any) -> Kind:
    """Return what a value of a state dict is; neither numpy nor PyTorch is imported for it."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Kind("torch", dtype, value.element_size(), tuple(value.shape))
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.hasobject or numpy.dtype(value.dtype.str) != value.dtype:
            raise InvalidTransfer(
                f"'{name}' has the dtype {value.dtype}, which cannot be published. View it as a plain one, such as uint16."
            )
        # One name for one type in both libraries; other byte orders are numpy's own.
        native = value.dtype.isnative and value.dtype.kind in "biufc"
        return Kind(
            "numpy", value.dtype.name if native else value.dtype.str, value.dtype.itemsize, value.shape
        )
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidTransfer(
            f"'{name}' must be an array of numpy, a tensor of PyTorch or a bytes-like object, got {type(value).__name__}"
        ) from None
    if not view.c_contiguous:
        raise InvalidTransfer(f"'{name}' must be contiguous, as plain bytes are")
    return Kind("", "bytes", 1, (view.nbytes,))


def is_elsewhere(value: Any) -> bool:
    """Return whether it is a tensor in the memory of an accelerator, where only PyTorch copies."""
    device = getattr(value, "device", None)
    return hasattr(value, "data_ptr") and getattr(device, "type", "cpu") != "cpu"


def local_of(name: str, value: Any) -> tuple[Any, Piece | None]:
    """Return the tensor of this process, and which part it is if it says so itself, as a DTensor does."""
    placements, mesh = getattr(value, "placements", None), getattr(value, "device_mesh", None)
    if placements is None or mesh is None or not hasattr(value, "to_local"):
        return value, None
    whole = tuple(int(size) for size in value.shape)
    start, shape = [0] * len(whole), list(whole)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidTransfer(f"'{name}' has no part in this process: it is not in the tensor's device mesh")
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard():
            raise InvalidTransfer(
                f"'{name}' is placed as {placement}; only replicated and sharded dimensions can be published. Redistribute it first."
            )
        # As PyTorch splits: all parts of the same length, except the last ones.
        at, count, here = placement.dim % len(whole), int(mesh.size(dim)), int(coordinate[dim])
        each = -(-shape[at] // count)
        first = min(each * here, shape[at])
        start[at] += first
        shape[at] = min(each, shape[at] - first)
    local = value.to_local()
    if tuple(local.shape) != tuple(shape):
        raise InvalidTransfer(
            f"'{name}' should have a part of shape {tuple(shape)} in this process, got {tuple(local.shape)}"
        )
    return local, Piece(whole, tuple(start), tuple(shape))


def parts_of(
    state: Mapping[str, Any], pieces: Mapping[str, Piece] | None
) -> Iterator[tuple[str, Any, Kind, Piece]]:
    """Yield the name, the tensor of this process, what it is, and which part, of all of a state dict."""
    pieces = pieces or {}
    unknown = [name for name in pieces if name not in state]
    if unknown:
        raise InvalidTransfer(f"pieces names '{unknown[0]}', which the state dict does not have")
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidTransfer(f"names must be strings, got {name!r}")
        local, said = local_of(name, value)
        kind = kind_of(name, local)
        piece = pieces.get(name) or said or Piece(kind.shape, (0,) * len(kind.shape), kind.shape)
        if piece.shape != kind.shape:
            raise InvalidTransfer(f"'{name}' has the shape {kind.shape}, and its piece {piece.shape}")
        yield name, local, kind, piece


Part = tuple[str, Any, Kind, Piece]


class Parts:
    """The tensors of the state dict that was read last: only what has changed since is read again."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def of(self, state: Mapping[str, Any], pieces: Mapping[str, Piece] | None) -> list[Part]:
        """Return what `parts_of` yields: the same list, if it is the same."""
        given = dict(pieces or {})
        known = self._known
        if known is not None and known.given == given and known.is_of(state):
            return known.parts
        parts = list(parts_of(state, pieces))
        self._known = _Known(state, given, parts)
        return parts


Look = Callable[[Any], object]

# They cannot be resized as long as they are in use here.
_BYTES: tuple[Look, ...] = (len,)
_ARRAY: tuple[Look, ...] = (attrgetter("shape"), attrgetter("dtype"))
_TENSOR: tuple[Look, ...] = (*_ARRAY, methodcaller("data_ptr"), methodcaller("stride"))
_OTHER: tuple[Look, ...] = (lambda _: object(),)
"""Never equals an earlier state."""


class _Known:
    """What was read.

    There may be tens of thousands of tensors. Reading them again is a pass over all for each of their properties, in which nothing
    is kept: kept objects would make the garbage collector walk over all of them, which takes longer than the pass.
    """

    def __init__(self, state: Mapping[str, Any], given: dict[str, Piece], parts: list[Part]) -> None:
        self.given, self.parts = given, parts
        self._names, self._values = list(state), list(state.values())
        kinds: dict[tuple[Look, ...], list[Any]] = {}
        for value in self._values:
            kinds.setdefault(_looks_at(value), []).append(value)
        self._looks = [
            (look, values, list(map(look, values))) for looks, values in kinds.items() for look in looks
        ]

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Whether these are the same tensors, where they were and what they were."""
        return (
            list(state) == self._names
            and all(map(is_, state.values(), self._values))
            and all(all(map(eq, map(look, values), shown)) for look, values, shown in self._looks)
        )


def _looks_at(value: Any) -> tuple[Look, ...]:
    """Return a function that says whether a value is where and what it was."""
    if hasattr(value, "to_local"):
        return _OTHER
    if hasattr(value, "data_ptr"):
        return _TENSOR
    if isinstance(value, (bytes, bytearray)):
        return _BYTES
    return _ARRAY if hasattr(value, "dtype") else _OTHER


def layout_of(parts: Sequence[tuple[str, Any, Kind, Piece]]) -> Layout:
    """Lay out a version, one tensor behind the other."""
    entries: list[Entry] = []
    offset = 0
    for name, _, kind, piece in parts:
        entry = Entry(name, kind.library, kind.dtype, kind.item, offset, piece)
        entries.append(entry)
        offset += -(-entry.nbytes // LINE) * LINE
    return Layout(entries)
