"""Which tests a change may break, guessed from names: for `./dev t --changed`.

A test is chosen for a changed file if it lies in the room of the same name, if its file has the changed file's name in its
own (a concept has one name in Rust, Python and tests), or if it mentions one of the names that the file defines. A changed
crate is tested whole, with those that use it. This is for quick answers; `./dev test` asks everything.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_TESTS = ("packages/*/tests", "tests", "benchmarks/tests")
_COMMON = 4
"""Shorter names than this are in every file."""


@dataclass
class Chosen:
    """What to run."""

    files: set[Path] = field(default_factory=set)
    """Test files, pages and folders of tests."""
    crates: set[str] = field(default_factory=set)


def changed_files(root: Path, since: str) -> list[Path]:
    """The files that differ from a commit, new ones included, relative to the root."""
    listed: list[str] = []
    for command in (("diff", "--name-only", since), ("ls-files", "--others", "--exclude-standard")):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True)
        listed += done.stdout.splitlines()
    return sorted({Path(line) for line in listed if (root / line).exists()})


def affected(root: Path, changed: Iterable[Path]) -> Chosen:
    """Choose tests for these changed files."""
    tests = {path.relative_to(root): path.read_text(encoding="utf-8") for path in _test_files(root)}
    chosen = Chosen()
    for path in changed:
        if path.suffix == ".md":
            chosen.files |= {path} if path.parts[0] in {"docs", "packages", "README.md"} else set()
        elif path.parts[0] == "crates":
            chosen.crates |= _with_dependents(root, path.parts[1])
            chosen.files |= {test for test in tests if _is_named_after(test, path.stem)}
        elif path.suffix in {".py", ".pyi", ".rs"}:
            chosen.files |= _for_source(root, path, tests)
    return chosen


def _for_source(root: Path, path: Path, tests: dict[Path, str]) -> set[Path]:
    if path in tests:
        return {path}
    if path.name == "conftest.py":
        return {path.parent}
    room = path.parent.name.lstrip("_")
    names = _defined(root / path) if path.suffix == ".py" else set()
    mentions = re.compile(rf"\b(?:{'|'.join(map(re.escape, [*names, path.stem]))})\b")
    package = path.parts[1] if path.parts[0] == "packages" else ""
    return {
        test
        for test, text in tests.items()
        if _is_named_after(test, path.stem)
        or (package in test.parts and test.parent.name == room)
        or mentions.search(text)
    }


def _is_named_after(test: Path, stem: str) -> bool:
    words = test.stem.removeprefix("test_")
    return len(stem) >= _COMMON and stem.strip("_") in {words, *words.split("_")}


def _defined(path: Path) -> set[str]:
    """The names of the functions and classes of a module that others can use."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_") and len(name) >= _COMMON}


def _test_files(root: Path) -> Iterator[Path]:
    for folder in _TESTS:
        for each in root.glob(folder):
            yield from each.rglob("test_*.py")


def _with_dependents(root: Path, crate: str) -> set[str]:
    """A crate and all that need it, for tests too."""
    needs: dict[str, set[str]] = {}
    for path in (root / "crates").glob("*/Cargo.toml"):
        metadata = tomllib.loads(path.read_text(encoding="utf-8"))
        needs[path.parent.name] = {*metadata.get("dependencies", {}), *metadata.get("dev-dependencies", {})}
    found = {crate}
    while more := {name for name, needed in needs.items() if needed & found} - found:
        found |= more
    return found & needs.keys()
