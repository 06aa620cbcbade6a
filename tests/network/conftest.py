"""What the tests over real networks share; where no networks can be made they are skipped, and say why."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The programs here import each other by name, as they do when they are run.
sys.path.insert(0, str(Path(__file__).parent))

from cluster import Network, missing, wait_until

collect_ignore = ["keeper.py", "launch.py"]
# What runs on the machines of a network imports what lies beside it.
collect_ignore_glob = ["programs/*"]
MARK = "NETWORK_TEST"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.full)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("network") and (reason := missing()):
        pytest.skip(reason)


def marked(mark: str) -> dict[int, int]:
    """The processes that have a mark in their variables, and the network that each is in."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "ns/net").stat().st_ino
            except OSError:
                continue
    return found


def children() -> set[str]:
    """The processes that this one has started."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended since
            found.update((task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Nothing stays behind a test: no process, descriptor or thread, and this process is where it was."""
    home = Path("/proc/thread-self/ns/net").stat().st_ino
    before = children(), len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}  # noqa: PTH208
    yield
    assert Path("/proc/thread-self/ns/net").stat().st_ino == home
    wait_until(lambda: not children() - before[0], lambda: f"processes are left: {children() - before[0]}", 5)
    assert len(os.listdir("/proc/self/fd")) <= before[1]  # noqa: PTH208
    assert {thread.name for thread in threading.enumerate()} <= before[2]


@pytest.fixture
def network() -> Iterator[Callable[[int], Network]]:
    """Make networks of so many machines; they are gone after the test."""
    made: list[Network] = []

    def make(hosts: int) -> Network:
        network = Network(hosts)
        network.__enter__()
        made.append(network)
        return network

    yield make
    for each in made:
        each.__exit__(None, None, None)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[int, int]]:
    """All processes that come from this test, whoever their parent is by now, and the network that each is in."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(MARK, mark)
    return lambda: marked(mark)
