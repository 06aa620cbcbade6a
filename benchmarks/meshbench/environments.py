"""The systems that are compared, and an environment of its own for each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class System:
    """One column of the table."""

    adapter: str
    requirements: tuple[str, ...] = ()
    """What to install; mesh's own wheel is added by `prepare`."""
    environment: str | None = None
    """Whose environment it uses; None: the driver's own interpreter, which is enough for the standard library."""
    variables: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    """A cargo project in the benchmarks' folder that the adapter runs; see `build_program`."""


SYSTEMS: Mapping[str, System] = {
    "mesh": System("mesh", environment="mesh"),
    "mesh-nospin": System("mesh", environment="mesh", variables={"MESH_SPIN_US": "0"}),
    "mesh-before": System("mesh", environment="mesh-before"),
    "monarch": System("monarch", ("torchmonarch==0.7.0",), "monarch"),
    "ray": System("ray", ("ray==2.60.0",), "ray", {"RAY_USAGE_STATS_ENABLED": "0"}),
    "xoscar": System("xoscar", ("xoscar==0.12.2",), "xoscar"),
    "socket": System("rawsocket", environment="socket"),
    # No sleeping core has to be woken when both ends share one; where the scheduler puts them decides what "socket" is.
    "socket-1core": System("rawsocket", environment="socket", variables={"MESH_BENCH_ONE_CORE": "1"}),
    "rawtls": System("rawtls", program="rawtls"),
    "chain": System("chain", program="chain"),
}
"""By the name that `--systems` takes. Every environment has numpy, so that all echo the same array."""


class SetupError(Exception):
    """An environment could not be made; the message says which and what the tool said."""


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SetupError(f"{what} failed (exit status {done.returncode}): {' '.join(command)}\n{done.stdout}")


def find_uv() -> str | None:
    """The uv command, on the path or beside this interpreter; None: venv and pip are used.

    Example:
        >>> find_uv() is None or find_uv().endswith("uv")
        True
    """
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if beside.exists() else None)


def build_wheel(source: Path, into: Path) -> Path:
    """Build the wheel of the package in the folder `source`, or take `source` if it is a wheel already."""
    if source.suffix == ".whl":
        if not source.exists():
            raise SetupError(f"no wheel at {source}; build it first, or give --mesh the package's folder")
        return source
    fresh = into / "wheel"
    shutil.rmtree(fresh, ignore_errors=True)
    uv = find_uv()
    if uv:
        _run([uv, "build", "--wheel", "--out-dir", str(fresh), str(source)], f"building {source.name}")
    else:
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(fresh)]
        _run([*pip, str(source)], f"building {source.name}")
    (wheel,) = fresh.glob("*.whl")
    return wheel


def build_program(home: Path, name: str) -> None:
    """Build the cargo project `name` in the benchmarks' folder `home`, into its own `target` folder."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise SetupError(f"no cargo to build {name} with; install Rust, or give --systems without {name}")
    project = home / name
    # Told where to build, so that the adapter finds the program whatever CARGO_TARGET_DIR says.
    command = [cargo, "build", "--release", "--locked", "--target-dir", str(project / "target")]
    _run([*command, "--manifest-path", str(project / "Cargo.toml")], f"building {name}")


def prepare(name: str, folder: Path, *, wheel: Path | None, torch: bool) -> Path:
    """Make or reuse the environment that the system `name` needs, and give its interpreter.

    An environment is reused when it was made from the same requirements by the same Python. Mesh's wheel is always
    installed anew, since its version alone does not tell two builds apart.
    """
    system = SYSTEMS[name]
    if system.environment is None:
        return Path(sys.executable)
    target = folder / f"bench-{system.environment}"
    python = target / "bin" / "python"
    wanted = [*system.requirements, "numpy", *(["torch"] if torch else [])]
    stamp = target / "made-from.json"
    made_from = json.dumps({"python": sys.version, "requirements": wanted, "compiled": True})
    uv = find_uv()
    # Compiled here, as pip does by itself: where PYTHONDONTWRITEBYTECODE is set, every process of a system would else do it
    # anew each time it starts, which takes longer than all the rest of its import.
    with_uv = [uv, "pip", "install", "--compile-bytecode", "--python", str(python)] if uv else []
    install = with_uv or [str(python), "-m", "pip", "install", "--compile"]
    if not (stamp.exists() and stamp.read_text() == made_from):
        shutil.rmtree(target, ignore_errors=True)
        make = [uv, "venv", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        _run([*make, str(target)], f"making the environment of {name}")
        _run([*install, *wanted], f"installing {', '.join(wanted)} for {name}")
        stamp.write_text(made_from)
    if system.adapter == "mesh" and wheel is not None:
        again = ["--reinstall-package", "mesh-core"] if uv else []
        _run([*install, *again, str(wheel)], f"installing {wheel.name}")
        if not uv:  # pip's --force-reinstall alone would fetch the dependencies again
            _run([*install, "--force-reinstall", "--no-deps", str(wheel)], f"installing {wheel.name}")
    return python


_VERSIONS = """
import json, sys
from importlib.metadata import distributions
print(json.dumps({d.name: d.version for d in distributions()} | {"python": sys.version.split()[0]}))
"""


def versions(python: Path) -> dict[str, str]:
    """Name and version of every distribution that the interpreter sees, and its own."""
    try:
        printed = subprocess.check_output([str(python), "-c", _VERSIONS], text=True, stderr=subprocess.STDOUT)
        found: dict[str, str] = json.loads(printed)
    except (OSError, subprocess.CalledProcessError, ValueError) as problem:
        raise SetupError(f"{python} is not a usable interpreter: {problem}") from problem
    return dict(sorted(found.items()))
