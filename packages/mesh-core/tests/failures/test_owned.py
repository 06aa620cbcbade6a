"""Everything an actor starts ends with the actor's process, however that ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from core_owners import suspend
from core_processes import Watch, family
from core_trees import TREES, Pipe, Trees, end, pipe, plant

from mesh_core import MeshError, ProcMesh, this_host

KINDS = [*TREES, "shell"]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Pipe]:
    with pipe(tmp_path / "tree") as made:
        yield made


@pytest.fixture
def own(runtime: None, fault_tolerant: None) -> Iterator[ProcMesh]:
    """Two processes of its own for a test that may break them."""
    with suppress(MeshError), this_host().spawn_procs({"gpus": 2}, name="mortal") as procs:
        yield procs


def fork_server_of(pid: int) -> int:
    return next(each for each in family() if pid in family(each))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_any_tree_ends_with_a_killed_worker(own: ProcMesh, tree: Pipe, kind: str) -> None:
    plant(own.slice(gpus=0).spawn("trees", Trees), kind, tree)
    assert tree.is_open
    os.kill(own.pids[0] or 0, signal.SIGKILL)
    assert tree.ended()


def stop(procs: ProcMesh, trees: Any) -> None:
    procs.stop().get()


def leave(procs: ProcMesh, trees: Any) -> None:
    trees.crash.broadcast("exit")


def crash(procs: ProcMesh, trees: Any) -> None:
    trees.crash.broadcast("segv")


def kill_fork_server(procs: ProcMesh, trees: Any) -> None:
    os.kill(fork_server_of(procs.pids[0] or 0), signal.SIGKILL)


def kill_all(procs: ProcMesh, trees: Any) -> None:
    fork_server = fork_server_of(procs.pids[0] or 0)
    for pid in (fork_server, *(pid for pid in procs.pids if pid)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize("how", [stop, leave, crash, kill_fork_server, kill_all])
@pytest.mark.parametrize("kind", ["daemon", "deaf", "headless"])
def test_a_tree_ends_with_its_worker(
    own: ProcMesh, tree: Pipe, how: Callable[[ProcMesh, Any], None], kind: str
) -> None:
    trees = own.slice(gpus=0).spawn("trees", Trees)
    plant(trees, kind, tree)
    how(own, trees)
    assert tree.ended()


SCRIPT = """
    import os, signal, sys, threading
    from mesh_core import this_host
    from core_trees import Trees

    if __name__ == "__main__":
        with this_host().spawn_procs({"gpus": 2}, start=sys.argv[3]) as procs:
            trees = procs.slice(gpus=0).spawn("trees", Trees)
            trees.plant.call_one(sys.argv[1], sys.argv[2]).get()
            print("ready")
            sys.stdin.readline()
"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None], ids=str)
@pytest.mark.parametrize(("kind", "start"), [("daemon", "fork"), ("deaf", "fork"), ("daemon", "exec")])
def test_a_tree_ends_with_the_script(
    script: Any, tree: Pipe, number: signal.Signals | None, kind: str, start: str
) -> None:
    run = script(SCRIPT, kind, tree.path, start)
    assert run.line() == "ready"
    tree.wait_for(TREES[kind][0])
    everything = run.watch()
    if number is None:
        run.say("")
    else:
        run.process.send_signal(number)
    run.finish()
    assert tree.ended()
    # The minder too.
    assert everything.wait() == []


ALONE = """
    import os, sys, threading
    from mesh_core import Sandboxes, run_tool, this_host
    from core_trees import TREES, Trees

    def tool(fifo):
        run_tool([sys.executable, "-S", "-c", TREES["session"][1], fifo])

    if __name__ == "__main__":
        boxes = Sandboxes(isolate=False, network=None)
        boxes.take()
        threading.Thread(target=tool, args=[sys.argv[2]], daemon=True).start()
        with this_host().spawn_procs() as procs:
            procs.spawn("trees", Trees).plant.call_one("daemon", sys.argv[1]).get()
            print("ready")
            sys.stdin.readline()
"""
NEXT = """
    import sys
    from mesh_core import this_host

    if __name__ == "__main__":
        with this_host().spawn_procs() as procs:
            procs.initialized.get()
            print("started")
            sys.stdin.readline()
"""


