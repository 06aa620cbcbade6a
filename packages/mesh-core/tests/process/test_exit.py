"""However a script ends, it ends cleanly: its own exit status, no foreign traceback, no leftover process, no hang."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from core_processes import Script, Watch, family, search_path

pytestmark = [pytest.mark.slow, pytest.mark.python]

START = """
import asyncio, atexit, contextlib, os, signal, sys, threading, time
from mesh_core import *
from core_samples import Coroutines, Echo, Gate

procs = this_host().spawn_procs({"gpus": 2})
echo = procs.spawn("echo", Echo)
held = procs.spawn("held", Coroutines)
assert echo.echo.call(1).get(timeout=30).values() == [1, 1]
print("up", flush=True)
sys.stdin.readline()
"""


def seeds(count: int, *, elsewhere: int) -> list[Any]:
    """Random runs, of which the first few are enough on another interpreter."""
    return [*range(elsewhere), *(pytest.param(n, marks=pytest.mark.once) for n in range(elsewhere, count))]


class Ended:
    """A script that has ended, and nothing of it is left."""

    def __init__(self, run: Script, watch: Watch) -> None:
        out, self.err = run.finish()
        self.status = run.process.returncode
        self.lines = out.splitlines()
        assert watch.wait() == [], "a process outlives its script"
        # What the interpreter, Rust and asyncio print about things that they could not end.
        for ugly in ("Exception ignored", "panicked", "FATAL", "Fatal", "was never", "Task was destroyed"):
            assert ugly not in self.err, self.err


def begin(run: Script) -> Watch:
    """Wait until the script is up, and let it continue."""
    assert run.line() == "up"
    watch = run.watch()
    run.say("")
    return watch


@pytest.fixture
def ended(script: Any) -> Any:
    """Run a script to its end."""

    def run(source: str) -> Ended:
        started = script(START + textwrap.dedent(source) + "\nprint('end', flush=True)\n")
        return Ended(started, begin(started))

    return run


# Ways in which a script ends by itself.


ENDINGS = {
    "the last line": ("pass", 0, ""),
    "sys.exit": ("sys.exit(4)", 4, ""),
    "an exception": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "os._exit": ("os._exit(3)", 3, ""),
    "sys.exit with calls under way": ("held.hold.call(); echo.echo.call(2); sys.exit(4)", 4, ""),
    "an exception in a with block": ("with procs: raise ValueError('mine')", 1, "ValueError: mine"),
    "sys.exit in a callback of the loop": (
        """
        async def main():
            asyncio.get_running_loop().call_later(0.01, sys.exit, 5)
            await held.hold.call()
        asyncio.run(main())
        """,
        5,
        "",
    ),
    "tasks that still await": (
        """
        async def main():
            tasks = [held.hold.call().as_asyncio() for _ in range(3)]
            async for first in held.hold.stream():
                break
            await asyncio.sleep(0)
        asyncio.run(main())
        """,
        0,
        "",
    ),
    "a failure that nobody handles": (
        """
        os.kill(procs.pids[0], signal.SIGKILL)
        held.slice(gpus=0).hold.call_one().get(timeout=30)
        """,
        1,
        "killed by signal 9",
    ),
    "an error that nobody handles": ("echo.fail.call(KeyError('k')).get()", 1, "KeyError"),
    "after a shutdown of its own": ("shutdown()", 0, ""),
    "actors in the script's own process": (
        """
        configure(stop_timeout=0.5)
        here = this_proc().spawn("here", Gate)
        here.block.broadcast()
        this_proc().spawn("there", Coroutines).hold.call()
        assert this_proc().spawn("echo", Echo).echo.call_one(1).get(timeout=30) == 1
        """,
        0,
        "",
    ),
}


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending(ended: Any, ending: str) -> None:
    source, status, said = ENDINGS[ending]
    done = ended(source)
    assert done.status == status, done.err
    assert (done.lines == ["end"]) == (status == 0)
    if said:
        assert said in done.err
        assert done.err.count("Traceback (most recent call last)") - done.err.count("remote") <= 1
    else:
        assert done.err == ""


def test_callbacks_at_exit(ended: Any) -> None:
    """Callbacks registered later run earlier, and can still call; the others get an error."""
    done = ended(
        """
        def late():
            print(echo.echo.call(2).get(timeout=30).values())
        atexit.register(late)
        """
    )
    assert (done.status, done.err, done.lines) == (0, "", ["end", "[2, 2]"])


def test_callbacks_at_exit_from_before_the_first_use(script: Any) -> None:
    run = script(
        """
        import atexit, threading
        from mesh_core import MeshError, this_host
        from core_samples import Echo

        def early():
            for use in (lambda: echo.echo.call(1), procs.stop):
                try:
                    use()
                except MeshError as error:
                    print("shut down" in str(error))

        atexit.register(early)
        procs = this_host().spawn_procs()
        echo = procs.spawn("echo", Echo)
        echo.echo.call(1).get()
        """
    )
    out, err = run.finish()
    assert (run.process.returncode, err, out.splitlines()) == (0, "", ["True", "True"])


def test_the_end_comes_while_a_thread_still_imports(script: Any) -> None:
    """A thread opens the job's door, and may not have got far when a short script ends."""
    run = script(
        """
        import importlib.abc, importlib.machinery, sys, threading
        from mesh_core import this_host
        from mesh_core._common.current import current
        from core_samples import Echo

        begun, closing = threading.Event(), threading.Event()

        class Slowly(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path, target=None):
                if name != "mesh_core.inspect._socket":
                    return None
                self.real = importlib.machinery.PathFinder.find_spec(name, path)
                return importlib.machinery.ModuleSpec(name, self, origin=self.real.origin)

            def exec_module(self, module):
                begun.set()
                assert closing.wait(30)
                self.real.loader.exec_module(module)

        sys.meta_path.insert(0, Slowly())
        echo = this_host().spawn_procs().spawn("echo", Echo)
        assert echo.echo.call_one(1).get(timeout=30) == 1
        begun.wait()
        current().hooks.closing.append(closing.set)
        print("up", flush=True)
        sys.stdin.readline()
        """
    )
    done = Ended(run, begin(run))
    assert (done.status, done.err) == (0, "")


