"""The database of operators in the global view, on the PyTorch that is installed: a table of several comparisons.

    python tools/operator_table.py FOLDER [--rows 0 1 2] [--one-in 2] [--only-print]

runs `tools/operator_database.py` for each row, and goes on where an earlier run with the same folder has ended. It prints the table of
`docs/how-to/global-view.md`, with all releases that the folder has results of, and what did not come out the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.torch_version import TorchVersion, __version__

from operator_database import counted, written

TOOL = Path(__file__).with_name("operator_database.py")
ROWS = (
    "--dtype float32 --layout first",
    "--dtype float32 --layout last",
    "--dtype float32 --layout mixed",
    "--dtype float64 --layout last",
    "--dtype complex64 --layout last",
    "--dtype int64 --layout last",
    "--dtype bfloat16 --layout mixed",
    "--dtype float32 --layout last --in-place",
    "--dtype int64 --layout mixed --in-place",
)
SECONDS = "40"
"""For one operator: its samples take long on a busy machine."""
HEADS = (
    "release", "numbers, and which dimension is split", "processes", "operators",
    "same", "same but for rounding", "refused", "different",
)  # fmt: skip


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)))
    parser.add_argument("--processes", default="2")
    parser.add_argument("--one-in", default="1")
    parser.add_argument("--only-print", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for row in [] if asked.only_print else asked.rows:
        results = asked.folder / f"{__version__} {row}.jsonl"
        command = [sys.executable, str(TOOL), asked.processes, "--global", *ROWS[row].split()]
        command += ["--one-in", asked.one_in, "--seconds", SECONDS, "--results", str(results)]
        print(f"{ROWS[row]}: {results}", flush=True)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    print(*table(asked.folder), sep="\n")


def table(folder: Path) -> Iterator[str]:
    """The lines of the table, and under it what is not the same."""
    found = [(results, *written(results)) for results in folder.glob("*.jsonl")]
    found.sort(key=lambda each: (TorchVersion(each[1]["release"]), each[0].name))
    others: list[str] = []
    yield f"| {' | '.join(HEADS)} |"
    yield "| --- " * len(HEADS) + "|"
    for _, about, said in found:
        for count in map(str, about["processes"]):
            outcomes = counted(said, count)
            yield f"| {' | '.join(row(about, count, [len(each) for each in outcomes.values()]))} |"
            others += [
                f"- {about['release']}, {numbers(about)}, {outcome}: `{name}`: {what}"
                for outcome, operators in outcomes.items()
                if outcome != "same"
                for name, what in operators.items()
            ]
    yield from ("", *others)


def row(about: dict[str, Any], count: str, outcomes: list[int]) -> list[str]:
    """The cells of a row."""
    done, of = sum(outcomes), about["operators"]
    drawn = f"{done} of {of}" if done < of else f"{of} drawn" if about["one_in"] > 1 else f"all {of}"
    release = ".".join(about["release"].split(".")[:2])
    return [release, numbers(about), count, drawn, *map(str, outcomes)]


def numbers(about: dict[str, Any]) -> str:
    """The numbers, and which dimension is split."""
    return f"{about['dtype']}{' in place' * about['in_place']}, {about['layout']}"


if __name__ == "__main__":
    main()
