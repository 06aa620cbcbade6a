"""How a worker's process ends, without the interpreter's finalization."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from mesh_core._system import streams


def leave(status: int) -> None:
    """End the process without the interpreter's finalization: threads of actors may be running anywhere."""
    streams.finish()
    os._exit(status)


def end_copy(error: BaseException) -> NoReturn:
    """End a child that an endpoint forked and that left the endpoint: it must not continue as the worker."""
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
