"""What fork servers import by themselves: packages that actor classes refer to, and modules that workers have imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.beside

_PARTS = """
import os, signal, sys, time
from mesh_core import Actor, ProcMesh, endpoint, inspect, this_host

def parents(procs):
    return [int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]) for pid in procs.pids]

def servers():
    return {one.pid: one for host in inspect.snapshot().hosts for one in host.fork_servers}

def preloaded(procs):
    return [list(servers()[pid].preloaded) for pid in parents(procs)]

def until(what):
    end = time.monotonic() + 50
    while not what():
        assert time.monotonic() < end, inspect.snapshot()
        time.sleep(0.01)
"""


def write(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


def lines(run: Any) -> list[str]:
    out, err = run.finish()
    assert run.process.returncode == 0, err
    return [*out.splitlines(), *([err] if "exec instead" in err else [])]


def preloaded(script: Any, source: str, options: str = "", *, answer: str = "''") -> list[str]:
    """Spawn processes; what their fork servers have imported by then, and the value of an expression."""
    run = script(
        f"""{_PARTS}
{source}

if __name__ == "__main__":
    with this_host().spawn_procs({options}) as procs:
        procs.initialized.get(50)
        print(preloaded(procs), {answer})
"""
    )
    return [line.rstrip() for line in lines(run)]


@pytest.fixture(autouse=True)
def _numpy() -> None:
    pytest.importorskip("numpy")


# What is chosen.


@pytest.mark.slow
def test_packages_that_a_class_refers_to_are_imported_before_the_fork(script: Any) -> None:
    run = script(
        _PARTS
        + """
import numpy as np

class Adds(Actor):
    @endpoint
    def had(self):
        return "numpy" in had_at_start

    @endpoint
    def add(self):
        return int(np.ones(3).sum())

if __name__ == "__main__":
    with this_host().spawn_procs({"g": 2}) as procs:
        print(preloaded(procs))
        print(procs.spawn("adds", Adds).add.call().get().values())
        print("fork server" in str(inspect.snapshot()), "numpy" in str(inspect.snapshot()))
    with this_host().spawn_procs(preload=[]) as procs:
        print(preloaded(procs))
    with this_host().spawn_procs(preload=["json"]) as procs:
        print(preloaded(procs))
        print(procs.spawn("adds", Adds).add.call_one().get())
"""
    )
    assert lines(run) == ["[['numpy'], ['numpy']]", "[3, 3]", "True True", "[[]]", "[['json']]", "3"]


@pytest.mark.slow
def test_nothing_is_chosen_where_the_users_own_come_first(script: Any) -> None:
    """PRL-1: they may set what packages look at when they are imported."""
    run = script(
        _PARTS
        + """
import numpy

class Adds(Actor):
    @endpoint
    def add(self):
        return numpy.ones(3)

def first():
    os.environ["OMP_NUM_THREADS"] = "1"

def late(_point):
    return {"OMP_NUM_THREADS": "1"}

if __name__ == "__main__":
    cpus = sorted(os.sched_getaffinity(0))
    for options in ({}, {"bootstrap": first}, {"env": late}, {"proc_bind": [cpus]}, {"start": "exec"}):
        with this_host().spawn_procs(**options) as procs:
            procs.initialized.get()
            print(*options, preloaded(procs))
