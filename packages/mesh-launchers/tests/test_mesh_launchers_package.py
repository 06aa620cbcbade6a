"""The package as it is: its version, what importing it brings in, and its public names."""

import subprocess
import sys
import tomllib
from pathlib import Path

import mesh_launchers

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

LIST_FOREIGN_MODULES = """
import sys
before = set(sys.modules)
import mesh_launchers
for name in sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names):
    print(name)
"""


def test_version_is_the_one_the_package_was_built_with():
    assert mesh_launchers.__version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]


def test_import_brings_in_nothing_but_itself_and_the_core():
    done = subprocess.run(
        [sys.executable, "-c", LIST_FOREIGN_MODULES], capture_output=True, text=True, check=True, timeout=30
    )
    assert {"mesh_core", "mesh_launchers"} <= set(done.stdout.split())
    assert {"cloudpickle", "mesh_core", "mesh_launchers", "pluggy"} >= set(done.stdout.split())


def test_public_names_are_there():
    for name in mesh_launchers.__all__:
        assert getattr(mesh_launchers, name) is not None
