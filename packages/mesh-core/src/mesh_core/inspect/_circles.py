"""Circles in a graph of waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def circles(graph: Mapping[N, Iterable[N]]) -> list[list[N]]:
    """A shortest circle of each knot: of each maximal set of nodes that can all reach each other.

    >>> circles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []})
    [['a', 'b', 'c']]
    >>> circles({"a": ["a", "b"], "b": []})
    [['a']]
    """
    found = []
    for knot in _knots(graph):
        members = set(knot)
        shortest = min((_around(graph, start, members) for start in knot), key=len)
        if shortest:
            found.append(shortest)
    return found


def _around(graph: Mapping[N, Iterable[N]], start: N, members: set[N]) -> list[N]:
    """The shortest path from a node to itself within its knot."""
    before: dict[N, N] = {}
    todo = deque([start])
    while todo:
        node = todo.popleft()
        for after in graph.get(node, ()):
            if after == start:
                way = [node]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            if after in members and after not in before:
                before[after] = node
                todo.append(after)
    return []


def _knots(graph: Mapping[N, Iterable[N]]) -> list[list[N]]:
    """Tarjan's strongly connected components with a circle in them, without recursion, in the order of the graph."""
    index: dict[N, int] = {}
    low: dict[N, int] = {}
    stack: list[N] = []
    on_stack: set[N] = set()
    knots: list[list[N]] = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(graph.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, after = work[-1]
            for each in after:
                if each not in index:
                    index[each] = low[each] = len(index)
                    stack.append(each)
                    on_stack.add(each)
                    work.append((each, iter(graph.get(each, ()))))
                    break
                if each in on_stack:
                    low[node] = min(low[node], index[each])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    knot = stack[at:]
                    del stack[at:]
                    on_stack.difference_update(knot)
                    if len(knot) > 1 or node in graph.get(node, ()):
                        knots.append(knot)
    places = {node: place for place, node in enumerate(graph)}
    return sorted(
        (sorted(knot, key=lambda node: places.get(node, 0)) for knot in knots),
        key=lambda knot: places.get(knot[0], 0),
    )
