"""Fixtures for several test files."""

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import ProcMesh, set_fault_handler, shutdown, this_host, this_proc

# Workers have the same path, and import the tests' actors from here.
sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("mesh_rdma") is not None:
    # Large parts go through the agents here, whatever else is installed.
    os.environ["MESH_BYPASS_THRESHOLD"] = "0"

from core_owners import Told
from core_processes import Script, Traces, script_environment
from core_samples import Echo

from warm_scripts import WarmScripts

# Some tests of one room run again in another, between hosts.
sys.path[1:1] = sorted(str(room) for room in Path(__file__).parent.iterdir() if room.is_dir())


class Site:
    """A folder of made-up distributions on disk, as an installer would have left them, on the path of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def module(self, name: str, source: str) -> None:
        """Write a module."""
        (self.path / f"{name}.py").write_text(source)

    def distribution(
        self, name: str, entry_points: str, *, version: str = "1.0", metadata: bool = True
    ) -> None:
        """Write a distribution's metadata."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(entry_points)
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def command(
        self, name: str, *, distribution: str, version: str = "1.0", source: str | None = None
    ) -> str:
        """Offer a command that prints its name and `--text`, or does what `source` says; return its module's name."""
        module = f"made_up_{distribution.replace('-', '_')}"
        self.module(module, COMMAND.format(name=name) if source is None else HEADER + source)
        self.distribution(distribution, f"[mesh.commands]\n{name} = {module}\n", version=version)
        return module


HEADER = """\
from pathlib import Path
from mesh_core.plugins import *

Path(__file__).with_suffix(".imported").touch()
"""

COMMAND = (
    HEADER
    + """
class Command:
    def configure(self, parser):
        parser.add_argument("--text", default="hello", help="what to say")

    def run(self, args):
        print("{name} says", args.text)
        return 0


@hookimpl
def mesh_register_commands():
    yield CommandPlugin(name="{name}", api_version=1, create=Command, summary="say something")
"""
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Made-up distributions; their modules are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name.startswith("made_up_"):
            del sys.modules[name]


@pytest.fixture
def page() -> Callable[[str], str]:
    """Read a page of the repository; the test is skipped where only the tests are at hand."""

    def read(name: str) -> str:
        root = next((each for each in Path(__file__).parents if (each / "mkdocs.yml").exists()), None)
        if root is None:
            pytest.skip("the documentation is not beside the tests")
        return (root / name).read_text()

    return read


@pytest.fixture(scope="session", autouse=True)
def alone() -> Iterator[None]:
    """A runtime folder of this run's own: tests that look into all jobs would look into those of other runs too."""
    with tempfile.TemporaryDirectory(prefix="mesh-runtime-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def light() -> Iterator[None]:
    """Workers look for modules where this process does, and import what little of pytest the tests' modules need there."""
    with tempfile.TemporaryDirectory(prefix="mesh-light-") as folder, pytest.MonkeyPatch.context() as patch:
        shutil.copy(Path(__file__).with_name("pytest_in_workers.py"), Path(folder, "pytest.py"))
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(autouse=True)
def tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing stays behind a test."""
    before = Traces()
    yield
    # pytest keeps them until the next test, and with them a mesh, its runtime and its descriptors.
    request.node.funcargs.clear()
    left = before.left_behind()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module")
def runtime() -> Iterator[None]:
    """A runtime that is warm before the first test of a module, and gone without a trace after the last."""
    # Tests of other packages, run in this process before, may have left theirs.
    shutdown()
    gc.collect()
    gc.freeze()  # what modules before have imported stays too, and need not be looked at again
    before = Traces()
    with this_host().spawn_procs() as procs:
        procs.initialized.get()
    this_proc()  # starts the thread of this process's own actors
    del procs
    yield
    shutdown()
    left = before.left_behind()
    assert not left, f"left behind by shutdown(): {left}"
    assert Traces().fork_servers == before.fork_servers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that this test starts do not wait for long for what does not stop."""
    monkeypatch.setenv("MESH_STOP_TIMEOUT", "0.5")


@pytest.fixture
def fault_tolerant() -> Iterator[None]:
    """What nobody has handled is nothing to stop for: without a handler the next call that waits would raise it."""
    before = set_fault_handler(lambda failure: None)
    yield
    set_fault_handler(before)


@pytest.fixture
def told(runtime: None) -> Iterator[Told]:
    """What comes to the script's fault handler."""
    found = Told()
    set_fault_handler(found.put)
    yield found
    set_fault_handler(None)


@pytest.fixture(scope="module")
def procs(runtime: None) -> Iterator[ProcMesh]:
    """Four processes, shared by the tests of a module."""
    with this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2}, name="shared") as procs:
        procs.initialized.get()
        yield procs


@pytest.fixture
def echo(procs: ProcMesh) -> Iterator[Any]:
    """An actor on each of the shared processes."""
    mesh = procs.spawn("echo", Echo)
    yield mesh
    mesh.stop().get()


@pytest.fixture(scope="session", autouse=True)
def warm_scripts(request: pytest.FixtureRequest, light: None) -> Iterator[WarmScripts | None]:
    """What scripts are forked from, if any test wants one; it is there before the first test counts processes."""
    if any("script" in getattr(item, "fixturenames", ()) for item in request.session.items):
        scripts = WarmScripts(script_environment())
        yield scripts
        scripts.close()
    else:
        yield None


@pytest.fixture
def script(tmp_path: Path, warm_scripts: WarmScripts | None) -> Iterator[Callable[..., Script]]:
    """Start a script; it and all its processes are gone afterwards, whatever the test did.

    It is a copy of a process that has imported Mesh, or, if it must be ``fresh``, runs in an interpreter of its own: where it
    looks at what has been imported, or changes itself by what its fork server inherits, such as a filter of system calls.
    """
    started: list[Script] = []

    def start(source: str, *args: str, fresh: bool = False) -> Script:
        path = tmp_path / f"script{len(started)}.py"
        started.append(Script(path, source, *args, warm=None if fresh else warm_scripts))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()
