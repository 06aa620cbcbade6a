"""Actors for pipelines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar

from core_refs import kept

from mesh_core import Actor, Pipeline, Port, Ref, Stage, context, endpoint, put

WITHIN = 30.0


class Marked:
    """A value that tells where it is unpickled."""

    def __init__(self, n: int, seen: tuple[int, ...] = ()) -> None:
        self.n = n
        self.seen = seen

    def __reduce__(self) -> Any:
        return _marked, (self.n, self.seen)


def _marked(n: int, seen: tuple[int, ...]) -> Marked:
    return Marked(n, (*seen, os.getpid()))


class ForActorsOnly:
    """A value that can be unpickled only where there is a worker."""

    def __init__(self, ref: Ref[bytearray] | None) -> None:
        self.ref = ref

    def __reduce__(self) -> Any:
        return _for_actors_only, (self.ref,)


def _for_actors_only(ref: Ref[bytearray] | None) -> ForActorsOnly:
    if not Worker.places:
        raise StopIteration
    return ForActorsOnly(ref)


class Worker(Actor):
    """Each endpoint is for a stage."""

    places: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.places.append(os.getpid())
        self.made = 0
        self.log: list[str] = []
        self.over = asyncio.Event()

    @endpoint
    def double(self, n: int) -> int:
        return 2 * n

    @endpoint
    def increment(self, n: int) -> int:
        return n + 1

    @endpoint
    def count(self, n: int) -> Iterator[int]:
        yield from range(n)

    @endpoint
    async def count_async(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    @endpoint
    def count_to_error(self, n: int) -> Iterator[int]:
        yield from range(n)
        if n > 2:
            raise ValueError(f"no more than {n}")

    @endpoint
    def pad(self, n: int) -> tuple[int, bytes]:
        return n, bytes(100_000)

    @endpoint
    def fountain(self, n: int) -> Iterator[bytes]:
        """Yield much, and count how much."""
        try:
            for _ in range(n):
                yield bytes(100_000)
                self.made += 1
        finally:
            self.log.append("fountain over")

    @endpoint
    def state(self) -> tuple[int, list[str]]:
        return self.made, self.log

    @endpoint
    def measure(self, data: bytes) -> int:
        return len(data)

    @endpoint
    def grow(self, data: bytearray) -> int:
        """Change what it was given: it is its own."""
        data[0] = 7
        return len(data)

    @endpoint
    def data(self, n: int) -> bytearray:
        return bytearray(n)

    @endpoint
    def put_two(self, n: int) -> list[Ref[bytearray]]:
        return [put(bytearray(n)), put(bytearray(2 * n))]

    @endpoint
    def measure_all(self, given: list[Ref[bytearray]]) -> list[int]:
        return [len(each.get()) for each in given]

    @endpoint
    def kept(self) -> int:
        return kept()[0]

    @endpoint
    def mark(self, n: int) -> Marked:
        return Marked(n)

    @endpoint
    def pass_on(self, marked: Marked) -> Marked:
        return marked

    @endpoint
    def for_actors_only(self, given: tuple[int, bool]) -> ForActorsOnly | None:
        n, with_ref = given
        return ForActorsOnly(put(bytearray(10_000)) if with_ref else None) if n else None

    @endpoint
    def for_actors_only_each(self, given: tuple[int, bool]) -> Iterator[ForActorsOnly | None]:
        n, with_ref = given
        yield ForActorsOnly(put(bytearray(10_000)) if with_ref else None) if n else None

    @endpoint
    def is_for_actors(self, value: object) -> bool:
        return isinstance(value, ForActorsOnly)

    @endpoint
    def divide(self, n: int) -> float:
        return 12 / n

    @endpoint
    def block(self, given: tuple[int, str]) -> int:
        """Return once the gate is open; a gate of no name is."""
        n, gate = given
        if gate:
            with Path(gate).open("rb", buffering=0) as file:
                file.read(1)
        return n

    @endpoint
    async def wait(self, told: Port[str]) -> None:
        """Wait until it is cancelled."""
        told.send("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.send("cancelled")
            raise

    @endpoint
    async def wait_unless_none(self, told: Port[str] | None) -> None:
        """The same, if there is anybody to tell."""
        if told is not None:
            told.send("begun")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.send("cancelled")
                raise

    @endpoint
    def die_once(self, given: tuple[int, str]) -> int:
        """Die of item 3, but not where another has died of it."""
        n, mark = given
        if n == 3:
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return n
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    @endpoint
    def die(self, n: int) -> int:
        """Die of item 3."""
        if n == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    @endpoint
    def yield_and_die(self, n: int) -> Iterator[int]:
        """Yield two values, and die of item 3 before the third."""
        yield 10 * n
        yield 10 * n + 1
        if n == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def who(self, _: int) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class User(Actor):
    """Runs a pipeline of its own."""

    @endpoint
    async def run_async(self, workers: Any, count: int) -> list[int]:
        pipeline = Pipeline(Stage(workers.count_async), Stage(workers.double), ordered=True)
        return [n async for n in pipeline.run([count])]

    @endpoint
    def run(self, workers: Any, count: int) -> list[int]:
        return list(Pipeline(Stage(workers.count), Stage(workers.double), ordered=True).run([count]))
