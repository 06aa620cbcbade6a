"""The collectives that ranks wait in, put together from what each process reports: who has not arrived, who does another one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mesh_core.inspect import Snapshot
from mesh_supervision._collectives import PASSED, At, members_of

_BRIEF_S = 0.3
"""Collectives that were shown for a shorter time may be about to end."""
_ENDLESS_S = 5.0
"""With all ranks in it, a collective that lasts for so long is reported."""
_ONE_SHAPE = frozenset(
    ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_base", "reduce_scatter", "reduce_scatter_base")
)  # fmt: skip
"""Collectives in which the tensors of all ranks have the same type and shape."""


@dataclass(frozen=True)
class Meeting:
    """A process group with members that wait in a collective."""

    members: tuple[str, ...]
    """The processes, in the order of their ranks."""
    at: dict[int, tuple[At, float]]
    """By rank, what the waiting members are in, and for how long."""
    passed: dict[int, int] = field(default_factory=dict)
    """By rank, the last collective that the other members have left, as far as they report it."""

    @property
    def about(self) -> str:
        """Identifies the group and the collective."""
        at = max((at for at, _ in self.at.values()), key=lambda at: at.number)
        return f"{at.group} {at.members} {at.number}"

    def proc(self, rank: int) -> str:
        """Return the process of a rank."""
        return self.members[rank] if rank < len(self.members) else ""

    def causes(self) -> tuple[dict[int, str], str]:
        """Return the ranks that keep the others waiting, and why; and a cycle of ranks that wait for messages of each other."""
        collective = {rank: at for rank, (at, _) in self.at.items() if at.number}
        if not collective:
            return self._of_messages()
        last = max(at.number for at in collective.values())
        there = {rank: at for rank, at in collective.items() if at.number == last}
        said = Counter(at.said for at in there.values()).most_common(1)[0][0]
        which = f"collective {last} ({said}), in which {len(there)} of {len(self.members)} ranks wait"
        missing: dict[int, str] = {}
        left = [rank for rank, number in self.passed.items() if rank not in self.at and number >= last]
        for rank in range(len(self.members)):
            if rank in there or rank in left:
                continue
            if rank not in self.at:
                missing[rank] = f"has not come to {which}"
            else:
                at = self.at[rank][0]
                what = f"collective {at.number} ({at.said})" if at.number else f"a {at.said}"
                missing[rank] = f"is still in {what}, and has not come to {which}"
        return missing or self._abandoned(there, left) or _mismatched(there) or self._endless(said, last), ""

    def _abandoned(self, there: dict[int, At], left: list[int]) -> dict[int, str]:
        """Those that wait in a collective that others have left: what they do there cannot be what the others did."""
        if not left:
            return {}
        others = f"{len(left)} of {len(self.members)} ranks have left it"
        return _mismatched(there) or {
            rank: f"is in collective {at.number} with {at.said}, and {others}: they did another one there, or with another root or shape"
            for rank, at in there.items()
        }

    def _endless(self, said: str, number: int) -> dict[int, str]:
        """All are there and agree: the network, or PyTorch's backend, does not complete it."""
        seconds = min(seconds for _, seconds in self.at.values())
        if seconds < _ENDLESS_S:
            return {}
        text = (
            f"is in collective {number} ({said}) for {seconds:.0f} s with all others, and it does not end: look at the network between "
            "them, or whether one has left it by an error"
        )
        return {min(self.at): text}

    def _of_messages(self) -> tuple[dict[int, str], str]:
        """Follow ranks that wait for a message of another rank, or to send one, to the rank that does neither."""
        causes: dict[int, str] = {}
        for start, (at, _) in self.at.items():
            way, rank = [start], at.root
            while rank is not None and rank in self.at and rank not in way:
                way.append(rank)
                rank = self.at[rank][0].root
            if rank is None:
                continue
            if rank in way:
                around = way[way.index(rank) :]
                first = around.index(min(around))
                around = around[first:] + around[:first]
                names = " -> ".join(f"{self.proc(each)} ({self.at[each][0].said})" for each in around)
                return (
                    {},
                    f"a cycle of messages between ranks, in which none can continue: {names} -> {self.proc(around[0])}",
                )
            before = self.at[way[-1]][0]
            what = "has not sent what" if before.op == "recv" else "has not received what"
            goes = "waits for" if before.op == "recv" else "sends"
            causes[rank] = f"{what} rank {way[-1]} {goes} ({before.said})"
        return causes, ""


def _mismatched(there: dict[int, At]) -> dict[int, str]:
    """Return those that do another collective than most, if all are at the same number."""
    does = {rank: (at.op, at.root, at.what if at.op in _ONE_SHAPE else "") for rank, at in there.items()}
    counts = Counter(does.values())
    if len(counts) == 1:
        return {}
    (usual, most), (_, second) = counts.most_common(2)
    usual_said = next(at.said for rank, at in there.items() if does[rank] == usual)
    found = {}
    for rank, at in there.items():
        if does[rank] != usual or most == second:
            other = (
                usual_said
                if does[rank] != usual
                else next(one.said for each, one in there.items() if does[each] != usual)
            )
            found[rank] = (
                f"is in collective {at.number} with {at.said}, where others do {other}: these never meet"
            )
    return found


def meetings(snap: Snapshot) -> list[Meeting]:
    """Return the groups in which ranks wait."""
    found: dict[tuple[str, str], dict[int, tuple[At, float]]] = {}
    passed: dict[tuple[str, str], dict[int, int]] = {}
    for proc in snap.procs:
        for promise in proc.promises:
            at = At.read(promise.name)
            if at is not None and at.op == PASSED:
                passed.setdefault((at.group, at.members), {})[at.rank] = at.number
            elif at is not None and promise.seconds >= _BRIEF_S:
                found.setdefault((at.group, at.members), {})[at.rank] = (at, promise.seconds)
    return [Meeting(tuple(members_of(group[1])), at, passed.get(group, {})) for group, at in found.items()]
