"""A version as a reader has it: under a lease, and where it lies."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mesh_rdma._errors import InvalidTransfer
from mesh_rdma._publication._layout import Entry

if TYPE_CHECKING:
    from mesh_rdma._publication._reader import Lease


class _Mapping(mmap.mmap):
    """Memory that keeps its lease: a reference to one keeps the other."""

    lease: Lease


def map_lease(lease: Lease, *, writable: bool = False) -> tuple[memoryview, _Mapping]:
    """Return the version's bytes, which keep the lease, and their keeper. Writes to them are visible only to this process."""
    view, mapping = map_slot(lease, writable=writable)
    mapping.lease = lease
    return view, mapping


def map_slot(lease: Lease, *, writable: bool = False) -> tuple[memoryview, _Mapping]:
    """Return the same without keeping the lease: for short-lived use while there is one."""
    skip = lease.offset % mmap.ALLOCATIONGRANULARITY
    length = skip + max(lease.layout.nbytes, 1)
    start = lease.offset - skip
    if writable:
        # PyTorch has no read-only memory. Changes stay in this mapping, which belongs to no other lease.
        flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    else:
        flags, protection = mmap.MAP_SHARED, mmap.PROT_READ
    mapping = _Mapping(lease.slot, length, flags=flags, prot=protection, offset=start)
    return memoryview(mapping)[skip : skip + lease.layout.nbytes], mapping


class Weights(Mapping[str, Any]):
    """A version of a publication: its tensors by name, as arrays in shared memory. Created by ``PublicationReader.use()``.

    numpy arrays are read-only. PyTorch tensors can be written to, which affects neither other readers nor the
    publication. Each array keeps the version: it does not change, and its slot is not reused, until the last of them is garbage.
    """

    version: int
    """Its number, such as to stamp it on what was made with it."""

    def __init__(self, leases: list[Lease]) -> None:
        self.version = leases[0].version
        self.incarnations = tuple(lease.incarnation for lease in leases)
        """The lives of the owners: two versions with one number are the same only if these are."""
        self._places: dict[str, tuple[Lease, Entry]] = {}
        for lease in leases:
            for entry in lease.layout:
                known = self._places.get(entry.name)
                if known is None or (entry.is_whole and not known[1].is_whole):
                    self._places[entry.name] = (lease, entry)
        self._leases: list[Lease] | None = leases
        self._mapped: dict[tuple[int, bool], memoryview] = {}

    def __getitem__(self, name: str) -> Any:
        if self._leases is None:
            raise InvalidTransfer(
                f"version {self.version} was released; use the weights inside of their with block"
            )
        lease, entry = self._places[name]
        if not entry.is_whole:
            raise InvalidTransfer(
                f"'{name}' is published in pieces, of which this is {entry.piece}. Use load_into to put them together."
            )
        return view_of(entry, self._bytes(lease, writable=entry.library == "torch"))

    def _bytes(self, lease: Lease, *, writable: bool) -> memoryview:
        key = (id(lease), writable)
        if key not in self._mapped:
            self._mapped[key], _ = map_lease(lease, writable=writable)
        return self._mapped[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def release(self) -> None:
        """Release the lease; the end of a ``with`` block does this. Arrays that are still referenced keep it."""
        self._leases = None
        self._places = {name: (None, entry) for name, (_, entry) in self._places.items()}  # type: ignore[misc]
        self._mapped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Weights: version {self.version}, {len(self)} tensors>"


def view_of(entry: Entry, memory: memoryview) -> Any:
    """Return an array on the bytes of a version."""
    part = memory[entry.offset : entry.offset + entry.nbytes]
    if entry.library == "numpy":
        import numpy

        return numpy.frombuffer(part, entry.dtype).reshape(entry.piece.shape)
    if entry.library == "torch":
        import torch

        dtype = getattr(torch, entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.piece.shape, dtype=dtype)
        return torch.frombuffer(part, dtype=dtype).view(entry.piece.shape)
    return part
