"""Processes for a test, gone after it."""

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
    """Give ``n`` running processes on this machine to a ``with`` block, or to a fixture; ``n=1`` is a mesh without dimensions.

    They are up when the block begins, so that what the block measures or kills is there, and stopped when it ends;
    one that hangs is killed after ``stop_timeout`` seconds. ``options`` are those of ``spawn_procs``.

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
