"""SIGTERM ends a script in order, and Ctrl-C says what it waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from core_processes import Script, Watch, search_path

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2, of="file", full=True)]

START = """
import asyncio, atexit, contextlib, ctypes, os, signal, sys, threading
from mesh_core import *
from core_samples import Coroutines, Echo, Gate

class Tidies(Actor):
    def __init__(self, folder):
        self.folder = folder

    @endpoint
    def ping(self):
        pass

    def __cleanup__(self, exc):
        if self.folder == "never":
            threading.Event().wait()
        with open(f"{self.folder}/tidied-{current_rank().rank}", "w"):
            pass

FOLDER = sys.argv[1]
"""

JOB = (
    START
    + """
procs = this_host().spawn_procs({"gpus": 2})
tidies = procs.spawn("tidies", Tidies, FOLDER)
gate = procs.spawn("gate", Gate)
held = procs.spawn("held", Coroutines)
tidies.ping.call().get(timeout=30)
atexit.register(print, "at exit", flush=True)
"""
)

WAITS = {
    "a call": "held.hold.call().get()",
    "a stream": "for future in held.hold.stream(): future.get()",
    "an event": "threading.Event().wait()",
    "asyncio": """
        async def main():
            try:
                print("up", flush=True)
                await held.hold.call()
            finally:
                print("task ends", flush=True)
        asyncio.run(main())
        """,
    "asyncio that sleeps": "asyncio.run(asyncio.sleep(600))",
    "uvloop": """
        import uvloop
        async def main():
            try:
                print("up", flush=True)
                await held.hold.call()
            finally:
                print("task ends", flush=True)
        uvloop.run(main())
        """,
    "another thread's call": """
        def work():
            try:
                waiting = held.hold.call()
                print("up", flush=True)
                waiting.get()
            except MeshError:
                print("thread ends", flush=True)
        threading.Thread(target=work).start()
        threading.Event().wait()
        """,
}


# The main thread blocks where only its own interruption by a signal wakes it, and another thread takes the signal.
ELSEWHERE = """
def take():
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Timer(0.2, take).start()
"""


def up(run: Script) -> Watch:
    """Wait until the script is up."""
    assert run.line() == "up"
    return run.watch()


def ends(run: Script, watch: Watch) -> tuple[int, list[str], str]:
    """Wait until the script and all its processes have ended."""
    out, err = run.finish()
    assert watch.wait() == []
    return run.process.returncode, out.splitlines(), err


def job(wait: str) -> str:
    """A script that waits, with everything that is to run when it ends."""
    says_up = "" if '"up"' in wait else 'print("up", flush=True)\n'
    body = textwrap.indent(says_up + textwrap.dedent(wait).strip(), "        ")
    return f"""{JOB}
try:
    with contextlib.ExitStack() as stack:
        stack.callback(print, "with ends", flush=True)
{body}
finally:
    print("finally", flush=True)
"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("wait", WAITS)
def test_sigterm_ends_in_order(script: Any, tmp_path: Path, wait: str) -> None:
    """EXIT-3, TERM-3."""
    if wait == "uvloop":
        pytest.importorskip("uvloop")
    run = script(job(WAITS[wait]), str(tmp_path))
    watch = up(run)
    run.process.send_signal(signal.SIGTERM)
    status, out, err = ends(run, watch)
    assert status == -signal.SIGTERM, err
    said = [line for line in out if line not in ("task ends", "thread ends")]
    assert said == ["with ends", "finally", "at exit"]
    assert len(out) == (4 if "ends" in WAITS[wait] else 3), out
    assert {path.name for path in tmp_path.glob("tidied-*")} == {"tidied-0", "tidied-1"}


DROPPED = """
r, w = os.pipe()
os.set_blocking(w, False)
with contextlib.suppress(BlockingIOError):
    while True:
        os.write(w, bytes(4096))
os.set_blocking(w, True)
file = open(w, "wb")
file.write(b"x")
print("up", flush=True)
# Whatever is raised while this waits for room is dropped.
del file
threading.Event().wait()
"""


