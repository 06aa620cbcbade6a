"""Who may import what: the rule that keeps the packages apart, as a check over source text.

RULE-1: a package imports no other package of the workspace but mesh_core, and mesh_core imports none.
RULE-2: of another package of the workspace, only public names are used; a leading underscore makes a name private.
RULE-3: what a module imports when it is itself imported is in the standard library or a declared dependency.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

_IMPORTERS = {"import_module", "__import__"}


@dataclass(frozen=True)
class Import:
    """One module or name that a source file imports: `module` for `import m`, `module.name` for `from m import name`."""

    target: str
    line: int
    when_loaded: bool

    @property
    def top(self) -> str:
        """The top-level module."""
        return self.target.partition(".")[0]

    @property
    def is_private(self) -> bool:
        """Whether any part of the path is private to its owner."""
        return any(_is_private(part) for part in self.target.split("."))


@dataclass(frozen=True)
class Violation:
    """A place that breaks the rule."""

    line: int
    why: str


@cache
def imports(source: str) -> list[Import]:
    r"""Every absolute import in the source, dynamic ones with a literal name and attribute paths included.

    Example:
        >>> [found.target for found in imports("import a.b\nfrom c import d")]
        ['a.b', 'c.d']
    """
    visitor = _Visitor()
    visitor.visit(ast.parse(source))
    return visitor.found


def violations(
    source: str,
    *,
    package: str,
    workspace: Collection[str],
    allowed: Collection[str],
    declared: Collection[str],
) -> Iterator[Violation]:
    """What is wrong with one source file of `package`.

    Args:
        source: the file's text.
        package: the import name of the package that the file belongs to.
        workspace: the import names of all packages of the workspace.
        allowed: those of them that this package may import.
        declared: the import names of its declared dependencies, extras included.
    """
    for found in imports(source):
        if found.top == package:
            continue
        if found.top in workspace:
            if found.top not in allowed:
                yield Violation(found.line, f"RULE-1: {package} must not import {found.target}")
            elif found.is_private:
                yield Violation(found.line, f"RULE-2: {found.target} is private to {found.top}")
        elif found.when_loaded and found.top not in {*sys.stdlib_module_names, *declared, *allowed}:
            yield Violation(
                found.line,
                f"RULE-3: {found.target} is imported with the module but is no declared dependency; "
                f"declare it, or import it where it is used",
            )


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Import] = []
        self._inside_function = 0
        # Local name of a module -> its full path, to follow `import mesh_core as m; m._private`.
        self._modules: dict[str, str] = {}

    def _add(self, target: str, node: ast.AST) -> None:
        line = getattr(node, "lineno", 0)
        self.found.append(Import(target, line, when_loaded=not self._inside_function))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)
            bound = alias.asname or alias.name.partition(".")[0]
            self._modules[bound] = alias.name if alias.asname else bound

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for alias in node.names:
            self._add(f"{node.module}.{alias.name}", node)
            self._modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if path := self._path(node):
            self._add(path, node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if called in _IMPORTERS and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                self._add(first.value, node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            # Seen by type checkers only: as far from the running module as a function's body.
            self._nested(node.body)
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for child in [*node.decorator_list, node.args]:
            self.visit(child)
        self._nested(node.body)

    def _nested(self, body: list[ast.stmt]) -> None:
        self._inside_function += 1
        for child in body:
            self.visit(child)
        self._inside_function -= 1

    def _path(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self._path(node.value)):
            return f"{base}.{node.attr}"
        return None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
