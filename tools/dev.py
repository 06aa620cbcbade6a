"""Run the project's sessions on a machine that has Python and a Rust toolchain, and nothing else.

`./dev demo` runs the demo. `./dev test` tests every package in some minutes, `./dev test --full` runs every check, and
`./dev test --all` all of them on every Python, and what takes longest; with `--verbose` the output of all sessions is
shown. `./dev gpu` runs what a GPU can prove, with the Python and the PyTorch that a machine has. `./dev env` makes `.venv`, where all packages run from their sources; `./dev t PATH...` runs tests there, and
`./dev t --changed` those that a change may break. `./dev NAME [ARGS]` runs the session of that name and hands ARGS to
it; `./dev list` shows them all. The first call makes a private environment under `.nox/` with nox and uv.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dev_environment import Environment
from gpu_run import command as gpu
from whole_run import Level, WholeRun

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".nox" / "tools"
CONSTRAINTS = ROOT / "constraints.txt"


def main(arguments: list[str]) -> int:
    heed_interrupts()
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if arguments else 2
    if arguments[0] == "gpu":
        # Where there is a GPU, there may be no toolchain and no network.
        return gpu.main(ROOT, lambda: str(prepare_tools().with_name("uv")), arguments[1:])
    problem = missing_toolchain()
    if problem:
        print(f"dev: {problem}", file=sys.stderr)
        return 1
    nox = [str(prepare_tools()), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    command, *rest = arguments
    if command in {"env", "t"}:
        os.environ.update(environment())
        made = Environment(ROOT, TOOLS / "bin")
        made.refresh()
        return made.test(rest) if command == "t" else 0
    if command == "list":
        return subprocess.call([*nox, "--list"], env=environment())
    if command == "test":
        given = {"--full", "--all", "--verbose"} & set(rest)
        level = Level.ALL if "--all" in given else Level.FULL if "--full" in given else Level.QUICK
        posargs = [argument for argument in rest if argument not in given]
        run = WholeRun(ROOT, nox, level, environment(), posargs, verbose="--verbose" in given)
        return run.run()
    return subprocess.call([*nox, "--session", command, *(["--", *rest] if rest else [])], env=environment())


def heed_interrupts() -> None:
    """A shell has what it runs in the background ignore these signals; tests send them to what inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def missing_toolchain() -> str:
    """What the machine lacks, with the remedy; empty when all is there."""
    if shutil.which("cargo", path=environment()["PATH"]) is None:
        return (
            "`cargo` is not on PATH; install Rust with rustup or your system's packages, then run this again"
        )
    if shutil.which("cc") is None:
        return "no C linker (`cc`), which Rust needs; install one, as in `apt-get install gcc libc6-dev`"
    return ""


def prepare_tools() -> Path:
    """The interpreter of the private environment; made on first use, and again when the pinned versions change."""
    python = TOOLS / "bin" / "python"
    stamp = TOOLS / "made-from.txt"
    wanted = CONSTRAINTS.read_text(encoding="utf-8")
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print("dev: preparing nox and uv under .nox/tools (once)", flush=True)
    shutil.rmtree(TOOLS, ignore_errors=True)
    packages = ["--constraint", str(CONSTRAINTS), "nox", "uv"]
    if uv := shutil.which("uv"):
        subprocess.check_call([uv, "venv", "--quiet", "--python", sys.executable, str(TOOLS)])
        subprocess.check_call([uv, "pip", "install", "--quiet", "--python", str(python), *packages])
    elif importlib.util.find_spec("ensurepip"):
        subprocess.check_call([sys.executable, "-m", "venv", str(TOOLS)])
        subprocess.check_call([str(python), "-m", "pip", "install", "--quiet", *packages])
    else:
        remedy = "install its venv module, as in `apt-get install python3-venv`"
        sys.exit(f"dev: this Python cannot make environments; {remedy}")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def environment() -> dict[str, str]:
    """The caller's environment, with cargo and every supported Python that lies ready within reach."""
    folders = [str(TOOLS / "bin"), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    cargo = Path.home() / ".cargo" / "bin"
    if cargo.is_dir():
        folders.append(str(cargo))
    # In front: pyenv's own `python3.12` is a shim that only works for the versions switched on.
    folders[1:1] = map(str, pyenv_pythons())
    return {**os.environ, "PATH": os.pathsep.join(dict.fromkeys(folders))}


def pyenv_pythons() -> Iterator[Path]:
    """The folder of the newest patch of each Python from 3.11 on that pyenv has installed."""
    newest: dict[int, tuple[int, Path]] = {}
    for path in Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob("versions/3.*/bin"):
        numbers = path.parent.name.split(".")[1:]
        if len(numbers) == 2 and all(map(str.isdigit, numbers)) and int(numbers[0]) >= 11:
            minor, patch = map(int, numbers)
            newest[minor] = max(newest.get(minor, (-1, path)), (patch, path))
    for _, (_, path) in sorted(newest.items()):
        yield path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
