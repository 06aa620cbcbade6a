"""Running other programs under limits."""

from __future__ import annotations

import asyncio
import marshal
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import Watch, descriptors, family
from core_trees import TREES, Pipe, pipe

from mesh_core import (
    Actor,
    MeshError,
    ProcMesh,
    Sandboxes,
    ToolLimit,
    detach,
    endpoint,
    run_tool,
    run_tool_async,
)
from mesh_core._blocks import tool_starts
from mesh_core._system import process_marks


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Pipe]:
    with pipe(tmp_path / "tree") as made:
        yield made


def planting(kind: str, tree: Pipe) -> list[str]:
    return [sys.executable, "-S", "-c", TREES[kind][1], tree.path]


def test_it_returns_output_and_usage() -> None:
    # The process that starts tools stays.
    assert run_tool(["true"]).ok
    before = descriptors()
    result = run_tool(["sh", "-c", "cat; echo two >&2; exit 3"], input="one")
    assert (result.stdout, result.stderr, result.returncode) == (b"one", b"two\n", 3)
    assert (result.text, result.ok, result.limit, result.truncated) == ("one", False, None, False)
    assert result.usage.wall_s > 0
    assert result.usage.peak_memory > 0
    assert descriptors() == before
    assert run_tool(["true"]).ok


def test_a_signal_is_a_negative_returncode() -> None:
    result = run_tool(["sh", "-c", "kill -SEGV $$"])
    assert (result.returncode, result.limit, result.ok) == (-signal.SIGSEGV, None, False)


def test_no_shell_is_used() -> None:
    assert run_tool(["echo", "$HOME", ";", "false"]).text == "$HOME ; false\n"
    with pytest.raises(TypeError, match="argv must be a list"):
        run_tool("echo hello")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"timeout": 0}, "timeout must be positive, got 0"),
        ({"memory": -1}, "memory must be positive"),
        ({"pids": 0}, "pids must be positive"),
        ({"max_output": -1}, "max_output must not be negative"),
    ],
)
def test_invalid_limits_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run_tool(["true"], **options)


def test_the_smallest_limits() -> None:
    assert run_tool(["echo", "1"], max_output=0).text == ""
    assert run_tool(["true"], pids=1).ok


def test_a_program_that_cannot_be_started_raises(tmp_path: Path) -> None:
    assert run_tool(["true"]).ok
    before = descriptors()
    with pytest.raises(FileNotFoundError) as caught:
        run_tool(["no-such-program"])
    assert caught.value.filename == "no-such-program"
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(PermissionError):
        run_tool([plain])
    for argv, env in ((["true", "a\0b"], None), (["true"], {"": "value"})):
        with pytest.raises(OSError, match="Invalid argument"):
            run_tool(argv, env=env)
    plain.chmod(0o755)
    plain.write_text("echo a shell reads what has no other format: $1")
    assert run_tool([plain, "so"]).text == "a shell reads what has no other format: so\n"
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        run_tool(["true"], cwd=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must name a program"):
        run_tool([])
    assert descriptors() == before
    # One for all tools, with nothing below it.
    assert sum("tool_minder" in line for line in family().values()) == 1


def test_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOES", "yes")
    monkeypatch.setenv("STAYS", "yes")
    result = run_tool(["sh", "-c", "pwd; env"], cwd=tmp_path, env={"COMES": "yes", "GOES": None})
    lines = result.text.splitlines()
    assert lines[0] == str(tmp_path)
    assert {"COMES=yes", "STAYS=yes"} < set(lines)
    assert "GOES=yes" not in lines


def test_long_input_and_output() -> None:
    """Neither side waits for the other while both write."""
    data = os.urandom(3_000_000)
    result = run_tool(["cat"], input=data, max_output=len(data))
    assert result.stdout == data
    assert not result.truncated
    short = run_tool(["cat"], input=data, max_output=1000)
    assert (short.stdout, short.truncated, short.ok) == (data[:1000], True, True)
    # It does not read its input.
    assert run_tool(["true"], input=data).ok


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["session", "daemon", "deaf", "stopped", "crowd"])
def test_a_timeout_ends_the_whole_tree(tree: Pipe, kind: str) -> None:
    """TOOL-1, after a timeout."""
    timeout, planted = 1.0, False
    while not planted:
        result = run_tool(planting(kind, tree) if kind != "daemon" else waits(tree), timeout=timeout)
        assert result.limit is ToolLimit.TIMEOUT
        assert not result.ok
        # What takes longer to start than this is not whole yet.
        planted = tree.said() == TREES[kind][0]
        timeout *= 2
    assert tree.ended()


