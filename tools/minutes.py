"""Where the minutes of a run went, by session and by package, beside what CONTRIBUTING.md allows them.

nox announces each session and each command; the time between two such lines is the command's. What compiles is
counted apart, as it is done once: budgets are for the rest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_SAID = re.compile(r"^(?:\x1b\[[0-9;]*m)*nox > (?:\x1b\[[0-9;]*m)*(?P<what>.*?)(?:\x1b\[[0-9;]*m)*$")
_BEGINS = re.compile(r"^Running session (?P<name>.+)$")
_ENDS = re.compile(r"^Session .+? (?:was successful|failed|aborted|raised|skipped|was skipped)\b")
_COMPILES = re.compile(
    r"^(?:building |uv build |python -m pip wheel |cargo (?:build|clippy|test --no-run)|python tools/control_plane)"
)
_PACKAGE = re.compile(r"\((?P<name>[\w-]+)\)$")
_ROW = re.compile(
    r"^\| (?P<name>[\w -]+?) \| (?P<quick>\d+) \| (?P<idle>\d+) \| (?P<busy>\d+) \|$", re.MULTILINE
)
_WORTH_A_LINE = 0.05
OTHER = "the workspace"
"""What the sessions belong to that are not about one package."""
WHOLE = "the whole run"
IDLE = 0.1
"""A machine is idle where other programs have no larger share of its processors."""


@dataclass
class Minutes:
    """The time of each session, fed line by line.

    Example:
        >>> minutes = Minutes(known=["mesh-core"])
        >>> for at, line in [(0, "Running session tests-3.11(mesh-core)"), (0, "building mesh-core 0.1"),
        ...                  (0, "uv build x"), (60, "pytest y"), (90, "Session tests-3.11(mesh-core) was successful")]:
        ...     minutes.feed(f"nox > {line}", at)
        >>> minutes.by_package()
        {'mesh-core': 0.5}
    """

    known: list[str]
    """The packages that have a budget of their own."""
    running: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    compiling: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _session: str = ""
    _since: float = 0.0
    _compiles: bool = False

    def feed(self, line: str, now: float) -> None:
        """Take one line of output, which came at `now` seconds."""
        said = _SAID.match(line.rstrip())
        if said is None:
            return
        if self._session:
            spent = self.compiling if self._compiles else self.running
            spent[self._session] += (now - self._since) / 60
        self._since = now
        what = said["what"]
        if begins := _BEGINS.match(what):
            self._session = begins["name"]
            self.running[self._session] += 0.0
        elif _ENDS.match(what):
            self._session = ""
        self._compiles = _COMPILES.match(what) is not None

    def add(self, other: Minutes) -> None:
        """Add the minutes of other sessions."""
        for mine, others in ((self.running, other.running), (self.compiling, other.compiling)):
            for session, minutes in others.items():
                mine[session] += minutes

    def by_package(self) -> dict[str, float]:
        """The minutes of each package, compiling left out."""
        found: defaultdict[str, float] = defaultdict(float)
        for session, minutes in self.running.items():
            package = _PACKAGE.search(session)
            known = package is not None and package["name"] in self.known
            found[package["name"] if package is not None and known else OTHER] += minutes
        return dict(found)


@dataclass(frozen=True)
class Budget:
    """The minutes that a part of a run may take."""

    idle: int
    busy: int | None = None


@dataclass(frozen=True)
class Spent:
    """What a run has taken."""

    minutes: Minutes
    whole: float
    """From its first line to its last; in a full run without the minutes in which wheels were compiled."""
    others: float
    """The share of the processors that other programs have had."""

    @property
    def was_idle(self) -> bool:
        """Whether the machine had little else to do."""
        return self.others <= IDLE

    def by_part(self) -> dict[str, float]:
        """The minutes of each package, of the workspace, and of the whole run."""
        return {**self.minutes.by_package(), WHOLE: self.whole}


def budgets(contributing: str, level: str) -> dict[str, Budget]:
    """What CONTRIBUTING.md allows the parts of a run.

    Example:
        >>> page = "| mesh-core | 3 | 6 | 14 |"
        >>> budgets(page, "quick"), budgets(page, "full")
        ({'mesh-core': Budget(idle=3, busy=None)}, {'mesh-core': Budget(idle=6, busy=14)})
    """
    found = {}
    for row in _ROW.finditer(contributing):
        quick, idle, busy = map(int, row.group("quick", "idle", "busy"))
        if level != "all":
            found[row["name"]] = Budget(quick) if level == "quick" else Budget(idle, busy)
    return found


def over_budget(spent: Spent, allowed: Mapping[str, Budget]) -> list[str]:
    """A line for each part that took longer than an idle machine may need; none on a busy one, which excuses it."""
    if not spent.was_idle:
        return []
    return [
        f"FAILED budget: {part} took {taken:.1f} minutes on an idle machine, and CONTRIBUTING.md allows {allowed[part].idle}; "
        "make it shorter, or agree on more there"
        for part, taken in spent.by_part().items()
        if part in allowed and taken > allowed[part].idle
    ]


def report(spent: Spent, allowed: Mapping[str, Budget], slowest: Iterable[tuple[str, float]]) -> str:
    """A page of text for the end of a run."""
    minutes = spent.minutes
    noticed = (name for name, taken in minutes.running.items() if taken >= _WORTH_A_LINE)
    longest = sorted(noticed, key=lambda name: -minutes.running[name])
    lines = [
        f"{'where the minutes went':<30}run  compile",
        *(
            f"  {name:<26}{minutes.running[name]:6.1f} {minutes.compiling.get(name, 0):8.1f}"
            for name in longest
        ),
        f"of the minutes that CONTRIBUTING.md allows; other programs had {spent.others:.0%} of the processors",
    ]
    by_part = spent.by_part()
    for part, budget in allowed.items():
        taken = by_part.get(part, 0.0)
        limit = budget.idle if spent.was_idle or budget.busy is None else budget.busy
        lines.append(f"  {part:<26}{taken:6.1f} of {limit}{' OVER' if taken > limit else ''}")
    lines.append("the slowest tests, in seconds")
    lines += [f"  {seconds:6.1f} {name}" for name, seconds in sorted(slowest, key=lambda each: -each[1])[:12]]
    return "\n".join(lines)
