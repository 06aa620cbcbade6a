"""A run of all sessions of a level: side by side, a line each, and at the end what failed and why.

The *level* says how much runs. ``quick`` tests each package's behaviour once, on one interpreter. ``full`` adds what takes
long: clusters, a virtual machine, long schedules, a second interpreter, types and pages. ``all`` is the whole matrix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from again import Outcome, run_alone, try_again
from lanes import FIRST, LONG, NARROW, Ended, Lanes, Session, Shape, cores
from machine_load import Load
from minutes import Minutes, Spent, budgets, over_budget, report
from records import VARIABLE, Record, read_all
from tally import Tally


class Level(Enum):
    """How much of the tests runs."""

    QUICK = "quick"
    FULL = "full"
    ALL = "all"


LEVEL = "MESH_TEST_LEVEL"
"""The variable that tells sessions and tests the level of their run."""
ONE_IN = "MESH_TEST_ONE_IN"
"""The variable that tells the tests of a session to draw one in so many of themselves."""
WHEELS = "MESH_WHEELS"
"""The variable that names the folder of the run's wheels."""

LEFT_OUT = {
    Level.QUICK: (
        "left out: clusters (ssh, Slurm, Kubernetes, Ray, networks of their own), the virtual machine with RDMA devices, "
        "long schedules and stress, the second interpreter, the lowest versions, types, pages, plugins, and the crates' own "
        "tests (`./dev rust`); `./dev test --full` runs them"
    ),
    Level.FULL: (
        "left out: other interpreters than the oldest and the newest, most of the global view's tests on older releases of "
        "PyTorch, fuzzing, the longest schedules; "
        "`./dev test --all` runs them"
    ),
    Level.ALL: "nothing was left out",
}


@dataclass
class WholeRun:
    """One run, from its first session to its last line."""

    root: Path
    nox: Sequence[str]
    level: Level
    environment: Mapping[str, str]
    posargs: Sequence[str] = ()
    verbose: bool = False
    _tallies: dict[str, Tally] = field(default_factory=dict)
    _minutes: dict[str, Minutes] = field(default_factory=dict)
    _failed: list[Ended] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)
    _compiled: float = 0.0

    def run(self) -> int:
        """Run it and return the exit status: 0 if all that failed has passed when it ran once more, alone."""
        load = Load()
        packages = sorted(path.name for path in (self.root / "packages").iterdir() if path.is_dir())
        logs = self.root / ".nox" / "logs"
        with tempfile.TemporaryDirectory(prefix="mesh-run-") as folder:
            shape = Shape.of(cores())
            env = {
                **self.environment,
                "PYTHONUNBUFFERED": "1",
                VARIABLE: folder,
                LEVEL: self.level.value,
            }
            env.setdefault(WHEELS, str(self.root / ".nox" / "wheels" / f"{time.time_ns()}-{os.getpid()}"))
            sessions = self._sessions(env)
            self._minutes = {each.name: Minutes(known=packages) for each in sessions}
            self._tallies = {each.name: Tally() for each in sessions}
            print(
                f"{len(sessions)} sessions, {shape.wide + shape.narrow} at a time; their output is in {logs}",
                flush=True,
            )
            lanes = Lanes(
                shape, self._command, folder=logs, env=env, on_line=self._on_line, on_end=self._on_end
            )
            lanes.run(sessions)
            records = list(read_all(Path(folder)))
        elapsed = (time.monotonic() - self._begun) / 60
        # Running failed tests again would make the machine look busier than it was.
        busy = load.share_of_others()
        again = try_again(records, run_alone(self.root), self.root / ".nox" / "flaky.json")
        return self._conclude(records, again, elapsed, busy)

    def _sessions(self, env: Mapping[str, str]) -> list[Session]:
        listed = subprocess.run(
            [*self.nox, "--list", "--json"], env=env, capture_output=True, text=True, check=False
        )
        if listed.returncode:
            sys.exit(f"dev: nox cannot list the sessions:\n{listed.stderr}")
        sessions = [
            Session(each["session"], NARROW in each["tags"], LONG in each["tags"])
            for each in json.loads(listed.stdout)
        ]
        # Not the very first of its lane: by then a narrow one has built what it needs.
        front = next((at for at, each in enumerate(sessions, 1) if not each.narrow and each.name != FIRST), 0)
        return [*sessions[:front], *sorted(sessions[front:], key=lambda each: not each.long)]

    def _command(self, session: Session) -> list[str]:
        return [*self.nox, "--session", session.name, *(["--", *self.posargs] if self.posargs else [])]

    def _on_line(self, session: Session, line: str) -> None:
        self._tallies[session.name].feed(line)
        self._minutes[session.name].feed(line, time.monotonic())
        if self.verbose:
            print(f"{session.name}: {line}", end="", flush=True)

    def _on_end(self, ended: Ended) -> None:
        name, tally = ended.session.name, self._tallies[ended.session.name]
        if name == FIRST:
            self._compiled = ended.seconds / 60
        if ended.status and not tally.counts["failed"]:
            tally.counts["failed"] += 1
            self._failed.append(ended)
        counted = str(tally) if any(tally.counts.values()) else "done"
        at = (time.monotonic() - self._begun) / 60
        print(f"{at:6.1f} min  {name:<30} {counted:<46} {ended.seconds / 60:5.1f} min", flush=True)

    def _conclude(self, records: Sequence[Record], again: Outcome, elapsed: float, busy: float) -> int:
        total = Tally()
        for each in self._tallies.values():
            total.counts.update(each.counts)
        total.forgive(again.forgiven, flaky=len(again.flaky))
        minutes = Minutes(known=next(iter(self._minutes.values())).known if self._minutes else [])
        for one in self._minutes.values():
            minutes.add(one)
        allowed = budgets((self.root / "CONTRIBUTING.md").read_text(encoding="utf-8"), self.level.value)
        spent = Spent(minutes, elapsed if self.level is Level.QUICK else elapsed - self._compiled, busy)
        slowest = [entry for record in records for entry in record.slowest]
        print("", report(spent, allowed, slowest), "", sep="\n")
        for ended in self._failed:
            print(
                f"FAILED session {ended.session.name}; the end of {ended.log}:", *ended.tail, "", sep="\n  "
            )
        too_long = over_budget(spent, allowed)
        total.counts["failed"] += len(too_long)
        lines = [*again.causes, *again.flaky, *again.broken, *too_long, LEFT_OUT[self.level]]
        print(*lines, total, sep="\n", flush=True)
        return 1 if total.counts["failed"] else 0
