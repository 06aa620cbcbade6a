"""One environment for all packages, which run from their sources: `./dev env` makes it, `./dev t` runs tests in it.

It is `.venv` in the checkout. The Python of all packages is imported from `packages/*/src`, so an edit there counts at
once. The native modules are compiled with the profile `testing` and put beside it; they are compiled again when a Rust
file is newer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from affected import Chosen, affected, changed_files
from lanes import Shape, cores

PROFILE = "testing"
"""The profile of `Cargo.toml` that native modules are compiled with for tests."""
GROUPS = ("test", "lint", "typing", "integration")
_STAMP = "made-from.txt"
_FEW = 3
"""More files than these are tested in several processes."""


@dataclass(frozen=True)
class Environment:
    """The environment of a checkout."""

    root: Path
    tools: Path
    """The folder of the programs nox and uv."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def refresh(self) -> None:
        """Make what is missing or older than what it is made from."""
        self._install()
        self._compile()

    def test(self, arguments: list[str]) -> int:
        """Run tests: those of files, folders and crates, or with `--changed [COMMIT]` what differs from a commit may break.

        Other arguments go to pytest.
        """
        chosen = Chosen()
        if arguments[:1] == ["--changed"]:
            since, arguments = "HEAD", arguments[1:]
            if arguments and not arguments[0].startswith("-"):
                since, *arguments = arguments
            chosen = affected(self.root, changed_files(self.root, since))
            if not chosen.files and not chosen.crates:
                print(f"dev: no test is known for what differs from {since}")
                return 0
        given = [Path(each).resolve() for each in arguments if Path(each.partition("::")[0]).exists()]
        crates = {
            path.relative_to(self.root).parts[1] for path in given if self.root / "crates" in path.parents
        }
        options = [each for each in arguments if self.root / "crates" not in Path(each).resolve().parents]
        status = self._test_crates(sorted(chosen.crates | crates))
        if chosen.files or options:
            status = self._test_files(sorted(map(str, chosen.files)), options) or status
        return status

    def _test_crates(self, crates: list[str]) -> int:
        if not crates:
            return 0
        packages = [word for crate in crates for word in ("--package", crate)]
        command = ["cargo", "test", "--quiet", "--locked", "--profile", PROFILE, *packages]
        return subprocess.call(command, cwd=self.root)

    def _test_files(self, files: list[str], options: list[str]) -> int:
        pages = any(each.endswith(".md") for each in [*files, *options])
        workers = ["-n", str(Shape.of(cores()).workers), "--dist", "loadfile"] if len(files) > _FEW else []
        command = [str(self.python), "-m", "pytest", "-q", "-p", "crash_proof", *workers]
        return subprocess.call([*command, *(["-p", "doc_examples"] if pages else []), *options, *files])

    def _install(self) -> None:
        stamp = self.folder / _STAMP
        wanted = _digest([self.root / "constraints.txt", *self._metadata()])
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return
        if self.folder.exists() and not stamp.exists():
            sys.exit(f"dev: {self.folder} was not made by ./dev env; move it away, or use it without ./dev")
        print("dev: making .venv; the first time this downloads PyTorch", flush=True)
        uv = str(self.tools / "uv")
        if not self.folder.exists():
            self._run(uv, "venv", "--quiet", "--python", sys.executable, str(self.folder))
            stamp.touch()
        packages = [word for path in self._packages() for word in ("--editable", str(path))]
        groups = [word for group in GROUPS for word in ("--group", f"{self.root / 'pyproject.toml'}:{group}")]
        needs = [each for path in self._packages() for each in _test_requirements(path)]
        held = ["--constraint", str(self.root / "constraints.txt")]
        target = ["--python", str(self.python)]
        self._run(uv, "pip", "install", "--quiet", *target, *held, *groups, *needs, *packages)
        stamp.write_text(wanted, encoding="utf-8")

    def _compile(self) -> None:
        for package in self._packages():
            sources = package / "rust"
            if not sources.is_dir():
                continue
            (module,) = (package / "src").iterdir()
            built = module / "_native.abi3.so"
            newest = max(path.stat().st_mtime for path in self._rust_files(sources))
            if built.exists() and built.stat().st_mtime >= newest:
                continue
            print(f"dev: compiling the native module of {package.name}", flush=True)
            self._run(
                *("cargo", "build", "--quiet", "--locked", "--profile", PROFILE),
                *("--manifest-path", str(sources / "Cargo.toml")),
            )
            name = f"lib{module.name}_native.so"
            target = Path(os.environ.get("CARGO_TARGET_DIR") or self.root / "target")
            # Not written over: processes that run may have it mapped.
            fresh = built.with_suffix(".new")
            shutil.copy(target / PROFILE / name, fresh)
            fresh.rename(built)

    def _rust_files(self, sources: Path) -> Iterator[Path]:
        yield from (self.root / "Cargo.toml", self.root / "Cargo.lock")
        for folder in (self.root / "crates", sources):
            for path in folder.rglob("*"):
                if path.suffix in {".rs", ".toml"}:
                    yield path

    def _packages(self) -> list[Path]:
        return sorted(path.parent for path in (self.root / "packages").glob("*/pyproject.toml"))

    def _metadata(self) -> list[Path]:
        return [self.root / "pyproject.toml", *(path / "pyproject.toml" for path in self._packages())]

    def _run(self, *command: str) -> None:
        settings = {**os.environ, "MATURIN_PEP517_ARGS": f"--profile {PROFILE}"}
        subprocess.check_call(command, cwd=self.root, env=settings)


def _test_requirements(package: Path) -> list[str]:
    import tomllib

    metadata = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    extra = metadata["project"].get("optional-dependencies", {}).get("test", [])
    return [*metadata.get("dependency-groups", {}).get("test", []), *extra]


def _digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()
