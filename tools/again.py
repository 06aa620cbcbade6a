"""A failed test is run once more, alone, when everything else is over.

One that passes then is *flaky*: it is named in the last lines, and the run is green. One that is flaky in two runs one
after the other is a bug to be mended, and said to be one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from records import Failure, Record

TOO_MANY = 15
"""So many failures are no accident: nothing is tried again."""
_LIMIT_S = 400.0

Run = Callable[[Record, Failure], bool]


@dataclass
class Outcome:
    """What became of the tests that had failed."""

    flaky: list[str] = field(default_factory=list)
    """A line for each that passed when it ran alone."""
    forgiven: int = 0
    """How many failures that were, as their runners count."""
    broken: list[str] = field(default_factory=list)
    """A line for each that did not."""
    causes: list[str] = field(default_factory=list)
    """What these said when they first failed."""


def run_alone(root: Path) -> Run:
    """Run one test in the environment that it failed in; its output is passed on."""

    def run(record: Record, failure: Failure) -> bool:
        print(f"\nagain, alone: {failure.name} ({record.session})", flush=True)
        try:
            done = subprocess.run(
                failure.command,
                cwd=root,
                env=record.environment,
                stdin=subprocess.DEVNULL,
                check=False,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    return run


def try_again(records: Iterable[Record], run: Run, history: Path) -> Outcome:
    """Run what failed once more; `history` keeps the names of the flaky ones for the next run."""
    records = list(records)
    outcome = Outcome()
    before = _read(history)
    now: list[str] = []
    hopeless = sum(len(record.failures) for record in records) > TOO_MANY
    for record in records:
        for failure in record.failures:
            what = f"{failure.name} ({record.session})" + (f": {failure.reason}" if failure.reason else "")
            if hopeless or not run(record, failure):
                outcome.broken.append(f"FAILED {what}")
                if failure.detail:
                    outcome.causes.append(f"{' ' + failure.name + ' ':_^110}\n{failure.detail}\n")
                continue
            now.append(failure.name)
            outcome.forgiven += failure.times
            twice = ", as in the run before: mend it" if failure.name in before else ""
            outcome.flaky.append(f"FLAKY{twice}: {what}")
    history.parent.mkdir(parents=True, exist_ok=True)
    history.write_text(json.dumps(now), encoding="utf-8")
    return outcome


def _read(history: Path) -> list[str]:
    try:
        return list(json.loads(history.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
