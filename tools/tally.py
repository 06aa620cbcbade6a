"""Count what test runners say while it passes by, and sum it up in one line."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST = re.compile(
    r"^=+ (?P<counts>.*\b(?:passed|failed|skipped|errors?|xfailed|xpassed)\b.*) in [\d.]+s.*=+$"
)
_CARGO = re.compile(r"^test result: \w+\. (?P<counts>.*) finished in .*$")
_COUNT = re.compile(r"(\d+) (\w+)")
# `nox > Session tests-3.11(mesh-core) failed.`; the session's own name follows the word.
_SESSION = re.compile(r"^nox > Session (?P<name>\S.*?) (?P<end>was successful|failed|aborted|raised)\b")

_MEANS = {
    "passed": "passed",
    "xfailed": "passed",
    "failed": "failed",
    "error": "failed",
    "errors": "failed",
    "xpassed": "failed",
    "skipped": "skipped",
    "ignored": "skipped",
}


@dataclass
class Tally:
    """The sum over all sessions of one nox run, fed line by line.

    A session that ends badly without one failed test in it (a lint, a build, a crash) counts as one failure, so that
    the sum never looks better than the exit status.

    Example:
        >>> tally = Tally()
        >>> tally.feed("===== 3 passed, 1 skipped in 0.12s =====")
        >>> str(tally)
        '3 passed, 0 failed, 1 skipped'
    """

    counts: Counter[str] = field(default_factory=Counter)
    failed_before: int = 0
    flaky: int = 0
    """How many failed, and passed when they ran once more."""

    def feed(self, line: str) -> None:
        """Take one line of output."""
        line = _COLOUR.sub("", line).rstrip()
        if summary := _PYTEST.match(line) or _CARGO.match(line):
            for number, word in _COUNT.findall(summary["counts"]):
                if word in _MEANS:
                    self.counts[_MEANS[word]] += int(number)
        elif ended := _SESSION.match(line):
            if ended["end"] != "was successful" and self.counts["failed"] == self.failed_before:
                self.counts["failed"] += 1
            self.failed_before = self.counts["failed"]

    def forgive(self, failures: int, *, flaky: int) -> None:
        """Count as passed the `flaky` tests that have passed when they ran once more."""
        self.flaky += flaky
        self.counts["failed"] -= failures
        self.counts["passed"] += flaky

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[word]} {word}" for word in ("passed", "failed", "skipped"))
