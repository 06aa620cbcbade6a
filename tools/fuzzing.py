"""Hostile bytes for what reads bytes of other hosts: `./dev fuzz` runs it, as does `./dev test --all`.

    python tools/fuzzing.py run [SECONDS] [TARGET ...]    each target for a minute, or SECONDS
    python tools/fuzzing.py grow [SECONDS] [TARGET ...]   make `fuzz/corpus` anew: mutations of the tests, grown for SECONDS

The stable compiler does, without a sanitizer: the crates have no unsafe code to sanitize. What breaks a target is left in
`fuzz/artifacts`; put it into `fuzz/corpus/TARGET` once it is mended, where `cargo test` tries it each time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "fuzz"
TARGETS = ("decode", "connection", "peer")
SECONDS = 60
LONGEST = 4096
"""Bytes of an input; a header has 80, a packet's runs some hundreds."""
MOST = 90_000
"""Bytes of what is kept of a target."""

# As `cargo fuzz run -s none` would have it: coverage is counted, debug assertions and overflows are errors.
_FLAGS = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
    "-Coverflow-checks",
]


def main(arguments: list[str]) -> int:
    """Do what the command line says; returns the exit status.

    Example:
        >>> main(["run", "5", "no-such-target"])
        2
    """
    if not arguments or arguments[0] not in ("run", "grow"):
        print(__doc__, file=sys.stderr)
        return 2
    do, *rest = arguments
    seconds = next((int(each) for each in rest if each.isdigit()), SECONDS)
    targets = [each for each in rest if not each.isdigit()] or list(TARGETS)
    unknown = [each for each in targets if each not in TARGETS]
    if unknown:
        print(f"fuzzing: no target {unknown[0]!r}; there are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    problem = missing()
    if problem:
        print(f"fuzzing: {problem}", file=sys.stderr)
        return 1
    programs = build()
    if do == "grow":
        grow(programs, targets, seconds)
        return 0
    return max(run(programs / target, target, seconds) for target in targets)


def missing() -> str:
    """What this machine lacks, with the remedy; empty if nothing."""
    if shutil.which("cargo") is None:
        return "`cargo` is not on PATH; install Rust with rustup or your system's packages"
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        return "no C++ compiler, which libFuzzer is built with; install one, as in `apt-get install g++`"
    return ""


def build() -> Path:
    """Build the targets; returns the folder with their programs."""
    version = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    # Named, so that the flags are not used for build scripts as well.
    host = next(line.split()[1] for line in version.splitlines() if line.startswith("host:"))
    folder = Path(os.environ.get("CARGO_TARGET_DIR") or FUZZ / "target")
    command = ["cargo", "build", "--release", "--bins", "--target", host, "--target-dir", str(folder)]
    flags = {"CARGO_ENCODED_RUSTFLAGS": "\x1f".join(_FLAGS)}
    subprocess.run(command, cwd=FUZZ, env={**os.environ, **flags}, check=True)
    return folder / host / "release"


def run(program: Path, target: str, seconds: int) -> int:
    """One target for a while, from the kept inputs on, which stay as they are; returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="mesh-fuzz-") as fresh:
        done = _fuzz(program, seconds, [fresh, str(FUZZ / "corpus" / target)], target)
    if done:
        print(
            f"fuzzing: {target} is broken by the input named above; run `{program} FILE` with it", flush=True
        )
    return done


def _fuzz(program: Path, seconds: int, folders: list[str], target: str) -> int:
    (FUZZ / "artifacts").mkdir(exist_ok=True)
    print(f"fuzzing: {target} for {seconds} s", flush=True)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST}",
        "-timeout=20",
        "-verbosity=0",
        "-print_funcs=0",
    ]
    prefix = f"-artifact_prefix={FUZZ / 'artifacts' / target}-"
    return subprocess.call([str(program), *options, "-print_final_stats=1", prefix, *folders])


def grow(programs: Path, targets: list[str], seconds: int) -> None:
    """Make the corpus: of the tests' mutations, grown for a while, those inputs that reach what no other does."""
    with tempfile.TemporaryDirectory(prefix="mesh-fuzz-") as folder:
        keep = {"MESH_KEEP_INPUTS": folder}
        command = ["cargo", "test", "-p", "mesh-proto", "--test", "hostile", "thousands"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **keep}, check=True)
        for target in targets:
            inputs, merged = Path(folder, target), Path(folder, f"{target}-merged")
            merged.mkdir()
            if _fuzz(programs / target, seconds, [str(inputs)], target):
                sys.exit(f"fuzzing: {target} is broken by the input named above; mend that first")
            options = ["-merge=1", f"-max_len={LONGEST}", "-verbosity=0"]
            subprocess.run([str(programs / target), *options, str(merged), str(inputs)], check=True)
            keep_some(merged, FUZZ / "corpus" / target)


def keep_some(merged: Path, corpus: Path) -> None:
    """Put inputs into the corpus in the place of what is there, the shortest first, up to a number of bytes."""
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    left = MOST
    for path in sorted(merged.iterdir(), key=lambda each: (each.stat().st_size, each.name)):
        left -= path.stat().st_size
        if left < 0:
            break
        shutil.copyfile(path, corpus / path.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
