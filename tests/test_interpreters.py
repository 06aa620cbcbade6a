"""Interpreters are started by `mesh_core.python_command` and what it is made of, so that none imports from its working directory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import workspace

HOW = "packages/mesh-core/src/mesh_core/_system/interpreter.py"
NAMED = {
    HOW: "it is the interpreter of `python_command`, if none is given",
    "packages/mesh-core/src/mesh_core/_blocks/sandboxes/stock.py": "an error names it",
    "packages/mesh-core/src/mesh_core/_blocks/tool_starts.py": "it runs a file with `-I`, which means `-P` too",
    "packages/mesh-core/src/mesh_core/_process/fork_server.py": "it comes before `code_words`",
    "packages/mesh-core/src/mesh_core/cli/_version.py": "it is shown",
    "packages/mesh-launchers/src/mesh_launchers/_commands.py": "it runs a script of the user, as the user would",
    "packages/mesh-launchers/src/mesh_launchers/_host.py": "a host may have it at the same path",
    "packages/mesh-launchers/src/mesh_launchers/_host_facts.py": "it is told to whoever has started the host",
    "packages/mesh-launchers/src/mesh_launchers/_local.py": "it is the default of an option",
    "packages/mesh-launchers/src/mesh_launchers/_program.py": "it is shown",
    "packages/mesh-launchers/src/mesh_launchers/_ray_driver/__main__.py": "it comes before the words of `python_command`",
    "packages/mesh-launchers/src/mesh_launchers/_remote.py": "it runs what the user types",
    "packages/mesh-launchers/src/mesh_launchers/torchrun.py": "`command` is given it",
    "examples/third-party/mesh-boxes/src/mesh_boxes/__init__.py": "it is the default of an option",
}
"""Where `sys.executable` may be used, and what for."""
SHELLS = {"sh", "/bin/sh", "bash"}
RUNS = re.compile(r"-[A-Za-z]*[cm]")
IN_PYTHON = re.compile(r"""["']-[A-Za-z]*[cm]["']""")
IN_RUST = re.compile(r'"-[A-Za-z]*[cm]"')


def breaches(text: str, *, may_name: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines of a module that make an interpreter's command by themselves."""
    if not IN_PYTHON.search(text) and "executable" not in text:
        return  # which saves parsing it
    tree = ast.parse(text)
    for_shells = {
        id(each)
        for display in ast.walk(tree)
        if isinstance(display, ast.List | ast.Tuple)
        and display.elts
        and isinstance(display.elts[0], ast.Constant)
        and display.elts[0].value in SHELLS
        for each in display.elts[:2]
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and RUNS.fullmatch(node.value):
            if id(node) not in for_shells:
                yield node.lineno, f"{node.value!r}: use mesh_core.python_command"
        elif isinstance(node, ast.Attribute) and not may_name and ast.unparse(node) == "sys.executable":
            yield node.lineno, "sys.executable: use mesh_core.python_command, or say here what it is for"


def sources() -> list[Path]:
    packages = [*workspace.packages(), *workspace.third_party()]
    return sorted(path for package in packages for path in (package.path / "src").rglob("*.py"))


def test_nobody_else_makes_the_command_of_an_interpreter() -> None:
    """PTH-1."""
    broken = []
    for path in sources():
        name = str(path.relative_to(workspace.ROOT))
        if name != HOW:
            broken += [
                f"{name}:{line}: {why}" for line, why in breaches(path.read_text(), may_name=name in NAMED)
            ]
    assert not broken, "\n".join(broken)


def test_rust_starts_interpreters_only_by_commands_that_it_is_given() -> None:
    """PTH-1."""
    files = [
        path
        for folder in ("crates", "packages")
        for path in (workspace.ROOT / folder).rglob("*.rs")
        if not {"target", "tests"} & {*path.relative_to(workspace.ROOT).parts} and path.name != "tests.rs"
    ]
    assert files
    found = [
        f"{path.relative_to(workspace.ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if IN_RUST.search(line) and not any(f'"{shell}"' in line for shell in SHELLS)
    ]
    assert not found, "\n".join(found)


def test_exceptions_are_still_needed() -> None:
    unneeded = [name for name in NAMED if "sys.executable" not in (workspace.ROOT / name).read_text()]
    assert not unneeded


@pytest.mark.parametrize(
    "line",
    [
        "run([python, '-c', code])",
        "run([sys.executable, '-m', 'mesh_launchers._keeper'])",
        "words = ['-Pc', code]",
        "os.execv(sys.executable, words)",
        "run(['sh', '-c', '\"$@\" &', 'sh', python, '-m', 'module'])",
    ],
)
def test_the_check_finds(line: str) -> None:
    assert list(breaches(line))


def test_the_check_lets_shells_be() -> None:
    assert not list(breaches("run(['/bin/sh', '-c', 'true'])"))
