"""The names of PyTorch's that begin with an underscore, of which another release may not have some."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mesh_tensor

pytest.importorskip("torch")

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.torch_version import TorchVersion

from mesh_core import MeshError
from mesh_tensor import Mesh
from mesh_tensor._torch._dtensor import DTensorSpec, TensorMeta
from mesh_tensor._torch._mesh import Devices
from mesh_tensor._torch._names import OLDEST, PRIVATE, PROVEN, TRIED, Private, check_release, missing

SOURCE = Path(mesh_tensor.__file__).parent
_QUALIFIED = re.compile(r"torch(\.\w+)*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.AST) -> str:
    """A dotted name, if it is one."""
    if isinstance(node, ast.Name):
        return node.id
    base = chain(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def own_names(trees: list[ast.Module]) -> set[str]:
    """What this package itself defines."""
    own: set[str] = set()
    for node in (each for tree in trees for each in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return own


def touched(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of PyTorch's: qualified where the source says whose they are, and otherwise bare."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                name = f"{node.module}.{each.name}"
                if any(map(is_private, name.split("."))):
                    yield name
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            inner.update(id(each) for each in ast.walk(node) if each is not node and chain(each))
            name = chain(node)
            if _QUALIFIED.fullmatch(name):
                parts = name.split(".")
                last = max((at for at, each in enumerate(parts) if is_private(each)), default=-1)
                if last > 0:
                    yield ".".join(parts[: last + 2])
                continue
            within = name.split(".")[1:] if name else [node.attr]
            if not name.startswith(("self.", "cls.")) or len(within) > 1:
                yield from (each for each in within if is_private(each) and each not in own)
        elif isinstance(node, ast.Constant) and _QUALIFIED.fullmatch(text := str(node.value)):
            yield from [text] if any(map(is_private, text.split("."))) else []


def in_source() -> dict[str, set[str]]:
    """All of them, and in which files."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if path.name != "_names.py"}
    own = own_names(list(trees.values()))
    names: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in touched(tree, own):
            names.setdefault(name, set()).add(str(path.relative_to(SOURCE)))
    return names


IN_SOURCE = in_source()
TOO_OLD = TorchVersion(torch.__version__) < OLDEST


def test_every_private_name_is_listed() -> None:
    listed = {each.name for each in PRIVATE}
    bare = {part for name in listed for part in name.split(".") if is_private(part)}
    # Marks of our own on DTensors, and of Python.
    bare |= {"_mesh_copied", "_mesh_failed", "_getframe"}
    unknown = {
        name: files
        for name, files in IN_SOURCE.items()
        if (
            name not in bare
            if "." not in name
            else not any(
                each == name or each.startswith(f"{name}.") or name.startswith(f"{each}.") for each in listed
            )
        )
    }
    assert not unknown, "list these in _torch/_names.py, with the reason"


def test_every_name_that_is_listed_is_used() -> None:
    words = set(
        re.findall(
            r"\w+", " ".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "_names.py")
        )
    )
    assert [each.name for each in PRIVATE if each.name.split(".")[-1] not in words | {"default"}] == []


@torch.library.custom_op("mesh_tensor_tests::private_names", mutates_args=())
def _custom(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def an_instance(of: str) -> object:
    """Something that has the names which its class does not have."""
    if of == "torch.nn.Module":
        return torch.nn.Module()
    if of == "torch.Tensor":
        return torch.nn.Parameter(torch.empty(0).as_subclass(type("Kind", (torch.Tensor,), {})))
    if of == "torch._library.custom_ops.CustomOpDef":
        return _custom
    if of == "torch.distributed.device_mesh.DeviceMesh":
        return Devices("cpu", (1,), ("one",), rank=0, life=1, groups={})
    assert of == "torch.distributed.tensor.DTensor"
    mesh: Any = an_instance("torch.distributed.device_mesh.DeviceMesh")
    form = TensorMeta(torch.Size([1]), (1,), torch.float32)
    return DTensor(torch.empty(1), DTensorSpec(mesh, (Replicate(),), form), requires_grad=False)


@pytest.mark.parametrize("private", PRIVATE, ids=lambda each: each.name)
def test_a_private_name_exists(private: Private) -> None:
    if private.for_global and TOO_OLD:
        pytest.skip(f"the global view needs PyTorch {OLDEST}")
    owner, _, name = private.name.rpartition(".")
    if private.of_instances:
        exists = hasattr(an_instance(owner), name)
    else:
        exists = private not in missing(for_global=True)
    assert exists, f"PyTorch {torch.__version__} lacks {private.name}: {private.why}"


@pytest.mark.parametrize(
    ("release", "asked_for", "said"),
    [
        ("2.10.2", "1", "fails in one process alone"),
        ("2.12.0+cpu", "0", f"to try it all the same, set {TRIED}=1"),
        ("2.14.1", "0", f"to try it all the same, set {TRIED}=1"),
    ],
)
def test_a_release_that_is_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, release: str, asked_for: str, said: str
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setenv(TRIED, asked_for)
    needed = ", ".join(PROVEN)
    with pytest.raises(
        MeshError, match=rf"needs PyTorch {needed} or newer, and this is {re.escape(release)}.*{said}"
    ):
        Mesh((1,), ("one",))


@pytest.mark.skipif(TOO_OLD, reason="this PyTorch is refused for its age")
@pytest.mark.parametrize(
    ("release", "asked_for"),
    [("2.11.0+cpu", "0"), ("2.12.1", "1"), ("2.13.1", "1"), ("2.15.2", "0"), ("2.16.0", "0")],
)
def test_a_release_that_was_compared_or_is_asked_for_is_taken(
    monkeypatch: pytest.MonkeyPatch, release: str, asked_for: str
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setenv(TRIED, asked_for)
    check_release()


@pytest.mark.skipif(TOO_OLD, reason="this PyTorch is refused for its age")
def test_a_release_that_lacks_a_name_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.tensor._dtensor_spec.TensorMeta")
    with pytest.raises(MeshError, match="TensorMeta, for layouts"):
        Mesh((1,), ("one",))
