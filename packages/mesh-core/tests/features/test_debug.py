"""Breakpoints in actors: `mesh debug` in a terminal beside the script."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import Script, Watch, family
from core_terminal import Terminal

from mesh_core._common import peers
from mesh_core._common.errors import MeshError
from mesh_core._features.debug import places
from mesh_core._features.debug.client import Stop
from mesh_core._features.debug.selection import Selection, names
from mesh_core.cli import main

pytestmark = [pytest.mark.python, pytest.mark.sampled(2, of="file", full=True)]

TRAINERS = """
from mesh_core import Actor, current_rank, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self, n):
        loss = n * 2
        breakpoint()
        loss += current_rank().rank
        return loss

    @endpoint
    def ping(self):
        return "pong"

class Other(Actor):
    @endpoint
    def ping(self):
        return "pong"

if __name__ == "__main__":
    with this_host().spawn_procs({"gpus": 4}) as procs:
        trainers = procs.spawn("trainers", Trainer)
        others = procs.spawn("others", Other)
        steps = trainers.step.call(5)
        print("called")
        while True:
            line = input()
            if line == "ping":
                print(others.ping.call().get().values())
            else:
                break
        print(steps.get(return_exceptions=True).values())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a runtime folder for this test alone."""
    path = tmp_path / "run"
    path.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """`mesh debug` at a terminal, for one script."""
    opened: list[Terminal] = []

    def start(run: Script, *arguments: str) -> Terminal:
        opened.append(
            Terminal("-m", "mesh_core.cli", "debug", "--job", str(run.process.pid), *arguments, env={})
        )
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def mesh_debug(run: Script, *arguments: str, status: int = 0) -> str:
    """Run one command and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "mesh_core.cli", "debug", "--job", str(run.process.pid), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def stopped(run: Script, count: int) -> list[str]:
    """Wait until ``count`` threads have stopped and return the lines that say so."""
    assert run.process.stderr is not None
    lines: list[str] = []
    while len(lines) < count:
        line = run.process.stderr.readline()
        assert line, "the script has ended"
        if " stopped at " in line:
            lines.append(line.rstrip("\n").partition("] ")[2])
    return sorted(lines)


