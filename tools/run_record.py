"""A pytest plugin: leaves a record of what failed, and of what took long (`records.py`). Idle where nobody wants one."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from records import Failure, Record, folder_of_this_run, session_of_this_run

_SLOWEST = 20
_LONGEST_DETAIL = 80
_WITH_VALUE = {"-p", "-o", "-c", "--rootdir", "--import-mode"}
_FLAGS = {"--doctest-modules", "--pyargs"}


class Recorder:
    """What one run of pytest had to say about each test."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._reasons: dict[str, str] = {}
        self._details: dict[str, str] = {}
        self._times: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of a test."""
        self._seconds[report.nodeid] += report.duration
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be read."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self._reasons.setdefault(report.nodeid, _reason(report))
            self._details.setdefault(report.nodeid, _detail(report))
            self._times[report.nodeid] += 1

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        options = rerun_options(list(map(str, self._config.invocation_params.args)))
        failures = [
            Failure(
                name,
                reason,
                [sys.executable, "-m", "pytest", *options, name],
                self._times[name],
                self._details[name],
            )
            for name, reason in self._reasons.items()
        ]
        slowest = sorted(self._seconds.items(), key=lambda each: -each[1])[:_SLOWEST]
        path = os.environ.get("PATH", os.defpath)
        Record(session_of_this_run(), path, failures, slowest).write(self._folder)


def rerun_options(arguments: list[str]) -> list[str]:
    """Those of pytest's arguments that say how a test is found and run, without those that choose tests.

    Example:
        >>> rerun_options(["-m", "slow", "-p", "doc_examples", "-n", "2", "docs"])
        ['-p', 'doc_examples']
    """
    kept: list[str] = []
    for index, argument in enumerate(arguments):
        if argument in _WITH_VALUE:
            kept += arguments[index : index + 2]
        elif argument in _FLAGS:
            kept.append(argument)
    return kept


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr or "").strip()
    return text.splitlines()[0][:300] if text else ""


def _detail(report: pytest.TestReport | pytest.CollectReport) -> str:
    sections = [text for name, text in report.sections if text.strip()]
    lines = "\n".join([report.longreprtext, *sections]).splitlines()
    return "\n".join(lines[-_LONGEST_DETAIL:])


def pytest_configure(config: pytest.Config) -> None:
    """Record where a folder is named; workers of pytest-xdist report to the process that started them."""
    folder = folder_of_this_run()
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config, folder), "mesh-run-recorder")
