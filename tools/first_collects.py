"""A pytest plugin: of the processes that pytest-xdist starts, one reads the tests first, and the others when it is done.

What they import is compiled by whichever comes first; in a new environment all of them would compile the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_FIRST = "gw0"
FILE = "mesh_collected"
"""What a process is told the name of the file by that says that the first has read all."""
_PATIENCE = 120.0
"""Seconds after which the others no longer wait: the first may have crashed."""
_folder = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process, before it starts, which file says that the first has collected."""
    stash = node.config.stash
    if _folder not in stash:
        stash[_folder] = tempfile.TemporaryDirectory(prefix="mesh-collected-")
    node.workerinput[FILE] = str(Path(stash[_folder].name) / "collected")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Wait for the first, or let the others know."""
    told = getattr(session.config, "workerinput", {})
    if FILE not in told:
        return (yield)
    collected = Path(told[FILE])
    if told["workerid"] != _FIRST:
        until = time.monotonic() + _PATIENCE
        while collected.parent.exists() and not collected.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return (yield)
    try:
        return (yield)
    finally:
        collected.touch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Delete the file; whoever still waits goes on."""
    if folder := config.stash.get(_folder, None):
        folder.cleanup()
