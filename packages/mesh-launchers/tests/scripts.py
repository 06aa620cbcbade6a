"""Scripts that tests run as processes of their own, and end as they like."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


class Script:
    """A script that says a word a line, and goes on when it is told to."""

    def __init__(self, folder: Path, text: str) -> None:
        path = folder / "script.py"
        path.write_text(
            f"from mesh_launchers import *\nif __name__ == '__main__':\n{textwrap.indent(textwrap.dedent(text), '    ')}"
        )
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )

    def heard(self) -> str:
        """Return the next line."""
        assert self.process.stdout is not None
        line = b""
        # Not readline(): of what it reads ahead, communicate() sees nothing.
        while not line.endswith(b"\n"):
            byte = os.read(self.process.stdout.fileno(), 1)
            assert byte, f"the script has ended: {self.process.communicate(timeout=30)[1]}"
            line += byte
        return line.decode().strip()

    def go(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end."""
        out, error = self.process.communicate(timeout=60)
        return self.process.returncode, out, error

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()
