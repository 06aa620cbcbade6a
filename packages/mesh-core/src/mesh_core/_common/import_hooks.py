"""Hooks around imports: run code before and after modules are loaded."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# These start threads (of OpenBLAS, OpenMP) on import, and install handlers that stop and restart them around a fork.
SURVIVE_FORKS = frozenset({"numpy", "scipy", "torch", "pandas", "sklearn"})
"""Packages that may be imported before a fork, although they start threads."""


class ImportHook(ABC):
    """A finder in first place: it lets the others find a module, and reports the loading of the modules it wants."""

    @abstractmethod
    def wants(self, name: str) -> bool:
        """Return whether to be notified of this module."""

    def before(self, name: str) -> None:  # noqa: B027 - a hook may do without
        """Called before a module, or a part of it, is loaded."""

    def after(self, name: str, *, done: bool) -> None:  # noqa: B027
        """Called after that part was loaded or failed to; ``done`` is true if the module is complete."""

    def install(self) -> None:
        """Start receiving notifications."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop receiving notifications."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as it would be found without this finder."""
        if not self.wants(name):
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(self, name, spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Wraps a module's loader until the module is loaded."""

    def __init__(self, hook: ImportHook, name: str, loader: Any) -> None:
        self._hook = hook
        self._name = name
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        # This is where extension modules are loaded.
        self._hook.before(self._name)
        try:
            create = getattr(self._loader, "create_module", None)
            made: ModuleType | None = None if create is None else create(spec)
            return made
        finally:
            self._hook.after(self._name, done=False)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        done = False
        self._hook.before(self._name)
        try:
            self._loader.exec_module(module)
            done = True
        finally:
            self._hook.after(self._name, done=done)


class Afterwards(ImportHook):
    """Runs code once a module is imported: now if it is already, else right after its import."""

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], object]] = {}

    def once(self, name: str, then: Callable[[], object]) -> None:
        """Call ``then`` once the module ``name`` is fully imported in this process."""
        if sys.modules.get(name) is not None:
            then()
        else:
            self._waiting[name] = then

    def wants(self, name: str) -> bool:
        """Return whether something waits for this module."""
        return name in self._waiting

    def after(self, name: str, *, done: bool) -> None:
        """Run what waits for this module."""
        if done and (then := self._waiting.pop(name, None)) is not None:
            then()


class ThreadCount(ImportHook):
    """Finds out which modules start threads when they are imported."""

    def __init__(self, count: Callable[[], int], trusted: frozenset[str]) -> None:
        self._count = count
        self._trusted = trusted
        self._depth = 0
        """How many nested imports of trusted modules are under way."""
        self._stack: list[list[int]] = []
        """For each import under way: the number of threads before it, and how many its nested imports started."""
        self.started: dict[str, int] = {}
        """By module, in import order: how many threads an untrusted module started itself."""

    def _trusts(self, name: str) -> bool:
        return name.partition(".")[0] in self._trusted

    def wants(self, name: str) -> bool:
        """All modules except those imported by trusted ones."""
        return self._depth == 0

    def before(self, name: str) -> None:
        """Count the threads."""
        self._stack.append([self._count(), 0])
        self._depth += self._trusts(name)

    def after(self, name: str, *, done: bool) -> None:
        """Count the threads again."""
        before, within = self._stack.pop()
        started = max(0, self._count() - before)
        if self._stack:
            self._stack[-1][1] += started
        if self._trusts(name):
            self._depth -= 1
        elif started > within:
            self.started[name] = self.started.get(name, 0) + started - within
