"""Loading: each process reads what it needs, whichever processes have written it."""

from __future__ import annotations

import difflib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core.extensions import find, install, progress
from mesh_tensor._checkpoint._place import CheckpointError, found
from mesh_tensor._checkpoint._save import ABOUT, forget
from mesh_tensor._checkpoint._state import flat, opened, put
from mesh_tensor._checkpoint._worker import Files, Wanted, check_whole, read_into
from mesh_tensor._descriptors import Descriptor

if TYPE_CHECKING:
    from mesh_tensor._stream import Stream

_Named = tuple[str, Any, bool]
_Read = tuple["Stream", int, list[_Named]]
S = TypeVar("S", bound=Mapping[str, Any])


def load(state: S, path: str | os.PathLike[str], *, ranks: Sequence[int] | None = None) -> S:
    """Load a checkpoint into existing tensors, on a mesh of any shape, and return the state with all other values.

    `state` names what to load. Its tensors, modules and optimizers receive the saved values in place. Nothing
    changes unless everything can be read.

    In the per-rank view, each process loads what the process of the same rank has saved. On a different number of processes, `ranks`
    gives for each process of the mesh the rank to load.
    """
    checkpoint = Checkpoint(found(Path(path).absolute()))
    prepared: list[torch.optim.Optimizer] = []
    try:
        _prepare(state, prepared)
        with progress(lambda: f"load {checkpoint.path.name}"):
            content = _load(opened(state), checkpoint, ranks)
    except BaseException:
        for optimizer in prepared:
            optimizer.state.clear()
        raise
    result: S = _closed(state, content)
    return result


def _load(content: Any, checkpoint: Checkpoint, ranks: Sequence[int] | None) -> Any:
    streams: dict[Stream, list[_Named]] = {}
    values: dict[str, tuple[Any, Any]] = {}
    with _disable_current_modes(), torch.no_grad():
        for name, (way, value) in flat(content).items():
            if isinstance(getattr(value, "descriptor", None), Descriptor):
                stacked = checkpoint.check(name, value, ranks)
                streams.setdefault(value.descriptor.stream, []).append((name, value, stacked))
            elif isinstance(value, torch.Tensor):
                checkpoint.check(name, value, ranks)
                values[name] = value, checkpoint.tensor(name)
            else:
                values[name] = way, checkpoint.value(name)
        adopting: list[_Read] = []
        try:
            for stream, wanted in streams.items():
                adopting.append((stream, next(stream.tensors.numbers), wanted))
                _read(checkpoint, *adopting[-1], ranks)
        except BaseException:
            for stream, number, _ in adopting:
                forget(stream, number)
            raise
        for stream, number, wanted in adopting:
            _adopt(stream, number, wanted)
        for place, value in values.values():
            if isinstance(place, torch.Tensor):
                place.copy_(value)
            else:
                put(content, place, value)
    return content


def _read(
    checkpoint: Checkpoint, stream: Stream, number: int, wanted: list[_Named], ranks: Sequence[int] | None
) -> None:
    stream.check()
    (find(Files) or install(Files)).install_on(stream.procs).get()
    places = stream.groups.ranks()
    sources = {
        address: rank if ranks is None or rank >= len(ranks) else ranks[rank]
        for address, rank in places.items()
    }
    asked = [Wanted(name, tensor.ref.number, stacked) for name, tensor, stacked in wanted]
    told = stream.ask(
        "checkpoint", "restore", number, str(checkpoint.path), checkpoint.metadata, sources, asked
    )
    for point, answer in stream.wait(told):
        stream.value(point, answer)


def _adopt(stream: Stream, number: int, wanted: list[_Named]) -> None:
    fresh = [stream.ref() if getattr(tensor, "is_global", False) else None for _, tensor, _ in wanted]
    named = [
        (name, tensor.ref.number, 0 if ref is None else ref.number)
        for (name, tensor, _), ref in zip(wanted, fresh, strict=True)
    ]
    for point, answer in stream.wait(stream.ask("checkpoint", "adopt", number, named)):
        stream.value(point, answer)
    for (_, tensor, _), ref in zip(wanted, fresh, strict=True):
        if ref is not None:
            issuer: Any = stream.issuer
            # An operator like others, so that views of the tensor see it.
            tensor.copy_(issuer.made(tensor.descriptor.form, ref))


