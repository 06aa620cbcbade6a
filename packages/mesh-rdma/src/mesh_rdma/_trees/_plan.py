"""Who reads from whom: a tree, and what becomes of it when some of it fails. No clock, no I/O.

TRE-1: of each host one rank reads from another host; the others read from ranks of their own host. The source is read by
as many as the fan-out says, whatever the number of ranks.
TRE-2: nobody is given a parent that reads from it, directly or not. A parent has all bytes, or reads from one that does, up
to the source.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

SOURCE = -1
"""The number of the source among the ranks."""


def fan_out(hosts: int, chunks: int) -> int:
    """Say how many hosts should read from one.

    A chain has each host send the bytes once; the last begins when they have passed all others. In a tree of two branches
    hosts send them twice, and the last begins sooner.
    """
    chain = hosts - 1 + chunks
    tree = 2 * chunks + 2 * math.log2(max(hosts, 1))
    return 1 if chain <= tree else 2


class Tree:
    """The ranks of one broadcast by number, and whom each of them reads from."""

    def __init__(self, hosts: Sequence[Hashable], *, chunks: int, first: Hashable = None) -> None:
        by_host: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        # Where the source is, its host passes the bytes on.
        groups = sorted(by_host.items(), key=lambda group: group[0] != first)
        width = fan_out(len(groups), chunks)
        leaders = [ranks[0] for _, ranks in groups]
        self._hosts = list(hosts)
        self._parent = [SOURCE] * len(hosts)
        for n, (_, ranks) in enumerate(groups):
            self._parent[ranks[0]] = leaders[(n - 1) // width] if n else SOURCE
            for rank in ranks[1:]:
                self._parent[rank] = ranks[0]
        self._order = [*leaders, *(rank for _, ranks in groups for rank in ranks[1:])]
        self._barred: set[int] = set()
        self._complete: set[int] = set()
        self._avoided: set[tuple[int, int]] = set()

    def order(self) -> list[int]:
        """Return the ranks, each behind the one that it reads from."""
        return list(self._order)

    def parent(self, rank: int) -> int:
        """Return whom a rank reads from."""
        return self._parent[rank]

    def complete(self, rank: int) -> None:
        """Note that a rank has all bytes. Whom it has read from no longer matters: that one may read from it now."""
        self._complete.add(rank)
        self._parent[rank] = SOURCE

    def has_all(self, rank: int) -> bool:
        """Whether a rank, or the source, has all bytes."""
        return rank == SOURCE or rank in self._complete

    def bar(self, rank: int) -> None:
        """Have nobody read from a rank, or from the source, any more."""
        self._barred.add(rank)

    def adopt(self, rank: int) -> int | None:
        """Give a rank another parent than the one that it has failed to read from; ``None`` if there is nobody."""
        self._avoided.add((rank, self._parent[rank]))
        usable = [each for each in self._candidates(rank) if (rank, each) not in self._avoided]
        if not usable:
            return None
        self._parent[rank] = usable[0]
        return usable[0]

    def _candidates(self, rank: int) -> Iterator[int]:
        """Those that it may read from, the best first."""
        good = [each for each in range(len(self._parent)) if self._can_give(each, rank)]
        # Over the network once for each host.
        yield from sorted(
            (each for each in good if self._hosts[each] == self._hosts[rank]), key=self._busyness
        )
        for each in self._above(rank):
            if each in good or (each == SOURCE and SOURCE not in self._barred):
                yield each
        if SOURCE not in self._barred:
            yield SOURCE
        yield from sorted(good, key=self._busyness)

    def _busyness(self, rank: int) -> tuple[bool, int]:
        return rank not in self._complete, self._parent.count(rank)

    def _above(self, rank: int) -> Iterator[int]:
        """Those that it reads from, directly or not."""
        while rank != SOURCE:
            rank = self._parent[rank]
            yield rank

    def _can_give(self, other: int, rank: int) -> bool:
        """Whether the bytes come to ``other``, and not by way of ``rank`` (TRE-2)."""
        if other == rank or other in self._barred:
            return False
        if other in self._complete:
            return True
        for each in self._above(other):
            if each == rank or each in self._barred:
                return False
            if each in self._complete:
                return True
        return True