def waits(tree: Pipe) -> list[str]:
    """A daemon, and a first process that does not end."""
    return ["sh", "-c", '"$@"; sleep 1000', "sh", *planting("daemon", tree)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["daemon", "headless"])
def test_remaining_processes_end_with_the_tool(tree: Pipe, kind: str) -> None:
    """TOOL-1, after the tool itself has ended."""
    result = run_tool(["sh", "-c", '"$@"; read line < /dev/null; sleep 0.5', "sh", *planting(kind, tree)])
    assert result.limit is None
    tree.wait_for(1)
    assert tree.ended()


@pytest.mark.slow
def test_memory_of_all_processes_counts() -> None:
    code = "import os, signal\nos.fork()\nos.fork()\nx = bytearray(60 << 20)\nsignal.pause()"
    result = run_tool([sys.executable, "-S", "-c", code], memory=200 << 20)
    assert result.limit is ToolLimit.MEMORY
    assert result.usage.peak_memory > 200 << 20
    alone = run_tool([sys.executable, "-S", "-c", "x = bytearray(60 << 20)"], memory=200 << 20)
    assert alone.ok


@pytest.mark.slow
def test_too_many_processes(tree: Pipe) -> None:
    result = run_tool(planting("crowd", tree), pids=20)
    assert result.limit is ToolLimit.PIDS
    assert tree.ended()
    assert run_tool(["sh", "-c", "true | true"], pids=20).ok


@pytest.mark.slow
def test_processor_time_of_killed_processes_counts() -> None:
    burn = "import os\nif os.fork(): os.wait()\nwhile True: pass"
    result = run_tool([sys.executable, "-S", "-c", burn], timeout=1.0)
    assert result.usage.cpu_s > 0.05


