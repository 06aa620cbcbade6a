"""What the exit status of ``mesh`` means."""

from typing import Final

OK: Final = 0
FAILED: Final = 1
"""The command ran, and what it was to do or to check failed."""
USAGE: Final = 2
"""The command line was wrong: as argparse has it."""
UNUSABLE: Final = 3
"""The command's plugin is broken, offered twice, or says that it cannot work here."""
INTERRUPTED: Final = 130
"""Ctrl-C: 128 + SIGINT, as shells count."""
PIPE_CLOSED: Final = 141
"""Whoever read the output has gone, as in ``mesh plugins | head -1``: 128 + SIGPIPE."""
