"""Find what a module's source imports from other modules, to decide in which order modules are reloaded."""

from __future__ import annotations

import ast
from typing import NamedTuple


class Taken(NamedTuple):
    """``from module import name as bound``; ``name`` may be ``*``."""

    module: str
    name: str
    bound: str


class Imports(NamedTuple):
    """Everything that a source imports."""

    modules: frozenset[str]
    """Full names; for ``from a import b`` both ``a`` and ``a.b``, which may or may not be a module."""
    taken: tuple[Taken, ...]
    """The names that it binds with ``from ... import`` at its top level."""


def imports_of(source: str | bytes, module: str, is_package: bool, filename: str = "<unknown>") -> Imports:
    """Find the imports in a module's source.

    >>> imports_of("from . import layers as l", "net.model", False).taken
    (Taken(module='net', name='layers', bound='l'),)
    """
    tree = ast.parse(source, filename)
    found: set[str] = set()
    taken = []
    top = {id(node) for node in tree.body}
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                origin = ".".join([*base, *([origin] if origin else [])])
            found.add(origin)
            for alias in node.names:
                found.add(f"{origin}.{alias.name}")
                if id(node) in top:
                    taken.append(Taken(origin, alias.name, alias.asname or alias.name))
    return Imports(frozenset(found), tuple(taken))


def in_order(needs: dict[str, frozenset[str]]) -> list[str]:
    """Sort names so that each follows those that it needs; names in a circle keep their order.

    >>> in_order({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset()})
    ['c', 'b', 'a']
    """
    done: dict[str, None] = {}

    for start, first in needs.items():
        stack = [(start, iter(sorted(first)))]
        entered = {start}
        while stack:
            name, rest = stack[-1]
            for need in rest:
                if need in needs and need not in done and need not in entered:
                    entered.add(need)
                    stack.append((need, iter(sorted(needs[need]))))
                    break
            else:
                done.setdefault(name)
                stack.pop()
    return list(done)
