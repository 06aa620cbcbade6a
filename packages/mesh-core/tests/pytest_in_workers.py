"""What test modules need of pytest where workers import them, for the actors that they define.

No tests run there, and to import pytest takes longer than all else that a worker imports.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


class _Ignored:
    """A mark, or how a fixture is made: leaves what it decorates as it is."""

    def __getattr__(self, name: str) -> _Ignored:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self


mark = fixture = param = _Ignored()


def __getattr__(name: str) -> Any:
    """Whatever else is asked for is pytest's own."""
    if name.startswith("__"):
        raise AttributeError(name)
    here = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    del sys.modules[__name__]
    return getattr(importlib.import_module("pytest"), name)
