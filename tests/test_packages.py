"""Each package as it is: its version, its public names, and what importing it brings in where all is installed."""

import ast
import importlib
import subprocess
import sys
import tomllib

import pytest

import workspace

PACKAGES = workspace.packages()
# Beside itself and mesh_core: what mesh_core reads, and finds plugins with.
COMES_WITH_CORE = {"cloudpickle", "mesh_core", "pluggy"}
# What else is said where it is used first; a package that is not here is imported, and nothing more.
USES = {
    "mesh_rdma": "mesh_rdma.RDMABuffer(bytearray(8))",
    "mesh_supervision": "from mesh_supervision import *",
}

LIST_FOREIGN_MODULES = """
import sys
before = set(sys.modules)
import {name}
{use}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names))
"""


@pytest.fixture(params=PACKAGES, ids=str)
def package(request):
    pytest.importorskip(request.param.import_name)
    return request.param


def test_version_is_the_one_the_package_was_built_with(package):
    assert importlib.import_module(package.import_name).__version__ == package.version
    if package.is_native:
        native = importlib.import_module(f"{package.import_name}._native")
        assert native.__version__ == package.version


def test_importing_it_brings_in_nothing_but_itself_and_the_core(package):
    name = package.import_name
    source = LIST_FOREIGN_MODULES.format(name=name, use=USES.get(name, ""))
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=50
    )
    found = set(done.stdout.split())
    assert name in found
    plugins = {each.import_name for each in workspace.third_party()}
    assert found - plugins <= {name, *COMES_WITH_CORE}


def test_public_names_are_there_and_listed(package):
    module = importlib.import_module(package.import_name)
    for name in module.__all__:
        value = getattr(module, name)
        assert name == "__version__" or not callable(value) or (value.__doc__ or "").strip(), name
    assert set(module.__all__) <= set(dir(module))


def test_mesh_core_says_which_package_has_a_name(package):
    import mesh_core

    module = importlib.import_module(package.import_name)
    elsewhere = [name for name in module.__all__ if not hasattr(mesh_core, name)]
    for name in elsewhere:
        with pytest.raises(AttributeError, match=rf"{package.import_name} \(pip install {package.name}\)"):
            getattr(mesh_core, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nowhere'$"):
        _ = mesh_core.nowhere


def test_each_release_of_pytorch_that_the_global_view_is_proven_with_is_tested():
    names = workspace.ROOT / "packages/mesh-tensor/src/mesh_tensor/_torch/_names.py"
    (proven,) = [
        ast.literal_eval(each.value)
        for each in ast.parse(names.read_text()).body
        if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", "") == "PROVEN"
    ]
    groups = tomllib.loads((workspace.ROOT / "pyproject.toml").read_text())["dependency-groups"]
    older = [name.removeprefix("torch-") for name in groups if name.startswith("torch-")]
    for release in older:
        assert groups[f"torch-{release}"] == [f"torch=={release}.*"]
    (newest,) = [
        line.partition("==")[2]
        for line in (workspace.ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    ]
    assert proven[0] == older[0], "which full runs take"
    assert {*proven} <= {*older, ".".join(newest.split(".")[:2])}
