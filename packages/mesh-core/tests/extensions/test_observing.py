"""Extensions that observe endpoints, and find the actors that exist when they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mesh_core import Actor, MeshError, Port, context, endpoint, this_host
from mesh_core._common.current import current
from mesh_core.extensions import EndpointCall, Extension, Proc, Raised, install, local_actors, uninstall

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]


@pytest.fixture(autouse=True)
def _uninstalled() -> Any:
    yield
    for name in ("tally", "second", "broken"):
        with contextlib.suppress(MeshError):
            uninstall(name)


class Tally(Extension):
    """Records all that it is told of endpoints."""

    name = "tally"

    def start(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.running: set[EndpointCall] = set()

    def endpoint_began(self, call: EndpointCall) -> None:
        self.running.add(call)
        self.told.append(("began", call.name, call.class_name, call.point.rank, call.endpoint))
        assert context().actor_instance.name == call.name

    def endpoint_ended(self, call: EndpointCall, error: BaseException | None) -> None:
        self.running.remove(call)
        self.told.append(("ended", call.endpoint, type(error).__name__))

    def endpoint_raised(self, raised: Raised) -> None:
        self.told.append(("raised", raised.endpoint))

    def receive(self, message: str, sender: Proc) -> Any:
        if message == "actors":
            return [actor.name for actor in local_actors()]
        told, self.told = self.told, []
        return told, len(self.running)


class Second(Extension):
    """Observes only the ends."""

    name = "second"

    def start(self) -> None:
        self.ends = 0

    def endpoint_ended(self, call: EndpointCall, error: BaseException | None) -> None:
        self.ends += 1

    def receive(self, message: str, sender: Proc) -> int:
        return self.ends


class Broken(Extension):
    """Raises whenever it is told anything."""

    name = "broken"

    def endpoint_began(self, call: EndpointCall) -> None:
        raise RuntimeError("began")

    def endpoint_ended(self, call: EndpointCall, error: BaseException | None) -> None:
        raise RuntimeError("ended")


class Quiet(Extension):
    """Observes nothing."""

    name = "second"


class Worker(Actor):
    """Answers in every way."""

    @endpoint
    def plain(self, n: int) -> int:
        if n < 0:
            raise ValueError("negative")
        return n

    @endpoint
    async def awaited(self, n: int) -> int:
        await asyncio.sleep(0)
        if n < 0:
            raise ValueError("negative")
        return n

    @endpoint(concurrent=True)
    async def forever(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    def items(self) -> Iterator[int]:
        yield from range(3)

    @endpoint
    async def later(self) -> AsyncIterator[int]:
        for n in range(2):
            yield n

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Port[int], n: int) -> None:
        port.send(n)


def told(tally: Tally, procs: Any) -> Any:
    return tally.call(procs, "told").get(timeout=30).item()


def test_endpoints_of_every_kind_are_observed() -> None:
    tally = install(Tally)
    second = install(Second)
    with this_host().spawn_procs() as procs:
        worker = procs.spawn("worker", Worker)
        for name in ("plain", "awaited"):
            run = getattr(worker, name)
            assert run.call_one(1).get(timeout=30) == 1
            begin = ("began", "worker", "Worker", 0, name)
            assert told(tally, procs) == ([begin, ("ended", name, "NoneType")], 0)
            assert isinstance(run.call_one(-1).exception(timeout=30), ValueError)
            assert told(tally, procs) == ([begin, ("ended", name, "ValueError"), ("raised", name)], 0)
        assert [each.get() for each in worker.items.stream()] == [0, 1, 2]
        assert [each.get() for each in worker.later.stream()] == [0, 1]
        assert worker.by_port.call_one(7).get(timeout=30) == 7
        kinds, running = told(tally, procs)
        assert [each[:1] + each[-1:] if each[0] == "began" else each[:2] for each in kinds] == [
            (what, name) for name in ("items", "later", "by_port") for what in ("began", "ended")
        ]
        assert running == 0
        worker.plain.broadcast(1)
        assert worker.plain.call_one(2).get(timeout=30) == 2
        assert second.call(procs, "ends").get(timeout=30).item() == 9


def test_a_cancelled_endpoint_ends() -> None:
    tally = install(Tally)
    with this_host().spawn_procs() as procs:
        worker = procs.spawn("worker", Worker)
        future = worker.forever.call_one()
        assert worker.awaited.call_one(1).get(timeout=30) == 1
        future.cancel()
        events: list[Any] = []
        for _ in range(2000):
            more, running = told(tally, procs)
            events += more
            if running == 0:
                break
        assert ("ended", "forever", "CancelledError") in events and ("raised", "forever") not in events


def test_what_a_hook_raises_harms_no_call(caplog: pytest.LogCaptureFixture) -> None:
    install(Broken)
    with this_host().spawn_procs() as procs:
        worker = procs.spawn("worker", Worker)
        assert worker.plain.call_one(1).get(timeout=30) == 1
        assert worker.awaited.call_one(2).get(timeout=30) == 2
        assert isinstance(worker.plain.call_one(-1).exception(timeout=30), ValueError)


def test_an_extension_that_comes_later_finds_actors_and_observes_them_until_it_goes() -> None:
    with this_host().spawn_procs() as procs:
        workers = [procs.spawn(name, Worker) for name in ("one", "two")]
        for each in workers:
            each.plain.call_one(1).get(timeout=30)
        tally = install(Tally)
        with pytest.raises(MeshError, match=r"has no extension 'tally'.*install_on\(\)"):
            tally.call(procs, "told").get(timeout=30)
        tally.install_on(procs).get(timeout=30)
        assert tally.call(procs, "actors").get(timeout=30).item() == ["one", "two"]
        workers[0].plain.call_one(1).get(timeout=30)
        assert len(told(tally, procs)[0]) == 2


def test_endpoints_pay_nothing_where_no_class_observes_them() -> None:
    process = current()
    before = process.around
    install(Quiet)
    assert process.around == before
    uninstall("second")
    tally = install(Tally)
    assert process.around != before
    install(Second)
    uninstall(tally.name)
    assert process.around != before
    uninstall("second")
    assert process.around == before
