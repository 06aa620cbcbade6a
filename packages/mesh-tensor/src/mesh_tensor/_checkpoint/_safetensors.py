"""A checkpoint as one file of the format of safetensors: a header in JSON, then the numbers."""

from __future__ import annotations

import json
import os
import struct
import uuid
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mesh_core.extensions import naming
from mesh_tensor._checkpoint._load import Checkpoint
from mesh_tensor._checkpoint._place import CheckpointError, found

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export_safetensors(
    checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], *, prefix: str = "", rank: int = 0
) -> None:
    """Write the tensors of a checkpoint to one safetensors file.

    Only names that start with `prefix` are written, without the prefix. For tensors that differ between processes, those of
    one `rank` are written. Values that are not tensors are left out. Only one tensor is in memory at a time.
    """
    source = Checkpoint(found(Path(checkpoint).absolute()))
    header: dict[str, object] = {}
    end = 0
    chosen: list[str] = []
    for name, saved in sorted(source.metadata.state_dict_metadata.items()):
        if not name.startswith(prefix) or not isinstance(saved, TensorStorageMetadata):
            continue
        dtype = saved.properties.dtype
        if dtype not in _NAMES:
            raise CheckpointError(f"{name!r} is of {dtype}, for which the format of safetensors has no name")
        apart = name in source.apart
        if apart and not 0 <= rank < saved.size[0]:
            raise CheckpointError(
                f"rank {rank} has saved no {name!r}: ranks from 0 to {saved.size[0] - 1} have"
            )
        shape = list(saved.size[1:] if apart else saved.size)
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name.removeprefix(prefix)] = {
            "dtype": _NAMES[dtype],
            "shape": shape,
            "data_offsets": [end, end + size],
        }
        end += size
        chosen.append(name)
    if not chosen:
        raise CheckpointError(
            f"the checkpoint at {source.path} has no tensor whose name begins with {prefix!r}"
        )
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = Path(file).absolute()
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with naming(target), partial.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name in chosen:
                tensor = source.tensor(name, rank if name in source.apart else None)
                out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
