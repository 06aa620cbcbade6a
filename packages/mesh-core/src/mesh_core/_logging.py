"""The ``mesh`` logger of a process: Mesh's own messages, and those of actors' ``self.logger`` below it."""

from __future__ import annotations

import logging
from typing import TextIO


class _Fallback(logging.StreamHandler[TextIO]):
    """Writes to stderr as long as the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Leave records to the program's handlers if it has any."""
        if not logging.getLogger().handlers:
            super().emit(record)


def set_up(level: str, where: str) -> None:
    """Log from ``level`` on, with ``where`` saying which process it was."""
    logger = logging.getLogger("mesh")
    logger.setLevel(level)
    if not any(isinstance(handler, _Fallback) for handler in logger.handlers):
        handler = _Fallback()
        handler.setFormatter(logging.Formatter(f"{where} %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
