"""multiprocessing inside an actor: classes and functions of the script go along to its processes.

multiprocessing sends a class or function as the name of a module and its own. What comes from the script has the module
``__main__``, which is another one here, so it is sent by value instead, as Mesh itself does. Processes that receive
such a thing do the same with what they send back.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

_SCRIPTS = ("__main__", "__mp_main__")


def teach() -> None:
    """Have multiprocessing's pickler send what is the script's by value, in this process and those that it starts."""
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
    """Make in a process of multiprocessing what was sent by value."""
    from mesh_core._serialize import loads

    if "multiprocessing.reduction" in sys.modules:
        teach()
    return loads(data, [bytearray(buffer) for buffer in buffers])
