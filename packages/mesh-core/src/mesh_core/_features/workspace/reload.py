"""Reload changed modules in a running process.

All or nothing: if one of them cannot be imported, changes to modules, functions and classes are undone. In each module,
functions and classes keep their objects and get new code (``patch``). Other names get their new values, also in other
modules of the workspace that imported them with ``from ... import``.
"""

from __future__ import annotations

import importlib
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from mesh_core._actors.endpoint import table_of
from mesh_core._features.workspace.imports import Imports, imports_of, in_order
from mesh_core._features.workspace.patch import Undo, patch, restore, same_kind
from mesh_core._features.workspace.synced import Answer, Synced

if TYPE_CHECKING:
    from mesh_core._features.workspace.placing import Workspace
    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._process.process import Process


def mark(process: Process, workspace: Workspace, root: str, changed: list[str]) -> None:
    """Note which changed modules this process has imported, from the copy or from the directory itself."""
    paths = set(changed)
    process.slots.of(Synced).stale.update(
        name for name, path in _loaded(root, workspace.source).items() if path in paths
    )


def reload(actor_host: ActorHost, workspace: Workspace, root: str) -> Answer:
    """Reload what has changed in this sync and in earlier ones that did not reload or failed to."""
    process = actor_host.process
    mine = _loaded(root, workspace.source)
    # A deleted module can no longer be imported; code that has imported it keeps it.
    again = [
        name
        for name, path in mine.items()
        if name in process.slots.of(Synced).stale and Path(root, path).exists()
    ]
    if not again:
        return Answer((), (), "")
    undo: Undo = []
    kept: list[str] = []
    name = ""
    try:
        imports: dict[str, Imports] = {}
        for name, path in mine.items():
            module = sys.modules[name]
            source = _read(Path(root, path))
            if source is not None:
                imports[name] = imports_of(source, name, hasattr(module, "__path__"), str(path))
        for name in in_order({name: imports[name].modules for name in again}):
            before = dict(vars(sys.modules[name]))
            _import_again(sys.modules[name], undo, kept)
            _hand_on(name, before, imports, undo)
    except BaseException as error:  # noqa: BLE001 - from the user's code; reported to the caller of the sync
        for step in reversed(undo):
            step()
        text = "".join(traceback.format_exception_only(error)).strip()
        return Answer((), (), f"{name}: {text}")
    process.slots.of(Synced).stale.difference_update(again)
    linecache.checkcache()
    _renew(actor_host, kept)
    return Answer(tuple(sorted(again)), tuple(kept), "")


def _loaded(root: str, source: str) -> dict[str, str]:
    """Return the modules imported from the workspace, with their paths in it."""
    found = {}
    folders: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        if isinstance(file, str) and spec is not None and spec.name == name:
            folder, _, last = file.rpartition("/")
            if folder not in folders:
                folders[folder] = os.path.realpath(folder)
            for top in (root, source):
                # The path as spelled in sys.path, or with links resolved.
                for known in (file, f"{folders[folder]}/{last}"):
                    if known.startswith(f"{top}/"):
                        found[name] = known[len(top) + 1 :]
    return found


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _import_again(module: ModuleType, undo: Undo, kept: list[str]) -> None:
    names = vars(module)
    before = dict(names)
    undo.append(lambda: restore(names, before))
    importlib.reload(module)
    stand_ins: dict[Any, Any] = {}
    for name, old in before.items():
        new = names.get(name)
        if (
            isinstance(old, (FunctionType, type))
            and isinstance(new, (FunctionType, type))
            and new is not old
            and new.__module__ == module.__name__
            and old.__module__ == module.__name__
        ):
            why = patch(old, new, undo, stand_ins)
            if why:
                kept.append(f"{module.__name__}.{name} ({why}): existing uses keep the old code")
            else:
                names[name] = old


def _hand_on(name: str, before: dict[str, Any], imports: dict[str, Imports], undo: Undo) -> None:
    """Update names that other modules imported from this one."""
    new = vars(sys.modules[name])
    for other, about in imports.items():
        names = vars(sys.modules[other])
        for module, taken, bound in about.taken:
            if module != name or other == name:
                continue
            pairs = [(key, key) for key in before] if taken == "*" else [(taken, bound)]
            for key, at in pairs:
                if key in new and key in before and at in names and names[at] is before[key]:
                    undo.append(lambda names=names, at=at, old=names[at]: names.__setitem__(at, old))  # type: ignore[misc]
                    names[at] = new[key]


def _renew(actor_host: ActorHost, kept: list[str]) -> None:
    """Give running actors the new endpoints that their executors can run; new actors get all of them."""
    actor_host._classes.clear()
    actor_host.process.forget_tables()
    tables = {id(actor.table): (actor._cls, actor.table) for actor in actor_host.actors.values()}
    for cls, table in tables.values():
        fresh = {} if cls is None else table_of(cls)
        for name, old in list(table.items()):
            new = fresh.get(name)
            if new is not None and same_kind(old, new):
                table[name] = new
            elif cls is not None:
                why = (
                    "it is gone"
                    if new is None
                    else "its kind has changed: sync, async, concurrent or with a port"
                )
                kept.append(
                    f"{cls.__module__}.{cls.__qualname__}.{name} ({why}): running actors keep the old one"
                )
