"""What is brought to a machine without a network: wheels of this checkout, and of what its tests need.

There they are unpacked into a folder that stands first on Python's path: neither pip nor an environment is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("mesh-core", "mesh-rdma", "mesh-tensor")
TOOLS = ("cloudpickle", "pluggy", "pytest", "pytest-timeout")
"""With what they need; PyTorch and numpy are the machine's own."""
PYTHON = "3.12"
LIMIT_MIB = 64
"""The most that the wheels and the checkout may have together."""


def bring(root: Path, uv: str, folder: Path, profile: str) -> int:
    """Build and download the wheels, and say how to go on. Returns an exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    settings = {**os.environ, "MATURIN_PEP517_ARGS": f"--profile {profile}"}
    constraints = str(root / "constraints.txt")
    for package in PACKAGES:
        print(f"dev: building {package}", flush=True)
        command = [uv, "build", "--wheel", "--quiet", "--python", sys.executable]
        command += ["--build-constraints", constraints, "--out-dir", str(folder)]
        subprocess.run([*command, str(root / "packages" / package)], check=True, env=settings)
    # The versions of everything that they need, which differ from one Python to the next.
    compiling = [uv, *["pip", "compile", "--quiet", "--no-header", "--no-annotate"]]
    compiling += ["--python-version", PYTHON, "--constraint", constraints, "-"]
    asked = "\n".join(TOOLS)
    done = subprocess.run(compiling, input=asked, text=True, stdout=subprocess.PIPE, check=True)
    print(f"dev: fetching {', '.join(done.stdout.split())}", flush=True)
    fetching = [
        uv,
        *["tool", "run", "--quiet", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"],
    ]
    fetching += ["--python-version", PYTHON, "--dest", str(folder), *done.stdout.split()]
    subprocess.run(fetching, check=True)
    (folder / ".gitignore").unlink(missing_ok=True)
    wheels, checkout = size_of(folder.glob("*.whl")), checkout_size(root)
    print(f"dev: {folder} has {wheels:.1f} MiB, and the checkout {checkout:.1f} MiB")
    print(f"dev: bring both to a machine with a GPU, and run there: ./dev gpu --from {folder.name}")
    if wheels + checkout > LIMIT_MIB:
        print(f"dev: together they have more than {LIMIT_MIB} MiB", file=sys.stderr)
        return 1
    return 0


def size_of(files: Iterable[Path]) -> float:
    """MiB of files."""
    return sum(path.stat().st_size for path in files) / (1 << 20)


def checkout_size(root: Path) -> float:
    """MiB of what git knows of the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False).stdout
    names = [root / name for name in listed.decode().split("\0") if name]
    return size_of(path for path in names if path.is_file())


def unpacked(folder: Path, into: Path) -> list[str]:
    """Unpack all wheels of a folder; return their names."""
    names = []
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
        # What a wheel has apart, such as libraries of its platform, belongs beside the rest.
        for part in into.glob("*.data/*lib"):
            for path in sorted(part.iterdir()):
                path.rename(into / path.name)
        names.append(wheel.name)
    return names


def problem(folder: Path) -> str:
    """Return what is wrong with a folder of wheels; nothing if all are there."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    found = {path.name.partition("-")[0].lower() for path in folder.glob("*.whl")}
    lacking = [name for name in (*PACKAGES, *TOOLS) if name.replace("-", "_") not in found]
    return f"{folder} lacks wheels of {', '.join(lacking)}" if lacking else ""
