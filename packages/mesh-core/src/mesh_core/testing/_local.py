"""Local processes for the duration of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core import ProcMesh


@contextlib.contextmanager
def local_procs(
    n: int = 1, *, label: str = "procs", stop_timeout: float = 2.0, **options: Any
) -> Iterator[ProcMesh]:
    """Run ``n`` processes on this machine for a ``with`` block or fixture; with ``n=1``, the mesh has no dimensions.

    They are up when the block begins, so that it can measure or kill them, and are stopped when it ends. A process that hangs
    is killed after ``stop_timeout`` seconds. ``options`` are those of ``spawn_procs``.

    >>> from mesh_core.testing import local_procs
    >>> with local_procs(3) as procs:
    ...     procs.sizes
    {'procs': 3}
    """
    from mesh_core._common.settings import configured
    from mesh_core._meshes.hosts import this_host

    with (
        configured(stop_timeout=stop_timeout),
        this_host().spawn_procs({label: n} if n != 1 else None, **options) as procs,
    ):
        procs.initialized.get()
        yield procs