def test_the_end_comes_while_the_job_is_opened_for_inspection(script: Any, tmp_path: Path) -> None:
    """EXIT-1. The thread that opens it holds a lock which the end needs."""
    stopping, opening = tmp_path / "stopping", tmp_path / "opening"
    os.mkfifo(stopping)
    os.mkfifo(opening)
    run = script(
        """
        import sys
        from mesh_core import *
        from mesh_core._features.debug import places

        FOLDER, listen = sys.argv[1], places.listen

        class Tells(Actor):
            @endpoint
            def ping(self):
                pass

            def __cleanup__(self, exc):
                open(f"{FOLDER}/stopping", "w").close()
                open(f"{FOLDER}/opening").close()

        class Listener:
            def __init__(self, listener):
                self.listener = listener

            def __getattr__(self, name):
                return getattr(self.listener, name)

            def fileno(self):
                # Under the lock. The script ends by now, and cannot go on before this returns.
                open(f"{FOLDER}/stopping").close()
                open(f"{FOLDER}/opening", "w").close()
                return self.listener.fileno()

        def slow(*args):
            listener, path = listen(*args)
            return Listener(listener), path

        places.listen = slow
        # A thread that is held up at the end is let go 10 seconds after this.
        configure(stop_timeout=600)
        this_host().spawn_procs().spawn("tells", Tells).ping.call_one().get(timeout=30)
        sys.exit(5)
        """,
        str(tmp_path),
    )
    _, err = run.finish()
    assert (run.process.returncode, err) == (5, "")


# Threads.


def test_a_thread_that_outlives_the_main_one(ended: Any) -> None:
    done = ended(
        """
        def work():
            threading.main_thread().join()
            print(echo.echo.call(2).get(timeout=30).values())
        threading.Thread(target=work).start()
        """
    )
    assert (done.status, done.err, done.lines) == (0, "", ["end", "[2, 2]"])


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("swallow", [False, True], ids=["plain", "swallowing errors"])
@pytest.mark.parametrize("seed", seeds(3, elsewhere=1))
def test_daemon_threads_that_never_stop_calling(ended: Any, swallow: bool, seed: int) -> None:
    """EXIT-1: they are held where they are. Before, they died of errors or took the process with them."""
    done = ended(
        f"""
        def forever(work):
            while True:
                try:
                    work()
                except MeshError:
                    if not {swallow}:
                        raise

        async def ask():
            await echo.echo_async.call(1)

        for work in (lambda: echo.echo.call(1).get(), lambda: asyncio.run(ask()), lambda: echo.echo.broadcast(1)):
            threading.Thread(target=forever, args=[work], daemon=True).start()
        threading.Event().wait({random.Random(seed).random() * 0.1})
        """
    )
    assert (done.status, done.err, done.lines) == (0, "", ["end"])


