"""Circles among the source files of a Rust crate: files that use each other's names, directly or through others.

    python tools/rust_circles.py [CRATE ...]

A file uses another one if it names something in its module: by `use`, or by a path in its code. What a module exports of its own
children is no use of them, and tests do not count. The compiler allows circles, but a file in one cannot be understood, moved or
tested without the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

Module = tuple[str, ...]
"""The path of a module in its crate; empty for the crate itself."""

_COMMENT = re.compile(r"//[^\n]*")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_TEST_FILE = re.compile(
    r"#\[cfg\([^\]]*\btest\b[^\]]*\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?mod (\w+);"
)
_TEST_BLOCK = re.compile(
    r"#\[cfg\([^\]]*\btest\b[^\]]*\)\]\s*(?:#\[[^\]]*\]\s*)*mod \w+ \{.*?\n\}", re.DOTALL
)
_BLOCK = re.compile(r"^(?:pub(?:\([^)]*\))?\s+)?mod \w+ \{.*?^\}", re.MULTILINE | re.DOTALL)
_USE = re.compile(r"^[ \t]*(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", re.MULTILINE)
_PATH = re.compile(r"(?<![\w:])(?:crate|self|super)(?:::\w+)+")


def modules(crate: Path) -> dict[Module, Path]:
    """The modules of a crate that are not tests, and their files."""
    source = crate / "src"
    found: dict[Module, Path] = {}
    for path in sorted(source.rglob("*.rs")):
        parts = path.relative_to(source).with_suffix("").parts
        found[parts[:-1] if parts[-1] in {"mod", "lib", "main"} else parts] = path
    tests = {
        (*module, name) for module, path in found.items() for name in _TEST_FILE.findall(path.read_text())
    }
    return {
        module: path
        for module, path in found.items()
        if not any(module[: len(test)] == test for test in tests)
    }


def paths_of(tree: str) -> Iterator[str]:
    """The paths of a `use` tree, one by one.

    Example:
        >>> list(paths_of("super::{a, b::{self, C as D}}"))
        ['super::a', 'super::b::self', 'super::b::C']
    """
    tree = re.sub(r"\s+as\s+\w+|\s", "", tree)
    head, brace, rest = tree.partition("{")
    if not brace:
        yield head
        return
    depth, part = 0, ""
    for char in rest[: rest.rindex("}")] + ",":
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            if part:
                yield from paths_of(head + part)
            part = ""
        else:
            part += char


def _in_file(block: re.Match[str]) -> str:
    """A module that lies within a file: what is above it is that file."""
    return block.group().replace("super::", "self::")


def uses(crate: Path) -> dict[Module, set[Module]]:
    """Which modules of a crate use which."""
    return _Crate(crate).uses()


class _Crate:
    def __init__(self, crate: Path) -> None:
        self._files = modules(crate)
        self._texts = {
            module: _BLOCK.sub(
                _in_file, _TEST_BLOCK.sub("", _COMMENT.sub("", _STRING.sub('""', path.read_text())))
            )
            for module, path in self._files.items()
        }
        self._children = {
            module: {other[-1] for other in self._files if other and other[:-1] == module}
            for module in self._files
        }
        self._exports = {
            module: {
                path.split("::")[-1]: path
                for exported, tree in _USE.findall(text)
                if exported
                for path in paths_of(tree)
            }
            for module, text in self._texts.items()
        }

    def uses(self) -> dict[Module, set[Module]]:
        return {module: set(self._used(module)) - {module} for module in self._files}

    def _used(self, module: Module) -> Iterator[Module]:
        text, children = self._texts[module], self._children[module]
        paths = [path for exported, tree in _USE.findall(text) if not exported for path in paths_of(tree)]
        code = _USE.sub("", text)
        paths += _PATH.findall(code)
        names = set(re.findall(r"\w+", code))
        paths += [path for name, path in self._exports[module].items() if name in names]
        if children:
            paths += re.findall(rf"(?<![\w:])(?:{'|'.join(children)})::\w+", code)
        for path in paths:
            if (found := self._home(module, path)) is not None:
                yield found

    def _home(self, module: Module, path: str) -> Module | None:
        """The module where the name at the end of a path is at home, if it is one of the crate."""
        names, base = path.split("::"), module
        if names[0] == "crate":
            names, base = names[1:], ()
        elif names[0] not in {"self", "super", *self._children[module]}:
            return None
        while names and names[0] in {"self", "super"}:
            base = base[:-1] if names[0] == "super" else base
            names = names[1:]
        absolute = (*base, *names)
        for length in range(len(absolute), -1, -1):
            if (found := absolute[:length]) in self._files:
                exported = self._exports[found].get(absolute[length]) if length < len(absolute) else None
                # The name may come from elsewhere, or from another crate: then the module itself is used.
                return (exported and exported != path and self._home(found, exported)) or found
        return None


def circles(graph: Mapping[Module, set[Module]]) -> list[list[Module]]:
    """The sets of modules that reach each other.

    Example:
        >>> circles({("a",): {("b",)}, ("b",): {("a",)}, ("c",): {("a",)}})
        [[('a',), ('b',)]]
    """
    reach = {module: _reached(module, graph) for module in graph}
    found = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    return sorted(sorted(circle) for circle in found)


def _reached(module: Module, graph: Mapping[Module, set[Module]]) -> set[Module]:
    reached: set[Module] = set()
    left = list(graph[module])
    while left:
        if (one := left.pop()) not in reached:
            reached.add(one)
            left.extend(graph[one])
    return reached


def report(crate: Path) -> list[str]:
    """What a person is told of a crate: each circle, and the uses that tie it."""
    graph, known = uses(crate), modules(crate)
    lines = []
    for circle in circles(graph):
        lines.append(f"{crate}: {len(circle)} files use each other:")
        lines += [
            f"  {known[one].relative_to(crate)} uses {known[other].relative_to(crate)}"
            for one in circle
            for other in sorted(graph[one].intersection(circle))
        ]
    return lines


def main() -> int:
    """Report the circles of these crates, or of all; the status is 1 if there is any."""
    workspace = Path(__file__).parent.parent
    crates = [Path(name) for name in sys.argv[1:]] or [
        each.parent.parent
        for pattern in ("crates/*/src/lib.rs", "packages/*/rust/src/lib.rs")
        for each in sorted(workspace.glob(pattern))
    ]
    lines = [line for crate in crates for line in report(crate)]
    print("\n".join(lines) or f"no circles in {len(crates)} crates")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
