"""A pytest plugin: notes each test as it ends, in the file that MESH_GPU_TALLY names, so that a run that is cut off leaves what it knows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Where `./dev gpu` begins, there is no pytest yet.
    import pytest

VARIABLE = "MESH_GPU_TALLY"
_LINES = 12


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that has ended, or whose fixtures have failed."""
    if report.when != "call" and report.passed:
        return
    outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
    told = {"test": report.nodeid.rpartition("/")[2], "outcome": outcome, "why": _why(report)}
    _note(told)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note files that cannot be imported, or are skipped as a whole."""
    if report.failed or report.skipped:
        outcome = "failed" if report.failed else "skipped"
        _note({"test": report.nodeid.rpartition("/")[2], "outcome": outcome, "why": _why(report)})


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return "\n".join(lines[:_LINES]) or "\n".join(report.longreprtext.splitlines()[-_LINES:])


def _note(told: dict[str, str]) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
