"""How a worker's process leaves, without what the interpreter does at its end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from mesh_core._system import streams


def leave(status: int) -> None:
    """End the process without what the interpreter does at its end: threads of actors may be anywhere."""
    streams.finish()
    os._exit(status)


def end_copy(error: BaseException) -> NoReturn:
    """End a child that an endpoint has forked, and that came out of the endpoint: it must not go on as the worker."""
    status = 1
    try:
        code = error.code if isinstance(error, SystemExit) else error
        if code is None or isinstance(code, int):
            status = code or 0
        else:
            import traceback

            sys.stderr.write(
                f"{code}\n" if isinstance(code, str) else "".join(traceback.format_exception(error))
            )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(status & 0xFF)
