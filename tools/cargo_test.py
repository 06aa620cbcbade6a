"""Run `cargo test` with the given arguments and leave a record of what failed (`records.py`).

    python tools/cargo_test.py --workspace --locked

The exit status is 1 where tests failed, and cargo's own where something else went wrong, such as the build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from records import Failure, Record, folder_of_this_run, session_of_this_run

_RUNS = re.compile(r"^\s+(?:Running|Doc-tests) \S")
_FAILED = re.compile(r"^test (?P<name>.+?)(?: - should panic)? \.\.\. FAILED$")
_TARGET = re.compile(r"^\s*`(?P<options>-p \S+ .+)`$|to rerun pass `(?P<only>[^`]+)`")
TESTS_FAILED = 1


def failures(lines: Iterable[str], options: Sequence[str] = ("--locked",)) -> list[Failure]:
    """The targets with tests that failed, and how to run those tests again; the `options` say how they are compiled.

    Example:
        >>> output = ["   Running tests/flow.rs (target/debug/deps/flow-1)", "test a::b ... FAILED",
        ...           "error: 1 target failed:", "    `-p mesh-proto --test flow`"]
        >>> [failure.name for failure in failures(output)]
        ['cargo test -p mesh-proto --test flow -- a::b']
    """
    runs: list[list[str]] = [[]]
    targets: list[str] = []
    for line in lines:
        if _RUNS.match(line):
            runs.append([])
        elif failed := _FAILED.match(line):
            runs[-1].append(failed["name"])
        elif target := _TARGET.search(line):
            targets.append(target["options"] or target["only"])
    # cargo names the targets in the order in which it ran them.
    return [
        Failure(
            name=f"cargo test {target} -- {' '.join(names)}",
            reason="",
            command=["cargo", "test", *options, *target.split(), "--", "--exact", *names],
            times=len(names),
        )
        for target, names in zip(targets, filter(None, runs), strict=False)
    ]


def main(arguments: list[str]) -> int:
    """Run, pass the output on, and record."""
    lines: list[str] = []
    with subprocess.Popen(
        ["cargo", "test", "--no-fail-fast", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line.rstrip())
    # With another profile all would be compiled again, to run one test.
    found = failures(lines, [each for each in arguments if each != "--workspace"])
    folder = folder_of_this_run()
    if found and folder is not None:
        Record(session_of_this_run(), os.environ.get("PATH", os.defpath), found).write(folder)
    return TESTS_FAILED if found else process.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
