"""Every way to call an actor, in one file: adverbs, slices, futures, ports, errors, owners. Needs mesh-core alone."""

from __future__ import annotations

import asyncio
import os

from mesh_core import Actor, Channel, MeshError, MeshFailure, current_rank, endpoint, send, this_host


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
        return await asyncio.sleep(seconds, "slept")

    @endpoint
    def leave(self) -> None:
        print("leaves with", self.value)  # to be seen where the script runs
        os._exit(3)


class Owner(Actor):
    @endpoint(concurrent=True)
    async def lose_one(self) -> MeshFailure:
        self.heard: asyncio.Future[MeshFailure] = asyncio.Future()
        this_host().spawn_procs().spawn("mine", Counter, 0).leave.broadcast()
        return await self.heard

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.heard.set_result(failure)
        return True  # handled: nobody else hears of it


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

        # Futures: send first, wait later. In coroutines they are awaited.
        futures = [row.add.call(1) for _ in range(3)]
        print("pipelined", [future.get(timeout=30).values() for future in futures])
        print("asyncio  ", asyncio.run(asyncio.wait_for(row.sleep.call(0.01), timeout=30)).values())
        print("cancel   ", counters.sleep.call(60.0).cancel())

        # Errors: an exception comes with its own type.
        try:
            counters.add.call(-1).get(timeout=30)
        except ValueError as error:
            print("error    ", type(error).__name__, "says:", str(error).splitlines()[0])
        print("deadline ", counters.sleep.with_options(timeout=0.05).call(60.0).exception())

        # Ports: what is sent to one arrives where it was opened. Combined replies are one value.
        port, answers = Channel[int].open()
        send(counters.add, (0,), port=port)
        print("ports    ", sorted(answers.recv().get(timeout=30) for _ in range(4)))
        print("reduce   ", counters.add.with_options(reduce="sum").call(0).get(timeout=30))

        # A process that ends is an error for those who wait for it, and for its owner: here the script, there an actor.
        counters.slice(hosts=1, gpus=1).leave.broadcast()
        outcomes = counters.add.call(0).get(timeout=30, return_exceptions=True).values()
        print("outcomes ", ["dead" if isinstance(each, MeshError) else each for each in outcomes])
        print("failure  ", str(outcomes[3]).splitlines()[0])
        owner = procs.slice(hosts=0, gpus=0).spawn("owner", Owner)
        print("owner    ", owner.lose_one.call_one().get(timeout=30).headline())


if __name__ == "__main__":
    main()
