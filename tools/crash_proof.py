"""A pytest plugin: how pytest-xdist hands out files, and that a worker that crashes costs its test, not the run.

With `--dist loadfile` the tests of a file stay together, as they share its fixtures. Long files would make the others wait
at the end, so that two kinds of tests may part: the test classes of a file, and the functions of a file with
`pytestmark = pytest.mark.split`.

pytest-xdist 3.8 hands all files of a crashed worker out again, finished ones too, and then waits forever for tests of these
to finish. It has the test that crashed run again, and does not tell a worker that its last test is the last.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_SPLIT = re.compile(r"^pytestmark = .*\bmark\.split\b", re.MULTILINE)


def unit(root: Path, test: str) -> str:
    """What is handed out as a whole with a test, given its node id."""
    # Without its parameters: the tests of a function may share what is made once.
    file, *names = test.partition("[")[0].split("::")
    if len(names) > 1:
        return f"{file}::{names[0]}"
    return f"{file}::{names[0]}" if names and _may_be_split(root / file) else file


@cache
def _may_be_split(path: Path) -> bool:
    return path.suffix == ".py" and _SPLIT.search(path.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out units in place of files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduler(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return unit(config.rootpath, nodeid)

        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work.pop(node)
            left = {file: tests for file, tests in units.items() if not all(tests.values())}
            if not left:
                return None
            tests = next(iter(left.values()))
            crashed: str = next(test for test, done in tests.items() if not done)
            tests[crashed] = True  # it is told as failed, and not run again here
            self.workqueue.update({file: tests for file, tests in left.items() if not all(tests.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node: Any) -> None:
            if node not in self.registered_collections:
                return  # it has just been started, and comes again
            super()._reschedule(node)
            if not self.workqueue and not node.shutting_down:
                node.shutdown()  # once it has done what it has

    return Scheduler(config, log)
