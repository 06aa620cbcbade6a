"""Run in the virtual machine: each file of tests in a process of its own, as the engine is chosen once for each process."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SYSTEM = Path("/usr/lib/python3/dist-packages/pyverbs")
ENVIRONMENT = {"test_pyverbs.py": {"MESH_RDMA_VERBS": "pyverbs"}}
"""What is set for a file."""

PLUGINS = [f"-pno:{name}" for name in ("cacheprovider", "xdist", "hypothesispytest")]
"""What costs seconds here, and is of no use."""


def main() -> None:
    results = Path(os.environ["SOFT_ROCE_SHARE"])
    with tempfile.TemporaryDirectory() as folder:
        # The system's Python may be another one of the same version; of its packages this is the only one that is wanted.
        (Path(folder) / "pyverbs").symlink_to(SYSTEM)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        for file in sorted(HERE.glob("test_*.py")):
            environment = {**os.environ, "PYTHONPATH": path, **ENVIRONMENT.get(file.name, {})}
            command = [sys.executable, "-m", "pytest", "-q", "--durations=5", "--timeout=90", *PLUGINS]
            command += [f"--junitxml={results / file.stem}.xml", *sys.argv[1:], str(file)]
            subprocess.run(command, env=environment, check=False)


if __name__ == "__main__":
    main()
