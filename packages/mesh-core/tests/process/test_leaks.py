"""Nothing is left behind: no process, thread, descriptor or file, after a mesh is stopped and after `shutdown()`."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
from core_processes import Traces, descriptors, family, fork_servers
from core_samples import Coroutines, Echo, Gate, Mixed

from mesh_core import MeshError, configured, shutdown, this_host, this_proc
from warm_scripts import WarmScripts

pytestmark = pytest.mark.usefixtures("runtime")


def work() -> None:
    """A bit of everything."""
    with this_host().spawn_procs(per_host={"gpus": 3}) as procs:
        echo, mixed = procs.spawn("echo", Echo), procs.spawn("mixed", Mixed)
        echo.echo.call(bytearray(200_000)).get().values()
        mixed.note_async.call(1).get()
        for future in echo.echo.stream(1):
            future.get()
        echo.fail.call(ValueError("expected")).exception()
        echo.slice(gpus=0).echo.call_one(1).cancel()
        asyncio.run(gather(echo))


async def gather(echo: Any) -> None:
    await asyncio.gather(*(echo.echo_async.call(n).as_asyncio() for n in range(10)))


def test_after_a_with_block() -> None:
    before = Traces()
    work()
    gc.collect()
    assert Traces().left_since(before) == ""


@pytest.mark.slow
def test_ten_rounds() -> None:
    work()
    gc.collect()
    count, threads = len(descriptors()), threading.active_count()
    for _ in range(10):
        work()
    gc.collect()
    assert len(descriptors()) == count
    assert threading.active_count() == threads


def test_without_stopping_anything(warm_scripts: WarmScripts | None) -> None:
    """Meshes without references are stopped by shutdown()."""
    before = Traces()
    for _ in range(3):
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        echo = procs.spawn("echo", Echo)
        echo.echo.call(1).get()
        this_proc().spawn("here", Echo).echo.call_one(1).get()
    assert len(Traces().workers - before.workers) == 6
    shutdown()
    # What starts tools stays, if tests of tools came before.
    left = {pid for pid, command in family().items() if "tool_minder" not in command}
    assert left == ({warm_scripts.pid} if warm_scripts else set())
    assert not any(thread.name.startswith("mesh") for thread in threading.enumerate())
    with pytest.raises(MeshError):
        echo.echo.call(1).get()
    del procs, echo
    gc.collect()
    # A new runtime replaces the old one.
    this_host().spawn_procs().stop().get()
    this_proc()
    assert Traces().left_since(before) == ""


@pytest.mark.full
@pytest.mark.slow
def test_runtimes_one_after_another() -> None:
    for n in range(6):
        shutdown()
        gc.collect()
        if n == 2:
            count = len(descriptors())
        with this_host().spawn_procs() as procs:
            procs.spawn("echo", Echo).echo.call_one(1).get()
        del procs
    shutdown()
    gc.collect()
    assert len(descriptors()) == count
    assert fork_servers(family()) == 0
    this_host().spawn_procs().stop().get()
    this_proc()


def test_actors_threads_end_with_them() -> None:
    def threads(pid: int | None) -> int:
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())

    with this_host().spawn_procs() as procs:
        procs.spawn("first", Echo).echo.call_one(1).get()
        count = threads(procs.pids[0])
        for n in range(20):
            echo = procs.spawn(f"echo-{n}", Echo)
            assert echo.echo.call_one(n).get() == n
            echo.stop().get()
        assert procs.spawn("last", Coroutines).notes.call_one().get() == []
        assert threads(procs.pids[0]) <= count + 1


def test_a_process_that_will_not_stop_is_killed_in_time() -> None:
    with configured(stop_timeout=0.3), this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        gates = procs.spawn("gates", Gate)
        gates.initialized.get()
        gates.block.broadcast()
        pids = procs.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_script_leaves_nothing_in_the_file_system(script: Any, tmp_path: Any) -> None:
    run = script(
        """
        import os, sys
        from mesh_core import this_host
        from core_samples import Echo

        if __name__ == "__main__":
            with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
                procs.spawn("echo", Echo).echo.call(bytearray(1 << 20)).get().values()
        """
    )
    run.finish()
    assert run.process.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script0.py"]
