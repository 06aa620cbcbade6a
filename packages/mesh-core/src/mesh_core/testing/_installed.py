"""Pretend that plugins are installed, for tests."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_core.plugins import Plugin, PluginKind, PluginManager, hookimpl

if TYPE_CHECKING:
    from importlib.metadata import DistributionFinder


class _Offer(importlib.metadata.Distribution):
    """A distribution that exists only in memory."""

    def __init__(self, name: str, entry_points: str) -> None:
        self._name = name
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n",
            "entry_points.txt": entry_points,
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _Finder:
    """A meta path finder that finds the distribution, but no modules."""

    def __init__(self, offer: _Offer) -> None:
        self._offer = offer

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[_Offer]:
        wanted = None if context is None else context.name
        return [self._offer] if wanted in (None, self._offer._name) else []


@contextlib.contextmanager
def installed_plugins(
    *plugins: Plugin[Any],
    kinds: Iterable[PluginKind[Plugin[Any]]] = (),
    distribution: str = "mesh-test-plugins",
) -> Iterator[None]:
    """Make plugins available in this process for a ``with`` block, found through entry points like installed ones.

    ``kinds`` are kinds that no installed package declares. Those whose owner is ``distribution`` are declared by it.

    >>> from mesh_core.plugins import COMMANDS, CommandPlugin, PluginManager
    >>> from mesh_core.testing import installed_plugins
    >>> with installed_plugins(CommandPlugin(name="greet", api_version=1, create=lambda: Greet())):
    ...     "greet" in PluginManager().names(COMMANDS)
    True
    """
    kinds = tuple(kinds)
    known = {kind.group: kind for kind in (*PluginManager().kinds(), *kinds)}.values()
    strangers = [each for each in plugins if not any(isinstance(each, kind.descriptor) for kind in known)]
    if strangers:
        raise TypeError(
            f"installed_plugins() takes descriptors of declared kinds, got {strangers[0]!r}. Try kinds=[...]."
        )
    module = types.ModuleType(f"_{distribution.replace('-', '_')}_{id(plugins):x}")
    lines: list[str] = []
    for kind in known:
        mine = [each for each in plugins if isinstance(each, kind.descriptor)]
        if mine:
            setattr(module, kind.hook, hookimpl(_yielding(kind.hook, mine)))
            lines += [f"[{kind.group}]", *(f"{each.name} = {module.__name__}" for each in mine)]
    own = [kind for kind in kinds if kind.owner == distribution]
    if own:
        lines.append("[mesh.kinds]")
    for kind in own:
        setattr(module, f"KIND_{kind.name}", kind)
        lines.append(f"{kind.name} = {module.__name__}:KIND_{kind.name}")
    finder: Any = _Finder(_Offer(distribution, "\n".join(lines) + "\n"))
    sys.modules[module.__name__] = module
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        del sys.modules[module.__name__]


def _yielding(name: str, plugins: list[Plugin[Any]]) -> Any:
    def hook() -> list[Plugin[Any]]:
        return plugins

    hook.__name__ = name
    return hook
