"""A pytest plugin: a worker of pytest-xdist that crashes costs its test, not the run.

pytest-xdist 3.8 hands all files of a crashed worker out again, finished ones too, and then waits forever for tests of these
to finish. It has the test that crashed run again, and does not tell a worker that its last test is the last.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, as `--dist loadfile` does."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduler(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
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