"""
    )
    assert lines(run) == [
        "[['numpy']]",
        "bootstrap [[]]",
        "env [[]]",
        "proc_bind [[]]",
        "start [[]]",
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "refers"),
    [
        ("class A(Actor):\n    @endpoint\n    def f(self): return numpy.ones(1)", True),
        ("class A(Actor):\n    size = numpy.float32", True),
        (
            "def helper(): return numpy.ones(1)\nclass A(Actor):\n    @endpoint\n    def f(self): return helper()",
            True,
        ),
        ("import far\nclass A(Actor):\n    @endpoint\n    def f(self): return far.near.ones()", True),
        ("from far import Base\nclass A(Base): pass", True),
        ("class A(Actor):\n    @endpoint\n    def f(self): return 1", False),
        (
            "class A(Actor):\n    @endpoint\n    def f(self):\n        import numpy\n        return numpy",
            False,
        ),
        ("class A(Actor):\n    @endpoint\n    def f(self): return self.numpy", False),
        ("import json\nclass A(Actor):\n    @endpoint\n    def f(self): return json", False),
    ],
)
def test_references_are_followed(script: Any, tmp_path: Path, source: str, refers: bool) -> None:
    write(
        tmp_path,
        far="import near\nfrom mesh_core import Actor\nclass Base(Actor): pass",
        near="import numpy as np\ndef ones(): return np.ones(1)",
    )
    if "far" not in source:
        write(tmp_path, far="", near="")
    found = preloaded(script, f"import numpy\n{source}")
    assert found == ["[['numpy']]" if refers else "[[]]"]


@pytest.mark.slow
def test_a_users_own_file_of_that_name_is_not_chosen(script: Any, tmp_path: Path) -> None:
    write(
        tmp_path,
        pandas="import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    )
    source = """
import pandas

class A(Actor):
    @endpoint
    def f(self): return pandas.__name__
"""
    answer = 'procs.spawn("a", A).f.call_one().get()'
    assert preloaded(script, source, answer=answer) == ["[[]] pandas"]


@pytest.mark.full
def test_environments_have_their_own_and_not_without_end(script: Any) -> None:
    run = script(
        _PARTS
        + """
import numpy

class A(Actor):
    @endpoint
    def f(self): return numpy.__name__, os.environ["NUMBER"]

if __name__ == "__main__":
    found, answers = [], []
    for number in [*range(11), 0]:
        with this_host().spawn_procs(env={"NUMBER": str(number)}) as procs:
            found += preloaded(procs)
            answers.append(procs.spawn("a", A).f.call_one().get())
    print(answers == [("numpy", str(number)) for number in [*range(11), 0]])
    print(len(servers()), found.count(["numpy"]), found.count([]))
"""
    )
    assert lines(run) == ["True", "9 9 3"]


# What is learnt.


_CLASS = """
import numpy
{first}
from mesh_core import Actor, endpoint
import os
IMPORTED_BY = os.getpid()
class Counts(Actor):
    @endpoint
    def importer(self): return IMPORTED_BY
    @endpoint
    def version(self): return "one"
"""

_RESPAWN = (
    _PARTS
    + """
import counts, marker

if __name__ == "__main__":
    with this_host().spawn_procs({"g": 2}, supervise=lambda failure: True) as procs:
        counted = procs.spawn("counts", counts.Counts, supervise=lambda failure: True)
        first = counted.importer.call().get().values()
        assert first == procs.pids
        # Modules are tried in order: once this one is there, the one before has been tried.
        procs.spawn("marks", marker.Marks, supervise=lambda failure: True).mark.call().get()
        until(lambda: all("marker" in each for each in preloaded(procs)))
        edit = os.environ.get("EDIT")
        if edit:
            text = open(counts.__file__).read()
            with open(counts.__file__, "w") as file: file.write(text.replace("one", "another"))
        print(preloaded(procs)[0])
        os.kill(procs.pids[0], signal.SIGKILL)
        until(lambda: procs.failed())
        procs.respawn().get(50)
        counted.respawn().get(50)
        again = counted.slice(g=0)
        importer = again.importer.call_one().get()
        print("before the fork" if importer == parents(procs)[0] else "in the worker" if importer == procs.pids[0] else "elsewhere")
        print(again.version.call_one().get())
