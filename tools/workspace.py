"""What the packages say about themselves, read from their own metadata.

Sessions, tests and checks ask here instead of keeping lists by hand: a package that is added to `packages/`, or a
plugin to `examples/third-party/`, is found, built, tested and checked without another line anywhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]

_PYTHON_CLASSIFIER = "Programming Language :: Python :: 3."


@dataclass(frozen=True)
class Package:
    """One folder with a `pyproject.toml` that builds a wheel."""

    path: Path

    def __str__(self) -> str:
        return self.name

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """The parsed `pyproject.toml`."""
        return tomllib.loads((self.path / "pyproject.toml").read_text(encoding="utf-8"))

    @property
    def name(self) -> str:
        """The distribution's name, normalised."""
        return canonicalize_name(self.metadata["project"]["name"])

    @property
    def import_name(self) -> str:
        """The top-level module: the name with underscores, for every package here."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """The version under `[project]`."""
        return str(self.metadata["project"]["version"])

    @property
    def source(self) -> Path:
        """The folder of the top-level module."""
        return self.path / "src" / self.import_name

    @property
    def tests(self) -> Path:
        """The folder of the package's own tests."""
        return self.path / "tests"

    @property
    def requirements(self) -> list[Requirement]:
        """What the package needs at run time."""
        return [Requirement(text) for text in self.metadata["project"].get("dependencies", ())]

    @property
    def test_requirements(self) -> list[str]:
        """What the package's tests need beyond the common `test` group: its own `test` group or extra."""
        group = self.metadata.get("dependency-groups", {}).get("test", ())
        extra = self.metadata["project"].get("optional-dependencies", {}).get("test", ())
        return [*group, *extra]

    @property
    def optional_requirements(self) -> list[str]:
        """What the tests use where it is there, installed by itself: the group `without-dependencies`.

        For what asks for more than it needs.
        """
        return list(self.metadata.get("dependency-groups", {}).get("without-dependencies", ()))

    @property
    def pythons(self) -> list[str]:
        """The minor versions of Python named by the classifiers, oldest first."""
        classifiers: list[str] = self.metadata["project"].get("classifiers", [])
        minors = {int(c.rpartition(".")[2]) for c in classifiers if c.startswith(_PYTHON_CLASSIFIER)}
        return [f"3.{minor}" for minor in sorted(minors)]

    @property
    def is_native(self) -> bool:
        """Whether a Rust module is built into the wheel."""
        return "maturin" in self.metadata.get("tool", {})


def packages(root: Path = ROOT) -> list[Package]:
    """The packages of the workspace; those that others depend on come first."""
    found = {package.name: package for package in _packages_under(root / "packages")}
    ordered: dict[str, Package] = {}

    def place(package: Package) -> None:
        if package.name in ordered:
            return
        for sibling in siblings(package, found.values()):
            place(sibling)
        ordered[package.name] = package

    for package in found.values():
        place(package)
    return list(ordered.values())


def third_party(root: Path = ROOT) -> list[Package]:
    """The complete outside plugins that serve as examples."""
    return list(_packages_under(root / "examples" / "third-party"))


def siblings(package: Package, among: Iterable[Package]) -> list[Package]:
    """The packages of `among` that `package` names as run-time dependencies."""
    needed = {canonicalize_name(requirement.name) for requirement in package.requirements}
    return [other for other in among if other.name in needed]


def closure(package: Package, among: Iterable[Package]) -> list[Package]:
    """`package` and all of `among` that it needs, directly or not; dependencies first."""
    among = list(among)
    collected: dict[str, Package] = {}

    def collect(current: Package) -> None:
        for sibling in siblings(current, among):
            collect(sibling)
        collected.setdefault(current.name, current)

    collect(package)
    return list(collected.values())


def lowest(requirement: Requirement) -> str:
    """The requirement pinned to the lowest version that it allows.

    Example:
        >>> lowest(Requirement("pluggy>=1.5,<2"))
        'pluggy==1.5'
    """
    floors = [Version(s.version) for s in requirement.specifier if s.operator in {">=", "~=", "=="}]
    if not floors:
        raise ValueError(
            f"{requirement} allows any version from the first one on; state the lowest that works, "
            f"such as '{requirement.name}>=1.0'"
        )
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}=={max(floors)}{marker}"


def allows(requirement: Requirement, version: str) -> bool:
    """Whether `version` satisfies `requirement`, pre-releases included."""
    return SpecifierSet(str(requirement.specifier)).contains(version, prereleases=True)


def _packages_under(folder: Path) -> Iterator[Package]:
    for pyproject in sorted(folder.glob("*/pyproject.toml")):
        yield Package(pyproject.parent)
