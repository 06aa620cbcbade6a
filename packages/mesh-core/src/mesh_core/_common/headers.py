"""Where the headers for native code of other packages are."""

from __future__ import annotations


def get_include() -> str:
    """Return the directory of Mesh's C headers, for the include path of an extension in C.

    There is one: ``mesh_core/promise.h``, for :meth:`Promise.native_handle`.

    >>> from pathlib import Path
    >>> from mesh_core import get_include
    >>> Path(get_include(), "mesh_core", "promise.h").is_file()
    True
    """
    # Builds of other packages want it, and no program that runs.
    from pathlib import Path

    return str(Path(__file__).resolve().parents[1] / "include")
