"""A worker killed by the kernel for lack of memory is distinguished from one killed by somebody else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import MeshFailure

LIMIT = 400 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup for this test, with a limit, if this machine allows one."""
    name = f"mesh-test-{os.getpid()}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mount = {"memory": "/sys/fs/cgroup/memory", "": "/sys/fs/cgroup"}.get(controllers)
        limit = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = Path(f"{mount}{path}", name)
        if mount is None or not folder.parent.is_dir():
            continue
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(LIMIT))
                yield folder
                return
            finally:
                folder.rmdir()
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.slow
def test_a_death_by_lack_of_memory_is_named(group: Path, script: Callable[..., Any]) -> None:
    run = script(
        f"""
        import os
        import sys
        from pathlib import Path
        Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
        from mesh_core import Actor, SupervisionError, endpoint, set_fault_handler, this_host

        class Hog(Actor):
            @endpoint
            def eat(self):
                # Written to, because only pages in use count.
                return len(bytearray(b"x") * {2 * LIMIT})

            @endpoint
            def die(self):
                os.kill(os.getpid(), 9)

        set_fault_handler(lambda failure: None)
        with this_host().spawn_procs({{"g": 3}}, name="procs") as procs:
            hogs = procs.spawn("hogs", Hog)
            hogs.initialized.get(timeout=30)
            for rank, name in ((0, "die"), (1, "eat"), (2, "die")):
                error = getattr(hogs.slice(g=rank), name).call_one().exception(timeout=50)
                print(error.failure.signal, error.failure.out_of_memory, error.failure.headline().partition(": ")[2])
        """,
        str(group),
        fresh=True,
    )
    out, err = run.finish()
    killed = "killed by signal 9 (SIGKILL)"
    assert out.splitlines() == [
        f"9 False {killed}",
        f"9 True {killed}, probably by the kernel as memory ran out",
        f"9 False {killed}",
    ], err


def test_the_headline_names_it() -> None:
    failure = MeshFailure(mesh_name="hogs", rank=1, signal=signal.SIGKILL, out_of_memory=True)
    assert failure.headline().endswith("(SIGKILL), probably by the kernel as memory ran out")
