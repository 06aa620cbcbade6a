"""``python -m mesh_core.cli`` is ``mesh``."""

import sys

from mesh_core.cli._app import main

if __name__ == "__main__":
    sys.exit(main())
