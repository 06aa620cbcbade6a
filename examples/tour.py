"""Every way to call an actor, in one file: adverbs, slices, futures, options, errors. Needs nothing but mesh-core."""

from __future__ import annotations

import asyncio
import os

from mesh_core import Actor, ActorTimeout, MeshError, SupervisionError, current_rank, endpoint, this_host


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def add(self, amount: int) -> int:
        if amount < 0:
            raise ValueError(f"cannot count down by {-amount}")
        self.value += amount
        return self.value

    @endpoint
    def where(self) -> str:
        return str(current_rank())

    @endpoint
    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    @endpoint
    def leave(self) -> None:
        os._exit(3)


async def from_asyncio(counters: Counter) -> list[str]:
    """Futures are awaitable, as often as wanted, and can be turned into asyncio's own."""
    futures = [counters.slice(gpus=0, hosts=host).sleep.call_one(0.01) for host in range(2)]
    return await asyncio.gather(*(future.as_asyncio() for future in futures))


def main() -> None:
    # Labels are yours to choose. On one machine this is a mesh of 2 times 2 processes.
    with this_host().spawn_procs({"hosts": 2, "gpus": 2}) as procs:
        counters = procs.spawn("counters", Counter, 10)  # returns at once; messages wait for the constructor
        print("mesh     ", counters)

        # Adverbs: the word after the endpoint says how to call.
        print("call     ", counters.add.call(1).get(timeout=30).values())
        print("call_one ", counters.slice(hosts=0, gpus=0).add.call_one(5).get(timeout=30))
        print("choose   ", counters.add.choose(0).get(timeout=30) in {11, 16})
        counters.add.broadcast(100)  # no reply; what is sent later arrives later
        print("broadcast", counters.add.call(0).get(timeout=30).values())
        print("stream   ", sorted(future.get(timeout=30) for future in counters.add.stream(0)))

        # Slices are meshes; so are results.
        row = counters.slice(hosts=1)
        print("slice    ", row.where.call().get(timeout=30).values())
        values = counters.add.call(0).get(timeout=30)
        print("results  ", [(point.rank, value) for point, value in values], values.item(hosts=1, gpus=0))
        print("flatten  ", counters.flatten("rank").slice(rank=-1).add.call_one(0).get(timeout=30))

        # Futures: send first, wait later.
        futures = [row.add.call(1) for _ in range(3)]
        print("pipelined", [future.get(timeout=30).values() for future in futures])
        print("asyncio  ", asyncio.run(from_asyncio(counters)))
        given_up = counters.sleep.call(60.0)
        print("cancel   ", given_up.cancel())

        # Errors: an exception comes with its own type.
        try:
            counters.add.call(-1).get(timeout=30)
        except ValueError as error:
            print("error    ", type(error).__name__, "says:", str(error).splitlines()[0])
        try:
            counters.sleep.with_options(timeout=0.05).call(60.0).get()
        except ActorTimeout as late:
            print("deadline ", late)

        # A process that ends is an error for those who wait for it, and for nobody else.
        try:
            counters.slice(hosts=1, gpus=1).leave.call_one().get(timeout=30)
        except SupervisionError as error:
            print("failure  ", str(error).splitlines()[0])
        outcomes = counters.add.call(0).get(timeout=30, return_exceptions=True)
        print("outcomes ", ["dead" if isinstance(each, MeshError) else each for each in outcomes.values()])


if __name__ == "__main__":
    main()
