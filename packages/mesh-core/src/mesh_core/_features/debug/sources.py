"""Send source code that is not in a file, such as a notebook's, along with the class that it defines."""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Iterator
from typing import Any


def with_sources(cls: type) -> object:
    """Return what to pickle for an actor class: the class, with its source if that is not in a file."""
    names = {code.co_filename for code in _codes(cls)}
    # Workers are on this host, or have the same files.
    found = {
        name: lines
        for name in names
        if not os.path.exists(name)  # noqa: PTH110 - a name may be anything
        and (lines := linecache.getlines(name))
    }
    return Sourced(cls, found) if found else cls


class Sourced:
    """A class in a pickle; it is unpickled as that class."""

    def __init__(self, cls: type, sources: dict[str, list[str]]) -> None:
        self._cls = cls
        self._sources = sources

    def __reduce__(self) -> Any:
        return arrive, (self._sources, self._cls)


def arrive(sources: dict[str, list[str]], cls: type) -> type:
    """Register sources, so that the debugger, tracebacks and ``inspect`` show them, and return the class."""
    for name, lines in sources.items():
        if not os.path.exists(name):  # noqa: PTH110
            # Without a modification time, so that linecache does not look for a newer file.
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return cls


def _codes(root: type) -> Iterator[types.CodeType]:
    """Yield the code of a class, and of everything it uses that is sent by value, for the debugger to show its source."""
    todo: list[Any] = [root]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            todo += each.__bases__
            if _travels(each):
                todo += vars(each).values()
        elif isinstance(each, types.FunctionType):
            if _travels(each):
                yield each.__code__
                todo += _used(each)
        elif isinstance(each, (staticmethod, classmethod)):
            todo.append(each.__func__)
        elif isinstance(each, property):
            todo += [each.fget, each.fset, each.fdel]
        elif type(each).__module__ == "mesh_core._actors.endpoint":
            todo.append(getattr(each, "function", None))


def _used(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function may call: the globals that it and its inner code name, and its closure."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not assigned yet


def _travels(each: Any) -> bool:
    """Return whether a class or function is sent by value instead of by name."""
    module = getattr(each, "__module__", None)
    return (
        module in (None, "__main__", "__mp_main__")
        or module not in sys.modules
        or "<locals>" in each.__qualname__
    )
