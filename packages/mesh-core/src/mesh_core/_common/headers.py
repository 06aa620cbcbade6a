"""Where the C headers for other packages' native code are."""

from __future__ import annotations


def get_include() -> str:
    """Return the directory of Mesh's C headers, for the include path of an extension in C.

    There is one: ``mesh_core/promise.h``, for :meth:`Promise.native_handle`.

    >>> from pathlib import Path
    >>> from mesh_core import get_include
    >>> Path(get_include(), "mesh_core", "promise.h").is_file()
    True
    """
    # Needed by builds of other packages, never by a running program.
    from pathlib import Path

    return str(Path(__file__).resolve().parents[1] / "include")
