"""Which modules the fork servers of a spawn import before they fork workers, if the spawn does not say.

Only those that take long and are known to survive a fork, that this process has imported, and that one of its actor classes
refers to: then workers would import them anyway, each on its own.

PRL-1: such a choice changes how fast workers are, and nothing that they can see: none is made where a worker runs a function of
the user's first, has variables of its own rank, or is bound to CPUs, on which packages may look when they are imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from mesh_core._actors.actor import Actor
from mesh_core._common.import_hooks import SURVIVE_FORKS

if TYPE_CHECKING:
    from mesh_core._process.process import Process

_MOST_ENVIRONMENTS = 8
"""Each environment has a fork server of its own, with its own copy of these modules."""

_MOST_MODULES = 2000
"""How many modules are looked at for references; what they import is rarely that much."""

_SCRIPT = ("__main__", "__mp_main__")


class _Environments:
    """The environments for which modules were chosen."""

    def __init__(self) -> None:
        self._known: set[frozenset[tuple[str, str | None]]] = set()

    def admit(self, environment: Mapping[str, str | None]) -> bool:
        """Return whether workers with this environment may have a fork server of their own."""
        key = frozenset(environment.items())
        if key not in self._known and len(self._known) >= _MOST_ENVIRONMENTS:
            return False
        self._known.add(key)
        return True


def choose(process: Process, changes: Mapping[str, str | None]) -> list[str]:
    """Choose what fork servers import for a spawn whose workers get the environment of this process with these changes."""
    found = referred({name for name in SURVIVE_FORKS if _is_installed(sys.modules.get(name))})
    if not found or not process.slots.of(_Environments).admit({**os.environ, **changes}):
        return []
    return sorted(found)


def referred(candidates: set[str]) -> set[str]:
    """Return those of these packages that an actor class of this process refers to."""
    if not candidates:
        return set()
    search = _Search(candidates)
    for cls in _subclasses(Actor):
        search.visit(cls)
    return search.run()


def _subclasses(cls: type) -> Iterator[type]:
    each: type
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _is_installed(module: ModuleType | None) -> bool:
    """Whether it is the installed package of its name, completely imported: not, for example, a file of the user's."""
    spec = getattr(module, "__spec__", None)
    if spec is None or getattr(spec, "_initializing", False):
        return False
    origin = spec.origin or ""
    return "/site-packages/" in origin or "/dist-packages/" in origin


class _Search:
    """Follows references from classes, functions and modules to packages."""

    def __init__(self, packages: set[str]) -> None:
        self._left = set(packages)
        self._found: set[str] = set()
        self._waiting: list[Any] = []
        self._seen: set[int] = set()
        self._modules = 0

    def visit(self, value: object) -> None:
        """Look at a value when its turn comes."""
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._waiting.append(value)

    def run(self) -> set[str]:
        """Look at everything that was visited and what it refers to, until all packages are found."""
        while self._waiting and self._left:
            self._look(self._waiting.pop())
        return self._found

    def _look(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self._look_into(value)
            return
        # Only code has a module of its own that can be asked for without running any: other values may make theirs up.
        of = value if isinstance(value, type | FunctionType) else type(value)
        name = of.__module__
        if isinstance(name, str) and not self._is_found(name) and name not in _SCRIPT:
            self.visit(sys.modules.get(name))
        # What travels by value takes its references along.
        if isinstance(value, FunctionType):
            self._look_at_function(value)
        elif isinstance(value, type) and (name in _SCRIPT or "<locals>" in value.__qualname__):
            for base in value.__mro__[1:]:
                self.visit(base)
            for each in list(vars(value).values()):
                self._visit_attribute(each)

    def _look_into(self, module: ModuleType) -> None:
        name = module.__name__
        root = name.partition(".")[0]
        if self._is_found(name) or root in sys.stdlib_module_names or root == "mesh_core" or name in _SCRIPT:
            return
        self._modules += 1
        if self._modules > _MOST_MODULES:
            self._waiting.clear()
            return
        for each in list(vars(module).values()):
            if isinstance(each, ModuleType):
                self.visit(each)
                continue
            of = each.__module__ if isinstance(each, type | FunctionType) else None
            if isinstance(of, str) and not self._is_found(of):
                self.visit(sys.modules.get(of))

    def _is_found(self, name: str) -> bool:
        root = name.partition(".")[0]
        if root in self._left:
            self._left.discard(root)
            self._found.add(root)
        return root in self._found

    def _visit_attribute(self, value: Any) -> None:
        # An endpoint, a property, a static or class method.
        for inner in ("function", "fget", "__func__"):
            function = getattr(value, inner, None)
            if isinstance(function, FunctionType):
                self.visit(function)
                return
        self.visit(value)

    def _look_at_function(self, function: FunctionType) -> None:
        if function.__module__ not in _SCRIPT and "<locals>" not in function.__qualname__:
            return  # its module was visited, which has what it refers to
        for name in _globals(function.__code__):
            if name in function.__globals__:
                self.visit(function.__globals__[name])
        for cell in function.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:  # it is empty
                continue


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the names of globals that some code reads, and not those that it imports itself."""
    import dis

    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _globals(const)
