"""The package as it is: its version, and that importing it brings in nothing else."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mesh_tensor

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

LIST_FOREIGN_MODULES = """
import sys
before = set(sys.modules)
import mesh_tensor
for name in sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names):
    print(name)
"""


def test_version_is_the_one_the_package_was_built_with():
    assert mesh_tensor.__version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]


def test_import_brings_in_nothing_but_itself():
    done = subprocess.run(
        [sys.executable, "-c", LIST_FOREIGN_MODULES], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.split() == ["mesh_tensor"]


def test_all_names_are_there_or_say_what_they_need():
    assert sorted(mesh_tensor.__all__) == dir(mesh_tensor)
    if importlib.util.find_spec("torch") is None:
        with pytest.raises(ImportError, match="pip install torch"):
            _ = mesh_tensor.activate
    else:
        assert all(getattr(mesh_tensor, name) is not None for name in mesh_tensor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tensors'"):
        _ = mesh_tensor.tensors
