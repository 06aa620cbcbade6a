"""Names of files in the errors of what is written to them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an ``OSError`` in the block name the file: those of a full disk, which a write raises, do not by themselves.

    >>> from mesh_core.extensions import naming
    >>> with naming("/dev/full"), open("/dev/full", "wb", buffering=0) as file:
    ...     _ = file.write(b"x")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: '/dev/full'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            import os

            error.filename = os.fspath(path)
        raise
