"""The package as it is: its version, what importing it brings in, and that all it offers is documented."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mesh_supervision
import mesh_supervision.testing
from mesh_core.plugins import POLICIES, PluginManager

PACKAGE = Path(__file__).parents[1]
DOCS = PACKAGE.parents[1] / "docs"
PAGES = (
    "choose-a-policy",
    "restore-state",
    "heal-a-training",
    "elastic-training",
    "watch-a-job",
    "watch-health",
)

LIST_FOREIGN_MODULES = """
import sys
before = set(sys.modules)
from mesh_supervision import *
for name in sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names):
    print(name)
"""


def test_version_is_the_one_the_package_was_built_with() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert mesh_supervision.__version__ == project["version"]


@pytest.mark.beside
@pytest.mark.slow
def test_import_brings_in_nothing_but_mesh_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST_FOREIGN_MODULES], capture_output=True, text=True, check=True, timeout=30
    )
    assert {"mesh_core", "mesh_supervision"} <= set(done.stdout.split())
    assert not {"numpy", "torch"} & set(done.stdout.split())


def test_every_public_name_is_documented() -> None:
    text = "".join((DOCS / "how-to" / f"{page}.md").read_text() for page in PAGES)
    for module in (mesh_supervision, mesh_supervision.testing):
        for name in module.__all__:
            if not name.startswith("_"):
                assert f"`{name}" in text or f"{name}(" in text, f"no page mentions {name}"
                assert (getattr(module, name).__doc__ or "").strip()


def test_every_policy_that_has_a_name_is_documented() -> None:
    text = (DOCS / "how-to" / "choose-a-policy.md").read_text()
    entries = [each for each in PluginManager().entries(POLICIES) if each.distribution == "mesh-supervision"]
    assert len(entries) == 5
    for each in entries:
        assert f'`"{each.name}"`' in text, f"the page does not mention {each.name}"
