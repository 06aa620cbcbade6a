"""What every package of the workspace has, and agrees on with the others."""

import importlib.metadata
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

import workspace

ROOT = workspace.ROOT
PACKAGES = workspace.packages()
LONGEST_FILE = 800
GENERATED = {".git", ".nox", ".venv", "target", "dist", "site", "build", "__pycache__", "node_modules"}


def source_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in GENERATED and not name.endswith("_cache")]
        yield from (Path(folder, name) for name in files if name.endswith((".py", ".pyi", ".rs")))


def test_no_source_file_is_longer_than_a_reader_can_hold():
    lengths = {path: path.read_text().count("\n") for path in source_files(ROOT)}
    assert len(lengths) > len(PACKAGES)
    too_long = [
        f"{path.relative_to(ROOT)}: {n} lines" for path, n in sorted(lengths.items()) if n > LONGEST_FILE
    ]
    assert not too_long, f"split by concept, at most {LONGEST_FILE} lines each: {too_long}"


def test_every_folder_of_packages_is_one():
    folders = {path.name for path in (ROOT / "packages").iterdir() if path.is_dir()}
    assert {package.name for package in PACKAGES} == folders


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_package_is_complete(package):
    for name in ("README.md", "CHANGELOG.md", f"src/{package.import_name}/py.typed", "tests"):
        assert (package.path / name).exists(), f"{package} lacks {name}"
    assert (package.path / "README.md").read_text().startswith(f"# {package}\n")
    project = package.metadata["project"]
    assert project["readme"] == "README.md"
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    # A copy: a link would lead out of what is built of the package alone.
    licence = package.path / "LICENSE"
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes() and not licence.is_symlink()
    assert project["authors"] == [{"name": "Mesh maintainers"}]
    assert "Typing :: Typed" in project["classifiers"]


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_changelog_begins_with_the_version_in_the_metadata(package):
    headings = re.findall(r"^## (\S+)", (package.path / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == package.version


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_installed_version_is_the_one_in_the_metadata(package):
    assert importlib.metadata.version(package.name) == package.version


def test_packages_support_the_same_pythons():
    assert len({tuple(package.pythons) for package in PACKAGES}) == 1
    for package in PACKAGES:
        assert package.metadata["project"]["requires-python"] == f">={package.pythons[0]}"


@pytest.mark.parametrize("package", PACKAGES[1:], ids=str)
def test_siblings_are_required_as_one_minor_version(package):
    known = {each.name: each for each in PACKAGES}
    needed = [requirement for requirement in package.requirements if requirement.name in known]
    assert "mesh-core" in {requirement.name for requirement in needed}
    for requirement in needed:
        current = Version(known[requirement.name].version)
        expected = f">={current.major}.{current.minor},<{current.major}.{current.minor + 1}"
        assert set(str(requirement.specifier).split(",")) == set(expected.split(",")), (
            f"{package}: {requirement}"
        )
        assert workspace.allows(requirement, str(current))


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_every_dependency_states_the_lowest_version_that_works(package):
    for requirement in package.requirements:
        assert "==" in workspace.lowest(requirement)


def test_native_half_has_the_version_of_its_package():
    crates = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert {package.version for package in PACKAGES if package.is_native} == {crates}


def test_pages_are_in_the_navigation_in_the_order_of_the_first_one():
    site, docs = (ROOT / "mkdocs.yml").read_text(), ROOT / "docs"
    shown = re.findall(r"^ +- (\S+\.md)$", site, re.MULTILINE)
    assert sorted(shown) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    linked = re.findall(r"\]\(([^)#:]+\.md)", (docs / "index.md").read_text())
    in_turn = [page for page in dict.fromkeys(linked) if not page.startswith("design/")]
    assert [page for page in shown if page in in_turn] == in_turn


def test_copy_buttons_leave_out_prompts():
    site = (ROOT / "mkdocs.yml").read_text()
    (style,) = re.findall(r"^extra_css:\n  - (\S+)$", site, re.MULTILINE)
    rules = (ROOT / "docs" / style).read_text()
    # The theme marks what it copies; the highlighter's names for prompts and output are these.
    assert re.search(
        r"\[data-md-copying\] \.gp,\n\[data-md-copying\]:has\(\.gp\) \.go \{\n +display: none;", rules
    )
    assert "content.code.copy" in site
