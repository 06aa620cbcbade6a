"""What a flood of garbage at a gateway costs the calls that go through it, and what the thrower alone costs them.

Windows alternate: nothing is thrown; the garbage goes to a plain server beside; it goes to the gateway. Calls are counted
from the first connection until the last has ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from meshbench.network import LOOPBACK, Agents, free_ports
from meshbench.processes import cpu_seconds

CONNECTIONS = 1000
SECONDS = 5.0
"""How long the flood takes, and the window in which nothing is thrown."""
_SLICE = 0.2
"""Seconds of calls between two looks whether the thrower is done."""


@dataclass(frozen=True)
class Window:
    """One stretch of time."""

    calls: float
    """Completed, a second."""
    agent: float
    """Seconds of processor time that the agent has had."""
    seconds: float
    """How long it was."""


Turn = tuple[Window, Window, Window]
"""Nothing thrown, thrown at the plain server, thrown at the gateway."""


def alternate(
    system: Any, turns: int, *, connections: int = CONNECTIONS, seconds: float = SECONDS
) -> list[Turn]:
    """Measure `turns` times three windows, over a `system` with another host."""
    agent, gateway = system.gateway()
    (port,) = free_ports(1)
    sink = Agents([[sys.executable, "-m", "meshbench.sink", str(port)]], [port])

    def quiet() -> Window:
        end = time.perf_counter() + seconds
        return _count(system, agent, lambda: time.perf_counter() < end)

    def beside(target: str) -> Window:
        with _thrower(target, connections, seconds) as busy:
            return _count(system, agent, busy)

    try:
        quiet()  # warms up
        return [(quiet(), beside(f"{LOOPBACK}:{port}"), beside(gateway)) for _ in range(turns)]
    finally:
        sink.end()


def slower(turns: list[Turn], than: int) -> float:
    """By how many percent fewer calls are completed with the gateway flooded than in another window of the same turn.

    Example:
        >>> slower([(Window(100, 1, 5), Window(80, 1, 5), Window(60, 1, 5))], 1)
        25.0
    """
    return median(100 * (1 - turn[2].calls / turn[than].calls) for turn in turns)


def garbage_cpu(turns: list[Turn], connections: int = CONNECTIONS) -> list[float]:
    """Seconds of the agent's processor time for each garbage connection: what it had beyond that of the quiet window.

    Example:
        >>> garbage_cpu([(Window(100, 1, 5), Window(90, 1, 5), Window(50, 1, 5))], 100)
        [0.005]
    """
    # Of what it has without garbage, most goes with the calls.
    return [
        (there.agent - quiet.agent / (quiet.calls * quiet.seconds) * there.calls * there.seconds)
        / connections
        for quiet, _, there in turns
    ]


def _count(system: Any, agent: int, busy: Callable[[], bool]) -> Window:
    cpu, start, calls = cpu_seconds([agent]), time.perf_counter(), 0
    while busy():
        calls += system.host_calls(_SLICE)
    seconds = time.perf_counter() - start
    return Window(calls / seconds, cpu_seconds([agent]) - cpu, seconds)


@contextmanager
def _thrower(target: str, connections: int, seconds: float) -> Iterator[Callable[[], bool]]:
    """Have garbage thrown; whether that still goes on can be asked."""
    command = [sys.executable, "-m", "meshbench.thrower", target, str(connections), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None  # both are pipes
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the thrower of garbage did not get ready")
            process.stdin.write("throw\n")
            process.stdin.flush()
            yield lambda: process.poll() is None
            told = json.loads(process.stdout.read())
        finally:
            process.kill()
    if sum(told.values()) != connections or "refused" in told:
        raise RuntimeError(f"of {connections} garbage connections to {target} became: {told}")
