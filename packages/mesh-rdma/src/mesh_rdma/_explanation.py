"""What is said of the choice of a transport: in the log, and by :func:`explain`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """The transports that would be tried for a buffer, in order, and why the others would not."""

    candidates: tuple[str, ...]
    """The transports that would be tried: the first is used, the next if that fails."""
    passed: dict[str, str]
    """The others, with the reason."""

    def __str__(self) -> str:
        chosen = ", then ".join(self.candidates) or "no transport"
        return "; ".join([chosen, *(f"not {name}: {reason}" for name, reason in self.passed.items())])
