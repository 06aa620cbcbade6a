"""Cells in a real Jupyter kernel and in IPython: await, get, output, interrupts, restarts."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from core_processes import inherited_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ipykernel") is None or importlib.util.find_spec("jupyter_client") is None,
        reason="ipykernel and jupyter_client are not installed",
    ),
    pytest.mark.python,
]

# Runs cells in a kernel, and prints the output of each. A cell that prints "waits" is then interrupted.
DRIVER = """
import json, sys
from jupyter_client.manager import start_new_kernel

def run(cell):
    shown = []

    def hook(message):
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            shown.append(content["text"].strip())
            if "waits" in content["text"]:
                manager.interrupt_kernel()
        elif kind == "execute_result":
            shown.append(content["data"]["text/plain"])
        elif kind == "error":
            shown.append(content["ename"])

    client.execute_interactive(cell, timeout=40, output_hook=hook, allow_stdin=False)
    return shown

manager, client = start_new_kernel(kernel_name="python3", startup_timeout=40)
try:
    for cell in json.load(sys.stdin):
        if cell == "restart":
            manager.restart_kernel(now=True)
            client.wait_for_ready(timeout=40)
            shown = []
        else:
            shown = run(cell)
        print(json.dumps(shown), flush=True)
finally:
    client.stop_channels()
    manager.shutdown_kernel()
"""

SETUP = """
import asyncio, os
from mesh_core import Actor, endpoint, proc_mesh, this_host

class Counter(Actor):
    def __init__(self):
        self.n = 0
    @endpoint
    def add(self, n):
        self.n += n
        return self.n
    @endpoint
    async def add_async(self, n):
        self.n += n
        return self.n
    @endpoint(concurrent=True)
    async def hold(self):
        await asyncio.Event().wait()

procs = this_host().spawn_procs({"gpus": 2})
counters = procs.spawn("counters", Counter)
await procs
procs.pids
"""


def environment(folder: Path) -> dict[str, str]:
    """A separate folder for what IPython and Jupyter write."""
    own = {
        name: str(folder / name.lower())
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in inherited_path())
    return {**os.environ, **own, "PYTHONPATH": path, "NO_COLOR": "1"}


class Notebook:
    """A kernel that runs cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *cells: str) -> list[list[str]]:
        """The output of each cell; the kernel has ended afterwards."""
        done = subprocess.run(
            [sys.executable, "-c", DRIVER],
            input=json.dumps(cells),
            capture_output=True,
            text=True,
            timeout=55,
            env=environment(self.folder),
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr
        for ugly in ("Traceback", "Exception ignored", "panicked", "was never", "was destroyed"):
            assert ugly not in done.stderr, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    return Notebook(tmp_path)


def all_ended(shown: str) -> bool:
    """Whether the processes whose pids a cell has printed are gone."""
    for pid in json.loads(shown):
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([watch], [], [], 20)
        os.close(watch)
        if not ended:
            return False
    return True


def test_await_and_get_in_cells(notebook: Notebook) -> None:
    first, *shown, last = notebook.run(
        SETUP,
        "(await counters.add.call(1)).values()",
        "counters.add_async.call(1).get(timeout=30).values()",
        "future = counters.add.call(1)",
        "(await future).values(), future.get().values()",
        "[each.values() for each in await asyncio.gather(*(counters.add_async.call(1) for _ in range(2)))]",
        "async for one in counters.add.stream(1): print(await one)",
        "async with proc_mesh(gpus=1) as own:\n    print((await own.spawn('own', Counter).add.call(7)).values())",
        "task = asyncio.ensure_future(counters.add.call(1).as_asyncio())",
        "(await task).values()",
        "counters.add.call('x').get()",
        "class Counter(Actor):\n    @endpoint\n    def again(self): return 'new'\n"
        "procs.spawn('again', Counter).again.call().get().values()",
    )
    assert [*shown, last] == [
        ["[1, 1]"],
        ["[2, 2]"],
        [],
        ["([3, 3], [3, 3])"],
        ["[[4, 4], [5, 5]]"],
        ["6\n6"],
        ["[7]"],
        [],
        ["[7, 7]"],
        ["ActorError[TypeError]"],
        ["['new', 'new']"],
    ]
    assert all_ended(first[0])


@pytest.mark.full
def test_an_interrupted_cell_and_the_next(notebook: Notebook) -> None:
    first, *shown = notebook.run(
        SETUP,
        "print('waits', flush=True)\ncounters.hold.call().get()",
        "counters.add.call(1).get(timeout=30).values()",
        # The kernel's own handler cancels the cell but does not wake its loop, which must wake by itself.
        "async def tick():\n    while True:\n        await asyncio.sleep(0.05)\nticking = asyncio.create_task(tick())\n"
        "print('waits', flush=True)\nawait counters.hold.call()",
        "ticking.cancel()\n(await counters.add.call(1)).values()",
        "counters.add_async.call(1).get(timeout=30).values()",
    )
    assert shown[0] == ["waits", "KeyboardInterrupt"]
    assert shown[1] == ["[1, 1]"]
    assert shown[2][0] == "waits"
    assert shown[2][1] in {"KeyboardInterrupt", "CancelledError"}
    assert shown[3:] == [["[2, 2]"], ["[3, 3]"]]
    assert all_ended(first[0])


@pytest.mark.once
@pytest.mark.full
def test_a_restart_of_the_kernel(notebook: Notebook) -> None:
    first, _, second, shown = notebook.run(
        SETUP + "\nfuture = counters.hold.call()\nprocs.pids",
        "restart",
        SETUP,
        "counters.add.call(1).get(timeout=30).values()",
    )
    assert shown == ["[1, 1]"]
    assert first != second
    assert all_ended(first[0]) and all_ended(second[0])


@pytest.mark.once
@pytest.mark.full
def test_a_kernel_that_is_shut_down_while_a_worker_is_busy(notebook: Notebook) -> None:
    cells = ["import os; os.environ['MESH_STOP_TIMEOUT'] = '0.5'", SETUP, "future = counters.hold.call()"]
    _, first, _ = notebook.run(*cells)
    assert all_ended(first[0])


def test_ipython(tmp_path: Path) -> None:
    """IPython in a terminal runs each cell in a loop that does not run between cells."""
    cells = [
        SETUP,
        "print((await counters.add.call(1)).values())",
        "print(counters.add_async.call(1).get(timeout=30).values())",
        "print((await counters.add_async.call(1)).values())",
        "import inspect; print(inspect.iscoroutinefunction(print))",
    ]
    path = tmp_path / "session.ipy"
    path.write_text("\n\n".join(cells))
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--no-confirm-exit", str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-4:] == ["[1, 1]", "[2, 2]", "[3, 3]", "False"]