"""
)


def respawned(script: Any, folder: Path, first: str = "") -> list[str]:
    write(
        folder,
        counts=_CLASS.format(first=first),
        marker=(
            "import numpy\nfrom mesh_core import Actor, endpoint\n"
            "class Marks(Actor):\n    @endpoint\n    def mark(self): return 1\n"
        ),
    )
    return lines(script(_RESPAWN))


@pytest.mark.slow
def test_the_module_of_a_class_is_imported_for_respawned_workers(script: Any, tmp_path: Path) -> None:
    """LSN-1."""
    assert respawned(script, tmp_path, "print('imported')")[-3:] == [
        "['numpy', 'counts', 'marker']",
        "before the fork",
        "one",
    ]


_UNSOUND = {
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "descriptor": "KEPT = open(__file__)",
    "connection": "import socket; KEPT = socket.socket()",
    "process": "import subprocess; KEPT = subprocess.Popen(['sleep', '0.1'])",
    "environment": "import os; os.environ['SET_BY_MODULE'] = str(os.getpid())",
    "path": "import sys; sys.path.append('/nowhere')",
    "signal": "import signal, threading\nif threading.current_thread() is threading.main_thread(): signal.signal(signal.SIGUSR1, print)",
    "logging": "import logging; logging.basicConfig(level=10)",
    "seed": "import random; random.seed(7)",
    "numpy seed": "numpy.random.seed(7)",
    "generator": "RNG = numpy.random.default_rng()",
    "runtime": "from mesh_core import this_host; HERE = this_host()",
    "failure": "if 'forkserver' in open('/proc/self/comm').read(): raise RuntimeError",
    "exit": "import os\nif 'forkserver' in open('/proc/self/comm').read(): os._exit(3)",
    "time": "import signal\nif 'forkserver' in open('/proc/self/comm').read(): signal.raise_signal(signal.SIGALRM)",
}


@pytest.mark.full
@pytest.mark.parametrize("what", sorted(_UNSOUND))
def test_modules_of_which_a_fork_would_not_be_as_good_are_left_alone(
    script: Any, tmp_path: Path, what: str
) -> None:
    """LSN-1."""
    assert respawned(script, tmp_path, _UNSOUND[what])[-3:] == [
        "['numpy', 'marker']",
        "in the worker",
        "one",
    ]


@pytest.mark.full
def test_workers_with_variables_of_their_own_teach_nothing(script: Any) -> None:
    """LSN-1: what a module reads from the environment differs from rank to rank."""
    run = script(
        _PARTS
        + """
import numpy, core_samples

class A(Actor):
    @endpoint
    def f(self): return numpy.__name__

if __name__ == "__main__":
    with this_host().spawn_procs({"g": 2}, torch_env=True) as procs, this_host().spawn_procs() as others:
        procs.spawn("echo", core_samples.Echo).echo.call(1).get()
        assert preloaded(procs) == [["numpy"]] * 2, preloaded(procs)
        others.spawn("echo", core_samples.Echo).echo.call(1).get()
        until(lambda: "core_samples" in preloaded(others)[0])
        print("learnt from the other")
"""
    )
    assert lines(run) == ["learnt from the other"]


@pytest.mark.full
def test_workers_are_not_given_a_module_that_was_changed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LSN-1."""
    monkeypatch.setenv("EDIT", "1")
    *told, err = respawned(script, tmp_path)
    assert told == ["['numpy', 'counts', 'marker']", "in the worker", "another"]
    assert "counts.py was changed after it was imported for new processes" in err


# How long imports may take.


@pytest.mark.full
def test_an_import_that_makes_progress_does_not_count(script: Any, tmp_path: Path) -> None:
    write(tmp_path, busy="import time\nend = time.monotonic() + 4\nwhile time.monotonic() < end: pass")
    source = "from mesh_core import configure\nconfigure(spawn_timeout=3)"
    assert preloaded(script, source, '{"g": 2}, preload=["busy"]') == ["[['busy'], ['busy']]"]


@pytest.mark.slow
def test_an_import_that_is_stuck_is_named(script: Any, tmp_path: Path) -> None:
    write(tmp_path, stuck="import threading\nthreading.Event().wait()")
    run = script(
        _PARTS
        + """
from mesh_core import SpawnError, configure, set_fault_handler
if __name__ == "__main__":
    set_fault_handler(lambda failure: None)
    configure(spawn_timeout=0.5)
    procs = this_host().spawn_procs(preload=["stuck"])
    until(lambda: any(one.importing == "stuck" for one in servers().values()))
    print("is importing stuck" in str(inspect.snapshot()))
    try:
        procs.initialized.get(50)
    except SpawnError as error:
        print(error)
"""
    )
    out, err = run.finish()
    seen, error = out.splitlines()[:2]
    assert seen == "True", err
    assert 'the process that forks workers is still importing "stuck"' in error
    assert "spawn_timeout (MESH_SPAWN_TIMEOUT)" in error
