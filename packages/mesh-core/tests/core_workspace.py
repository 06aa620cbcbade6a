"""Helpers for the tests of `sync_workspace`, in a module that workers and scripts can import."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from mesh_core import WorkspaceReport, this_host


def sync(path: Path, **options: Any) -> WorkspaceReport:
    return this_host().sync_workspace(path, **options).get(timeout=30)


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def value_of(module: str, name: str = "value") -> Any:
    """What a module of the worker's has under a name; a function is called."""
    found = getattr(importlib.import_module(module), name)
    return found() if callable(found) else found


def file_of(module: str) -> str | None:
    return importlib.import_module(module).__file__
