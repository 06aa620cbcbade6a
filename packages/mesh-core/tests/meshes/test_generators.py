"""Generator endpoints: what they yield is a stream."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mesh_core import (
    Actor,
    ActorError,
    Channel,
    ProcMesh,
    as_endpoint,
    current_rank,
    endpoint,
    send,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

SOON = 30.0


class Source(Actor):
    """Yields, and records how its generators end."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @endpoint
    def count(self, n: int, *, fail_at: int | None = None) -> Iterator[int]:
        try:
            for i in range(n):
                if i == fail_at:
                    raise ValueError(f"no {i}")
                yield i
        finally:
            self.log.append("count over")

    @endpoint
    async def count_async(self, n: int, *, fail_at: int | None = None) -> AsyncIterator[int]:
        try:
            for i in range(n):
                if i == fail_at:
                    raise ValueError(f"no {i}")
                await asyncio.sleep(0)
                yield i
        finally:
            self.log.append("count_async over")

    @endpoint
    def places(self) -> Iterator[tuple[int, int]]:
        for i in range(3):
            yield current_rank().rank, i

    def plain(self, n: int) -> Iterator[int]:
        yield from range(n)

    @endpoint
    def logged(self) -> list[str]:
        return self.log


class SoftSource(Actor):
    """The same with coroutines only: they run on the loop."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.how = ""

    @endpoint(concurrent=True)
    async def forever(self, *, suspend: bool) -> AsyncIterator[int]:
        try:
            for i in itertools.count():
                yield i
                if suspend and i == 2:
                    await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.how = "cancelled"
            raise
        finally:
            self.how += " over"
            self.over.set()

    @endpoint(concurrent=True)
    async def ended(self) -> str:
        await self.over.wait()
        return self.how

    def plain(self, n: int) -> Iterator[int]:
        yield from range(n)

    async def plain_async(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i


@pytest.fixture
def source(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("source", Source)
    yield mesh
    mesh.stop().get(SOON)


@pytest.fixture
def soft(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.slice(hosts=0, gpus=0).spawn("soft", SoftSource)
    yield mesh
    mesh.stop().get(SOON)


@pytest.fixture
def one(source: Any) -> Any:
    return source.slice(hosts=0, gpus=1)


NAMES = ["count", "count_async"]


@pytest.mark.parametrize("name", NAMES)
def test_items_come_in_order(one: Any, name: str) -> None:
    assert [item.get(SOON) for item in getattr(one, name).stream(500)] == list(range(500))
    assert list(getattr(one, name).stream(0)) == []
    assert one.logged.call_one().get(SOON) == [f"{name} over"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_items_in_a_coroutine(one: Any, name: str) -> None:
    async def main() -> list[int]:
        return [await item async for item in getattr(one, name).stream(20)]

    assert asyncio.run(main()) == list(range(20))


def test_items_of_many_ranks_come_in_the_order_of_each(source: Any) -> None:
    items = [item.get(SOON) for item in source.places.stream()]
    assert len(items) == 12
    for rank in range(4):
        assert [i for place, i in items if place == rank] == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_an_error_in_the_middle_comes_after_the_items(one: Any, name: str) -> None:
    *items, last = list(getattr(one, name).stream(5, fail_at=3))
    assert [item.get(SOON) for item in items] == [0, 1, 2]
    with pytest.raises(ValueError, match="no 3") as caught:
        last.get(SOON)
    assert isinstance(caught.value, ActorError)


def test_items_come_while_the_generator_goes_on(soft: Any) -> None:
    items = iter(soft.forever.stream(suspend=True))
    assert [next(items).get(SOON) for _ in range(3)] == [0, 1, 2]
    del items
    assert soft.ended.call_one().get(SOON) == "cancelled over"


@pytest.mark.parametrize("how", ["break", "cancel", "async break"])
def test_leaving_the_loop_ends_the_generator(soft: Any, how: str) -> None:
    if how == "async break":

        async def main() -> None:
            async for item in soft.forever.stream(suspend=False):
                if await item == 5:
                    break

        asyncio.run(main())
    elif how == "break":
        for item in soft.forever.stream(suspend=False):
            if item.get(SOON) == 5:
                break
    else:
        stream = soft.forever.stream(suspend=True)
        next(iter(stream)).get(SOON)
        stream.cancel()
    assert soft.ended.call_one().get(SOON).endswith("over")


def test_leaving_the_loop_ends_a_sync_generator_at_its_next_item(one: Any) -> None:
    for item in one.count.stream(10**9):
        if item.get(SOON) == 5:
            break
    assert one.logged.call_one().get(SOON) == ["count over"]


@pytest.mark.parametrize("adverb", ["call", "call_one", "choose", "broadcast"])
def test_other_adverbs_name_stream(one: Any, adverb: str) -> None:
    for each in (one.count, one.count.with_options(timeout=5), pickle.loads(pickle.dumps(one)).count):
        with pytest.raises(TypeError, match=r"source\.count is a generator.*source\.count\.stream\(\.\.\.\)"):
            getattr(each, adverb)(3)
    with pytest.raises(ValueError, match="generator"):
        one.count.with_options(reduce="sum")


def test_wrong_arguments_are_refused_here(one: Any) -> None:
    with pytest.raises(TypeError, match="missing required argument 'n'"):
        one.count.stream()


def test_a_deadline_ends_the_generator(soft: Any) -> None:
    timeout, items = 0.2, list[int]()
    # A deadline that passes before it has yielded all is too short.
    while len(items) < 3:
        stream = iter(soft.forever.with_options(timeout=timeout).stream(suspend=True))
        items.clear()
        with pytest.raises(TimeoutError):
            items.extend(future.get(SOON) for future in stream)
        timeout *= 2
    assert items == [0, 1, 2]
    assert soft.ended.call_one().get(SOON) == "cancelled over"


@pytest.mark.parametrize("name", NAMES)
def test_items_to_any_port(one: Any, name: str) -> None:
    port, receiver = Channel[int].open()
    with receiver:
        send(getattr(one, name), (4,), port=port)
        assert [receiver.recv().get(SOON) for _ in range(4)] == [0, 1, 2, 3]


def test_plain_generators_as_endpoints(one: Any, soft: Any) -> None:
    for method in (one.plain, soft.plain, soft.plain_async):
        assert [item.get(SOON) for item in as_endpoint(method).stream(4)] == [0, 1, 2, 3]


def test_without_a_mesh_it_is_the_plain_method() -> None:
    source = Source()
    assert list(source.count(3)) == [0, 1, 2]
    assert source.logged() == ["count over"]


def test_a_generator_takes_no_response_port() -> None:
    with pytest.raises(TypeError, match="is a generator, whose items are its answers"):

        @endpoint(explicit_response_port=True)
        def both(self: Any, port: Any) -> Iterator[int]:
            yield 1


def test_streams_of_one_actor_take_turns(one: Any) -> None:
    found: list[list[int]] = [[], []]

    def read(into: list[int]) -> None:
        into += [item.get(SOON) for item in one.count_async.stream(50)]

    threads = [threading.Thread(target=read, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert found == [list(range(50))] * 2
