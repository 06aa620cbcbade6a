"""Dining philosophers: actors that compete for forks, nobody starves, and nothing ever locks up.

A fork is an actor of its own. Taking one waits until it is free: `take` is concurrent, so that the fork can be put back
meanwhile. Every philosopher takes the fork with the lower number first; so there is no circle of waiting.
"""

from __future__ import annotations

import asyncio

from mesh_core import Actor, current_rank, endpoint, this_host

NAMES = ["Arendt", "Buber", "Confucius", "Diotima", "Epicurus"]
MEALS = 20


class Fork(Actor):
    """Lies between two philosophers, and is in one hand at a time."""

    def __init__(self) -> None:
        self.in_use = asyncio.Lock()
        self.taken = 0

    @endpoint(concurrent=True)
    async def take(self) -> bool:
        """Return once the fork is the caller's; say whether it had to wait."""
        waited = self.in_use.locked()
        await self.in_use.acquire()
        self.taken += 1
        return waited

    @endpoint
    async def put_back(self) -> None:
        """Lay it down for the neighbour."""
        self.in_use.release()

    @endpoint
    async def uses(self) -> int:
        return self.taken


class Philosopher(Actor):
    """Thinks, takes two forks, eats, and puts them back."""

    def __init__(self, forks: Fork) -> None:
        seat = current_rank()["seat"]
        first, second = sorted([seat, (seat + 1) % len(NAMES)])
        self.name, self.first, self.second = NAMES[seat], forks.slice(seat=first), forks.slice(seat=second)

    @endpoint
    async def dine(self, meals: int) -> str:
        """Eat so many meals."""
        waits = 0
        for _ in range(meals):
            await asyncio.sleep(0.001)  # thinking
            waits += await self.first.take.call_one()
            waits += await self.second.take.call_one()
            await asyncio.sleep(0.001)  # eating
            self.first.put_back.broadcast()
            self.second.put_back.broadcast()
        return f"{self.name} has eaten {meals} times and waited for a fork {waits} times"


def main() -> None:
    hosts = this_host()
    with hosts.spawn_procs({"procs": -(-len(NAMES) // len(hosts))}) as procs:
        table = procs.flatten("seat").slice(seat=slice(0, len(NAMES)))
        forks = table.spawn("forks", Fork)
        philosophers = table.spawn("philosophers", Philosopher, forks)
        for _, report in philosophers.dine.call(MEALS).get(timeout=60):
            print(report)
        print("forks were used", forks.uses.call().get(timeout=30).values(), "times")


if __name__ == "__main__":
    main()
