"""Route log records: those of the ``mesh`` logger in a controller, all records in a worker."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_core._features.logs.fallback import Fallback
from mesh_core._system.streams import LineStream

if TYPE_CHECKING:
    from mesh_core._features.logs.records import Encoder


class _ToController(logging.Handler):
    """Sends a worker's records to the controller, each with its level, as text and, if wanted, as records too.

    It is ``logging.lastResort`` instead of a logger's handler, so that programs that set up handlers, with
    ``logging.basicConfig`` for example, find logging as they expect it.
    """

    def __init__(self, *, records: bool) -> None:
        super().__init__()
        self._records = records
        self._encoder: Encoder | None = None
        """Made for the first record: most processes log nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to stderr."""
        try:
            text = self.format(record).rstrip("\n") + "\n"
            stream = sys.stderr
            if isinstance(stream, LineStream):
                stream.record(text, record.levelno, self._encode(record) if self._records else b"")
            elif stream is not None:
                # The program has replaced stderr, to capture what is written to it.
                stream.write(text)
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)

    def _encode(self, record: logging.LogRecord) -> bytes:
        if self._encoder is None:
            from mesh_core._features.logs.records import Encoder

            self._encoder = Encoder()
        return self._encoder.encode(record)

    def format(self, record: logging.LogRecord) -> str:
        """Name the logger only if it says more than the actor's name, which precedes the line anyway."""
        own = record.name in ("root", "mesh") or record.name.startswith("mesh.")
        self.formatter = logging.Formatter(
            "%(levelname)s %(message)s" if own else "%(levelname)s %(name)s: %(message)s"
        )
        return super().format(record)


def set_up(level: str, where: str) -> None:
    """Log from ``level`` on, in a controller; ``where`` names the process in each line."""
    logger = logging.getLogger("mesh")
    if isinstance(logging.lastResort, _ToController):
        return
    logger.setLevel(level)
    if not any(isinstance(handler, Fallback) for handler in logger.handlers):
        handler = Fallback()
        handler.setFormatter(logging.Formatter(f"{where} %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def set_up_worker(level: str, *, records: bool) -> None:
    """Send a worker's records to the controller, from ``level`` on unless a preloaded module has set up handlers."""
    logging.lastResort = _ToController(records=records)
    logging.basicConfig = _not_by_itself(logging.basicConfig)
    if not logging.getLogger().handlers:
        logging.getLogger().setLevel(level)


def _not_by_itself(basic_config: Callable[..., None]) -> Callable[..., None]:
    """Let programs configure logging, but not logging itself.

    Its functions, such as ``logging.info``, give the root logger a handler if it has none. Records would no longer come
    to the script, from any logger.
    """

    @functools.wraps(basic_config)
    def configure(**options: Any) -> None:
        if sys._getframe(1).f_globals is not vars(logging):
            basic_config(**options)

    return configure


def set_level(level: int) -> None:
    """Set the level from which on a worker sends records."""
    logging.getLogger().setLevel(level)
