"""Hooks, which plugins implement. A hook only returns descriptors, and is never called while messages or data are moved.

A hook is called when plugins of its kind are looked up by name or listed. Its name is the kind's
:attr:`~mesh_core.plugins.PluginKind.hook`.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any, Final

import pluggy

from mesh_core.plugins._descriptors import Plugin
from mesh_core.plugins._kinds import PluginKind

PROJECT: Final = "mesh"

_hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a kind's hook."""


def spec_of(kind: PluginKind[Any]) -> ModuleType:
    """Return a kind's hook specification for pluggy: no arguments, returns descriptors."""

    def hook() -> Iterable[Plugin[Any]]:  # type: ignore[empty-body]
        """Return descriptors."""

    hook.__name__ = kind.hook
    module = ModuleType(kind.hook)
    setattr(module, kind.hook, _hookspec(hook))
    return module
