"""The reference pages of mesh-rdma, mesh-tensor, mesh-supervision and mesh-launchers, made from docstrings.

    python tools/reference_pages.py            # writes docs/reference/rdma.md and the others
    python tools/reference_pages.py --check    # says whether they are as they would be written

It needs all packages, and PyTorch, which are in the environment of `./dev env`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {
    "rdma": (
        "mesh_rdma",
        "[move memory](../how-to/move-memory.md), [publish weights](../how-to/publish-weights.md)",
    ),
    "tensor": (
        "mesh_tensor",
        "[compute on a mesh](../how-to/compute-on-a-mesh.md), [spread tensors over it](../how-to/global-view.md)",
    ),
    "supervision": (
        "mesh_supervision",
        "[choose a policy](../how-to/choose-a-policy.md), [heal a training](../how-to/heal-a-training.md)",
    ),
    "launchers": ("mesh_launchers", "[launch hosts](../how-to/launch-hosts.md)"),
}
"""By the page's name: the package, and how-to pages to begin with."""


def page(name: str) -> str:
    """Return the text of a page."""
    module_name, begin = PAGES[name]
    module = importlib.import_module(module_name)
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Other names": []}
    for public in sorted(module.__all__, key=str.lower):
        if public.startswith("__"):
            continue
        value = getattr(module, public)
        if isinstance(value, ModuleType):
            kinds["Other names"].append(_row(f"{public}", value))
        elif isinstance(value, type) and issubclass(value, BaseException):
            kinds["Errors"].append(_row(public, value))
        elif isinstance(value, type):
            kinds["Classes"] += _class(public, value)
        elif callable(value):
            kinds["Functions"].append(_row(f"{public}{_parameters(value)}", value))
        else:
            kinds["Other names"].append(_row(public, value))
    about = (
        f"What is imported from `{module_name}`, in the words of its docstrings. `help(...)` shows the rest of them, with examples. "
        f"To begin with: {begin}."
    )
    text = [f"# `{module_name}`", "", about]
    for kind, rows in kinds.items():
        if rows:
            text += ["", f"## {kind}", "", "| name | is |", "| --- | --- |", *rows]
    return "\n".join([*text, ""])


def _class(name: str, cls: type) -> Iterator[str]:
    """Rows of a class: itself, and what it adds to its bases."""
    yield _row(name if issubclass(cls, enum.Enum) else f"{name}{_parameters(cls)}", cls)
    for attribute, value in sorted(vars(cls).items()):
        if attribute.startswith("_"):
            continue
        found = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not inspect.getdoc(found) or isinstance(found, type):
            continue
        if inspect.isfunction(found):
            yield _row(f"{name}.{attribute}{_parameters(found, isinstance(value, staticmethod))}", found)
        elif isinstance(found, property):
            yield _row(f"{name}.{attribute}", found)


def _parameters(function: Any, is_static: bool = True) -> str:
    """Return names of parameters, with their defaults."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    parameters = list(signature.parameters.values())
    if not is_static:
        parameters = parameters[1:]
    shown = [_shown(each) for each in parameters]
    text = str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))
    return text.replace("=Ellipsis", "=...")


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.default is not inspect.Parameter.empty and "<" in repr(parameter.default):
        # An object without a spelling of its own.
        parameter = parameter.replace(default=...)
    return parameter.replace(annotation=inspect.Parameter.empty)


def _row(name: str, value: Any) -> str:
    """Return a row: the name, and the first paragraph of the docstring."""
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    told = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", first).replace("``", "`")
    return f"| `{name}` | {' '.join(told.split())} |".replace("\\|", "|")


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    stale = []
    for name in PAGES:
        path, text = DOCS / "reference" / f"{name}.md", page(name)
        if not path.exists() or path.read_text() != text:
            stale.append(str(path))
            if "--check" not in arguments:
                path.write_text(text)
    if stale and "--check" in arguments:
        print(f"not as the docstrings say: {', '.join(stale)}; run python tools/reference_pages.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