def test_a_daemon_thread_that_holds_a_lock_does_not_hold_the_end(ended: Any) -> None:
    """A callback at exit waits for something that a thread has while it is in a call: the thread continues, if late."""
    done = ended(
        """
        from mesh_core._process import process as _process
        _process._GRACE = 0.2
        configure(stop_timeout=0.2)
        lock, begun = threading.Lock(), threading.Event()

        def work():
            with lock, contextlib.suppress(MeshError):
                begun.set()
                held.hold.call().get()

        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        # Behind Mesh's own, which is what was registered before.
        atexit.unregister(_process._leave)
        atexit.register(lambda: print(lock.acquire(timeout=30)))
        atexit.register(_process._leave)
        """
    )
    assert (done.status, done.err, done.lines) == (0, "", ["end", "True"])


# Other processes.


def test_a_forked_child_that_exits(ended: Any) -> None:
    done = ended(
        """
        sys.stdout.flush()
        for use in (lambda: None, lambda: echo.echo.call(1), procs.stop, this_host().spawn_procs, shutdown):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(MeshError):
                    use()
                sys.exit(6)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(echo.echo.call(2).get(timeout=30).values())
        """
    )
    assert (done.status, done.err, done.lines) == (0, "", ["6"] * 5 + ["[2, 2]", "end"])


@pytest.mark.slow
def test_a_forked_child_that_leaves_a_block_ends_nothing_of_its_parents(script: Any, tmp_path: Path) -> None:
    """However it leaves: with an exception, which stays the one that it was, or at the end of the block."""
    run = script(
        """
        import os, sys
        from mesh_core import Pool, Queue, Sandboxes, this_host
        from mesh_core.testing import LocalCluster
        from core_samples import Echo

        class Mine(Exception):
            pass

        def leaves(made, use):
            for how in (None, Mine, SystemExit):
                pid = 0
                left = None
                try:
                    with made() as it:
                        sys.stdout.flush()
                        pid = os.fork()
                        if pid == 0 and how is not None:
                            raise how
                        if pid:
                            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                            print(status, use(it))
                except BaseException as error:
                    left = type(error)
                    if pid:
                        raise
                if pid == 0:
                    os._exit(7 if left is how else 8)

        def items(queue):
            queue.put(5).get(timeout=30)
            return queue.take().get(timeout=30)

        with this_host().spawn_procs() as procs:
            echo = procs.spawn("echo", Echo)
            leaves(Queue, items)
            leaves(lambda: Pool(echo), lambda pool: pool.submit(echo.echo, 5).get(timeout=30))
            with Sandboxes(network=None) as boxes:
                leaves(lambda: boxes.take(timeout=30), lambda box: box.call(len, "12345", timeout=30))
        leaves(lambda: LocalCluster(hosts=1), lambda cluster: len(cluster.attach().initialized.get(timeout=30) or "12345"))
        """
    )
    out, err = run.finish()
    assert (out.splitlines(), err) == (["7 5"] * 12, "")


def test_a_forked_child_frees_nothing_of_its_parents(script: Any) -> None:
    """SHM-3: a copy of a process holds no chunk; what it drops is still in use."""
    run = script(
        """
        import os, pickle
        from mesh_core import this_host
        from core_samples import Echo

        class Raw:
            def __init__(self, part):
                self.part = memoryview(part)

            def __reduce_ex__(self, protocol):
                return Raw, (pickle.PickleBuffer(self.part),)

        with this_host().spawn_procs() as procs:
            echo = procs.spawn("echo", Echo)
            kept = echo.echo.call_one(Raw(b"a" * (1 << 20))).get()
            pid = os.fork()
            if pid == 0:
                del kept
                os._exit(0)
            os.waitpid(pid, 0)
            for _ in range(20):
                echo.echo.call_one(Raw(b"b" * (1 << 20))).get()
            print(bytes(kept.part[:3]), bytes(kept.part[-3:]))
        """
    )
    out, err = run.finish()
    assert (out, err) == ("b'aaa' b'aaa'\n", "")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_child_that_an_endpoint_forks_does_not_go_on_as_the_worker(ended: Any, kind: str) -> None:
    """It would answer in the worker's place, on the worker's own link."""
    done = ended(
        f"""
        def fork(end):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                if end == "raise":
                    raise ValueError("mine")
                if end == "exit":
                    sys.exit(6)
                return "from the child"
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        class Forks(Actor):
            @endpoint
            {"async " if kind == "async" else ""}def fork(self, end):
                return fork(end)

        forks = procs.slice(gpus=0).spawn("forks", Forks)
        print([forks.fork.call_one(end).get(timeout=30) for end in ("exit", "raise", "return", "exit")])
        print(echo.echo.call(2).get(timeout=30).values())
        """
    )
    assert (done.status, done.lines) == (0, ["[6, 1, 1, 6]", "[2, 2]", "end"])
    assert "ValueError: mine" in done.err and "is a fork of process" in done.err


