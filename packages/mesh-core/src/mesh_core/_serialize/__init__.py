"""Objects to bytes and back: one pickle stream, with large data beside it that is not copied.

A message is *part 0*, a protocol 5 pickle, and a list of *buffers*: views of the sender's own memory, which
the runtime writes or maps in place, and blocks, in which small tensors and arrays lie side by side. There are three ways to part 0; the cheapest that works is used:

* **plain**: arguments made of ``None``, numbers, strings and small bytes go straight through C pickle;
* **stream**: anything else goes through a C pickler, with large data lifted out of the stream;
* **by value**: what the receiver cannot import (``__main__``, notebooks, lambdas, local classes) goes through
  cloudpickle, which is imported when the first such object is sent.

Each ends in a stream that C pickle reads, so the receiver needs only one way.

Invariants, cited by the tests:

* SER-1: an object that occurs twice in one message is one object on arrival.
* SER-2: arrays and tensors arrive writable, and keep their buffer alive.
* SER-3: the sender's large data is never copied into the stream.
* SER-4: nothing in a stream refers to ``__main__`` by name.
"""

from __future__ import annotations

from _pickle import dumps as _c_dumps
from _pickle import loads as _c_loads
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError
from mesh_core._serialize.culprit import explain_load_failure, serialization_error
from mesh_core._serialize.handlers import OUT_OF_BAND_BYTES
from mesh_core._serialize.pickle import dump_by_value, dump_stream
from mesh_core._serialize.stream import LIFTED_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from mesh_core._native import Block

__all__ = ["OUT_OF_BAND_BYTES", "dump_message", "dumps", "explain_load_failure", "loads"]

_ATOMS = frozenset({type(None), bool, int, float, str})
_all_atoms = _ATOMS.issuperset

# Checking the types of a longer sequence costs more than the fixed price of the stream way.
_SCAN_LIMIT = 32


def dumps(obj: object, *, root: str | None = None) -> tuple[bytes, list[memoryview]]:
    """Convert ``obj`` to part 0 and its out-of-band buffers.

    The buffers are views of the caller's memory: they must be written or copied before the caller may
    change that memory. ``root`` is the name of ``obj`` in errors; without it, an ``(args, kwargs)`` pair is
    described by its arguments.

    >>> from mesh_core.extensions import dumps, loads
    >>> data, buffers = dumps(((1, "two"), {"three": 3.0}))
    >>> loads(data, buffers)
    ((1, 'two'), {'three': 3.0})
    >>> data, buffers = dumps({"weights": bytearray(1_000_000)})
    >>> len(data) < 100, [buffer.nbytes for buffer in buffers]
    (True, [1000000])
    """
    if _is_plain(obj):
        return _c_dumps(obj, 5), []
    data, buffers = _dumped(obj, root, OUT_OF_BAND_BYTES)
    return data, [memoryview(buffer) for buffer in buffers]


def dump_message(obj: object, *, root: str | None = None) -> tuple[bytes, list[memoryview | Block]]:
    """Like :func:`dumps`, for the native layer: small tensors and arrays lie side by side, in blocks that it sends as they are."""
    return (_c_dumps(obj, 5), []) if _is_plain(obj) else _dumped(obj, root, LIFTED_BYTES)


def _dumped(obj: object, root: str | None, alone: int) -> tuple[bytes, list[memoryview | Block]]:
    try:
        found = dump_stream(obj, alone)
        return dump_by_value(obj, alone) if found is None else found
    except (MemoryError, MeshError):
        # A reducer that refuses an object explains why itself.
        raise
    except Exception as error:
        raise serialization_error(obj, error, root) from error


def loads(data: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """Rebuild the object that was given to :func:`dumps`.

    Arrays, tensors and memoryviews are created *on* the buffers, which must be contiguous, and writable
    if the result is to be. Results loaded twice from the same buffers share their memory.

    >>> from mesh_core.extensions import dumps, loads
    >>> data, buffers = dumps([1, 2, None])
    >>> loads(data)
    [1, 2, None]
    """
    try:
        return _c_loads(data, buffers=buffers) if buffers else _c_loads(data)
    except MemoryError:
        raise
    except MeshError as error:
        # Functions that rebuild objects explain their errors themselves.
        if getattr(error, "arrival", None) is not None:
            # It will be loaded again, and buffers can be taken out of a message only once.
            error._loaded_from = data, buffers
        raise
    except Exception as error:
        raise explain_load_failure(error) from error


def _is_plain(obj: object) -> bool:
    """Return whether plain C pickle handles ``obj`` correctly; cheap, with false negatives."""
    if type(obj) is not tuple:
        return type(obj) in _ATOMS or _all_plain((obj,))
    # A call, `((1, 2), {})`, is by far the most frequent message, so it is checked first and without recursion.
    if len(obj) == 2 and type(obj[0]) is tuple and type(obj[1]) is dict:
        args, kwargs = obj
        if not kwargs:
            return len(args) <= _SCAN_LIMIT and (_all_atoms(map(type, args)) or _all_plain(args))
        return (
            len(args) <= _SCAN_LIMIT
            and len(kwargs) <= _SCAN_LIMIT
            and _all_plain(args)
            and _all_plain(kwargs.values())
        )
    return len(obj) <= _SCAN_LIMIT and _all_plain(obj)


def _all_plain(values: Iterable[Any]) -> bool:
    """Check each value, and one level into short containers."""
    for value in values:
        kind = type(value)
        if kind in _ATOMS:
            continue
        if kind is tuple or kind is list:
            if len(value) > _SCAN_LIMIT or not _all_atoms(map(type, value)):
                return False
        elif kind is dict:
            if len(value) > _SCAN_LIMIT or not _all_atoms(map(type, value)):
                return False
            if not _all_atoms(map(type, value.values())):
                return False
        elif kind is not bytes or len(value) >= OUT_OF_BAND_BYTES:
            return False
    return True
