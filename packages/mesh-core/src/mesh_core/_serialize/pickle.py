"""The two ways to pickle what plain C pickle cannot do alone: as a stream, and by value."""

from __future__ import annotations

import copyreg
import importlib
import sys
from _io import BufferedRandom, BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from _pickle import Pickler
from collections.abc import Callable
from functools import cache
from types import CodeType, ModuleType
from typing import Any
from weakref import WeakSet

from mesh_core._common.errors import Unsendable
from mesh_core._native import Block
from mesh_core._serialize.handlers import add_handlers
from mesh_core._serialize.stream import OUT_OF_BAND_BYTES, Stream

Message = tuple[bytes, list[memoryview | Block]]
_FILES = (TextIOWrapper, BufferedReader, BufferedWriter, BufferedRandom, FileIO)
# In the order of the constructor's parameters.
# fmt: off
_FIELDS_OF_CODE = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags", "co_code", "co_consts", "co_names",
    "co_varnames", "co_filename", "co_name", "co_qualname", "co_firstlineno", "co_linetable", "co_exceptiontable", "co_freevars", "co_cellvars",
)
# fmt: on


def dump_stream(obj: object, alone: int) -> Message | None:
    """Pickle ``obj`` with the C pickler; return ``None`` if it may have to be pickled by value.

    C pickle writes a class of ``__main__`` as a name, which means another module at the receiver.
    Searching for that name in the finished stream costs almost nothing, while checking every object
    would cost a Python call each. A false alarm only costs time (SER-4).
    """
    if _wanted_by_value():
        return None
    stream = Stream(alone)
    pickler = Pickler(stream, 5, buffer_callback=stream.keep)
    pickler.dispatch_table = table = copyreg.dispatch_table.copy()
    add_handlers(table, stream)
    try:
        pickler.dump(obj)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - foreign pickling code may raise anything
        # cloudpickle may handle what C pickle cannot; if not, its error is the better one.
        return None
    part0 = stream.part0()
    # The latter is multiprocessing's name for the script in a process that it spawned.
    by_value = b"__main__" in part0 or b"__mp_main__" in part0
    return None if by_value else (part0, stream.buffers)


def dump_by_value(obj: object, alone: int = OUT_OF_BAND_BYTES) -> Message:
    """Pickle ``obj`` with cloudpickle: code that cannot be imported at the receiver travels along."""
    stream = Stream(alone)
    pickler = _by_value_pickler()(stream)
    try:
        pickler.dump(obj)
    except BaseException:
        # The error's traceback refers to both. If a view and the object behind it are garbage in one cycle, CPython frees
        # the memory first and crashes.
        pickler.clear_memo()
        stream.buffers.clear()
        raise
    return stream.part0(), stream.buffers


def make_class(maker: Callable[..., type], *arguments: Any) -> type:
    """Return this process's existing copy of a class that was sent by value, or begin to create it."""
    known: type | None = _tracker().get(arguments[-2])
    return known if known is not None else maker(*arguments)


def fill_class(cls: type, state: tuple[Callable[[type, Any], object], Any]) -> None:
    """Set the methods and attributes of a class that was just created; leave a complete one alone.

    A class is sent with every message that mentions it. If it were filled each time, each message would reset
    a worker's class attributes, and a returned result would replace the methods of the script's
    own class with copies that no longer see the script's globals.
    """
    if cls not in _complete_classes():
        setter, attributes = state
        setter(cls, attributes)
        _complete_classes().add(cls)


def reduce_module(module: ModuleType) -> Any:
    """Reduce a module with its own class, such as ``torch.ops``, by its name or as an attribute of a named parent."""
    name = getattr(module, "__name__", "")
    if sys.modules.get(name) is module:
        return importlib.import_module, (name,)
    parent, _, own = name.rpartition(".")
    found = sys.modules.get(parent)
    # Not with getattr: such modules create attributes on demand.
    if found is not None and getattr(found, "__dict__", {}).get(own) is module:
        return getattr, (found, own)
    for known, loaded in list(sys.modules.items()):
        if loaded is module:
            return importlib.import_module, (known,)
    return NotImplemented


def reduce_code(code: CodeType) -> Any:
    """Reduce code with its file name, which cloudpickle 3.1.3 omits; tracebacks and debuggers need it to show lines."""
    return CodeType, tuple(getattr(code, field) for field in _FIELDS_OF_CODE)


def reduce_file(file: Any) -> Any:
    """Reduce a standard stream to the receiver's own; refuse any other file instead of copying it."""
    if file is sys.stdout or file is sys.stderr:
        return getattr, (sys, "stdout" if file is sys.stdout else "stderr")
    raise Unsendable(
        f"cannot pickle an open file ({getattr(file, 'name', 'without a name')!r})",
        "Send its path and open it there, or send its contents.",
    )


@cache
def _complete_classes() -> WeakSet[type]:
    """Return the classes that are sent by value and complete in this process."""
    return WeakSet()


def _tracker() -> Any:
    # cloudpickle's table of classes sent or received by value, by the id that is sent with them. It has
    # no public name; without it, cloudpickle itself finds the existing class, after creating it needlessly.
    implementation = importlib.import_module("cloudpickle.cloudpickle")
    return getattr(implementation, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})


def _wanted_by_value() -> bool:
    """Return whether the user asked cloudpickle to send some importable module by value."""
    cloudpickle: Any = sys.modules.get("cloudpickle")
    # Another thread may still be importing it; then nothing is registered yet.
    registry = getattr(cloudpickle, "list_registry_pickle_by_value", None)
    return registry is not None and bool(registry())


@cache
def _by_value_pickler() -> Callable[[Stream], Any]:
    """Import cloudpickle and return our pickler derived from its own."""
    cloudpickle: Any = importlib.import_module("cloudpickle")
    script = sys.modules.get("__mp_main__")
    if script is not None:
        cloudpickle.register_pickle_by_value(script)

    class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, stream: Stream) -> None:
            # Read by the base class's constructor.
            self.dispatch_table = {
                **cloudpickle.Pickler.dispatch_table,
                **dict.fromkeys(_FILES, reduce_file),
                CodeType: reduce_code,
            }
            add_handlers(self.dispatch_table, stream)
            super().__init__(stream, protocol=5, buffer_callback=stream.keep)

        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if reduced is NotImplemented and isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return reduce_module(obj)
            if isinstance(obj, type) and type(reduced) is tuple and len(reduced) == 6:
                _complete_classes().add(obj)
                maker, arguments, state, _, _, setter = reduced
                return make_class, (maker, *arguments), (setter, state), None, None, fill_class
            return reduced

    return ByValuePickler
