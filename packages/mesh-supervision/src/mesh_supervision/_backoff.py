"""How long a restart waits: exponential, bounded, with jitter that a seed decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long a restart is delayed, depending on the number of restarts in the preceding period.

    The first ``free`` restarts are not delayed. After that the delay is ``initial`` seconds, multiplied by ``factor`` with each further restart,
    up to ``most``. ``jitter`` is the random part of a delay: 0.5 turns 10 seconds into something between 5
    and 10. The randomness comes from ``seed``, the mesh's name and the number of the restart, so that a run can be repeated, and
    two meshes that fail together do not restart together.

    >>> backoff = Backoff(initial=1.0, most=5.0, jitter=0.0)
    >>> [backoff.delay(n) for n in range(5)]
    [0.0, 1.0, 2.0, 4.0, 5.0]
    """

    initial: float = 0.1
    factor: float = 2.0
    most: float = 30.0
    jitter: float = 0.5
    free: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("initial", "most"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of seconds from 0, got {value!r}")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor must be a finite number from 1, got {self.factor!r}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be a number from 0 to 1, got {self.jitter!r}")
        if self.free < 0:
            raise ValueError(f"free must be a whole number from 0, got {self.free!r}")

    def delay(self, before: int, salt: int = 0) -> float:
        """The delay of a restart in seconds, after ``before`` restarts in the preceding period.

        A different ``salt`` gives a different jitter.
        """
        step = before - self.free
        if step < 0:
            return 0.0
        try:
            whole = min(self.most, self.initial * self.factor**step)
        except OverflowError:
            whole = self.most
        return whole * (1.0 - self.jitter * _chance(self.seed, salt)) if self.jitter else whole


def _chance(seed: int, salt: int) -> float:
    """A number from 0 to 1 (excluded), always the same for the same arguments."""
    mixed = (seed * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
