"""Import every module of some packages, and say which cannot be imported.

    python -W error tools/import_all.py mesh_core mesh_rdma

Where a session runs few of a package's tests, this shows what the interpreter or a version of a dependency has changed in the
others' way. What needs an optional package that is missing is passed over.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback


def modules(name: str) -> list[str]:
    """The package and all its modules; those that are programs are left out.

    Example:
        >>> modules("json")
        ['json', 'json.decoder', 'json.encoder', 'json.scanner', 'json.tool']
    """
    path = importlib.import_module(name).__path__
    found = [name]
    for each in pkgutil.iter_modules(path, f"{name}."):
        if each.name.endswith(".__main__"):
            continue
        found += modules(each.name) if each.ispkg else [each.name]
    return found


def main(names: list[str]) -> int:
    """Import all of them."""
    broken = 0
    for name in names:
        for module in modules(name):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                # An optional dependency; a module of our own is never one.
                if (error.name or "").partition(".")[0] in {*names, ""}:
                    raise
                print(f"{module} was passed over: it needs {error.name}")
            except Exception:  # noqa: BLE001 - whatever it is, the others are looked at too
                traceback.print_exc()
                broken += 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
