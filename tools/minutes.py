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
_COMPILES = re.compile(r"^(?:building |uv build |python -m pip wheel |cargo (?:clippy|test --no-run))")
_PACKAGE = re.compile(r"\((?P<name>[\w-]+)\)$")
_ROW = re.compile(r"^\| (?P<name>[\w -]+?) \| (?P<idle>\d+) \| (?P<busy>\d+) \|$", re.MULTILINE)
_WORTH_A_LINE = 0.05
OTHER = "the workspace"
"""What the sessions belong to that are not about one package."""


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

    def by_package(self) -> dict[str, float]:
        """The minutes of each package, compiling left out."""
        found: defaultdict[str, float] = defaultdict(float)
        for session, minutes in self.running.items():
            package = _PACKAGE.search(session)
            known = package is not None and package["name"] in self.known
            found[package["name"] if package is not None and known else OTHER] += minutes
        return dict(found)


def budgets(contributing: str) -> dict[str, tuple[int, int]]:
    """What CONTRIBUTING.md allows each package: minutes on an idle and on a busy machine."""
    return {row["name"]: (int(row["idle"]), int(row["busy"])) for row in _ROW.finditer(contributing)}


def report(
    minutes: Minutes,
    allowed: Mapping[str, tuple[int, int]],
    slowest: Iterable[tuple[str, float]],
) -> str:
    """A page of text for the end of a run."""
    noticed = (name for name, spent in minutes.running.items() if spent >= _WORTH_A_LINE)
    longest = sorted(noticed, key=lambda name: -minutes.running[name])
    lines = [
        f"{'where the minutes went':<30}run  compile",
        *(
            f"  {name:<26}{minutes.running[name]:6.1f} {minutes.compiling.get(name, 0):8.1f}"
            for name in longest
        ),
        "of the minutes that CONTRIBUTING.md allows",
    ]
    spent = minutes.by_package()
    for package, (idle, busy) in allowed.items():
        taken = spent.get(package, 0.0)
        verdict = "" if taken <= idle else " on a busy machine" if taken <= busy else " OVER"
        lines.append(f"  {package:<26}{taken:6.1f} of {idle if taken <= idle else busy}{verdict}")
    total = sum(minutes.running.values())
    lines.append(f"  {'all':<26}{total:6.1f}, and {sum(minutes.compiling.values()):.1f} for compiling")
    lines.append("the slowest tests, in seconds")
    lines += [f"  {seconds:6.1f} {name}" for name, seconds in sorted(slowest, key=lambda each: -each[1])[:12]]
    return "\n".join(lines)
