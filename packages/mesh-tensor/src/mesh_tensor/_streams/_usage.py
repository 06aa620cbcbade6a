"""The memory that all streams of a mesh's processes use together."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError, ValueMesh

if TYPE_CHECKING:
    from mesh_tensor._stream import Stream


def total_usage(main: Stream) -> ValueMesh[Any]:
    """Wait for all streams, and return how many tensors each process has, and how much memory they use; what they share counts once."""
    for stream in list(main.tensors.streams):
        # Those of the global view, and of slices, have tensors on the same processes; what has failed there is told to who asks for it.
        with suppress(MeshError):
            stream.flush()
    lanes = main.tensors.guard.lanes
    if not lanes:
        return main.wait(main.ask("usage"))
    main.tensors.guard.settle()
    streams = [main, *[lane.issuer(main.procs, main.issuer.cls).stream for lane in lanes]]
    asked = [stream.ask("usage", True) for stream in streams]
    answers = [stream.wait(future) for stream, future in zip(streams, asked, strict=True)]
    told = []
    for each in zip(*[answer.values() for answer in answers], strict=True):
        tensors = sum(count for _, (count, _) in each)
        storages: dict[int, int] = {}
        for _, (_, found) in each:
            storages |= found
        told.append(("value", (tensors, sum(storages.values()))))
    return ValueMesh.of(answers[0].extent, told)
