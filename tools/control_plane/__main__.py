"""Build the control plane, and print where it is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from control_plane import BuildError, build

try:
    print(build())
except BuildError as error:
    sys.exit(f"no Kubernetes control plane: {error}")
