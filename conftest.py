"""For all tests of the workspace: the level of a run, and what it draws."""

from levels import pytest_collection_modifyitems, pytest_configure, pytest_report_header

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_report_header"]
