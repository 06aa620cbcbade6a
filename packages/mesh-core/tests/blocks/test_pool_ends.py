"""How pools end: Ctrl-C, forks, shutdown() (FOL-1..3)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from core_processes import Script

pytestmark = pytest.mark.slow

START = """
    import os, signal, sys, threading
    from core_pool import Worker, join_pool_thread
    from mesh_core import MeshError, Pool, configure, shutdown, this_host

    procs = this_host().spawn_procs({"gpus": 3})
    workers = procs.spawn("workers", Worker)
    pool = Pool(workers)
"""


def test_ctrl_c_in_a_map_loses_no_turn(script: Callable[..., Script]) -> None:
    run = script(
        START
        + """
    interrupted = 0
    ended = threading.Event()

    def interrupt():
        # At ever other places: the waits differ.
        for n in range(60):
            ready.acquire()
            ended.wait(0.0003 * (n % 7))
            os.kill(os.getpid(), signal.SIGINT)

    ready = threading.Semaphore(0)
    threading.Thread(target=interrupt, daemon=True).start()
    while interrupted < 60:
        try:
            ready.release()
            kind = pool.map if interrupted % 2 else pool.map_unordered
            for n in kind(workers.double, iter(int, 1)):
                pass
        except KeyboardInterrupt:
            interrupted += 1
    pool.close().get(20)
    print(pool.progress.waiting, pool.progress.running, len(pool))
    with Pool(workers) as other:
        print(sorted(set(other.map_unordered(workers.who, range(60)))))
    places = pool._own._places
    print([places.busy(place) for place in places], places.waiting, pool._runner._waiting)
    shutdown()
    """
    )
    out, err = run.finish()
    assert out.splitlines() == ["0 0 0", "[0, 1, 2]", "[0, 0, 0] 0 0"], err


def test_ctrl_c_while_submit_waits_for_room(script: Callable[..., Script]) -> None:
    run = script(
        START
        + """
    from mesh_core import Channel

    told, heard = Channel[str].open()
    tasks = [pool.submit(workers.wait, told) for _ in range(6)]
    for _ in range(3):
        heard.recv().get(20)
    try:
        print("full", flush=True)
        pool.submit(workers.double, 1)
    except KeyboardInterrupt:
        print("interrupted", pool.progress.waiting)
    for task in tasks:
        task.cancel()
    print(list(pool.map(workers.double, range(5))), pool.progress.waiting, pool._runner._waiting)
    """
    )
    assert run.line() == "full"
    run.process.send_signal(signal.SIGINT)
    out, err = run.finish()
    assert out.splitlines() == ["interrupted 3", "[0, 2, 4, 6, 8] 0 0"], err


def test_shutdown_ends_open_pools(script: Callable[..., Script]) -> None:
    run = script(
        # The replicas never finish by themselves.
        START.replace("procs =", "configure(stop_timeout=0.2)\n    procs =")
        + """
    from mesh_core import Channel

    told, heard = Channel[str].open()
    running = [pool.submit(workers.wait, told) for _ in range(3)]
    for _ in range(3):
        heard.recv().get(20)
    waiting = pool.submit(workers.double, 1)
    shutdown()
    print([thread.name for thread in threading.enumerate()])
    print([isinstance(each.exception(5), MeshError) for each in (*running, waiting)], len(pool))
    try:
        pool.submit(workers.double, 1)
    except MeshError:
        print("refused")
    with this_host().spawn_procs({"gpus": 1}) as procs, Pool(procs.spawn("again", Worker)) as pool:
        print(pool.submit(pool.actors.double, 4).get(20))
    """
    )
    out, err = run.finish()
    assert out.splitlines() == ["['MainThread']", "[True, True, True, True] 0", "refused", "8"], err


def test_script_ends_with_a_pool_that_is_open(script: Callable[..., Script]) -> None:
    run = script(START + "\n    results = pool.map(workers.double, iter(int, 1))\n    print(next(results))\n")
    out, err = run.finish()
    assert (out, err, run.process.returncode) == ("0\n", "", 0)


def test_forked_copy_refuses(script: Callable[..., Script]) -> None:
    run = script(
        START
        + """
    print(pool.submit(workers.double, 1).get(20))
    results = pool.map(workers.double, iter(int, 1))
    next(results)
    pid = os.fork()
    if not pid:
        try:
            pool.submit(workers.double, 1)
        except MeshError as error:
            del results
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), next(results))
    pool.close(cancel=True).get(20)
    """
    )
    out, err = run.finish()
    assert out.splitlines() == ["2", "7 0"], err


@pytest.mark.usefixtures("runtime")
def test_the_thread_ends_when_there_is_no_work(procs: Any) -> None:
    import threading

    from core_pool import Worker, join_pool_thread

    from mesh_core import Pool

    workers = procs.spawn("workers", Worker)
    pool = Pool(workers)
    assert pool.submit(workers.double, 1).get(20) == 2
    # The pool is open, and starts the thread again when there is a task.
    join_pool_thread()
    assert "mesh-pool" not in {thread.name for thread in threading.enumerate()}
    assert pool.submit(workers.double, 1).get(20) == 2
    join_pool_thread()
    workers.stop().get()