def test_sigterm_that_is_lost_where_it_is_raised_is_raised_again(script: Any, tmp_path: Path) -> None:
    """EXIT-3."""
    run = script(job(DROPPED), str(tmp_path))
    watch = up(run)
    while Path(f"/proc/{run.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    run.process.send_signal(signal.SIGTERM)
    status, out, err = ends(run, watch)
    assert status == -signal.SIGTERM, err
    assert out == ["with ends", "finally", "at exit"]


CAUGHT = """
try:
    print("up", flush=True)
    threading.Event().wait()
except SystemExit:
    print("caught", flush=True)
print("goes on", flush=True)
"""


def test_sigterm_that_the_script_catches_is_its_own_affair(script: Any, tmp_path: Path) -> None:
    """It is not raised again."""
    run = script(job(CAUGHT), str(tmp_path))
    watch = up(run)
    run.process.send_signal(signal.SIGTERM)
    status, out, err = ends(run, watch)
    assert status == 0, err
    assert out == ["caught", "goes on", "with ends", "finally", "at exit"]


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("wait", ["an event", "asyncio that sleeps"])
def test_sigterm_that_another_thread_takes_is_heard(script: Any, tmp_path: Path, wait: str) -> None:
    """The same goes for one that arrives when the main thread is about to block."""
    run = script(job(ELSEWHERE + WAITS[wait]), str(tmp_path))
    watch = up(run)
    status, out, err = ends(run, watch)
    assert status == -signal.SIGTERM, err
    assert out == ["with ends", "finally", "at exit"]
    assert err == ""


def test_a_script_that_catches_it_decides_on_its_status(script: Any, tmp_path: Path) -> None:
    run = script(
        JOB
        + """
try:
    print("up", flush=True)
    held.hold.call().get()
except SystemExit as error:
    print(error.code)
    sys.exit(3)
""",
        str(tmp_path),
    )
    watch = up(run)
    run.process.send_signal(signal.SIGTERM)
    assert ends(run, watch) == (3, ["143", "at exit"], "")
    assert len(list(tmp_path.glob("tidied-*"))) == 2


def test_sigterm_while_the_script_ends_changes_nothing(script: Any, tmp_path: Path) -> None:
    stopping, sent = tmp_path / "stopping", tmp_path / "sent"
    os.mkfifo(stopping)
    os.mkfifo(sent)
    run = script(
        START
        + """
class Tells(Tidies):
    def __cleanup__(self, exc):
        open(f"{self.folder}/stopping", "w").close()
        open(f"{self.folder}/sent").close()
        super().__cleanup__(exc)

configure(stop_timeout=60, sigterm_grace=60)
procs = this_host().spawn_procs()
procs.spawn("tells", Tells, FOLDER).ping.call_one().get(timeout=30)
print("up", flush=True)
sys.exit(5)
""",
        str(tmp_path),
    )
    watch = up(run)
    stopping.open().close()
    run.process.send_signal(signal.SIGTERM)
    sent.open("w").close()
    status, _, err = ends(run, watch)
    assert (status, "Traceback" in err) == (5, False), err
    assert (tmp_path / "tidied-0").exists()


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("second", ["the grace", "a second SIGTERM"])
def test_processes_that_do_not_end_are_killed(script: Any, second: str) -> None:
    """TERM-1."""
    grace = 0.3 if second == "the grace" else 600
    run = script(
        f"from mesh_core import configure; configure(stop_timeout=600, sigterm_grace={grace})\n"
        + job("held.hold.call().get()"),
        "never",
    )
    watch = up(run)
    run.process.send_signal(signal.SIGTERM)
    assert [run.line() for _ in range(3)] == ["with ends", "finally", "at exit"]
    if second != "the grace":
        # It says what it waits for.
        assert run.process.stderr is not None
        assert run.process.stderr.readline() == "mesh: stopping 2 processes; another SIGTERM kills them\n"
        run.process.send_signal(signal.SIGTERM)
    assert ends(run, watch)[0] == -signal.SIGTERM


def test_an_interpreter_that_is_held_up_dies_when_the_grace_is_over(script: Any) -> None:
    """No Python signal handler ever runs there."""
    run = script(
        "from mesh_core import configure; configure(sigterm_grace=0.3)\n"
        + job(
            "lock, library = ctypes.create_string_buffer(256), ctypes.PyDLL(None)\n"
            "library.pthread_mutex_lock(lock)\n"
            'print("up", flush=True)\n'
            "library.pthread_mutex_lock(lock)"
        ),
        "never",
    )
    watch = up(run)
    run.process.send_signal(signal.SIGTERM)
    assert ends(run, watch)[0] == -signal.SIGTERM


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes a namespace of processes")
@pytest.mark.parametrize("first", ["in order", "killed"])
def test_the_first_process_of_a_container(tmp_path: Path, first: str) -> None:
    """By default, the kernel does nothing to that process."""
    made = "from mesh_core import configure; configure(stop_timeout=600, sigterm_grace=0.3)\n"
    path = tmp_path / "script.py"
    path.write_text((made if first == "killed" else "") + job("held.hold.call().get()"))
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, str(path)]
    with subprocess.Popen(
        [*command, str(tmp_path) if first == "in order" else "never"],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search_path()),
        },
    ) as outer:
        assert outer.stdout is not None
        line = outer.stdout.readline()
        if outer.poll() is not None:
            pytest.skip("no namespace of processes can be made here")
        assert line == "up\n"
        (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGTERM)
        out, _ = outer.communicate(timeout=50)
    assert (outer.returncode, out.splitlines()) == (143, ["with ends", "finally", "at exit"])
    assert len(list(tmp_path.glob("tidied-*"))) == (2 if first == "in order" else 0)


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("whose", ["the script's", "nobody's", "from another thread", "off"])
def test_whose_handler_it_is(script: Any, whose: str) -> None:
    first = {
        "the script's": "signal.signal(signal.SIGTERM, mine); use()",
        "nobody's": "use()",
        "from another thread": "thread = threading.Thread(target=use); thread.start(); thread.join()",
        "off": "configure(sigterm_grace=0); use()",
    }[whose]
    run = script(
        f"""{START}
def mine(number, frame):
    pass

def use():
    this_host().spawn_procs().initialized.get(timeout=30)

before = signal.getsignal(signal.SIGTERM)
{first}
now = signal.getsignal(signal.SIGTERM)
print(now is mine, now is before)
shutdown()
now = signal.getsignal(signal.SIGTERM)
print(now is mine, now is before)
""",
        "",
    )
    out, err = run.finish()
    owned = {"the script's": "True False", "nobody's": "False False"}.get(whose, "False True")
    after = "True False" if whose == "the script's" else "False True"
    assert (out.splitlines(), err) == ([owned, after], "")


