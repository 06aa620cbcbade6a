"""The script's own code, of which hosts may have another version: packages of its folder, or editable installations."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from mesh_launchers._host_facts import digest

_OURS = "mesh_"
"""Mesh itself is compared by its version."""


def own_code() -> dict[str, str]:
    """Return the modules and packages that the script has imported and that are not installed, with fingerprints of their sources."""
    paths = sysconfig.get_paths()
    installed = [Path(paths[each]).resolve() for each in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name.startswith(_OURS) or name in ("__main__", "__mp_main__"):
            continue
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        try:
            path = Path(file).resolve(strict=True)
            if any(each in path.parents for each in installed):
                continue
            what = digest(path.parent if hasattr(module, "__path__") else path)
        except OSError:
            continue
        if what is not None:
            found[name] = what
    return found
