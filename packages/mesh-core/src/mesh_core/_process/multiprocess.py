"""multiprocessing inside an actor: classes and functions of the script reach the processes that it starts.

multiprocessing pickles a class or function as its module and name. The script's module is called ``__main__``,
which is a different module here, so the script's objects are pickled by value, as in Mesh messages. Processes that
receive such an object do the same with what they send back.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

_SCRIPTS = ("__main__", "__mp_main__")


def teach() -> None:
    """Make multiprocessing pickle the script's objects by value, in this process and those that it starts."""
    pickler: Any = sys.modules["multiprocessing.reduction"].ForkingPickler
    if "reducer_override" in vars(pickler):
        return

    def reducer_override(_: Any, obj: Any) -> Any:
        if (isinstance(obj, type) or type(obj) is FunctionType) and getattr(
            obj, "__module__", None
        ) in _SCRIPTS:
            from mesh_core._serialize.pickle import dump_by_value

            data, buffers = dump_by_value(obj)
            return revive, (data, [bytes(buffer) for buffer in buffers])
        return NotImplemented

    pickler.reducer_override = reducer_override


def revive(data: bytes, buffers: list[bytes]) -> Any:
    """Rebuild, in a process of multiprocessing, an object that was pickled by value."""
    from mesh_core._serialize import loads

    if "multiprocessing.reduction" in sys.modules:
        teach()
    return loads(data, [bytearray(buffer) for buffer in buffers])
