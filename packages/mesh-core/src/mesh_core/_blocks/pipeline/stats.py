"""Statistics of a pipeline's stages, and which stage is the slowest."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE, RESULTS = "the source", "the loop over the results"


@dataclass(frozen=True, slots=True)
class StageStats:
    """Statistics of one stage of a pipeline."""

    name: str
    taken: int
    """Items that it has started."""
    made: int
    """Values that it has produced."""
    quarantined: int
    """Items that failed and were set aside."""
    retried: int
    """How often an item was started again because its replica was lost."""
    replicas: int
    """How many items it can work on at the same time."""
    busy: float
    """The share of its replicas' time, from 0 to 1, in which they worked."""
    blocked: float
    """The share in which there was work, but no room for its output."""
    waiting: float
    """The share in which there was nothing to do."""
    held: int
    """Bytes of items that wait for it or that it works on."""

    def __str__(self) -> str:
        more = f", {self.quarantined} quarantined" * bool(self.quarantined)
        more += f", {self.retried} retried" * bool(self.retried)
        return (
            f"{self.name}: {self.taken} in, {self.made} out{more}; {self.busy:.0%} busy, {self.blocked:.0%} blocked, "
            f"{self.waiting:.0%} waiting; {self.held:,} bytes"
        )


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Statistics of a run of a pipeline; ``stages`` in order."""

    stages: tuple[StageStats, ...]
    results: int
    """Results that were taken."""
    held: int
    """Bytes in the whole pipeline, including results that nobody has taken."""
    most_held: int
    """The highest value of ``held`` so far."""
    max_bytes: int
    """The limit."""
    source: float
    """The share of the run's time in which it waited for the source."""
    loop: float
    """The share in which the loop over the results was busy with a result."""

    @property
    def slowest(self) -> str:
        """The bottleneck: the name of a stage, ``"the source"`` or ``"the loop over the results"``."""
        return self._slowest()[0]

    @property
    def why(self) -> str:
        """Why :attr:`slowest` is the slowest."""
        return self._slowest()[1]

    def _slowest(self) -> tuple[str, str]:
        slowest = max(self.stages, key=lambda stage: stage.busy)
        share = max(slowest.busy, self.source, self.loop)
        if share == slowest.busy:
            return slowest.name, f"its replicas were busy {share:.0%} of the time"
        if share == self.source:
            return SOURCE, f"it took {share:.0%} of the time to give items"
        return RESULTS, f"it was at work on results {share:.0%} of the time"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.stages), f"slowest: {self.slowest} ({self.why})"])


class Clock:
    """Where the loop over the results spends its time: waiting for the source, waiting for results, or in its own body."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._spent = {"source": 0.0, "loop": 0.0, "stages": 0.0}
        self._now = "stages"

    def turn(self, to: str, now: float) -> None:
        """Switch to ``"source"``, ``"loop"``, ``"stages"`` or ``"over"``."""
        if self._at is not None and self._now != "over":
            self._spent[self._now] += now - self._at
        self._at, self._now = now, to

    def tick(self, now: float) -> None:
        """Count the time up to now, if it has begun."""
        if self._at is not None:
            self.turn(self._now, now)

    def share(self, what: str) -> float:
        """The share of the time up to the last switch."""
        return self._spent[what] / (sum(self._spent.values()) or 1.0)


class Meter:
    """Counters of one stage. It never reads a clock; callers pass the time."""

    def __init__(self, now: float) -> None:
        self.taken = self.made = self.quarantined = self.retried = 0
        self.running = 0
        """Items that replicas have."""
        self.stuck = 0
        """Those of them that cannot continue because nobody reads what they yield."""
        self.held_back = False
        """Whether items wait that may not be started."""
        self.turns = 0
        self._busy = self._blocked = self._all = 0.0
        self._at = now

    def tick(self, now: float) -> None:
        """Count the time up to now. Call this before any of the counters changes."""
        passed, self._at = now - self._at, now
        turns = max(self.turns, self.running)
        self._all += passed * turns
        self._busy += passed * (self.running - self.stuck)
        self._blocked += passed * ((turns - self.running) * self.held_back + self.stuck)

    def stats(self, name: str, held: int) -> StageStats:
        """The statistics up to the last tick."""
        whole = self._all or 1.0
        busy, blocked = self._busy / whole, self._blocked / whole
        waiting = max(0.0, 1.0 - busy - blocked) if self._all else 0.0
        return StageStats(
            name,
            self.taken,
            self.made,
            self.quarantined,
            self.retried,
            self.turns,
            busy,
            blocked,
            waiting,
            held,
        )
