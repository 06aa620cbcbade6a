"""Promises that are finished through a descriptor: by native threads, child processes, anything that can write (CMP-2, CMP-3)."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from core_processes import Script, descriptors

from mesh_core import Actor, BrokenPromise, MeshError, Promise, endpoint, gather, this_host, wait

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

SOON = 30.0


def status(number: int) -> bytes:
    return struct.pack("=i", number)


def fill(write: int) -> None:
    while True:
        os.write(write, bytes(4096))


def barrier() -> None:
    """Wait until everything that was written or closed before has been processed."""
    promise = Promise[None]()
    write = promise.descriptor()
    os.close(write)
    promise.future.exception(timeout=SOON)


def test_a_status_finishes_the_promise() -> None:
    promise = Promise[None]("transfer")
    write = promise.descriptor()
    os.write(write, status(0))
    assert promise.future.get(timeout=SOON) is None
    os.close(write)
    barrier()


def test_finish_turns_the_status_into_the_result() -> None:
    promise = Promise[str](finish=lambda number: f"status {number}")
    write = promise.descriptor()
    os.write(write, status(-3))
    os.close(write)
    assert promise.future.get(timeout=SOON) == "status -3"
    barrier()


def test_a_nonzero_status_is_an_error() -> None:
    promise = Promise[None]("transfer")
    write = promise.descriptor()
    os.write(write, status(11))
    os.close(write)
    with pytest.raises(MeshError, match="promise 'transfer' was finished with status 11"):
        promise.future.get(timeout=SOON)
    barrier()


@pytest.mark.parametrize("sent", range(4))
def test_closing_before_a_whole_status_breaks_the_promise(sent: int) -> None:
    promise = Promise[None]("transfer")
    write = promise.descriptor()
    os.write(write, bytes(sent))
    os.close(write)
    with pytest.raises(BrokenPromise, match="promise 'transfer' was dropped before it had a result"):
        promise.future.get(timeout=SOON)
    # The holder of the promise could not have known.
    assert promise.set_result(None) is False
    assert promise.set_exception(ValueError("late")) is False
    assert not promise.cancelled


def test_an_open_copy_keeps_the_promise_open() -> None:
    promise = Promise[None]()
    future = promise.future
    write = promise.descriptor()
    copy = os.dup(write)
    del promise
    gc.collect()
    os.close(write)
    barrier()
    assert not future.done()
    os.write(copy, status(0))
    os.close(copy)
    assert future.get(timeout=SOON) is None
    barrier()


def test_of_two_statuses_the_first_counts() -> None:
    promise = Promise[int](finish=lambda number: number)
    write = promise.descriptor()
    os.write(write, status(1) + status(2))
    assert promise.future.get(timeout=SOON) == 1
    barrier()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.write(write, status(3))
    finally:
        signal.signal(signal.SIGPIPE, before)
    os.close(write)
    barrier()
    assert promise.future.get() == 1


def test_a_second_outcome_is_dropped() -> None:
    kept, given_up = Promise[int](), Promise[int]()
    writes = [promise.descriptor() for promise in (kept, given_up)]
    kept.set_result(5)
    given_up.future.cancel()
    for write in writes:
        os.write(write, status(0))
        os.close(write)
    barrier()
    assert kept.future.get() == 5
    assert given_up.cancelled


def test_the_first_of_two_descriptors_counts() -> None:
    promise = Promise[int](finish=lambda number: number)
    first, second = promise.descriptor(), promise.descriptor()
    os.write(second, status(2))
    assert promise.future.get(timeout=SOON) == 2
    os.close(first)
    os.close(second)
    barrier()
    assert promise.future.get() == 2


def test_an_endless_writer_delays_nobody() -> None:
    promise = Promise[None]()
    write = promise.descriptor()
    os.write(write, status(0))
    promise.future.get(timeout=SOON)
    fcntl.fcntl(write, fcntl.F_SETFL, os.O_NONBLOCK)
    # Nobody reads it, so it fills up.
    with pytest.raises(BlockingIOError):
        fill(write)
    barrier()
    os.close(write)
    barrier()


def test_no_descriptor_leaks() -> None:
    before = descriptors()
    for n in range(50):
        promise = Promise[None]()
        write = promise.descriptor()
        if n % 3:
            os.write(write, status(n))
        os.close(write)
        promise.future.exception(timeout=SOON)
    barrier()
    assert len(descriptors()) == len(before)


def test_one_wait_for_many_descriptors() -> None:
    promises = [Promise[int](finish=lambda number: number) for _ in range(40)]
    writes = [promise.descriptor() for promise in promises]

    def write_all() -> None:
        for n, write in enumerate(writes):
            os.write(write, status(n))
            os.close(write)

    thread = threading.Thread(target=write_all)
    thread.start()
    done, pending = wait([promise.future for promise in promises], timeout=SOON)
    thread.join()
    assert len(done) == 40 and not pending
    assert gather(*[promise.future for promise in promises]).get() == list(range(40))
    barrier()


def test_a_coroutine_awaits_a_status() -> None:
    async def main() -> str:
        promise = Promise[str](finish=lambda number: f"status {number}")
        write = promise.descriptor()
        asyncio.get_running_loop().call_soon(os.write, write, status(4))
        try:
            return await promise.future
        finally:
            os.close(write)

    assert asyncio.run(main()) == "status 4"
    barrier()


def test_the_descriptor_is_inherited_only_if_passed_on() -> None:
    promise = Promise[None]()
    write = promise.descriptor()
    assert not os.get_inheritable(write)
    os.close(write)
    promise.future.exception(timeout=SOON)


def test_a_child_process_finishes_the_promise() -> None:
    promise = Promise[int](finish=lambda number: number)
    write = promise.descriptor()
    code = f"import os, struct; os.write({write}, struct.pack('=i', 42))"
    child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[write])
    os.close(write)
    assert promise.future.get(timeout=SOON) == 42
    assert child.wait() == 0
    barrier()


def test_a_killed_child_process_breaks_the_promise() -> None:
    promise = Promise[None]()
    write = promise.descriptor()
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[write])
    os.close(write)
    child.kill()
    child.wait()
    assert isinstance(promise.future.exception(timeout=SOON), BrokenPromise)


class Waiter(Actor):
    """Waits for a child process in a worker."""

    @endpoint
    def run(self) -> int:
        promise = Promise[int](finish=lambda number: number)
        write = promise.descriptor()
        code = f"import os, struct; os.write({write}, struct.pack('=i', 1))"
        child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[write])
        os.close(write)
        number = promise.future.get(timeout=SOON)
        child.wait()
        return number

    @endpoint
    async def run_async(self) -> int:
        promise = Promise[int](finish=lambda number: number)
        write = promise.descriptor()
        os.write(write, status(2))
        os.close(write)
        return await promise.future


def test_it_works_in_a_worker() -> None:
    with this_host().spawn_procs() as procs:
        waiter = procs.spawn("waiter", Waiter)
        assert waiter.run.call_one().get(timeout=SOON) == 1
        assert waiter.run_async.call_one().get(timeout=SOON) == 2


def test_the_end_of_the_runtime_breaks_the_promise(script: Callable[..., Script]) -> None:
    running = script("""
        import os, struct
        from mesh_core import MeshError, Promise, shutdown
        said, silent = Promise(), Promise()
        writes = [said.descriptor(), silent.descriptor()]
        os.write(writes[0], struct.pack("=i", 0))
        shutdown()
        print(said.future.get(), type(silent.future.exception()).__name__)
        for write in writes:
            try:
                os.write(write, bytes(4))
            except BrokenPipeError:
                print("nobody reads")
        try:
            silent.descriptor()
        except MeshError as error:
            print("refused")
    """)
    assert [running.line() for _ in range(4)] == [
        "None BrokenPromise",
        "nobody reads",
        "nobody reads",
        "refused",
    ]
    running.finish()
    assert running.process.returncode == 0


def test_a_forked_child_can_write_but_not_open_a_descriptor(script: Callable[..., Script]) -> None:
    running = script("""
        import os, struct
        from mesh_core import MeshError, Promise
        promise = Promise(finish=lambda status: f"status {status}")
        write = promise.descriptor()
        pid = os.fork()
        if pid == 0:
            try:
                promise.descriptor()
            except MeshError:
                print("refused", flush=True)
            os.write(write, struct.pack("=i", 7))
            os._exit(0)
        os.close(write)
        print(promise.future.get(30), flush=True)
        os.waitpid(pid, 0)
    """)
    assert [running.line(), running.line()] == ["refused", "status 7"]
    running.finish()
    assert running.process.returncode == 0
