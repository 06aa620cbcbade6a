"""What importing mesh_core brings with it, and what only the first spawn may bring: modules do not depend on the machine's noise."""

from __future__ import annotations

import subprocess
import sys

WITHIN = 60
_NAMES = "from mesh_core import Actor, endpoint, this_host"
# For these Mesh needs processes or errors first; each takes a millisecond or more.
_LATE = {
    *(
        "asyncio",
        "bz2",
        "concurrent.futures",
        "dataclasses",
        "difflib",
        "html",
        "importlib.metadata",
        "inspect",
        "json",
    ),
    *(
        "logging",
        "lzma",
        "pathlib",
        "pickle",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "traceback",
        "urllib",
    ),
}
_FIRST_SPAWN = """
class Greeter(Actor):
    @endpoint
    def greet(self): return "hello"
if __name__ == "__main__":
    from mesh_core._meshes.spawning import Recipe
    order = Recipe.order
    def ordering(self, *args, **kwargs):
        call = order(self, *args, **kwargs)
        print(*sys.modules)
        return call
    Recipe.order = ordering
    with this_host().spawn_procs({"gpus": 1}) as procs:
        assert procs.spawn("greeters", Greeter).greet.call_one().get(timeout=60) == "hello"
    print(*sys.modules)
"""


def _brought(code: str) -> list[set[str]]:
    """The modules that some code has brought whenever it prints those there are."""
    program = f"import sys; bare = ' '.join(sys.modules)\n{code}\nprint(bare)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode == 0, done.stderr
    *lists, bare = (set(line.split()) for line in done.stdout.splitlines())
    return [each - bare for each in lists]


def _own(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] == "mesh_core"}


def test_the_import_brings_hardly_a_module():
    (brought,) = _brought("import mesh_core; print(*sys.modules)")
    rooms = {f"mesh_core.{name}" for name in ("_bundle", "_common", "_common.current", "_common.slots")}
    assert _own(brought) == {"mesh_core", *rooms}
    assert not brought & _LATE
    assert len(brought) <= 40, sorted(brought)


def test_the_names_that_every_script_imports_bring_what_they_are_made_of():
    (brought,) = _brought(f"{_NAMES}; print(*sys.modules)")
    assert not brought & _LATE
    assert len(_own(brought)) <= 20, sorted(_own(brought))
    assert len(brought) <= 60, sorted(brought)


def test_processes_are_ordered_before_a_script_imports_what_it_needs_later():
    ordered, called = _brought(f"{_NAMES}\n{_FIRST_SPAWN}")
    later = {
        f"mesh_core.{name}"
        for name in ("_failures.supervision", "_failures.ledger", "inspect", "_hosting.responses")
    }
    assert later <= called
    assert not ordered & {
        *later,
        "asyncio",
        "cloudpickle",
        "socket",
        "shutil",
        "bz2",
        "lzma",
        "html",
        "pathlib",
    }


def test_a_name_is_the_same_object_whenever_it_is_asked_for():
    code = """
import mesh_core
first = {name: getattr(mesh_core, name) for name in mesh_core.__all__}
assert all(getattr(mesh_core, name) is first[name] for name in mesh_core.__all__)
assert all(vars(mesh_core)[name] is first[name] for name in mesh_core.__all__)
print(*sys.modules)
"""
    (brought,) = _brought(code)
    assert "mesh_core._meshes.procs" in brought


def test_an_error_of_the_native_layer_needs_no_process():
    code = """
from mesh_core import MeshError
from mesh_core._native import credentials_list
try:
    credentials_list("/nowhere")
except MeshError as error:
    assert type(error).__name__ == "AuthenticationError", repr(error)
    print(*sys.modules)
"""
    (brought,) = _brought(code)
    assert "mesh_core._bundle.callables" in brought
    assert "mesh_core._process.process" not in brought
