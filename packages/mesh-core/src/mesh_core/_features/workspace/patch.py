"""Give functions and classes that are in use new code, while the objects stay the same.

So callbacks, ``from x import f`` in other modules, existing instances and pickles by name keep working, because they
refer to the same objects as before.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, MutableMapping
from types import CellType, FunctionType
from typing import Any

from mesh_core._actors.endpoint import EndpointProperty

Undo = list[Callable[[], object]]
"""Functions that undo the changes, to be called from last to first."""

_MISSING = object()
_NEVER = frozenset(
    {"__dict__", "__weakref__", "__slots__", "__abstractmethods__", "_abc_impl", "__static_attributes__"}
)
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__doc__", "__type_params__")


def patch(old: Any, new: Any, undo: Undo, stand_ins: dict[Any, Any]) -> str:
    """Give ``old`` the code of ``new``; return why that is impossible, or an empty string.

    ``stand_ins`` maps new functions and classes to the old ones that were kept so far.
    """
    if old is new or (isinstance(new, (FunctionType, type)) and stand_ins.get(new) is old):
        return ""
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        return _patch_function(old, new, undo, stand_ins)
    if isinstance(old, type) and isinstance(new, type):
        return _patch_class(old, new, undo, stand_ins)
    return "it is a different kind of object now"


def _patch_function(old: FunctionType, new: FunctionType, undo: Undo, stand_ins: dict[Any, Any]) -> str:
    if old.__code__.co_freevars != new.__code__.co_freevars:
        return "it closes over other variables"
    if old.__globals__ is not new.__globals__:
        return "it belongs to another module"
    # Newer interpreters evaluate annotations on access, which may fail.
    lazy = hasattr(FunctionType, "__annotate__")
    for name in (*_OF_FUNCTIONS, "__annotate__" if lazy else "__annotations__"):
        if hasattr(new, name):
            _set(old, name, getattr(new, name), undo)
    restore(old.__dict__, dict(new.__dict__), undo)
    # Before its closure, which may contain the function itself.
    stand_ins[new] = old
    # The closure of a decorated function contains the original function.
    for name, mine, theirs in zip(
        new.__code__.co_freevars, old.__closure__ or (), new.__closure__ or (), strict=True
    ):
        if name != "__class__":
            _patch_cell(mine, theirs, undo, stand_ins)
    return ""


def _patch_cell(old: CellType, new: CellType, undo: Undo, stand_ins: dict[Any, Any]) -> None:
    try:
        before, value = old.cell_contents, new.cell_contents
    except ValueError:  # empty: not assigned yet
        return
    if before is value or (_same_place(before, value) and not patch(before, value, undo, stand_ins)):
        return
    undo.append(lambda: setattr(old, "cell_contents", before))
    old.cell_contents = value


def _patch_class(old: type, new: type, undo: Undo, stand_ins: dict[Any, Any]) -> str:
    bases = tuple(stand_ins.get(base, base) for base in new.__bases__)
    if bases != new.__bases__:
        with contextlib.suppress(TypeError):  # incompatible layout: it keeps its own bases
            new.__bases__ = bases
    why = _obstacle(old, new)
    if why:
        return why
    for cell in _class_cells(new):
        cell.cell_contents = old  # for super()
    for name in [name for name in vars(old) if name not in vars(new) and name not in _NEVER]:
        _delete(old, name, undo)
    for name, value in list(vars(new).items()):
        before = vars(old).get(name, _MISSING)
        if name not in _NEVER and not _patch_member(before, value, undo, stand_ins):
            _set(old, name, value, undo)
    stand_ins[new] = old
    return ""


def _obstacle(old: type, new: type) -> str:
    if type(old) is not type(new):
        return "its metaclass has changed"
    if issubclass(new, enum.Enum):
        return "members of an enum cannot be replaced"
    if old.__bases__ != new.__bases__:
        return "its bases have changed"
    if old.__dict__.get("__slots__") != new.__dict__.get("__slots__"):
        return "its slots have changed"
    return ""


def _patch_member(old: Any, new: Any, undo: Undo, stand_ins: dict[Any, Any]) -> bool:
    """Patch a class attribute in place, and return whether that worked, so that the object can stay."""
    if type(old).__name__ in ("member_descriptor", "getset_descriptor"):
        return True
    if isinstance(old, (staticmethod, classmethod)) and type(old) is type(new):
        old, new = old.__func__, new.__func__
    elif isinstance(old, EndpointProperty) and isinstance(new, EndpointProperty):
        if not same_kind(old, new) or old.arity.text != new.arity.text:
            return False
        old, new = old.function, new.function
    return _same_place(old, new) and not patch(old, new, undo, stand_ins)


def _same_place(old: Any, new: Any) -> bool:
    """Return whether two objects are versions of the same function or class."""
    kinds = (FunctionType, type)
    return (
        isinstance(old, kinds)
        and type(old) is type(new)
        and old.__module__ == new.__module__
        and old.__qualname__ == new.__qualname__
    )


def same_kind(old: EndpointProperty[..., Any], new: EndpointProperty[..., Any]) -> bool:
    """Return whether a running actor can switch endpoints; the executor was chosen for their kind when it started."""
    return (old.is_async, old.concurrent, old.arity.port) == (new.is_async, new.concurrent, new.arity.port)


def _class_cells(cls: type) -> Iterator[Any]:
    for value in vars(cls).values():
        for function in _functions(value):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name == "__class__":
                    yield cell


def _functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
    for name in ("__func__", "function", "fget", "fset", "fdel", "func", "__wrapped__"):
        inner = None if isinstance(value, type) else getattr(value, name, None)
        if isinstance(inner, FunctionType):
            yield inner


def restore(names: MutableMapping[str, Any], before: dict[str, Any], undo: Undo | None = None) -> None:
    """Make a namespace equal to ``before``."""
    if undo is not None:
        now = dict(names)
        undo.append(lambda: restore(names, now))
    # Never empty it, because other threads use it.
    names.update(before)
    for name in [name for name in names if name not in before]:
        del names[name]


def _set(thing: Any, name: str, value: Any, undo: Undo) -> None:
    before = vars(thing).get(name, _MISSING) if isinstance(thing, type) else getattr(thing, name, _MISSING)
    undo.append(lambda: delattr(thing, name) if before is _MISSING else setattr(thing, name, before))
    setattr(thing, name, value)


def _delete(cls: type, name: str, undo: Undo) -> None:
    before = vars(cls)[name]
    undo.append(lambda: setattr(cls, name, before))
    delattr(cls, name)