def test_what_is_interrupted_while_it_is_rebuilt(script: Any) -> None:
    """Ctrl-C is not the call's outcome: it is raised once."""
    run = script(
        """
        import os, signal
        from mesh_core import MeshError, this_host
        from core_samples import Echo

        class Slow:
            def __init__(self, pid):
                self.pid = pid

            def __setstate__(self, state):
                vars(self).update(state)
                if os.getpid() == self.pid:
                    signal.raise_signal(signal.SIGINT)

        with this_host().spawn_procs() as procs:
            future = procs.spawn("echo", Echo).echo.call_one(Slow(os.getpid()))
            for _ in range(2):
                try:
                    future.get(timeout=30)
                except (KeyboardInterrupt, MeshError) as error:
                    print(type(error).__name__, error)
        """
    )
    out, err = run.finish()
    assert err == ""
    first, second = out.splitlines()
    assert first.startswith("KeyboardInterrupt")
    assert (
        second
        == "MeshError the result of echo.echo was being rebuilt when Ctrl-C came, and is lost; call again"
    )


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(script: Any, method: str) -> None:
    run = script(
        f"""
        import multiprocessing
        from mesh_core import this_host
        from core_samples import Echo

        def use(queue):
            with this_host().spawn_procs() as procs:
                queue.put(procs.spawn("echo", Echo).echo.call_one(5).get(timeout=30))

        def plain(queue):
            queue.put(5)

        if __name__ == "__main__":
            with this_host().spawn_procs() as procs:
                echo = procs.spawn("echo", Echo)
                echo.echo.call_one(1).get()
                context = multiprocessing.get_context({method!r})
                queue = context.Queue()
                # A forked copy of a process that uses Mesh cannot use it.
                child = context.Process(target=plain if {method!r} == "fork" else use, args=[queue])
                child.start()
                print(queue.get(timeout=30))
                child.join()
                print(child.exitcode, echo.echo.call_one(2).get(timeout=30))
        """
    )
    out, err = run.finish()
    assert (run.process.returncode, err, out.splitlines()) == (0, "", ["5", "0 2"])


# Signals.


@pytest.mark.once
@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_workers_too(script: Any, number: int) -> None:
    # Whoever runs the tests may ignore SIGHUP, which is inherited.
    run = script(
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + START + "held.hold.call().get()"
    )
    watch = begin(run)
    run.process.send_signal(number)
    assert Ended(run, watch).status == -number


def test_ctrl_c_is_raised_once_and_the_script_goes_on(script: Any) -> None:
    """As from a terminal, it goes to the whole process group; the workers are not affected."""
    run = script(
        "import os; os.setpgid(0, 0)"
        + START
        + textwrap.dedent(
            """
            async def wait():
                print("waits", flush=True)
                await held.hold.call()

            def block():
                print("waits", flush=True)
                held.hold.call().get()

            def stream():
                print("waits", flush=True)
                for future in held.hold.stream():
                    future.get()

            for use in (block, lambda: asyncio.run(wait()), stream):
                try:
                    use()
                except KeyboardInterrupt:
                    print(echo.echo.call(2).get(timeout=30).values(), flush=True)
            """
        )
    )
    watch = begin(run)
    for _ in range(3):
        assert run.line() == "waits"
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.line() == "[2, 2]"
    done = Ended(run, watch)
    assert (done.status, done.err) == (0, "")


def test_a_script_ends_by_sigint_whatever_else_runs_at_its_end(script: Any) -> None:
    """EXIT-2: the interpreter forgets why it ends when any thread runs code from text, as importing a dataclass does."""
    # It waits for a call: a signal that comes just before the interpreter waits for a lock does not end that wait.
    run = script(
        """
        import atexit
        from mesh_core import this_host
        from core_samples import Coroutines

        waits = this_host().spawn_procs().spawn("held", Coroutines).hold.call()
        atexit.register(lambda: exec("pass"))
        print("up", flush=True)
        waits.get()
        """,
        fresh=True,
    )
    watch = begin(run)
    run.process.send_signal(signal.SIGINT)
    done = Ended(run, watch)
    assert done.status == -signal.SIGINT
    assert "KeyboardInterrupt" in done.err


