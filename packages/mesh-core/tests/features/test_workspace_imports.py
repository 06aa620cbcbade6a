"""`sync_workspace`: processes import what was synced, and reload it on request."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_samples import Echo
from core_workspace import file_of, sync, value_of, write

from mesh_core import MeshError, ProcMesh, this_host

pytestmark = pytest.mark.python


@pytest.fixture(scope="module", autouse=True)
def keeper(runtime: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start the keeper before the first test and keep it until the last."""
    this_host().sync_workspace(tmp_path_factory.mktemp("nothing")).get()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory to sync."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def importable(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the directory importable in the script."""
    monkeypatch.syspath_prepend(str(tree))
    before = set(sys.modules)
    yield tree
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and file.startswith(str(tree)):
            del sys.modules[name]


@pytest.fixture
def worker() -> Iterator[Any]:
    """Spawn an actor in its own process that runs functions."""
    with this_host().spawn_procs(name="worker") as procs:
        yield procs.spawn("worker", Echo)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_processes_spawned_later_import_from_the_copy(importable: Path, start: Any) -> None:
    name = f"made_up_later_{start}"
    write(importable / f"{name}.py", "value = 'synced'")
    sync(importable)
    write(importable / f"{name}.py", "value = 'edited since'")
    with this_host().spawn_procs(start=start) as procs:
        worker: Any = procs.spawn("later", Echo)
        assert worker.call.call_one(value_of, name).get() == "synced"
        assert not worker.call.call_one(file_of, name).get().startswith(str(importable))


def test_running_processes_import_from_the_copy(importable: Path, worker: Any) -> None:
    write(importable / "made_up_running.py", "value = 'synced'")
    # Python has searched, and remembers that it found nothing.
    assert isinstance(worker.call.call_one(value_of, "made_up_absent").exception(), ModuleNotFoundError)
    write(importable / "made_up_absent.py", "value = 'now'")
    sync(importable)
    assert worker.call.call_one(value_of, "made_up_running").get() == "synced"
    assert worker.call.call_one(value_of, "made_up_absent").get() == "now"


def test_subdirectories_are_importable_as_in_the_script(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tree / "src" / "made_up_layout.py", "value = 'src'")
    write(tree / ".venv" / "made_up_layout.py", "value = 'venv'")
    monkeypatch.syspath_prepend(str(tree / ".venv"))
    monkeypatch.syspath_prepend(str(tree / "src"))
    sync(tree)
    with this_host().spawn_procs() as procs:
        worker: Any = procs.spawn("layout", Echo)
        assert worker.call.call_one(file_of, "made_up_layout").get().endswith("/src/made_up_layout.py")


def test_preloading_uses_the_last_sync(importable: Path) -> None:
    seen = []
    for value in (1, 2):
        write(importable / "made_up_preload.py", f"value = {value}")
        sync(importable)
        with this_host().spawn_procs(preload=["made_up_preload"]) as procs:
            seen.append(procs.spawn("preloaded", Echo).call.call_one(value_of, "made_up_preload").get())
    assert seen == [1, 2]


def test_a_change_of_the_same_size_in_the_same_second_is_seen(importable: Path, worker: Any) -> None:
    module = importable / "made_up_quick.py"
    for value in range(6):
        write(module, f"value = {value}")
        os.utime(module, (1_700_000_000, 1_700_000_000))
        sync(importable, reload=True)
        assert worker.call.call_one(value_of, "made_up_quick").get() == value
        with this_host().spawn_procs() as procs:
            assert procs.spawn("fresh", Echo).call.call_one(value_of, "made_up_quick").get() == value


def test_processes_spawned_by_actors_are_notified(importable: Path) -> None:
    write(importable / "made_up_nested.py", "value = 1")
    with this_host().spawn_procs() as procs:
        caller: Any = procs.spawn("caller", Echo)
        inner: Any = caller.call.call_one(spawn_inner).get()
        sync(importable)
        assert inner.call.call_one(value_of, "made_up_nested").get() == 1
        write(importable / "made_up_nested.py", "value = 2")
        assert sync(importable, reload=True).reloaded == ("made_up_nested",)
        assert inner.call.call_one(value_of, "made_up_nested").get() == 2


def spawn_inner() -> Any:
    return this_host().spawn_procs().spawn("inner", Echo)


# Reloading.

MODEL = """
from mesh_core import Actor, endpoint
from PARTS.rate import RATE, scale

class Base:
    def name(self):
        return "base"

class Model(Actor, Base):
    def __init__(self):
        self.steps = 0
        self.callback = scale

    def name(self):
        return "model of " + super().name()

    @endpoint
    def step(self, x):
        self.steps += 1
        return self.steps, scale(x), self.callback(x), RATE, self.name()

    @endpoint
    async def step_async(self, x):
        return scale(x)
"""