@pytest.mark.full
def test_what_is_left_by_a_script_killed_with_all_that_would_clean_up_ends_with_the_next_start(
    script: Any, tree: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker and the script's tools have started, sockets and folders. Workers, and what `run_tool` started, end at once."""
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))
    with pipe(tmp_path / "tool") as tool:
        run = script(ALONE, tree.path, tool.path, fresh=True)
        assert run.line() == "ready"
        tree.wait_for(TREES["daemon"][0])
        tool.wait_for(TREES["session"][0])
        tools = writers(tool)
        beside = {pid for pid in tools if parent(pid) in tools}
        assert len(beside) == 1
        everything = run.watch()
        ours = {pid for pid, line in family(run.process.pid).items() if tree.path not in line}
        cleaning = [pid for pid in ours if is_cleaning(pid)]
        assert len(cleaning) == 4, "the fork server, its minder, that of tools, and the guard of boxes"
        # All of them, before any hears that another has ended.
        for pid in (run.process.pid, *cleaning):
            suspend(pid)
        for pid in (run.process.pid, *cleaning):
            os.kill(pid, signal.SIGKILL)
        run.finish()
        # The daemon, and what a tool's first process had started: until this user starts another job, which other tests may do now.
        left = everything.wait(2.0)
        assert {pid for pid in left if tree.path not in command(pid)} <= beside
        assert [each.name for each in temporary.iterdir()] != []
        other = script(NEXT, fresh=True)
        assert other.line() == "started"
        assert tree.ended() and tool.ended()
        gone = time.monotonic() + 20
        while left_in(temporary) - {str(other.process.pid)} and time.monotonic() < gone:
            time.sleep(0.01)
        assert left_in(temporary) <= {str(other.process.pid)}
        other.say("")
        other.finish()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_cleaning(pid: int) -> bool:
    """Whether a process ends what others leave."""
    line = command(pid)
    return "minder" in line or "guard" in line or "fork server" in line


def left_in(folder: Path) -> set[str]:
    """What processes of Mesh have put into a folder, and jobs into that for sockets."""
    sockets = folder / f"mesh-{os.geteuid()}"
    jobs = {each.name for each in sockets.iterdir()} if sockets.exists() else set()
    return jobs | {
        each.name for each in folder.iterdir() if each.name.startswith("mesh-") and each != sockets
    }


def test_children_of_a_living_worker_survive(own: ProcMesh, tree: Pipe, tmp_path: Path) -> None:
    """Its daemon is a child of the fork server, like those of dead workers."""
    with pipe(tmp_path / "other") as other:
        trees = own.spawn("trees", Trees)
        plant(trees.slice(gpus=0), "daemon", tree)
        plant(trees.slice(gpus=1), "daemon", other)
        os.kill(own.pids[0] or 0, signal.SIGKILL)
        assert tree.ended()
        assert other.is_open
        own.stop().get()
        assert other.ended()


@pytest.mark.parametrize("kind", ["session", "daemon"])
def test_a_detached_process_keeps_running(own: ProcMesh, tree: Pipe, kind: str) -> None:
    """And so does everything it started before."""
    trees = own.slice(gpus=0).spawn("trees", Trees)
    first = plant(trees, kind, tree)
    daemon = next(
        pid for pid in (first, *writers(tree)) if Path(f"/proc/{pid}").exists() and pid in writers(tree)
    )
    trees.detach.call_one(daemon).get()
    watch = Watch(writers(tree))
    try:
        fork_server = Watch([fork_server_of(own.pids[0] or 0)])
        os.kill(fork_server.pids[0], signal.SIGKILL)
        assert fork_server.wait() == []
        assert watch.wait(0.8) == watch.pids
    finally:
        for pid in watch.pids:
            end(pid)
    assert tree.ended()


def writers(tree: Pipe) -> list[int]:
    """The processes that have the fifo open, except this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        pid = int(folder.parent.name)
        with suppress(OSError):
            if pid != os.getpid() and any(str(fd.readlink()) == tree.path for fd in folder.iterdir()):
                found.append(pid)
    return sorted(found)


def test_a_killed_minder_is_replaced(own: ProcMesh) -> None:
    own.initialized.get()
    fork_server = fork_server_of(own.pids[0] or 0)

    def minder() -> int:
        return next((pid for pid, line in family(fork_server).items() if "minder" in line), 0)

    first = minder()
    watch = Watch([first])
    os.kill(first, signal.SIGKILL)
    assert watch.wait() == []
    while minder() in (0, first):
        os.sched_yield()


def test_an_actor_cannot_detach_its_own_process(own: ProcMesh) -> None:
    trees = own.slice(gpus=0).spawn("trees", Trees)
    with pytest.raises(MeshError, match="cannot detach itself"):
        trees.detach.call_one(own.pids[0]).get()
    with pytest.raises(ProcessLookupError, match="no process"):
        trees.detach.call_one(1 << 30).get()
