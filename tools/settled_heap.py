"""A pytest plugin: the garbage collector passes over what was there before the first test.

That is some hundred thousand objects, modules and tests, which stay until the end. Many tests collect garbage to see what is
left behind them, and each time would take a sixth of a second of a processor.
"""

from __future__ import annotations

import gc

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take all objects that collection has left for permanent."""
    gc.collect()
    gc.freeze()
