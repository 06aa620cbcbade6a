"""The line on a terminal that says how far something is."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from core_terminal import Terminal

from mesh_core import Promise, configured
from mesh_core.extensions import clear_progress, progress, watched

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.slow]

SOON = 30.0
ERASED = "\r\x1b[K"


class Screen:
    """A terminal in place of stderr, and everything that has been written to it."""

    def __init__(self, here: int, stream: IO[str]) -> None:
        self._here = here
        self.stream = stream
        self.text = ""

    def expect(self, text: str) -> None:
        """Read until this has been written."""
        until = time.monotonic() + SOON
        while text not in self.text:
            ready = select.select([self._here], [], [], max(0.0, until - time.monotonic()))[0]
            assert ready, f"{text!r} did not come; written: {self.text!r}"
            self.text += os.read(self._here, 65536).decode()

    def rest(self) -> str:
        """All that has been written so far."""
        while select.select([self._here], [], [], 0)[0]:
            self.text += os.read(self._here, 65536).decode()
        return self.text


@pytest.fixture(autouse=True)
def idle() -> Iterator[None]:
    """The thread ends by itself when there is nothing to show."""
    yield
    until = time.monotonic() + SOON
    while any(thread.name == "mesh-progress" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


@contextlib.contextmanager
def at_terminal() -> Iterator[Screen]:
    """Inside of a test: pytest sets stderr anew before it."""
    here, there = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, open(there, "w") as stream:  # noqa: PTH123 - a descriptor
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "xterm")
        yield Screen(here, stream)
    os.close(here)


def test_a_line_comes_after_a_second_follows_and_is_gone_at_the_end() -> None:
    with at_terminal() as screen:
        done = 0
        begin = time.monotonic()
        with progress(lambda: f"indexing: {done} of 2 files"):
            screen.expect("\rindexing: 0 of 2 files, ")
            assert time.monotonic() - begin >= 1.0
            done = 1
            screen.expect("\rindexing: 1 of 2 files, ")
        assert screen.rest().endswith(ERASED)
        assert "\n" not in screen.text


@pytest.mark.full
def test_what_is_quick_shows_nothing() -> None:
    with at_terminal() as screen:
        for _ in range(100):
            with progress(lambda: "quick"):
                pass
        assert screen.rest() == ""


@pytest.mark.full
def test_the_newest_of_several_is_shown() -> None:
    with at_terminal() as screen, progress(lambda: "outer"):
        screen.expect("\router, ")
        with progress(lambda: "inner"):
            screen.expect("\rinner, ")
        screen.text = ""
        screen.expect("\router, ")


def test_a_line_makes_room_for_others() -> None:
    with at_terminal() as screen, progress(lambda: "waiting"):
        screen.expect("\rwaiting, ")
        clear_progress()
        screen.stream.write("something else\n")
        screen.stream.flush()
        screen.expect(f"{ERASED}something else\r\n")
        screen.text = ""
        screen.expect("\rwaiting, ")


@pytest.mark.full
def test_a_text_that_raises_ends_nothing() -> None:
    with at_terminal() as screen:
        texts: Iterator[Any] = iter([ValueError, "fine"])

        def text() -> str:
            found = next(texts, "fine")
            if isinstance(found, str):
                return found
            raise found

        with progress(text):
            screen.expect("\rfine, ")


def test_a_future_shows_how_far_it_is_while_somebody_waits() -> None:
    with at_terminal() as screen:
        promise = Promise[int]()
        future = watched(promise.future, lambda: "export: 1 of 2 files")
        got: list[int] = []
        waiting = threading.Thread(target=lambda: got.append(future.get(timeout=SOON)))
        waiting.start()
        screen.expect("\rexport: 1 of 2 files, ")
        promise.set_result(7)
        waiting.join()
        assert got == [7]
        assert screen.rest().endswith(ERASED)


def test_nothing_is_written_where_there_is_no_terminal_or_where_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with at_terminal() as screen:
        calls: list[str] = []

        def text() -> str:
            calls.append(threading.current_thread().name)
            return "hidden"

        with configured(progress="OFF"), progress(text):
            pass
        monkeypatch.setenv("TERM", "dumb")
        with progress(text):
            pass
        with (tmp_path / "log").open("w") as log, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", log)
            with progress(text):
                pass
        with contextlib.closing(screen.stream):
            pass
        with progress(text):
            pass  # stderr is closed
        assert not calls


@pytest.mark.full
def test_plain_lines_are_written_elsewhere_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    with path.open("w") as log, monkeypatch.context() as patch, configured(progress="ON"):
        patch.setattr(sys, "stderr", log)
        with progress(lambda: "indexing"):
            until = time.monotonic() + SOON
            while not path.read_text() and time.monotonic() < until:
                time.sleep(0.05)
    written = path.read_text()
    assert written.startswith("indexing, ")
    assert written.endswith(" s\n")
    assert "\r" not in written


SLOW_BOOTSTRAP = """
    import time
    from mesh_core import this_host

    def slow() -> None:
        print("a line of a worker", flush=True)
        time.sleep(3)

    with this_host().spawn_procs({"gpus": 2}, bootstrap=slow) as procs:
        procs.initialized.get(timeout=60)
        print("all are up")
"""


@pytest.mark.full
def test_processes_that_take_long_to_start(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SLOW_BOOTSTRAP))
    terminal = Terminal(str(script), env={"TERM": "xterm"})
    try:
        seen = terminal.expect("all are up", 60)
        assert "\rprocs: the bootstrap has run in 0 of 2 processes, 1 s" in seen
        # The line of the worker stands alone, and nothing is left of the progress.
        assert "a line of a worker\n" in seen
        assert seen.endswith(f"{ERASED}all are up")
        assert terminal.finish() == 0
    finally:
        terminal.close()


SLOW_SYNC = """
    from pathlib import Path
    from mesh_core.testing import LocalCluster
    from mesh_core._features.workspace import synchronizer

    find = synchronizer.Scanner.scan

    def slow(scanner):
        import time

        time.sleep(2)
        return find(scanner)

    if __name__ == "__main__":
        synchronizer.Scanner.scan = slow
        with LocalCluster(hosts=1) as cluster:
            report = cluster.attach().sync_workspace(Path(__file__).parent).get(timeout=60)
            print(report.files, "files")
"""


@pytest.mark.full
def test_a_sync_that_takes_long(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SLOW_SYNC))
    terminal = Terminal(str(script), env={"TERM": "xterm"})
    try:
        seen = terminal.expect("1 files", 60)
        assert f"\rsync_workspace: looks for changes in {tmp_path.name}, 1 s" in seen
        assert seen.endswith(f"{ERASED}1 files")
        assert terminal.finish() == 0
    finally:
        terminal.close()