def test_another_ctrl_c_hurries_the_end(script: Any, tmp_path: Path) -> None:
    """While the script's end waits for a worker that does not stop, Ctrl-C kills that worker at once."""
    fifo = tmp_path / "stopping"
    os.mkfifo(fifo)
    run = script(
        """
        import sys
        from mesh_core import Actor, configure, endpoint, this_host
        from core_samples import Gate

        class Tells(Actor):
            @endpoint
            async def ping(self):
                pass

            def __cleanup__(self, exc):
                open(FIFO, "w").close()

        FIFO = sys.argv[1]
        configure(stop_timeout=600)
        procs = this_host().spawn_procs()
        gate, tells = procs.spawn("gate", Gate), procs.spawn("tells", Tells)
        tells.ping.call_one().get()
        gate.initialized.get()
        gate.block.broadcast()
        print("up", flush=True)
        sys.stdin.readline()
        sys.exit(7)
        """,
        str(fifo),
    )
    watch = begin(run)
    fifo.open().close()  # until the worker has been asked to stop
    run.process.send_signal(signal.SIGINT)
    done = Ended(run, watch)
    assert (done.status, done.err) == (7, "")


VICTIM = """
import asyncio, sys
from mesh_core import this_host
from core_samples import Echo

def use():
    with this_host().spawn_procs({"gpus": 2}) as procs:
        echo = procs.spawn("echo", Echo)
        echo.echo.call(bytearray(200_000)).get()
        asyncio.run(ask(echo))

async def ask(echo):
    await asyncio.gather(*(echo.echo_async.call(n) for n in range(5)))
    async for future in echo.echo.stream(1):
        await future

print("up", flush=True)
try:
    while True:
        use()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if sys.argv[1] == "raise":
        raise
    use()
    print("went on", flush=True)
"""


def end_of_swallowed(victim: subprocess.Popen[str]) -> tuple[str, str]:
    """End a script that continues although it was interrupted, for which only the interpreter may be responsible.

    What is raised in the callback of a weak reference (importlib uses them) or in a finalizer is printed and dropped. A
    second interrupt while asyncio handles the first leaves its loop waiting for tasks that it has
    forgotten to wake.
    """
    os.killpg(victim.pid, signal.SIGINT)
    try:
        out, err = victim.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.kill(victim.pid, signal.SIGABRT)  # prints all stacks
        out, err = victim.communicate()
        pytest.fail(f"it hung:\n{out}{err}")
    assert "Exception ignored in" in err or "_cancel_all_tasks" in err, err
    return out, err


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("pause", [0.05, 0.0002])
@pytest.mark.parametrize("seed", seeds(10, elsewhere=3))
def test_ctrl_c_at_any_moment(tmp_path: Path, seed: int, pause: float) -> None:
    """EXIT-2: during a spawn, a call, a wait, a stop, the end; once or twice, soon or at once."""
    chance = random.Random(f"{seed} {pause}")
    mode = chance.choice(["raise", "go on"])
    twice = chance.random() < 0.5
    path = tmp_path / "victim.py"
    path.write_text(VICTIM)
    before = set(family())
    with subprocess.Popen(
        [sys.executable, str(path), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search_path()),
            "MESH_STOP_TIMEOUT": "2",
            "PYTHONFAULTHANDLER": "1",
        },
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "up\n"
        # The moment is the test: whatever it hits must end well.
        threading.Event().wait(chance.random() * 0.6)
        watch = Watch(set(family(victim.pid)))
        os.killpg(victim.pid, signal.SIGINT)
        if twice:
            threading.Event().wait(chance.random() * pause)
            os.killpg(victim.pid, signal.SIGINT)
        try:
            out, err = victim.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            out, err = end_of_swallowed(victim)
    assert watch.wait() == []
    assert set(family()) <= before
    if err.endswith("asyncio.exceptions.CancelledError\n"):
        # `asyncio.run()` forgets an interrupt that arrives after it has installed its handler and before it begins to count.
        assert victim.returncode == 1, err
    elif mode == "raise":
        assert victim.returncode == -signal.SIGINT, err
    elif twice:
        assert victim.returncode in {0, -signal.SIGINT}, err
    else:
        assert (victim.returncode, out.splitlines()) == (0, ["interrupted", "went on"]), err
    # No more than that: asyncio and the interpreter have moments in which an interrupt leaves text.
    for ugly in ("panicked", "FATAL", "Fatal", "mesh_core._common.errors", "ignored in atexit"):
        assert ugly not in err, err
