"""The output of ``mesh --version``, from metadata alone, so that it works even if a package cannot be imported."""

import importlib.metadata
import platform
import re
import sys

from mesh_core.cli._quiet import quiet_manager
from mesh_core.cli._table import aligned


def version_report() -> str:
    """List the installed Mesh packages, other packages that offer plugins, and Python, with their versions."""
    found = {"mesh-core": _version_of("mesh-core")} | _family() | _outside()
    rows = [(name, version) for name, version in found.items()]
    rows.append(
        ("python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})")
    )
    return aligned(rows)


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _family() -> dict[str, str]:
    """Return the distributions called mesh-something that require mesh-core; unrelated ones share the prefix."""
    names = {
        re.sub(r"[-_.]+", "-", str(each.name)).lower()
        for each in importlib.metadata.distributions()
        if re.match(r"mesh[-_.]", str(each.name), re.IGNORECASE)
    }
    needs_core = re.compile(r"mesh[-_.]core\b(?![-_.])", re.IGNORECASE)
    return {
        name: _version_of(name)
        for name in sorted(names)
        if any(needs_core.match(each) for each in importlib.metadata.requires(name) or [])
    }


def _outside() -> dict[str, str]:
    return {each.distribution: each.version for each in quiet_manager().entries()}
