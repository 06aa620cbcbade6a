"""Calls of all kinds, kept, dropped and cancelled."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

from actors import Beside
from client import Client
from world import LIMIT, NAMED

from mesh_core import ActorError, ActorTimeout, this_proc


class Caller(Client):
    """Calls the meshes that there are, and checks the answers."""

    async def call(self) -> None:
        site = self.pick()
        if site is None:
            return
        mesh, size = self.some(site)
        value = self.random.randrange(1000)
        name = self.random.choice(["echo", "aecho"])
        future = getattr(mesh, name).call(value)
        await self.settle(
            f"{name} of {size} on {site.name}",
            site,
            lambda: self.result(future),
            lambda got: got.values() == [value] * size,
        )

    async def burst(self) -> None:
        """Many calls to one actor, in order."""
        site = self.pick()
        if site is None:
            return
        rank = self.random.randrange(site.size)
        actor = site.workers.slice(gpus=rank)
        sender = f"{self.name}/{self.world.done['burst']}/{self.random.random()}"
        futures = [actor.next.call_one(sender, n) for n in range(self.random.randint(1, 200))]
        kept = futures if self.random.random() < 0.7 else futures[:3]
        del futures
        for n, future in enumerate(kept):
            await self.settle(
                f"burst {n} to rank {rank} of {site.name}",
                site,
                functools.partial(self.result, future),
                lambda step: step == 1,
            )

    async def big(self) -> None:
        """Through shared memory, there and back."""
        site = self.pick()
        if site is None:
            return
        mesh, size = self.some(site)
        length = self.random.choice([1, 65536, 300_000, 3_000_000, 20_000_000])
        data = bytearray(b"\x05") * length
        future = mesh.total.call(data)

        def check(got: Any) -> bool:
            return all(n == length and len(back) == length and back[0] == 7 for n, back in got.values())

        await self.settle(
            f"{length} bytes to {size} of {site.name}", site, lambda: self.result(future), check
        )
        if data[0] != 5:
            self.world.violate(f"{site.name} wrote into its caller's buffer")

    async def broadcast(self) -> None:
        site = self.pick()
        if site is None:
            return
        mesh, _ = self.some(site)
        try:
            for _ in range(self.random.randint(1, 50)):
                mesh.count.broadcast(b"x" * self.random.choice([1, 1000, 100_000]))
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"broadcast to {site.name}: {error!r}")

    async def stream(self) -> None:
        site = self.pick()
        if site is None:
            return
        mesh, size = self.some(site)
        stream = mesh.nap.stream(self.random.random() / 50)
        taken = size if self.random.random() < 0.7 else self.random.randint(0, size)
        for n, future in enumerate(stream):
            if n == taken:
                break
            await self.settle(
                f"stream {n} of {size} of {site.name}",
                site,
                functools.partial(self.result, future),
                lambda got: isinstance(got, float),
            )
        if taken < size and self.random.random() < 0.5:
            stream.cancel()

    async def choose(self) -> None:
        site = self.pick()
        if site is None:
            return
        futures = [site.workers.nap.choose(0.001) for _ in range(self.random.randint(1, 10))]
        for future in futures:
            await self.settle(
                f"choose of {site.name}",
                site,
                functools.partial(self.result, future),
                lambda got: got == 0.001,
            )

    async def cancel(self) -> None:
        site = self.pick()
        if site is None:
            return
        name = self.random.choice(["nap", "lull", "block"])
        future = getattr(self.one(site), name).call_one(0.02 if name == "block" else 0.2)
        if self.awaits and self.random.random() < 0.5:
            task = asyncio.ensure_future(self.result(future))
            await asyncio.sleep(self.random.random() / 100)
            task.cancel()
            try:
                await task
            except (asyncio.CancelledError, *NAMED):
                pass
            return
        future.cancel()
        try:
            await self.result(future)
        except (asyncio.CancelledError, *NAMED):
            pass

    async def deadline(self) -> None:
        """A call that cannot make it."""
        site = self.pick()
        if site is None:
            return
        mesh, _ = self.some(site)
        limit = self.random.choice([0.0001, 0.005, 0.05])
        future = mesh.nap.with_options(timeout=limit).call(30.0)
        started = time.monotonic()
        try:
            await self.result(future)
        except ActorTimeout:
            pass
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"deadline on {site.name}: {error!r}")
        else:
            self.world.violate(f"deadline on {site.name}: 30 s passed in {time.monotonic() - started:.1f} s")
        if time.monotonic() - started > LIMIT / 2:
            self.world.violate(
                f"deadline of {limit} s on {site.name} took {time.monotonic() - started:.1f} s"
            )

    async def drop(self) -> None:
        """Futures that nobody looks at."""
        site = self.pick()
        if site is None:
            return
        mesh, _ = self.some(site)
        mesh.nap.call(self.random.random() / 20)
        mesh.fail.call("value")
        mesh.nap.stream(0.01)
        mesh.total.call(bytearray(200_000))

    async def fail(self) -> None:
        site = self.pick()
        if site is None:
            return
        kind = self.random.choice(["value", "key", "own", "exit", "interrupt"])
        future = self.one(site).fail.call_one(kind)
        try:
            await self.result(future)
        except ActorError:
            pass
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"fail({kind}) on {site.name}: {error!r}")
        else:
            self.world.violate(f"fail({kind}) on {site.name} succeeded")
        whole = site.workers.afail.call()
        try:
            await self.result(whole)
        except OSError:
            pass
        except NAMED as error:
            if not site.harmed:
                self.world.violate(f"afail on {site.name}: {error!r}")

    async def nested(self) -> None:
        site = self.pick()
        if site is None:
            return
        future = self.one(site).nested.call_one(21)
        await self.settle(f"nested on {site.name}", site, lambda: self.result(future), lambda got: got == 42)

    async def local(self) -> None:
        """An actor in the controller itself."""
        mine: Any = this_proc().spawn("mine", Beside)
        future = mine.double.call_one(4)
        await self.settle("local", None, lambda: self.result(future), lambda got: got == 8)
        stopped = mine.stop()
        await self.settle("stop of local", None, lambda: self.result(stopped), lambda got: got is None)
