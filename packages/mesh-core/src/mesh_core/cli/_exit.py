"""Exit statuses of ``mesh``."""

from typing import Final

OK: Final = 0
FAILED: Final = 1
"""The command ran, but what it did or checked failed."""
USAGE: Final = 2
"""The command line was wrong; argparse exits with the same status."""
UNUSABLE: Final = 3
"""The command's plugin is broken, is offered twice, or cannot work on this machine."""
INTERRUPTED: Final = 130
"""Ctrl-C: 128 + SIGINT, as shells count."""
PIPE_CLOSED: Final = 141
"""The reader closed the output, as in ``mesh plugins | head -1``: 128 + SIGPIPE."""
