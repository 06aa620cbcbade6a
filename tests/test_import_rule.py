"""The packages stay apart: rules 1 to 3 of `tools/import_rule.py`, on every package and outside plugin."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import doc_page
import import_rule
import workspace

PACKAGES = workspace.packages()
PLUGINS = workspace.third_party()
CORE = "mesh_core"
NAMES = {package.import_name for package in PACKAGES}
HEAVY = {"numpy", "torch"}


def declared(package: workspace.Package) -> set[str]:
    extras = package.metadata["project"].get("optional-dependencies", {}).values()
    texts = [str(requirement) for requirement in package.requirements] + [
        text for extra in extras for text in extra
    ]
    return {workspace.Requirement(text).name.replace("-", "_") for text in texts}


def allowed(package: workspace.Package) -> set[str]:
    """Siblings: mesh_core for a plugin of ours; what an outside plugin declares."""
    if package in PLUGINS:
        return declared(package) & NAMES
    return {CORE} - {package.import_name}


def sources(package: workspace.Package) -> list[Path]:
    return sorted((package.path / "src").rglob("*.py"))


@pytest.mark.parametrize("package", [*PACKAGES, *PLUGINS], ids=str)
def test_package_imports_only_what_it_may(package):
    broken = [
        f"{path.relative_to(workspace.ROOT)}:{violation.line}: {violation.why}"
        for path in sources(package)
        for violation in import_rule.violations(
            path.read_text(),
            package=package.import_name,
            workspace=NAMES,
            allowed=allowed(package),
            declared=declared(package),
        )
    ]
    assert sources(package), f"{package} has no sources under src/"
    assert not broken, "\n".join(broken)


def outside() -> list[Path]:
    """What is written as users of Mesh write: examples and outside packages with their tests, and the other packages."""
    files = [*(workspace.ROOT / "examples").rglob("*.py"), *(workspace.ROOT / "examples").rglob("*.md")]
    for package in PACKAGES:
        if package.import_name != CORE:
            files += [*package.path.rglob("*.py"), package.path / "README.md"]
    return sorted(files)


def texts_of(path: Path) -> list[str]:
    text = path.read_text()
    return [text] if path.suffix == ".py" else [block.code for block in doc_page.blocks(text)]


def test_nobody_outside_of_core_imports_what_is_private_to_it():
    """Also in functions, tests and READMEs: what these do, users copy. Attributes are what ruff's SLF001 looks at."""
    broken = [
        f"{path.relative_to(workspace.ROOT)}: {violation.why}"
        for path in outside()
        for text in texts_of(path)
        for violation in import_rule.violations(
            text, package="", workspace={CORE}, allowed={CORE}, declared=set()
        )
        if violation.why.startswith("RULE-2")
    ]
    assert not broken, "\n".join(broken)
    assert {path.parts[-3] for path in outside()} >= {plugin.name for plugin in PLUGINS}


def module_and_name(path: str) -> tuple[ModuleType, str | None]:
    """`mesh_core.plugins.ProbeResult.of` -> the module mesh_core.plugins and the name ProbeResult."""
    top, *rest = path.split(".")
    module = importlib.import_module(top)
    for part in rest:
        if isinstance(getattr(module, part, None), ModuleType) or importlib.util.find_spec(
            f"{module.__name__}.{part}"
        ):
            module = importlib.import_module(f"{module.__name__}.{part}")
        else:
            return module, part
    return module, None


@pytest.mark.parametrize("package", [*PACKAGES, *PLUGINS], ids=str)
def test_names_taken_from_core_are_exported_by_it(package):
    if package.import_name == CORE:
        texts = [(path, path.read_text()) for path in sorted(workspace.ROOT.glob("examples/*.py"))]
    else:
        texts = [(path, path.read_text()) for path in sources(package)]
    for path, text in texts:
        for found in import_rule.imports(text):
            if found.top == CORE:
                module, name = module_and_name(found.target)
                offered = {*getattr(module, "__all__", vars(module)), "__version__", None}
                assert name in offered, f"{path}:{found.line}: {name} is not in {module.__name__}.__all__"


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_nothing_heavy_is_a_dependency_of_or_imported_with_core(package):
    if package.import_name == CORE:
        assert not declared(package) & HEAVY
    code = f"import sys, {package.import_name}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    if not declared(package) & HEAVY:
        assert done.stdout.split() == []


def test_core_imports_none_of_its_plugins():
    others = sorted(NAMES - {CORE})
    code = f"import sys, {CORE}; print(*sorted(set({others!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import mesh_tensor", "RULE-1"),
        ("from mesh_tensor.placement import Shard", "RULE-1"),
        ("def f():\n    import mesh_tensor", "RULE-1"),
        ("import importlib\nimportlib.import_module('mesh_tensor')", "RULE-1"),
        ("__import__('mesh_tensor')", "RULE-1"),
        ("from mesh_core import _native", "RULE-2"),
        ("from mesh_core._native import Region", "RULE-2"),
        ("import mesh_core._native", "RULE-2"),
        ("import mesh_core\nmesh_core._native.Region", "RULE-2"),
        ("def f():\n    from mesh_core._common.current import current", "RULE-2"),
        (
            "def f():\n    import importlib\n    importlib.import_module('mesh_core._process.process')",
            "RULE-2",
        ),
        ("import mesh_core.testing as t\nt._helper()", "RULE-2"),
        ("import torch", "RULE-3"),
        ("class A:\n    import torch", "RULE-3"),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", "RULE-3"),
    ],
)
def test_rule_finds_what_breaks_it(source, rule):
    found = list(
        import_rule.violations(source, package="mesh_rdma", workspace=NAMES, allowed={CORE}, declared={CORE})
    )
    assert rule in {violation.why.partition(":")[0] for violation in found}


@pytest.mark.parametrize(
    "source",
    [
        "import os, mesh_core\nmesh_core.__version__\nmesh_core.this_host()",
        "from mesh_core import Actor\nclass A(Actor):\n    _private = 1",
        "from . import _handle",
        "import mesh_rdma._handle",
        "def f():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ],
)
def test_rule_leaves_alone_what_keeps_it(source):
    assert not list(
        import_rule.violations(source, package="mesh_rdma", workspace=NAMES, allowed={CORE}, declared={CORE})
    )


def test_importing_mesh_core_leaves_out_what_takes_long_to_import():
    slow = {
        "ast",
        "asyncio",
        "dataclasses",
        "inspect",
        "json",
        "logging",
        "multiprocessing",
        "pluggy",
        "subprocess",
    }
    code = (
        "import sys; before = set(sys.modules); import mesh_core; print(*sorted(set(sys.modules) - before))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    imported = set(printed.stdout.split())
    assert "mesh_core" in imported, printed.stderr
    assert not imported & slow
