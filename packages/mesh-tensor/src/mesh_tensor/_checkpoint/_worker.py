"""The part of a mesh's process in a checkpoint: it copies its tensors, plans, writes its files, and reads them again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Partial, Replicate

from mesh_core import MeshError
from mesh_core.extensions import Extension, Proc, find
from mesh_tensor._checkpoint._place import writing
from mesh_tensor._instructions import LOST, Failed, sent
from mesh_tensor._torch._dtensor import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh_core import Future
    from mesh_tensor._bench import Bench

Chunks = dict[tuple[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    """A tensor to read."""

    name: str
    ref: int
    stacked: bool
    """Whether each process has one of its own."""


def snapshot(bench: Bench, number: int, ranks: dict[Any, int], named: list[tuple[str, int]]) -> Any:
    """Keep copies of tensors as they are now, and return what there is to write."""
    rank = ranks[bench.address]
    items: list[WriteItem] = []
    chunks: Chunks = {}
    for name, ref in named:
        tensor = bench.find(ref)
        failed = getattr(tensor, "_mesh_failed", None)
        if failed is not None or tensor is LOST or type(tensor) is Failed:
            return "value", (name, sent(failed or tensor))
        if isinstance(tensor, DTensor):
            local, size, offsets = _part(bench, tensor)
        else:
            local = tensor.detach().unsqueeze(0)
            size, offsets = (len(ranks), *tensor.shape), (rank, *[0] * tensor.dim())
        if not local.numel() and 0 not in size:
            continue  # An uneven split leaves this process nothing.
        copy = local.to("cpu", copy=True, memory_format=torch.contiguous_format)
        chunks[name, tuple(offsets)] = copy
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=copy.shape),
            properties=TensorProperties.create_from_tensor(copy),
            size=torch.Size(size),
        )
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    _kept()[number] = chunks
    return "value", SavePlan(items, planner_data={})


def _part(bench: Bench, tensor: DTensor) -> tuple[torch.Tensor, Sequence[int], Sequence[int]]:
    bench.refresh(tensor)
    if any(isinstance(each, Partial) for each in tensor.placements):
        whole = [Replicate() if isinstance(each, Partial) else each for each in tensor.placements]
        tensor = tensor.redistribute(tensor.device_mesh, whole)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(tensor.shape), offsets


def restore(  # noqa: PLR0917 - as it is sent
    bench: Bench,
    number: int,
    path: str,
    metadata: Metadata,
    sources: dict[Any, int] | None,
    wanted: list[Wanted],
) -> Any:
    """Read tensors, beside the existing ones."""
    read: dict[str, Any] = {}
    locals_: dict[str, torch.Tensor] = {}
    items: list[ReadItem] = []
    for each in wanted:
        saved = metadata.state_dict_metadata[each.name]
        assert isinstance(saved, TensorStorageMetadata), "the controller has looked"
        there = bench.find(each.ref)
        offsets: Sequence[int] = [0] * len(saved.size)
        shape: Sequence[int] = saved.size
        dtype = there.dtype if isinstance(there, torch.Tensor) else saved.properties.dtype
        if isinstance(there, DTensor):
            if any(isinstance(one, Partial) for one in there.placements):
                raise MeshError(
                    f"{each.name!r} lies as summands on the mesh: load it into one that is sharded or replicated"
                )
            shape, offsets = compute_local_shape_and_global_offset(
                there.shape, there.device_mesh, there.placements
            )
        elif each.stacked:
            assert sources is not None, "the controller has asked"
            offsets, shape = [sources[bench.address], *offsets[1:]], (1, *saved.size[1:])
        local = torch.empty(shape, dtype=dtype)
        mine = create_read_items_for_chunk_list(
            each.name, saved, [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))]
        )
        check_whole(each.name, mine, local)
        items += mine
        locals_[each.name] = local
        read[each.name] = local[0] if each.stacked else local
        if isinstance(there, DTensor):
            on_device = local.to(there.to_local().device)
            read[each.name] = (there, on_device)
    read_into(path, metadata, items, locals_)
    _kept()[number] = read
    return "value", None


def adopt(bench: Bench, number: int, refs: list[tuple[str, int, int]]) -> Any:
    """Replace tensors by what was read: in their memory, or under a new name."""
    read = _kept().pop(number)
    for name, ref, fresh in refs:
        value = read[name]
        if isinstance(value, tuple):
            like, local = value
            bench.env[fresh] = DTensor(local, like._spec, requires_grad=False)  # noqa: SLF001 - the same layout
            continue
        there = bench.find(ref)
        if isinstance(there, torch.Tensor) and not isinstance(there, DTensor):
            there.copy_(value)
        else:
            bench.env[ref] = value
    return "value", None


def discard(_bench: Bench, number: int) -> Any:
    """Drop what was kept."""
    _kept().pop(number, None)
    return "value", None


def read_into(path: str, metadata: Metadata, items: list[ReadItem], tensors: dict[str, torch.Tensor]) -> None:
    """Read pieces into tensors."""
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(LoadPlan(items), _Into(tensors)).wait()


def check_whole(name: str, items: list[ReadItem], tensor: torch.Tensor) -> None:
    """Raise if a checkpoint does not have all of a tensor."""
    if sum(torch.Size(each.lengths).numel() for each in items) != tensor.numel():
        raise MeshError(f"the checkpoint has not all of {name!r}: it is not whole")


class _From(DefaultSavePlanner):
    """Provides what is written."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__()
        self.chunks = chunks

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return a piece of a tensor."""
        index = write_item.index
        assert index.offset is not None, "these are tensors"
        return self.chunks[index.fqn, tuple(index.offset)]


class _Into(DefaultLoadPlanner):
    """Says where read data goes."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return a piece of a tensor."""
        piece = self.tensors[read_item.dest_index.fqn]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            piece = piece.narrow(dim, start, length)
        return piece

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: it is there already."""


class Files(Extension):
    """Writes the files of a process in the background."""

    name = "mesh_tensor.files"

    def start(self) -> None:
        """Have nothing."""
        self.kept: dict[int, Any] = {}
        self.last: dict[Path, Future[Path]] = {}
        """At a controller: what is being saved to each path."""

    async def receive(self, message: tuple[Any, ...], sender: Proc) -> Any:
        """Write what was kept."""
        number, path, target, plan = message
        kept = self.kept.pop(number, None)
        if not plan.items:
            return []
        return await asyncio.to_thread(write, path, target, plan, kept)


def write(path: str, target: str, plan: SavePlan, chunks: Chunks) -> Any:
    """Write a plan."""
    with writing(target):
        return FileSystemWriter(path).write_data(plan, _From(chunks)).wait()


def _kept() -> dict[int, Any]:
    files = find(Files)
    assert files is not None, "installed by the controller"
    return files.kept
