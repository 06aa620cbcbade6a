"""Whether hosts match the script that has them: the same Python and mesh-core, and the same packages and code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DIFFERENCES = 5


def refusal(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return why what has one environment cannot be used by a script of another; empty if it can."""
    if there["python"].split(".")[:2] != here["python"].split(".")[:2]:
        return f"it has Python {there['python']} ({there['executable']}), and the script Python {here['python']}: functions and classes cannot be sent from one to the other"
    theirs, ours = there["packages"].get("mesh-core"), here["packages"].get("mesh-core")
    if theirs != ours:
        return f"it has mesh-core {theirs}, and the script mesh-core {ours}: install the same version on both"
    return ""


def compare(there: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return why hosts of this environment cannot be used, and how else they differ from the script."""
    differs = [
        f"{name} {there['packages'].get(name) or 'is missing'}, and {version} here"
        for name, version in sorted(here["packages"].items())
        if there["packages"].get(name) != version
    ]
    more = len(differs) - _DIFFERENCES
    if more > 0:
        differs[_DIFFERENCES:] = [f"and {more} more packages"]
    changed = [
        f"{name} has other source files in {at} (hosts.sync_workspace() brings those of the script)"
        for name, (at, what) in sorted(there.get("code", {}).items())
        if here["code"].get(name) != what
    ]
    return refusal(there, here), (*changed, *differs)
