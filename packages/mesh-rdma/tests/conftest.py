"""Other processes to transfer from and to."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PEER = Path(__file__).parent / "peer.py"


class Other:
    """Another process; its methods are those of `Peer` in peer.py, or of another program like it."""

    def __init__(self, *before: str, program: Path = PEER) -> None:
        self.program = program
        self.process = self.start(before)

    def start(self, before: tuple[str, ...]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*before, sys.executable, str(self.program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            self.tell(name, *arguments, **options)
            return self.hear()

        return ask

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        data = pickle.dumps((name, arguments, options))
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("=Q", len(data)) + data)
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        (length,) = struct.unpack("=Q", self.process.stdout.read(8))
        result = pickle.loads(self.process.stdout.read(length))
        if isinstance(result, Exception):
            raise result
        return result

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def halt(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        # Until then it may still answer.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


@pytest.fixture(scope="session")
def kind_of_other() -> type[Other]:
    """How the others are started; those on Soft-RoCE are in another way."""
    return Other


@pytest.fixture(scope="module")
def shared(kind_of_other: type[Other]) -> Iterator[Other]:
    """A process that all tests of a file use; none ends it."""
    other = kind_of_other()
    yield other
    other.end()


@pytest.fixture
def other(kind_of_other: type[Other]) -> Iterator[Other]:
    """A process of the test's own."""
    made = kind_of_other()
    yield made
    made.end()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def in_threads() -> Callable[[Callable[[int], None], int], None]:
    """Run a function in several threads at once, and raise what one of them raises."""

    def run(function: Callable[[int], None], count: int) -> None:
        errors: list[BaseException] = []

        def guarded(n: int) -> None:
            try:
                function(n)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    return run
