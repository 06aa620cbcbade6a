"""Hold two versions of mesh-core against each other: `python benchmarks/duel.py BEFORE.whl AFTER.whl [--only ITEM,…]`.

Both run at once and work in turn, a slice of some tens of milliseconds each, so that whatever else the machine does affects
both alike. Each round starts both anew, since where a process's memory and threads happen to lie decides a few percent. The
ratio is the median over all pairs of slices of after to before; beside it are the smallest and the largest median of a round.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HOME = Path(__file__).resolve().parent
sys.path.insert(0, str(HOME))

from meshbench.environments import SetupError, prepare  # noqa: E402
from meshbench.machine import describe  # noqa: E402
from meshbench.slices import SLICES  # noqa: E402


class Side:
    """One version, in an interpreter of its own."""

    def __init__(self, python: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(HOME)}
        command = [str(python), "-m", "meshbench.slices", "mesh"]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )

    def ask(self, line: str) -> str:
        """Say a line and return the answer."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(line + "\n")
        answer = self._child.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"{line!r} was not answered: exit status {self._child.wait()}")
        return answer

    def close(self) -> None:
        """End it."""
        self._child.communicate()


def duel(item: str, pythons: Sequence[Path], rounds: int, slices: int) -> str:
    """The line of one item."""
    taken: list[tuple[float, float]] = []
    medians: list[float] = []
    for _ in range(rounds):
        pairs = one_round(item, pythons, max(2, slices // rounds))
        medians.append(statistics.median(new / old for old, new in pairs))
        taken += pairs
    old, new = (statistics.median(column) for column in zip(*taken, strict=True))
    ratio = statistics.median(new / old for old, new in taken)
    unit = SLICES[item].unit
    return (
        f"| {item} | {old:.4g} {unit} | {new:.4g} {unit} "
        f"| {ratio:.3f} | {min(medians):.3f} to {max(medians):.3f} |"
    )


def one_round(item: str, pythons: Sequence[Path], slices: int) -> list[tuple[float, float]]:
    """Pairs of what the two versions took."""
    before, after = sides = [Side(python) for python in pythons]
    for side in sides:
        side.ask(f"begin {item}")
        side.ask("slice")  # maps memory, fills caches
    taken = []
    for number in range(slices):
        # Each is first in turn, since the second finds the caches as the first has left them.
        order = (before, after) if number % 2 else (after, before)
        values = {side: float(side.ask("slice")) for side in order}
        taken.append((values[before], values[after]))
    for side in sides:
        side.ask("end")
        side.close()
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; less is better, and a ratio below 1 means that the later version is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the older wheel, or an interpreter that has it")
    parser.add_argument("after", type=Path, help="the newer wheel, or an interpreter that has it")
    parser.add_argument(
        "--only", default=",".join(SLICES), help="which items, by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often both are started anew (default: %(default)s)"
    )
    parser.add_argument("--slices", type=float, default=1.0, help="so many times the usual number of slices")
    parser.add_argument("--label", help="write the table to results/<date>-<label>.md too")
    parser.add_argument(
        "--envs", type=Path, default=HOME.parent / ".nox", help="where the environments are made"
    )
    options = parser.parse_args(argv)
    items = options.only.split(",")
    if unknown := [item for item in items if item not in SLICES]:
        raise SystemExit(f"no item is called {', '.join(unknown)}; there are {', '.join(SLICES)}")
    options.envs.mkdir(parents=True, exist_ok=True)
    pythons = []
    for name, what in (("mesh-before", options.before), ("mesh", options.after)):
        try:
            pythons.append(
                prepare(name, options.envs, wheel=what, torch=False) if what.suffix == ".whl" else what
            )
        except SetupError as problem:
            print(problem, file=sys.stderr)
            return 1
    lines = ["| item | before | after | ratio | rounds |", "| --- | ---: | ---: | ---: | ---: |"]
    print(*lines, sep="\n", flush=True)
    machine = describe()
    for item in items:
        lines.append(duel(item, pythons, options.rounds, round(SLICES[item].slices * options.slices)))
        print(lines[-1], flush=True)
    if options.label:
        write(options.label, machine, lines)
    return 0


def write(label: str, machine: Mapping[str, object], lines: Sequence[str]) -> None:
    """Keep the table, with what the machine is."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = ", ".join(f"{name}: {value}" for name, value in machine.items())
    page = [
        f"# Before and after, {date}, {label}",
        "",
        f"{about}.",
        "",
        *(__doc__ or "").splitlines()[2:],
        "",
        *lines,
    ]
    path = HOME / "results" / f"{date}-{label}.md"
    path.write_text("\n".join(page) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
