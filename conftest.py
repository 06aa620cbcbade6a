"""For all tests of the workspace: the level of a run, what it draws, and what garbage collection need not look at."""

from levels import pytest_collection_modifyitems, pytest_configure, pytest_report_header
from settled_heap import pytest_collection_finish

__all__ = [
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
]
