"""``python -m mesh_core`` is the ``mesh`` command."""

import sys

from mesh_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