class Project:
    """An actor of a class in the workspace, spawned before the first sync."""

    def __init__(self, tree: Path, procs: ProcMesh, stem: str) -> None:
        # Unique names: processes can still import from the copies of other tests.
        self.tree, self.procs, self.model, self.parts = tree, procs, f"{stem}_model", f"{stem}_parts"
        write(tree / self.parts / "__init__.py", "")
        self.write_rate(1, 1)
        self.write_model(MODEL)
        self.cls = importlib.import_module(self.model).Model
        self.actors: Any = procs.spawn("model", self.cls)
        # It imports the current module.
        self.actors.initialized.get()

    def write_rate(self, rate: int, factor: int) -> None:
        text = f"RATE = {rate}\ndef scale(x):\n    return {factor} * x\n"
        write(self.tree / self.parts / "rate.py", text)

    def write_model(self, text: str) -> None:
        write(self.tree / f"{self.model}.py", text.replace("PARTS", self.parts))

    def step(self, x: int) -> Any:
        return self.actors.step.call(x).get().values()


@pytest.fixture
def project(importable: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    with this_host().spawn_procs(per_host={"gpus": 2}, name="models") as procs:
        yield Project(importable, procs, f"made_up_{zlib.crc32(request.node.name.encode()):x}")


def test_running_actors_get_the_new_code_and_keep_their_state(project: Project) -> None:
    assert project.step(3) == [(1, 3, 3, 1, "model of base")] * 2
    project.write_rate(2, 10)
    report = sync(project.tree, reload=True)
    assert f"{project.parts}.rate" in report.reloaded
    assert report.kept == ()
    # By name, by `from import`, and as a callback that was taken before.
    assert project.step(3) == [(2, 30, 30, 2, "model of base")] * 2
    project.write_model(MODEL.replace("+= 1", "+= 100").replace("model of", "new model of"))
    assert sync(project.tree, reload=True).reloaded == (project.model,)
    assert project.step(3) == [(102, 30, 30, 2, "new model of base")] * 2
    later = project.procs.spawn("later", project.cls)
    assert later.step.call(1).get().values() == [(100, 10, 10, 2, "new model of base")] * 2


def test_without_reload_running_code_stays(project: Project) -> None:
    project.write_rate(2, 10)
    assert sync(project.tree).reloaded == ()
    assert project.step(3) == [(1, 3, 3, 1, "model of base")] * 2


def test_unchanged_modules_keep_their_state(project: Project) -> None:
    write(project.tree / f"{project.parts}_state.py", "seen = []\n")
    # The first sync counts what was touched since the job began as changed.
    sync(project.tree, reload=True)
    worker: Any = project.procs.spawn("worker", Echo)
    worker.call.call(append_to, f"{project.parts}_state").get()
    project.write_rate(2, 10)
    assert sync(project.tree, reload=True).reloaded == (f"{project.parts}.rate",)
    assert worker.call.call(append_to, f"{project.parts}_state").get().values() == [2, 2]


def append_to(module: str) -> int:
    seen = importlib.import_module(module).seen
    seen.append(1)
    return len(seen)


def test_endpoints_that_running_actors_cannot_switch_are_named(project: Project) -> None:
    sync(project.tree)
    changed = MODEL.replace("async def step_async", "def step_async")
    changed = changed.replace("def step(self, x):", "def step(self, x, more=0):\n        self.extra()")
    project.write_model(changed + "\n    def extra(self):\n        self.steps += len(super().name())\n")
    report = sync(project.tree, reload=True)
    assert len(report.kept) == 1
    assert report.kept[0].startswith(f"{project.model}.Model.step_async (its kind has changed:")
    assert report.kept[0].endswith("running actors keep the old one")
    assert project.step(3) == [(5, 3, 3, 1, "model of base")] * 2
    assert project.actors.step_async.call(3).get().values() == [3, 3]
    sync(project.tree, reload=True)
    # Again, because the actors' endpoints are no longer those of the class.
    project.write_model(changed.replace("self.extra()", "self.steps += 50"))
    assert len(sync(project.tree, reload=True).kept) == 1
    assert project.step(3) == [(56, 3, 3, 1, "model of base")] * 2


def test_a_failed_reload_changes_nothing(project: Project) -> None:
    sync(project.tree, reload=True)
    project.write_rate(5, 10)
    for broken, where in (
        ("def f(:", f'File "{project.model}.py", line '),
        ("raise RuntimeError('on import')", ""),
    ):
        project.write_model(MODEL.replace("+= 1", "+= 100") + broken)
        said = f"2 processes could not .* their old code: {project.model}: {where}"
        with pytest.raises(MeshError, match=said):
            sync(project.tree, reload=True)
    assert project.step(3) == [(1, 3, 3, 1, "model of base")] * 2
    # Changes of the other module are not forgotten.
    project.write_model(MODEL.replace("+= 1", "+= 100"))
    assert sync(project.tree, reload=True).reloaded == (project.model, f"{project.parts}.rate")
    assert project.step(3) == [(101, 30, 30, 5, "model of base")] * 2


def test_changes_synced_without_reload_are_reloaded_by_the_next_sync(project: Project) -> None:
    sync(project.tree, reload=True)
    project.write_rate(2, 10)
    sync(project.tree)
    assert sync(project.tree, reload=True).reloaded == (f"{project.parts}.rate",)
    assert project.step(3) == [(1, 30, 30, 2, "model of base")] * 2
    assert sync(project.tree, reload=True).reloaded == ()


DECORATED = """
import dataclasses, functools

def times(n):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return n * function(*args)
        return wrapper
    return decorate

@times(FACTOR)
def value():
    return VALUE

def make():
    def down(n):
        return 0 if n == 0 else VALUE + down(n - 1)
    return down

down = make()

@functools.cache
def cached():
    return VALUE

@dataclasses.dataclass
class Point:
    x: int = VALUE

    @property
    def twice(self):
        return FACTOR * self.x

    @classmethod
    def make(cls):
        return [FACTOR]

    @times(FACTOR)
    def decorated(self):
        return self.x
"""
USER = """
import made_up_decorated
from made_up_decorated import Point, cached, down, value
held, point = [value, Point.make], Point(100)

def everything():
    return (
        [each() for each in held], value(), cached(), Point(), point.twice, Point.make(), point.decorated(), down(3),
        type(point) is Point, value is made_up_decorated.value, Point is made_up_decorated.Point,
    )
"""


def test_decorated_functions_and_all_kinds_of_members_get_the_new_code(importable: Path, worker: Any) -> None:
    write(importable / "made_up_decorated.py", DECORATED.replace("FACTOR", "2").replace("VALUE", "5"))
    write(importable / "made_up_user.py", USER)
    sync(importable, reload=True)
    ask = worker.call.with_options(timeout=30).call_one
    seen = ask(text_of, "made_up_user", "everything").get()
    assert seen == "([10, [2]], 10, 5, Point(x=5), 200, [2], 200, 15, True, True, True)"
    write(importable / "made_up_decorated.py", DECORATED.replace("FACTOR", "3").replace("VALUE", "7"))
    assert sync(importable, reload=True).kept == ()
    seen = ask(text_of, "made_up_user", "everything").get()
    # A classmethod that was bound before refers to the old function, which has the new code.
    assert seen == "([21, [3]], 21, 7, Point(x=7), 300, [3], 300, 21, True, True, True)"


def text_of(module: str, name: str) -> str:
    return str(value_of(module, name))


def test_classes_that_cannot_be_changed_in_place_are_named(importable: Path, worker: Any) -> None:
    text = "import enum\nclass Base: pass\nclass Kind({}):\n    {}\nclass Color(enum.Enum):\n    RED = {}\n"
    write(importable / "made_up_kinds.py", text.format("", "pass", 1))
    sync(importable)
    worker.call.call_one(value_of, "made_up_kinds", "__name__").exception()
    write(importable / "made_up_kinds.py", text.format("Base", "__slots__ = ('x',)", 2))
    report = sync(importable, reload=True)
    assert [each.partition(":")[0] for each in report.kept] == [
        "made_up_kinds.Color (members of an enum cannot be replaced)",
        "made_up_kinds.Kind (its bases have changed)",
    ]


@pytest.mark.once
@pytest.mark.full
@pytest.mark.slow
def test_a_stuck_process_delays_no_sync(importable: Path) -> None:
    with this_host().spawn_procs(name="stuck") as procs:
        worker: Any = procs.spawn("stuck", Echo)
        worker.echo.call_one(1).get()
        [pid] = procs.pids
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            write(importable / "made_up_stuck.py", "value = 1")
            sync(importable)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert worker.call.call_one(value_of, "made_up_stuck").get() == 1


@pytest.mark.once
def test_a_process_that_dies_meanwhile_delays_no_reload(importable: Path, fault_tolerant: None) -> None:
    with this_host().spawn_procs(name="dying") as procs:
        worker: Any = procs.spawn("dying", Echo)
        worker.echo.call_one(1).get()
        [pid] = procs.pids
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        write(importable / "made_up_dying.py", "value = 1")
        future = this_host().sync_workspace(importable, reload=True)
        os.kill(pid, signal.SIGKILL)
        assert future.get(timeout=30).sent == ("made_up_dying.py",)