def test_a_forked_child_dies_of_sigterm(script: Any, tmp_path: Path) -> None:
    """TERM-2; so does a process that multiprocessing ends with terminate()."""
    run = script(
        JOB
        + """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
child.start()
child.terminate()
child.join()
print(child.exitcode, len(tidies.ping.call().get(timeout=30).values()))
""",
        str(tmp_path),
    )
    out, err = run.finish()
    assert (run.process.returncode, out.splitlines(), err) == (0, ["-15 2", "at exit"], "")


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("where", ["with", "end"])
def test_ctrl_c_says_what_is_being_stopped_and_another_one_kills(script: Any, where: str) -> None:
    run = script(
        f"""{START}
configure(stop_timeout=600)
procs = this_host().spawn_procs({{"gpus": 2}})
tidies = procs.spawn("tidies", Tidies, "never")
tidies.ping.call().get(timeout=30)
print("up", flush=True)
with {"procs" if where == "with" else "contextlib.nullcontext()"}:
    threading.Event().wait()
""",
        "never",
    )
    watch = up(run)
    run.process.send_signal(signal.SIGINT)
    assert run.process.stderr is not None
    err = ""
    while "mesh: stopping" not in err:
        line = run.process.stderr.readline()
        assert line, err
        err += line
    assert err.endswith("mesh: stopping 2 processes; Ctrl-C again to kill them\n")
    run.process.send_signal(signal.SIGINT)
    status, _, rest = ends(run, watch)
    assert status == -signal.SIGINT, rest
    assert not any(line.startswith("mesh:") for line in rest.splitlines())