def sockets(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def debugged(folder: Path) -> list[str]:
    """Return the sockets of processes with stopped threads."""
    return [name for name in sockets(folder) if name.endswith(".sock")]


@pytest.fixture(autouse=True)
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show each rank's own line; normally, equal lines of ranks are merged."""
    monkeypatch.setenv("MESH_LOG_WINDOW", "0")


@pytest.fixture
def trainers(script: Any) -> Script:
    """Four ranks at a breakpoint."""
    run: Script = script(TRAINERS)
    assert run.line() == "called"
    lines = stopped(run, 4)
    assert [line.partition(" stopped at ")[0] for line in lines] == [
        f"mesh: trainers,gpus={n}" for n in range(4)
    ]
    assert lines[2].endswith(":9 in step (breakpoint); attach with: mesh debug attach trainers,gpus=2")
    return run


PDB = r"\(Pdb\) $"
DESK = r"mesh debug> $"


def test_list_attach_step_print_cast_continue(trainers: Script, terminal: Any, folder: Path) -> None:
    desk = terminal(trainers)
    table = desk.expect(DESK)
    assert re.search(r"\n2 +script0.py \(\d+\) +trainers +2 +gpus=2 +\S+script0.py:9 +step ", table)

    assert "-> loss += current_rank().rank" in desk.ask("attach gpus=3", PDB)
    assert desk.ask("p loss", PDB).startswith("10\n")
    assert "-> return loss" in desk.ask("n", PDB)
    assert desk.ask("p loss", PDB).startswith("13\n")
    assert desk.ask("loss = 100", PDB)
    assert desk.ask("pp self.__class__.__name__", PDB).startswith("'Trainer'\n")
    where = desk.ask("w", PDB)
    assert "step()" in where
    assert "mesh_core" not in where
    assert "->\t        return loss" in desk.ask("ll", PDB)
    desk.press("d")
    desk.expect(r"stays stopped")
    desk.expect(DESK)

    answers = desk.ask("cast gpus=0:3 p loss", DESK)
    assert "trainers gpus=0:3 (3 alike):\n  10\n" in answers
    answers = desk.ask("cast all p loss", DESK)
    assert "trainers gpus=0:3 (3 alike):\n  10\n" in answers
    assert "trainers gpus=3:\n  100\n" in answers
    assert "continues" in desk.ask("continue gpus=1", DESK)
    assert "gpus=1" not in desk.ask("list", DESK)
    assert "3 alike" not in desk.ask("cast all n", DESK)
    assert "continues" in desk.ask("continue all", DESK)
    assert "nothing is stopped" in desk.ask("list", DESK)
    desk.type("quit")
    assert desk.finish() == 0
    trainers.say("end")
    assert trainers.line() == "[10, 11, 12, 100]"
    trainers.finish()
    assert not sockets(folder)


def test_other_threads_continue(trainers: Script, folder: Path) -> None:
    """DBG-1."""
    trainers.say("ping")
    assert trainers.line() == "['pong', 'pong', 'pong', 'pong']"
    assert len([name for name in sockets(folder) if name.endswith(".sock")]) == 4
    mesh_debug(trainers, "continue")
    assert not debugged(folder)


@pytest.mark.slow
def test_commands_without_a_terminal(trainers: Script) -> None:
    stops = json.loads(mesh_debug(trainers, "list", "--json"))["stops"]
    assert [(stop["number"], stop["coordinates"], stop["function"]) for stop in stops] == [
        (n, {"gpus": n}, "step") for n in range(4)
    ]
    assert stops[0]["job"] == trainers.process.pid
    assert {stop["pid"] for stop in stops} < set(family(trainers.process.pid))
    assert mesh_debug(trainers, "cast", "gpus=1:3", "p", "loss") == "trainers gpus=1:3 (2 alike):\n  10\n"
    # The job may be named last, too.
    job = ("--job", str(trainers.process.pid))
    assert mesh_debug(trainers, "cast", "gpus=1:3", "p loss", *job) == "trainers gpus=1:3 (2 alike):\n  10\n"
    assert "did you mean 'gpus'" in mesh_debug(trainers, "cast", "gpu=1", "p loss", status=1)
    assert "matches 2" in mesh_debug(trainers, "attach", "gpus=1:3", status=1)
    assert "cast needs" in mesh_debug(trainers, "cast", "all", status=1)
    assert "4 alike" in mesh_debug(trainers, "continue", "all")
    assert "nothing is stopped" in mesh_debug(trainers, "list")
    assert "nothing is stopped" in mesh_debug(trainers, "continue", status=1)


@pytest.mark.once
@pytest.mark.slow
def test_a_lost_terminal_leaves_it_stopped(trainers: Script, terminal: Any) -> None:
    """DBG-4."""
    desk = terminal(trainers, "attach", "2")
    desk.expect(PDB)
    assert "somebody else is attached" in mesh_debug(trainers, "cast", "gpus=2", "p loss")
    assert "gpus=2" in mesh_debug(trainers, "list")
    desk.process.kill()
    desk.process.wait()
    again = terminal(trainers, "attach", "gpus=2")
    assert "-> loss += current_rank().rank" in again.expect(PDB)
    assert again.ask("p loss", PDB).startswith("10\n")
    again.ask("c", "continues")
    assert again.finish() == 0
    assert "3 alike" in mesh_debug(trainers, "continue")
    trainers.say("end")
    assert trainers.line() == "[10, 11, 12, 13]"


@pytest.mark.once
@pytest.mark.slow
def test_a_process_killed_while_somebody_is_attached(trainers: Script, terminal: Any, folder: Path) -> None:
    desk = terminal(trainers)
    desk.expect(DESK)
    desk.ask("attach gpus=1", PDB)
    pid = json.loads(mesh_debug(trainers, "list", "--json"))["stops"][1]["pid"]
    watch = Watch([pid])
    os.kill(pid, signal.SIGKILL)
    assert f"process {pid} is gone" in desk.expect(DESK)
    assert not watch.wait()
    assert f"{trainers.process.pid}/{pid}.sock" in "".join(sockets(folder))
    assert "gpus=1 " not in desk.ask("list", DESK)
    assert f"{pid}.sock" not in "".join(sockets(folder))
    desk.ask("continue", DESK)
    trainers.say("end")
    assert "SupervisionError" in trainers.line()


def test_ctrl_c_interrupts_a_command_and_leaves_the_program_alone(trainers: Script, terminal: Any) -> None:
    desk = terminal(trainers)
    desk.expect(DESK)
    desk.ask("attach gpus=0", PDB)
    desk.interrupt(PDB)
    desk.type("[print('begun')] + [0 for _ in iter(int, 1)]")
    desk.expect("\nbegun\n")
    desk.press("c")
    assert "KeyboardInterrupt" in desk.expect(PDB)
    assert desk.ask("p loss", PDB).startswith("10\n")
    desk.ask("interact", ">>> $")
    assert desk.ask("loss + 1", ">>> $").startswith("11\n")
    desk.press("d")
    desk.expect(PDB)
    desk.ask("c", DESK)
    desk.ask("continue", DESK)
    trainers.say("end")
    assert trainers.line() == "[10, 11, 12, 13]"


def test_ctrl_c_stops_what_was_stepped_over(script: Any, terminal: Any) -> None:
    run = script(
        """
        from mesh_core import Actor, endpoint, this_host

        class Spin(Actor):
            def spin(self):
                self.begun = True
                print("begun", flush=True)
                while self.begun:
                    pass
                return 3

            @endpoint
            def go(self):
                breakpoint()
                found = self.spin()
                return found

        with this_host().spawn_procs() as procs:
            print(procs.spawn("spin", Spin).go.call_one().get())
        """
    )
    stopped(run, 1)
    desk = terminal(run, "attach", "spin")
    desk.expect(PDB)
    desk.type("n")
    assert run.line() == "[spin] begun"
    desk.press("c")
    assert "spin()" in desk.expect(PDB)
    desk.ask("self.begun = False", PDB)
    desk.ask("c", "continues")
    assert desk.finish() == 0
    assert run.line() == "3"


def test_breakpoints_set_at_the_prompt_and_quit(script: Any, terminal: Any) -> None:
    run = script(
        """
        import pdb
        from mesh_core import Actor, endpoint, this_host

        class Loop(Actor):
            @endpoint
            def go(self, n):
                pdb.set_trace()
                total = 0
                for i in range(n):
                    total += i
                return total

        with this_host().spawn_procs() as procs:
            loop = procs.spawn("loop", Loop)
            print(loop.go.call_one(3).get())
            print(repr(loop.go.call_one(3).exception()))
        """
    )
    stopped(run, 1)
    desk = terminal(run, "attach", "loop")
    assert "total = 0" in desk.expect(PDB)
    assert "Breakpoint 1" in desk.ask("b 11, i == 2", PDB)
    assert "total += i" in desk.ask("c", PDB)
    assert desk.ask("p i, total", PDB).startswith("(2, 1)\n")
    assert "Deleted" in desk.ask("clear 1", PDB)
    desk.ask("c", "continues")
    assert desk.finish() == 0
    assert run.line() == "3"
    stopped(run, 1)
    # q fails the call, not the process.
    mesh_debug(run, "cast", "all", "q")
    assert "BdbQuit" in run.line()
    run.finish()
    assert run.process.returncode == 0


def test_stepping_out_of_the_endpoint_continues_it(script: Any) -> None:
    run = script(
        """
        from mesh_core import Actor, endpoint, this_host

        class One(Actor):
            @endpoint
            def go(self):
                breakpoint()
                return 1

            @endpoint
            def again(self):
                return 2

        with this_host().spawn_procs() as procs:
            one = procs.spawn("one", One)
            print(one.go.call_one().get())
            print(one.again.call_one().get())
        """
    )
    stopped(run, 1)
    assert "--Return--" in mesh_debug(run, "cast", "all", "n")
    assert "continues" in mesh_debug(run, "cast", "all", "n")
    assert run.line() == "1"
    assert run.line() == "2"


@pytest.mark.full
@pytest.mark.slow
def test_coroutines_and_constructors(script: Any) -> None:
    run = script(
        """
        import asyncio
        from mesh_core import Actor, endpoint, this_host

        class Slow(Actor):
            def __init__(self):
                ready = "built"
                breakpoint()
                self.ready = ready

            @endpoint
            async def wait(self):
                breakpoint()
                first = 1
                await asyncio.sleep(0.01)
                second = first + 1
                return self.ready, second

        with this_host().spawn_procs() as procs:
            print(procs.spawn("slow", Slow).wait.call_one().get())
        """
    )
    assert " in __init__ " in stopped(run, 1)[0]
    assert "'built'" in mesh_debug(run, "cast", "all", "p ready")
    mesh_debug(run, "continue")
    assert " in wait " in stopped(run, 1)[0]
    mesh_debug(run, "cast", "all", "n")
    # Step over an await and back into the same coroutine.
    assert "second = first + 1" in mesh_debug(run, "cast", "all", "n")
    mesh_debug(run, "cast", "all", "n")
    assert "2" in mesh_debug(run, "cast", "all", "p second")
    assert "continues" in mesh_debug(run, "cast", "all", "n")
    assert run.line() == "('built', 2)"


@pytest.mark.slow
def test_source_without_a_file_is_shown(script: Any) -> None:
    run = script(
        '''
        import linecache, sys, types

        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        cells = [
            """
        from mesh_core import Actor, endpoint, this_host
        import inspect

        def helper(n):
            doubled = n * 2  # in another cell
            breakpoint()
            return doubled
        """,
            """
        class Cell(Actor):
            @endpoint
            def source(self):
                return inspect.getsource(helper)

            @endpoint
            def go(self, n):
                return helper(n)

            @endpoint
            def fail(self):
                raise ValueError("no")  # a comment to be seen
        """,
            """
        with this_host().spawn_procs() as procs:
            cell = procs.spawn("cell", Cell)
            print(cell.source.call_one().get().splitlines()[1].strip())
            print("raise ValueError" in cell.fail.call_one().exception().remote_traceback)
            print(cell.go.call_one(4).get())
        """,
        ]
        for number, source in enumerate(cells):
            name = f"<cell {number}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), main.__dict__)
        '''
    )
    assert run.line() == "doubled = n * 2  # in another cell"
    assert run.line() == "True"
    assert "<cell 0>:8 in helper" in stopped(run, 1)[0]
    listed = mesh_debug(run, "cast", "all", "ll")
    assert "doubled = n * 2  # in another cell" in listed
    assert "return helper(n)" in mesh_debug(run, "cast", "all", "w")
    mesh_debug(run, "continue")
    assert run.line() == "8"


@pytest.mark.slow
def test_post_mortem(script: Any) -> None:
    run = script(
        """
        from mesh_core import Actor, ActorError, configure, endpoint, this_host

        class Divider(Actor):
            def _divide(self, a, b):
                return a / b

            @endpoint
            def divide(self, a, b):
                return self._divide(a, b)

            @endpoint
            async def divide_async(self, a, b):
                return self._divide(a, b)

        configure(post_mortem=True)
        with this_host().spawn_procs() as procs:
            divider = procs.spawn("divider", Divider)
            print(divider.divide.call_one(6, 3).get())
            print(repr(divider.divide.call_one(6, 0).exception()))
            print(repr(divider.divide_async.call_one(7, 0).exception()))
        """
    )
    assert run.line() == "2.0"
    for a, name in ((6, "divide"), (7, "divide_async")):
        (line,) = stopped(run, 1)
        assert " in _divide (ZeroDivisionError: division by zero)" in line
        assert f"  ({a}, 0)\n" in mesh_debug(run, "cast", "all", "p a, b")
        where = mesh_debug(run, "cast", "all", "w")
        assert f"{name}()" in where
        assert "mesh_core" not in where
        mesh_debug(run, "cast", "all", "u")
        assert "continues" in mesh_debug(run, "continue")
        assert "ZeroDivisionError" in run.line()


def test_the_users_own_hook_comes_first(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        from mesh_core import Actor, endpoint, this_host

        class One(Actor):
            @endpoint
            def go(self):
                breakpoint()
                return 1

        with this_host().spawn_procs(env={"PYTHONBREAKPOINT": "%s"}) as procs:
            print(procs.spawn("one", One).go.call_one().get())
        """
    assert script(source % "0").line() == "1"
    assert script(source % "builtins.int").line() == "1"


def test_an_actor_of_the_controller_itself(script: Any) -> None:
    run = script(
        """
        import sys
        from mesh_core import Actor, endpoint, shutdown, this_proc

        class Here(Actor):
            @endpoint
            def go(self):
                here = 1
                breakpoint()
                return here

        before = sys.breakpointhook
        print(this_proc().spawn("here", Here).go.call_one().get())
        shutdown()
        print(sys.breakpointhook is before)
        import threading
        print([t.name for t in threading.enumerate() if "debug" in t.name])
        sys.stdin.readline()
        breakpoint()
        print("after")  # plain pdb stops here, and reads from stdin
        """
    )
    stopped(run, 1)
    assert "  1\n" in mesh_debug(run, "cast", "here", "p here")
    mesh_debug(run, "continue")
    assert run.line() == "1"
    assert run.line() == "True"
    assert run.line() == "[]"
    run.say("\np 40 + 2\nc")
    assert "(Pdb) 42\n" in run.finish()[0]


@pytest.mark.slow
def test_several_in_one_process(script: Any, folder: Path) -> None:
    """Breakpoints in threads of two actors, a thread of the user, and a forked copy of the process."""
    run = script(
        """
        import os, threading
        from mesh_core import Actor, endpoint, this_host

        def stop(name):
            breakpoint()
            return name

        class Both(Actor):
            @endpoint
            def plain(self, name):
                return stop(name)

            @endpoint
            def thread(self, name):
                thread = threading.Thread(target=stop, args=(name,), name="mine")
                thread.start()
                thread.join()
                return name

            @endpoint
            def fork(self, name):
                child = os.fork()
                if child == 0:
                    stop(name)
                    os._exit(7)
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        with this_host().spawn_procs() as procs:
            calls = [
                procs.spawn("a", Both).plain.call_one("first"),
                procs.spawn("b", Both).thread.call_one("second"),
            ]
            input()
            # Not at the same time: no copy of a process is sound while a thread holds, say, the lock of an import.
            calls.append(procs.spawn("c", Both).fork.call_one("third"))
            print([call.get() for call in calls])
        """
    )
    stopped(run, 2)
    run.say("")
    stopped(run, 1)
    stops = json.loads(mesh_debug(run, "list", "--json"))["stops"]
    assert {(stop["mesh"], stop["thread"]) for stop in stops} >= {("a", "mesh-a")}
    assert "mine" in {stop["thread"] for stop in stops}
    assert len({stop["pid"] for stop in stops}) == 2
    answers = mesh_debug(run, "cast", "all", "p name")
    for name in ("first", "second", "third"):
        assert f"  '{name}'\n" in answers
    assert "continues" in mesh_debug(run, "continue", "a")
    assert len(json.loads(mesh_debug(run, "list", "--json"))["stops"]) == 2
    mesh_debug(run, "continue")
    assert run.line() == "['first', 'second', 7]"
    assert not debugged(folder)


@pytest.mark.full
@pytest.mark.slow
def test_breakpoints_in_odd_places(script: Any) -> None:
    run = script(
        """
        from mesh_core import Actor, endpoint, this_host

        def prepare():
            breakpoint()
            print("prepared", flush=True)

        class Odd(Actor):
            @endpoint
            def go(self):
                breakpoint(header="look here")
                return 1

            @property
            def nested(self):
                breakpoint()
                return 41

            def __cleanup__(self, exc):
                breakpoint()
                print("cleaned", flush=True)

        with this_host().spawn_procs(bootstrap=prepare) as procs:
            odd = procs.spawn("odd", Odd)
            print(odd.go.call_one().get(), flush=True)
            odd.stop().get()
        """
    )
    assert " in prepare " in stopped(run, 1)[0]
    mesh_debug(run, "continue")
    assert run.line() == "[procs] prepared"
    assert "(breakpoint: look here)" in stopped(run, 1)[0]
    # At the prompt, it would wait for itself.
    assert "evaluated here)\n  42\n" in mesh_debug(run, "cast", "odd", "p self.nested + 1")
    mesh_debug(run, "continue")
    assert run.line() == "1"
    assert " in __cleanup__ " in stopped(run, 1)[0]
    mesh_debug(run, "continue")
    assert run.line() == "[odd] cleaned"


@pytest.mark.once
def test_breakpoint_without_a_socket_folder_is_reported_and_skipped(script: Any, folder: Path) -> None:
    run = script(
        """
        import os
        from mesh_core import Actor, endpoint, this_host
        from mesh_core._features.debug import places

        class One(Actor):
            @endpoint
            def go(self):
                places.folders = lambda: ["/proc/nowhere"]
                breakpoint()
                return 1

        with this_host().spawn_procs() as procs:
            print(procs.spawn("one", One).go.call_one().get())
        """
    )
    out, err = run.finish()
    assert out == "1\n"
    assert "breakpoint skipped, because nobody could attach to it" in err


@pytest.mark.once
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_sockets_are_removed_with_the_job(trainers: Script, folder: Path) -> None:
    """Stopped workers are killed when the script ends, and leave nothing behind."""
    assert sockets(folder)
    trainers.process.send_signal(signal.SIGINT)
    trainers.finish()
    assert not sockets(folder)


@pytest.mark.once
def test_listing_removes_sockets_of_killed_jobs(trainers: Script, folder: Path) -> None:
    """DBG-3."""
    watch = trainers.watch()
    trainers.process.kill()
    trainers.process.wait()
    assert not watch.wait()
    assert sockets(folder)
    assert "nothing is stopped" in mesh_debug(trainers, "list")
    assert not sockets(folder)


@pytest.mark.once
def test_garbage_at_the_socket_has_no_effect(trainers: Script, folder: Path) -> None:
    (path, *_) = sorted(folder.rglob("*.sock"))
    for rubbish in (
        b"\0\xff" * 1000 + b"\n",
        b"[" * 100_000 + b"\n",
        b"[]\n",
        b'{"do": "attach", "stop": {}}\n',
        b'{"do": "answer", "line": "c"}\n',
        b'{"do": 7}\n{"x": 1}\n',
        b"{",
    ):
        with places.connect(str(path)) as peer:
            peer.sendall(rubbish)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
    assert "4 alike" in mesh_debug(trainers, "cast", "all", "p loss")


@pytest.mark.once
def test_another_users_processes_are_refused_at_both_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DBG-2."""
    listener, path = places.listen(1)
    try:
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        with places.connect(path):
            pass
        monkeypatch.setattr(peers, "peer_of", lambda _: (os.getpid(), 12345))
        with pytest.raises(PermissionError, match="belongs to uid 12345"):
            places.connect(path)
        assert list(places.find(1)) == []
        there, here = socket.socketpair()
        with there, here, pytest.raises(PermissionError):
            peers.require_same_user(here)
    finally:
        listener.close()
        places.unlink(path)
    assert not sockets(folder)


def stop_at(mesh: str, **coordinates: int) -> Stop:
    return Stop("", 1, 1, "", 1, mesh, coordinates, {"rank": 0})


@pytest.mark.once
def test_selections() -> None:
    stops = [stop_at("a", hosts=h, gpus=g) for h in range(2) for g in range(3)] + [stop_at("b")]
    for text, wanted in {
        "all": range(7),
        "": range(7),
        "3": [3],
        "1,6": [1, 6],
        "a": range(6),
        "b": [6],
        "a b": range(7),
        "gpus=1": [1, 4],
        "hosts=1,gpus=0:2": [3, 4],
        "a hosts=0 gpus=::2": [0, 2],
        "gpus=1:": [1, 2, 4, 5],
    }.items():
        assert Selection.parse(text).pick(stops) == [stops[n] for n in wanted], text
    assert names(stops[:3]) == "a hosts=0,gpus=0:3"
    assert names([stops[0], stops[4]]) == "a hosts=0,gpus=0 hosts=1,gpus=1"
    assert names([stops[0], stops[2]]) == "a hosts=0,gpus=0 hosts=0,gpus=2"
    assert names(stops[6:]) == "b"
    for text in ("gpus=", "gpus=x", "gpus=-1", "gpus=0:1:0", "gpus=1:2:3:4"):
        with pytest.raises(MeshError, match="a coordinate must be"):
            Selection.parse(text)
    with pytest.raises(MeshError, match="did you mean 'gpus'"):
        Selection.parse("gpu=1").pick(stops)
    with pytest.raises(MeshError, match="the meshes are: a, b"):
        Selection.parse("zzz").pick(stops)
    with pytest.raises(MeshError, match="nothing is stopped"):
        Selection.parse("all").pick([])


@pytest.mark.once
def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["debug", "--help"])
    out = capsys.readouterr().out
    for word in ("list", "attach", "cast", "continue", "--job"):
        assert word in out
