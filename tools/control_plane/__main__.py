"""Build the control plane, and print where it is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from control_plane import BuildError, build


def main() -> int:
    """Build it; the exit status is 1 where that cannot be done."""
    try:
        print(build())
    except BuildError as error:
        print(f"there is no Kubernetes control plane for the tests: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
