"""One who acts on meshes at random: how it waits, what it picks, and the meshes that it makes and stops."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Literal

from actors import Quick, Worker
from world import CROWD, LIMIT, NAMED, Site, World

from mesh_core import ActorTimeout, this_host


class Client:
    """One thread's (or task's) random actions. Each is a coroutine that a thread runs without a loop."""

    def __init__(self, world: World, name: str, seed: int, *, awaits: bool) -> None:
        self.world = world
        self.name = name
        self.random = random.Random(f"{seed}/{name}")
        self.awaits = awaits
        self.number = 0

    # Waiting, in this client's way.

    async def result(self, future: Any, limit: float = LIMIT) -> Any:
        if self.awaits:
            async with asyncio.timeout(limit):
                return await future
        return future.get(limit)

    async def settle(
        self, what: str, site: Site | None, wait: Callable[[], Any], check: Callable[[Any], bool]
    ) -> None:
        """Wait for a call; only a harmed site may fail it, and only with a named error."""
        started = time.monotonic()
        try:
            value = await wait()
        except NAMED as error:
            took = time.monotonic() - started
            late = isinstance(error, ActorTimeout) and took > LIMIT - 1
            if late or (site is not None and not site.harmed):
                self.world.violate(f"{what}: {type(error).__name__} after {took:.1f} s: {error}")
            else:
                self.world.note(f"{what}: {type(error).__name__}")
        except TimeoutError:
            self.world.violate(f"{what}: no answer within {LIMIT} s")
        else:
            if not check(value):
                self.world.violate(f"{what}: wrong answer {str(value)[:200]}")

    def pick(self) -> Site | None:
        with self.world.lock:
            return self.random.choice(self.world.sites) if self.world.sites else None

    def some(self, site: Site) -> tuple[Any, int]:
        """The whole mesh of workers, a part of it, or one."""
        first = self.random.randrange(site.size)
        last = self.random.randint(first + 1, site.size)
        if self.random.random() < 0.3:
            return site.workers, site.size
        return site.workers.slice(gpus=slice(first, last)), last - first

    def one(self, site: Site) -> Any:
        return site.workers.slice(gpus=self.random.randrange(site.size))

    async def spawn(self) -> None:
        world, rng = self.world, self.random
        size = rng.choice([1, 1, 2, 3, 5])
        with world.lock:
            crowd = sum(site.size for site in world.sites) + world.pending
            if crowd + size > CROWD:
                return
            world.pending += size
            world.spawned += 1
            name = f"site-{world.spawned}"
        try:
            start: Literal["fork", "exec"] = "exec" if rng.random() < 0.25 else "fork"
            preload = rng.choice([[], [], [], ["decimal"]])
            world.note(f"spawn {name} of {size} by {start}, preload={preload}")
            procs = this_host().spawn_procs(
                {"gpus": size}, name, start=start, preload=preload, env={"SITE": name}, bootstrap=None
            )
            workers: Any = procs.spawn("worker", Worker)
            quick: Any = procs.spawn("quick", Quick)
            site = Site(name, size, procs, workers, quick)
            with world.lock:
                world.sites.append(site)
        finally:
            with world.lock:
                world.pending -= size
        if rng.random() < 0.5:
            await self.settle(
                f"start of {name}", site, lambda: self.result(procs.initialized), lambda v: v is None
            )

    async def stop(self) -> None:
        with self.world.lock:
            if len(self.world.sites) < 2:
                return
            site = self.random.choice(self.world.sites)
            self.world.sites.remove(site)
            site.harmed = site.stopping = True
        self.world.note(f"stop {site.name}")
        stopped = site.procs.stop()
        if self.random.random() < 0.8:
            await self.settle(f"stop of {site.name}", None, lambda: self.result(stopped), lambda v: v is None)

    async def extra(self) -> None:
        """Actors that come and go on a site."""
        site = self.pick()
        if site is None:
            return
        broken = self.random.random() < 0.3
        # A mesh whose constructor raises fails its calls; the site itself is unharmed.
        made: Any = site.procs.spawn("extra", Worker, "no") if broken else site.procs.spawn("extra", Worker)
        future = made.echo.call(3)
        if broken:
            try:
                await self.result(future)
            except NAMED as error:
                if not site.harmed and not isinstance(error, ValueError):
                    self.world.violate(f"call to a broken actor of {site.name}: {error!r}")
            else:
                self.world.violate(f"call to a broken actor of {site.name} succeeded")
        else:
            await self.settle(f"extra of {site.name}", site, lambda: self.result(future), lambda v: True)
        if self.random.random() < 0.8:
            stopped = made.stop()
            await self.settle(
                f"stop of extra of {site.name}", None, lambda: self.result(stopped), lambda v: True
            )
