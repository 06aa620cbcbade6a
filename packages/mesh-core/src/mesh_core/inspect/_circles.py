"""Find circles in a wait-for graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def circles(graph: Mapping[N, Iterable[N]]) -> list[list[N]]:
    """Return a shortest circle of each strongly connected component.

    >>> circles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []})
    [['a', 'b', 'c']]
    >>> circles({"a": ["a", "b"], "b": []})
    [['a']]
    """
    found = []
    for component in _components(graph):
        members = set(component)
        shortest = min((_around(graph, start, members) for start in component), key=len)
        if shortest:
            found.append(shortest)
    return found


def _around(graph: Mapping[N, Iterable[N]], start: N, members: set[N]) -> list[N]:
    """Return the shortest circle of waits through a node, within its component."""
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


def _components(graph: Mapping[N, Iterable[N]]) -> list[list[N]]:
    """Return the strongly connected components that contain a circle, in the order of the graph.

    Tarjan's algorithm, without recursion.
    """
    index: dict[N, int] = {}
    low: dict[N, int] = {}
    stack: list[N] = []
    on_stack: set[N] = set()
    components: list[list[N]] = []
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
                    component = stack[at:]
                    del stack[at:]
                    on_stack.difference_update(component)
                    if len(component) > 1 or node in graph.get(node, ()):
                        components.append(component)
    places = {node: place for place, node in enumerate(graph)}
    return sorted(
        (sorted(each, key=lambda node: places.get(node, 0)) for each in components),
        key=lambda component: places.get(component[0], 0),
    )
