"""A pytest plugin: every page of the documentation with Python in it is one test.

The blocks of a page run in order in one fresh interpreter, as a reader would paste them (`doc_page.py`). Pages that need
torch run in a copy of one that has imported it (`warm_scripts.py`). A comment above a block changes that, and says why:

    <!-- example: not run, because it needs two machines -->     the next block is only shown
    <!-- example: needs torch -->                                the page is skipped where torch is missing

Use it with `pytest -p doc_examples docs README.md`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from doc_page import blocks
from warm_scripts import TORCH, WarmProcess, WarmScripts

_NEEDS = re.compile(r"<!-- example: needs (\w+) -->")
_RUNNER = Path(__file__).with_name("doc_page.py")
_TIME_LIMIT = 50.0  # inside pytest's own limit, so that the page's output is still shown
# Optimizers and compiled steps import the last one when they are first used, in each process.
_IMPORTED = (*TORCH, "torch._dynamo")
_warm = pytest.StashKey[WarmScripts]()


class PageFailed(Exception):
    """A page's code ended with an error; the text is what it printed."""


class Page(pytest.Item):
    """One page, run as a program."""

    def runtest(self) -> None:
        """Run the page; raise with its output unless it ends well."""
        for name in _needs(self.path):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{self.path.name} needs {name}, which this environment does not have")
        with tempfile.TemporaryDirectory() as folder:
            self._run_in(folder)

    def _run_in(self, folder: str) -> None:
        with self._start(folder) as process:
            try:
                output, _ = process.communicate(timeout=_TIME_LIMIT)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise PageFailed(f"did not end within {_TIME_LIMIT} s; until then:\n{output}") from None
                raise
        if process.returncode != 0:
            raise PageFailed(f"ended with status {process.returncode}:\n{output}")

    def _start(self, folder: str) -> subprocess.Popen[str]:
        """Start the page's program, in a session of its own: if it overstays, its workers end with it."""
        words = [str(_RUNNER), str(self.path)]
        warm = self.config.stash.get(_warm, None)
        if warm is not None and "torch" in _needs(self.path) and warm.suits(os.environ):
            return WarmProcess(
                warm,
                words,
                os.environ,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                cwd=folder,
                leads=True,
            )
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """The page's own output instead of this plugin's traceback."""
        if isinstance(excinfo.value, PageFailed):
            return f"{self.path}: {excinfo.value}"
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where pytest points to."""
        return self.path, 0, f"page {self.path.name}"


class MarkdownFile(pytest.File):
    """A page as a collector: one item, or none when it has no Python to run."""

    def collect(self) -> Iterable[pytest.Item]:
        """The page, if there is something to run."""
        if any(block.runs for block in blocks(self.path.read_text(encoding="utf-8"))):
            page = Page.from_parent(self, name=self.path.stem)
            if _needs(self.path):
                page.add_marker(pytest.mark.needs)
            yield page


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Claim Markdown files."""
    if file_path.suffix == ".md":
        return MarkdownFile.from_parent(parent, path=file_path)
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import PyTorch once for all pages that need it, and in nobody's time."""
    wanted = any(isinstance(item, Page) and "torch" in _needs(item.path) for item in session.items)
    if wanted and not session.config.option.collectonly and importlib.util.find_spec("torch") is not None:
        session.config.stash[_warm] = WarmScripts(os.environ, _IMPORTED)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what pages were forked from."""
    if warm := config.stash.get(_warm, None):
        warm.close()


def _needs(path: Path) -> list[str]:
    return _NEEDS.findall(path.read_text(encoding="utf-8"))
