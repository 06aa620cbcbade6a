"""The package as it is: its version, its names, and what importing it brings in."""

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import mesh_rdma
from mesh_rdma import RDMAError, _errors, _native

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

LIST_FOREIGN_MODULES = """
import sys
before = set(sys.modules)
import mesh_rdma
mesh_rdma.RDMABuffer(bytearray(8))
for name in sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names):
    print(name)
"""


def test_version_is_the_one_the_package_was_built_with():
    version = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    assert mesh_rdma.__version__ == _native.__version__ == version


@pytest.mark.beside
def test_brings_in_neither_numpy_nor_torch():
    done = subprocess.run(
        [sys.executable, "-c", LIST_FOREIGN_MODULES], capture_output=True, text=True, check=True, timeout=30
    )
    found = set(done.stdout.split())
    assert {"numpy", "torch"}.isdisjoint(found)
    # Transports of other packages are loaded with the first buffer, by what finds plugins.
    if all(each.dist.name == "mesh-rdma" for each in entry_points(group="mesh.transports")):
        assert found == {"mesh_core", "mesh_rdma"}


def test_every_name_is_there_and_documented():
    for name in mesh_rdma.__all__:
        value = getattr(mesh_rdma, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
    assert dir(mesh_rdma) == sorted(mesh_rdma.__all__)


def test_every_kind_of_error_has_an_exception():
    assert set(_errors.KINDS) == set(_native.ERROR_KINDS)
    assert all(issubclass(kind, RDMAError) for kind in _errors.KINDS.values())
