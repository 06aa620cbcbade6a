"""Mesh's own handler, for programs that set up no logging of their own."""

from __future__ import annotations

import logging
from typing import TextIO


class Fallback(logging.StreamHandler[TextIO]):
    """Mesh's own handler in a controller: writes to stderr as long as the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Leave records to the program's handlers if it has any."""
        if not logging.getLogger().handlers:
            super().emit(record)