def test_cancelling_the_coroutine_kills_the_tool(tree: Pipe) -> None:
    """TOOL-1, when the caller is cancelled."""

    async def main() -> None:
        task = asyncio.ensure_future(run_tool_async(planting("session", tree)))
        await asyncio.to_thread(tree.wait_for, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert tree.ended()


def test_the_first_process_is_waited_for_last(tree: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """TOOL-2: until then its pid, which is in the mark of everything that it started, is not reused."""
    wait, others = os.wait4, list[int]()

    def look_and_wait(pid: int, options: int) -> Any:
        others.extend(each for each in process_marks.all_pids() if each != pid and has_opened(tree, each))
        return wait(pid, options)

    async def main() -> None:
        task = asyncio.ensure_future(run_tool_async(planting("session", tree)))
        await asyncio.to_thread(tree.wait_for, 2)
        monkeypatch.setattr(os, "wait4", look_and_wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert tree.ended()
    assert others == []


def has_opened(tree: Pipe, pid: int) -> bool:
    """Whether a process belongs to the tree and is alive: processes that have ended have no command line."""
    try:
        return tree.path in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_the_event_loop_is_not_blocked() -> None:
    async def main() -> None:
        read, write = os.pipe()
        slow = asyncio.ensure_future(run_tool_async(["cat", f"/proc/{os.getpid()}/fd/{read}"]))
        assert (await run_tool_async(["echo", "quick"])).text == "quick\n"
        assert not slow.done()
        os.write(write, b"slow")
        os.close(write)
        assert (await slow).text == "slow"
        os.close(read)

    asyncio.run(main())
    assert "mesh-tool" not in {thread.name for thread in threading.enumerate()}


def test_errors_reach_the_coroutine() -> None:
    async def main() -> None:
        with pytest.raises(FileNotFoundError):
            await run_tool_async(["no-such-program"])
        with pytest.raises(ValueError, match="timeout must be positive"):
            await run_tool_async(["true"], timeout=-1)

    asyncio.run(main())


SCRIPT = """
    import sys
    from mesh_core import run_tool

    print("ready")
    run_tool([sys.executable, "-S", "-c", *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_tools_end_with_the_script(script: Any, tree: Pipe, number: signal.Signals) -> None:
    run = script(SCRIPT, TREES["session"][1], tree.path)
    assert run.line() == "ready"
    tree.wait_for(TREES["session"][0])
    everything = run.watch()
    run.process.send_signal(number)
    run.finish()
    assert tree.ended()
    assert everything.wait() == []


class Agent(Actor):
    @endpoint
    async def use(self, argv: list[str], **options: Any) -> Any:
        return await run_tool_async(argv, **options)

    @endpoint
    def use_here(self, argv: list[str], **options: Any) -> Any:
        return run_tool(argv, **options)


def minders() -> set[int]:
    """The processes that end what fork servers leave; wait until there is one."""
    end = time.monotonic() + 20
    while not (found := {pid for pid, command in family().items() if "minder of a fork server" in command}):
        assert time.monotonic() < end, "the fork server has no minder"
        time.sleep(0.01)
    return found


@pytest.mark.usefixtures("fault_tolerant")
def test_tools_of_actors(procs: ProcMesh, tree: Pipe, tmp_path: Path) -> None:
    agents = procs.spawn("agents", Agent)
    results = agents.use.call(["sh", "-c", "echo $PPID"]).get().values()
    assert [int(result.text) for result in results] == procs.pids
    before = minders()
    assert agents.use_here.call(["true"]).get().values()[0].ok
    call = agents.slice(hosts=0, gpus=0).use.call_one(planting("daemon", tree))
    call.get()
    assert tree.ended()
    with pipe(tmp_path / "other") as other:
        waiting = agents.slice(hosts=0, gpus=0).use.call_one(planting("session", other))
        other.wait_for(2)
        waiting.cancel()
        assert other.ended()
    # Nobody has taken it for a tool's.
    assert minders() == before
    agents.stop().get()


@pytest.mark.slow
def test_tools_end_with_a_killed_worker(fault_tolerant: None, tree: Pipe, runtime: None) -> None:
    from contextlib import suppress

    from mesh_core import MeshError, this_host

    with suppress(MeshError), this_host().spawn_procs(name="mortal") as own:
        agents = own.spawn("agents", Agent)
        agents.use.broadcast(planting("session", tree))
        tree.wait_for(2)
        watch = Watch(pid for pid in own.pids if pid is not None)
        os.kill(watch.pids[0], signal.SIGKILL)
        assert tree.ended()
        assert watch.wait() == []


@pytest.mark.full
def test_a_detached_process_outlives_the_tool(tree: Pipe) -> None:
    """MRK-1: a detached process is not signalled, except the first one, for which the caller waits."""
    found: list[int] = []

    def find() -> None:
        tree.wait_for(1)
        found.extend(pid for pid, line in family().items() if tree.path in line)
        for pid in found:
            detach(pid)

    finder = threading.Thread(target=find)
    finder.start()
    try:
        result = run_tool(["sh", "-c", '"$@" & wait', "sh", *planting("child", tree)], timeout=4.0)
        finder.join()
        assert result.limit is ToolLimit.TIMEOUT
        assert tree.is_open
    finally:
        finder.join()
        for pid in found:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
    assert tree.ended()


ESCAPES = {
    "lowered": "resource.setrlimit(10, (5, 5))",
    "detached": "resource.setrlimit(10, (hard, hard))",
    "lowered in a child": "os.fork() and os._exit(os.wait()[1]); resource.setrlimit(10, (5, 5))",
    "in a child of the tool's parent": (
        "__import__('ctypes').CDLL(None).syscall("
        "{'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x8011, 0, 0, 0, 0) and os._exit(0); "
        "resource.setrlimit(10, (5, 5)); os.setsid(); __import__('time').sleep(1000)"
    ),
    "of another tool": "resource.setrlimit(10, ((1 << 22) - 1, hard))",
}
ESCAPE = """
import os, resource, sys
pipe = open(sys.argv[1], "w")
_, hard = resource.getrlimit(10)
{}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        while True:
            pass
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ESCAPES)
def test_what_a_tool_does_to_its_limits_leads_nowhere(how: str, tree: Pipe) -> None:
    """TOOL-3."""
    argv = [sys.executable, "-S", "-c", ESCAPE.format(ESCAPES[how]), tree.path]
    assert run_tool(argv).ok
    assert tree.ended()
    beside = threading.Thread(target=run_tool, args=[["sleep", "0.2"]])
    beside.start()
    with pytest.raises(FileNotFoundError):
        run_tool(["no-such-program"])
    assert run_tool(["echo", "beside"]).text == "beside\n"
    beside.join()


@pytest.mark.usefixtures("fault_tolerant")
@pytest.mark.parametrize("how", ESCAPES)
def test_what_a_tool_of_an_actor_does_to_its_limits_leads_nowhere(
    how: str, procs: ProcMesh, tree: Pipe
) -> None:
    """TOOL-3."""
    agents = procs.spawn("agents", Agent)
    argv = [sys.executable, "-S", "-c", ESCAPE.format(ESCAPES[how]), tree.path]
    assert agents.slice(hosts=0, gpus=0).use_here.call_one(argv).get().ok
    assert tree.ended()
    assert agents.use.call(["true"]).get().values()[0].ok
    agents.stop().get()


class Keeper(Agent):
    @endpoint
    def keep(self, argv: list[str]) -> int:
        """Start a daemon that is detached."""
        with subprocess.Popen(["sh", "-c", '"$@" & echo $!', "sh", *argv], stdout=subprocess.PIPE) as shell:
            assert shell.stdout is not None
            pid = int(shell.stdout.readline())
            detach(pid)
        return pid


@pytest.mark.usefixtures("fault_tolerant")
def test_what_an_actor_has_detached_is_not_taken_for_what_a_tool_has(procs: ProcMesh, tree: Pipe) -> None:
    """TOOL-3: it has come to the same reaper."""
    keepers = procs.spawn("keepers", Keeper)
    argv = ["sh", "-c", 'exec >/dev/null 2>&1; exec "$@"', "sh", *planting("child", tree)]
    pid = keepers.slice(hosts=0, gpus=0).keep.call_one(argv).get()
    try:
        tree.wait_for(1)
        for _ in range(2):
            assert all(each.ok for each in keepers.use_here.call(["true"]).get().values())
        assert tree.is_open
        keepers.stop().get()
    finally:
        os.kill(pid, signal.SIGKILL)
    assert tree.ended()


def test_a_minder_that_was_killed_is_an_error_once(tree: Pipe) -> None:
    found: list[int] = []

    def kill() -> None:
        tree.wait_for(TREES["session"][0])
        [minder] = [pid for pid, line in family().items() if "tool_minder" in line]
        found.append(minder)
        os.kill(minder, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(MeshError, match=r"minds the tools of this script .* has ended"):
        run_tool(planting("session", tree), timeout=20.0)
    killer.join()
    assert tree.ended()
    assert run_tool(["echo", "again"]).text == "again\n"


def test_tools_inherit_what_the_script_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process that starts them has got from it earlier."""
    show = ["sh", "-c", "pwd; umask; ulimit -c; echo $NOW; nproc"]
    assert run_tool(["true"]).ok
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOW", "yes")
    core, cores, umask = resource.getrlimit(resource.RLIMIT_CORE), os.sched_getaffinity(0), os.umask(0o027)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
        os.sched_setaffinity(0, [min(cores)])
        assert run_tool(show).text.split() == [str(tmp_path), "0027", "0", "yes", "1"]
    finally:
        os.umask(umask)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_CORE, core)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run_tool(["echo", "here"]).text == "here\n"


def test_a_tool_has_no_descriptors_but_its_own() -> None:
    code = "import os; print([fd for fd in range(256) if os.path.exists(f'/proc/self/fd/{fd}')])"
    assert run_tool([sys.executable, "-S", "-c", code]).text == "[0, 1, 2]\n"


def test_ignored_ends_of_children_are_an_error() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        for start in (lambda: run_tool(["true"]), lambda: Sandboxes(network=None)):
            with pytest.raises(MeshError, match=r"cannot start .* ignores SIGCHLD.*signal.SIG_DFL"):
                start()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert run_tool(["true"]).ok


def test_a_tool_whose_start_or_end_is_interrupted_is_ended(
    tree: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOOL-1: Ctrl-C between an order to the minder and its answer, or after the answer."""
    assert run_tool(["true"]).ok
    real, left = marshal.loads, [0]

    def interrupted(data: bytes) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(data)

    monkeypatch.setattr(tool_starts.marshal, "loads", interrupted)
    for answer in (1, 2):
        left[0] = answer
        with pytest.raises(KeyboardInterrupt):
            run_tool(planting("session", tree), timeout=0.5)
    assert run_tool(["echo", "goes on"]).text == "goes on\n"
    assert not [line for line in family().values() if tree.path in line]
