"""The configuration of a new process: packed by its spawner, passed in a memory file, read in the process.

The layout is a header of two lengths, the part common to all ranks as JSON, and, if ranks differ, the end offset of
each rank's own part followed by those parts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = struct.Struct("<QI")
_END = struct.Struct("<Q")


def pack(told: dict[str, Any], own: Sequence[Mapping[str, str | None]] = ()) -> bytes:
    """Pack ``told``, and each rank's changes to the environment, in the form that :func:`read` takes.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(pack({"name": "x"}, [{"A": "0"}, {"A": "1"}]))
    ...     file.flush()
    ...     read(file.fileno(), 1)
    {'name': 'x', 'own': {'A': '1'}}
    """
    import json

    common = json.dumps(told).encode()
    parts = [json.dumps(dict(each)).encode() for each in own]
    at = _HEAD.size + len(common) + _END.size * len(parts)
    ends = []
    for part in parts:
        at += len(part)
        ends.append(_END.pack(at))
    return b"".join([_HEAD.pack(len(common), len(parts)), common, *ends, *parts])


def read(file: int, rank: int) -> dict[str, Any]:
    """Read a rank's configuration. Does not move the descriptor's offset, which other processes share."""
    import json

    length, count = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
    told: dict[str, Any] = json.loads(os.pread(file, length, _HEAD.size))
    told["own"] = {}
    if count:
        ends = _HEAD.size + length
        begin = ends + _END.size * count
        if rank:
            (begin,) = _END.unpack(os.pread(file, _END.size, ends + _END.size * (rank - 1)))
        (end,) = _END.unpack(os.pread(file, _END.size, ends + _END.size * rank))
        told["own"] = json.loads(os.pread(file, end - begin, begin))
    return told


def executable(env: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split an environment into what a program can be started with, and what is too long for that.

    The kernel accepts 128 KiB for one variable and a quarter of the stack limit for all.
    """
    if sum(map(len, env)) + sum(map(len, env.values())) < _ONE:
        return env, {}
    fits: dict[str, str] = {}
    room = _ALL
    for key, value in sorted(env.items(), key=lambda item: len(item[1])):
        size = len(os.fsencode(key)) + len(os.fsencode(value)) + 2
        if size > _ONE or size > room:
            break
        room -= size
        fits[key] = value
    return fits, {key: value for key, value in env.items() if key not in fits}


_ONE = 120_000
_ALL = 1_000_000
