"""END-1: no package asks a mesh of actors for what an endpoint of that name would hide; it asks `mesh_of()` or the mesh's private fields.

Type checkers see it where a variable is known to be an `ActorMesh`, which has no such attributes; this test sees the usual names of others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_core._actors.actor import GIVING_WAY

ROOT = Path(__file__).parent.parent
MESHES = {
    "actors",
    "mesh",
    "member",
    "members",
    "replica",
    "spawned",
    "workers",
    "_actors",
    "_mesh",
}
"""What variables and fields with meshes of actors are called."""
HIDDEN = GIVING_WAY - {"mesh"}
# Parsing takes seconds, and there is nothing to be found in a file without such text.
TEXT = re.compile(rf"\b(?:{'|'.join(sorted(MESHES))})\s*\.\s*(?:{'|'.join(sorted(HIDDEN))})\b")
OTHERS = {"mesh_core/_meshes/handle.py"}
"""The file in which they are defined."""


def shadowed(source: str) -> Iterator[tuple[int, str]]:
    """Find where a mesh is asked for such an attribute: the line, and the expression."""
    if not TEXT.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in HIDDEN:
            owner = node.value
            called = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if called in MESHES:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("package", sorted(each.name for each in (ROOT / "packages").iterdir()))
def test_meshes_are_not_asked_for_what_endpoints_hide(package: str) -> None:
    src = ROOT / "packages" / package / "src"
    found = [
        f"{path.relative_to(src)}:{line}: {what}"
        for path in sorted(src.rglob("*.py"))
        if str(path.relative_to(src)) not in OTHERS
        for line, what in shadowed(path.read_text())
    ]
    assert not found, (
        "an endpoint may have that name: use mesh_of(), or a private field within mesh_core\n"
        + "\n".join(found)
    )


def test_it_finds_them() -> None:
    assert sorted(
        shadowed("x.mesh.failed()\nactors.name\nmesh_of(actors).name\nprocs.name\nself._mesh.respawn")
    ) == [
        (1, "x.mesh.failed"),
        (2, "actors.name"),
        (5, "self._mesh.respawn"),
    ]
