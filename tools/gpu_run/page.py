"""The table that is printed, and the page that is written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_run.running import Found
from gpu_run.steps import Step

NOT_YET = "not run yet"


def table(found: Sequence[Found]) -> str:
    """Return a Markdown table with a row for each step."""
    rows = ["| step | state | found | s |", "| --- | --- | --- | ---: |"]
    for each in found:
        short = each.short.replace("|", "/").replace("\n", " ")
        rows.append(f"| {each.step.name} | {each.state} | {short} | {each.seconds:.0f} |")
    return "\n".join(rows)


def page(found: Sequence[Found], *, where: str, rehearsed: bool) -> str:
    """Return the whole page."""
    kind = (
        "A rehearsal without a GPU: it shows that the programs run, and nothing about a GPU."
        if rehearsed
        else where
    )
    parts = [
        "# What a GPU has run",
        kind,
        f"Written by `./dev gpu`, with Python {sys.version.split()[0]}.",
        table(found),
    ]
    for each in found:
        skipped = [
            f"- {count} skipped: {why}" for why, count in each.skipped.items() if each.state != "not run"
        ]
        if not each.details and not skipped:
            continue
        parts.append(f"## {each.step.name[0].upper()}{each.step.name[1:]}")
        if skipped:
            parts.append("\n".join(skipped))
        if each.details:
            parts.append(f"```text\n{each.details}\n```")
    return "\n\n".join(parts) + "\n"


def empty(steps: Sequence[Step]) -> str:
    """Return the page for a project that no GPU has run yet."""
    found = [Found(step, NOT_YET, "") for step in steps]
    lines = table(found).replace(" | 0 |", " |  |")
    return (
        "# What a GPU has run\n\nNothing yet: no GPU was at hand. `./dev gpu` on a machine with one fills this page; "
        f"[Run it on a GPU](../../docs/how-to/gpu-run.md) says how.\n\n{lines}\n"
    )


def main() -> None:
    """Print the page of a project that no GPU has run."""
    from gpu_run.steps import STEPS

    sys.stdout.write(empty(STEPS))


def write(path: Path, text: str) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
