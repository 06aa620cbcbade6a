"""What mesh must reach, read from `targets.toml`, and whether it did."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from meshbench.catalogue import FIGURES
from meshbench.summary import value

BEST_PEER = "best peer"
_PEERS = ("monarch", "ray", "xoscar")


@dataclass(frozen=True)
class Target:
    """A bound on a figure of mesh: in its unit, or as a multiple of another system's, or of another figure, in that run."""

    figure: str
    bound: Fraction
    at_most: bool
    stat: str = "p50"
    against: str | None = None
    note: str = ""
    of: str | None = None
    """Which figure it is a multiple of, if not the same; mesh's own, unless `against` says otherwise."""

    @property
    def relative(self) -> bool:
        """Whether the bound is a multiple."""
        return self.against is not None or self.of is not None

    @property
    def wording(self) -> str:
        """The bound for people.

        Example:
            >>> Target("call_sync", Fraction(1, 12), at_most=True, against="monarch").wording
            "≤ 1/12 of monarch's"
        """
        sign = "≤" if self.at_most else "≥"
        if not self.relative:
            return f"{sign} {float(self.bound):,g} {FIGURES[self.figure].unit}"
        if self.of is not None:
            whose = "" if self.against is None else f"{self.against}'s "
            return f"{sign} {float(self.bound):g}× {whose}“{FIGURES[self.of].title}”"
        number = (
            str(self.bound) if self.bound < 1 and self.bound.numerator == 1 else f"{float(self.bound):g}×"
        )
        return (
            f"{sign} {number} of {self.against}'s" if "/" in number else f"{sign} {number} {self.against}'s"
        )


@dataclass(frozen=True)
class Verdict:
    """What became of a target."""

    target: Target
    reached: Fraction | None
    """Mesh's figure in its unit, or the multiple; None: not measured."""
    missing: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None: not measured."""
        if self.reached is None:
            return None
        return self.reached <= self.target.bound if self.target.at_most else self.reached >= self.target.bound

    @property
    def wording(self) -> str:
        """`reached`, by how much it is missed, or what was not measured."""
        if self.reached is None:
            return f"not measured: {self.missing}"
        if self.met:
            return "reached"
        bound = self.target.bound
        if not self.reached or not bound:
            return "**missed**"
        factor = self.reached / bound if self.target.at_most else bound / self.reached
        return f"**missed** by {float(factor):.2f}×"


def read(path: Path) -> list[Target]:
    """The targets in a file; an unknown figure or a bound that is missing or doubled is a ValueError."""
    targets = []
    for entry in tomllib.loads(path.read_text())["target"]:
        name = entry["figure"]
        if name not in FIGURES:
            raise ValueError(f"{path.name}: no figure is called {name!r}; there are {', '.join(FIGURES)}")
        if ("at_most" in entry) == ("at_least" in entry):
            raise ValueError(f"{path.name}: a target for {name!r} needs one of at_most and at_least")
        of = entry.get("of")
        if of is not None and of not in FIGURES:
            raise ValueError(
                f"{path.name}: a target for {name!r} is a multiple of {of!r}, which is no figure"
            )
        at_most = "at_most" in entry
        targets.append(
            Target(
                figure=name,
                bound=Fraction(str(entry["at_most" if at_most else "at_least"])),
                at_most=at_most,
                stat=entry.get("stat", "p50"),
                against=entry.get("against"),
                note=entry.get("note", ""),
                of=of,
            )
        )
    return targets


def judge(target: Target, figures: Mapping[str, Any]) -> Verdict:
    """Hold a run's figures against a target.

    Example:
        >>> target = Target("tensor", Fraction(15), at_most=False, against="monarch")
        >>> judge(target, {"tensor": {"mesh": {"p50": 8.0}, "monarch": {"p50": 0.5}}}).wording
        'reached'
    """
    mine = value(figures, target.figure, "mesh", target.stat)
    if mine is None:
        return Verdict(target, None, f"{target.figure} of mesh")
    if not target.relative:
        return Verdict(target, _exact(mine))
    figure, system = target.of or target.figure, target.against or "mesh"
    if system == BEST_PEER:
        known = [v for peer in _PEERS if (v := value(figures, figure, peer, target.stat)) is not None]
        if len(known) < len(_PEERS):
            return Verdict(target, None, f"{figure} of every peer")
        theirs: float | None = (max if FIGURES[figure].more_is_better else min)(known)
    else:
        theirs = value(figures, figure, system, target.stat)
    if not theirs:
        return Verdict(target, None, f"{figure} of {system}")
    return Verdict(target, _exact(mine) / _exact(theirs))


def _exact(x: float) -> Fraction:
    """As written, not as stored: 1.2 is 6/5, so that a bound that is met to the digit counts as met."""
    return Fraction(str(x))