class Checkpoint:
    """The content of a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.metadata: Metadata = FileSystemReader(path).read_metadata()
            about = path / ABOUT
            self.apart: dict[str, dict[str, int]] = (
                json.loads(about.read_text(encoding="utf-8"))["apart"] if about.exists() else {}
            )
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint at {path} cannot be read: {type(error).__name__}: {error}"
            ) from error
        self._check_files()

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for each in (self.metadata.storage_data or {}).values():
            ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
        for name, end in ends.items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                raise CheckpointError(
                    f"the checkpoint at {self.path} is not whole: its file {name} "
                    + ("is missing" if size is None else f"has {size} bytes of at least {end}")
                )

    def about(self, name: str) -> Any:
        """Return what is known about a value."""
        found = self.metadata.state_dict_metadata.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self.metadata.state_dict_metadata, 3)
            raise CheckpointError(
                f"the checkpoint at {self.path} has no {name!r}"
                + (f"; it has {', '.join(map(repr, near))}" if near else "")
                + ". Leave it out of the state to load the others"
            )
        return found

    def check(self, name: str, tensor: torch.Tensor, ranks: Sequence[int] | None) -> bool:
        """Raise unless a tensor can be loaded into that one; whether each process has saved one of its own."""
        saved = self.about(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{name!r} is a tensor here, and a value of another kind in {self.path}")
        sizes = self.apart.get(name)
        shape = tuple(saved.size) if sizes is None else tuple(saved.size[1:])
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name!r} has the shape {shape} in {self.path}, and {tuple(tensor.shape)} where it is to be loaded"
            )
        if sizes is None:
            return False
        count = saved.size[0]
        procs = getattr(tensor, "procs", None)
        if procs is None:
            raise CheckpointError(
                f"{name!r} in {self.path} was saved by {count} processes, each its own ({sizes}): load it into tensors of a "
                "mesh, made with share() for example"
            )
        if ranks is None and len(procs) != count:
            raise CheckpointError(
                f"{name!r} in {self.path} was saved by {count} processes, each its own, and {procs} has {len(procs)}: say with "
                "ranks= whose each is to get"
            )
        if ranks is not None and (len(ranks) != len(procs) or any(not 0 <= each < count for each in ranks)):
            raise CheckpointError(
                f"ranks= must have a number from 0 to {count - 1} for each of the {len(procs)} processes of {procs}, got {list(ranks)}"
            )
        return True

    def tensor(self, name: str, rank: int | None = None) -> torch.Tensor:
        """Read a tensor here: all of it, or what one process has saved."""
        saved = self.metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata), "looked at before"
        offsets, shape = [0] * len(saved.size), list(saved.size)
        if rank is not None:
            offsets[0], shape[0] = rank, 1
        whole = torch.empty(shape, dtype=saved.properties.dtype)
        items = create_read_items_for_chunk_list(
            name, saved, [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))]
        )
        check_whole(name, items, whole)
        read_into(str(self.path), self.metadata, items, {name: whole})
        return whole if rank is None else whole[0]

    def value(self, name: str) -> Any:
        """Read a value that is not a tensor."""
        if not isinstance(self.about(name), BytesStorageMetadata):
            raise CheckpointError(
                f"{name!r} is a tensor in {self.path}, and a value of another kind where it is to be loaded"
            )
        where = self.metadata.storage_data[MetadataIndex(name)]
        with (self.path / where.relative_path).open("rb") as file:
            file.seek(where.offset)
            return torch.load(io.BytesIO(file.read(where.length)), weights_only=False)


def _prepare(state: Any, prepared: list[torch.optim.Optimizer]) -> None:
    """Give optimizers that have not taken a step yet the state that is to be loaded."""
    if isinstance(state, torch.optim.Optimizer):
        parameters = [each for group in state.param_groups for each in group["params"] if each.requires_grad]
        if state.state or not parameters:
            return
        prepared.append(state)
        before = [(each, each.grad) for each in parameters]
        rates = [(group, group["lr"]) for group in state.param_groups]
        try:
            for each in parameters:
                each.grad = torch.zeros_like(each)
            for group, rate in rates:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            state.step()
        finally:
            for each, gradient in before:
                each.grad = gradient
            for group, rate in rates:
                group["lr"] = rate
    elif isinstance(state, Mapping):
        for each in state.values():
            _prepare(each, prepared)


def _closed(state: Any, content: Any) -> Any:
    """Give modules and optimizers their state, and return the state with these in it."""
    if isinstance(state, torch.nn.Module):
        # Tensors have their values already; this is for other values of a module.
        extra = {key: value for key, value in content.items() if not isinstance(value, torch.Tensor)}
        if extra:
            state.load_state_dict(extra, strict=False)
        return state
    if callable(getattr(state, "load_state_dict", None)):
        state.load_state_dict(content)
        return state
    if isinstance(state, Mapping):
        return {key: _closed(value, content[key]) for key, value in state.items()}
    return content
