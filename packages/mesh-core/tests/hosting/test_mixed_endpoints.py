"""Actors with plain functions and coroutines: their thread and the loop take turns (STG-1, TURN-1)."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import (
    Actor,
    ActorTimeout,
    Port,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    as_endpoint,
    context,
    endpoint,
    inspect,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime")
WITHIN = 60.0
WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """A process that a test may do anything to."""
    with this_host().spawn_procs(name="own") as procs:
        procs.initialized.get(WITHIN)
        yield procs


class Both(Actor):
    """Notes what it handles, and fails if two endpoints overlap that may not."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.others: list[Any] = []
        self.busy = False
        self.gates: dict[str, asyncio.Event] = {}
        self.thread = threading.get_ident()
        WHERE.set("constructor")

    def _enter(self) -> None:
        assert not self.busy
        self.busy = True

    def _leave(self, value: Any) -> Any:
        self.busy = False
        self.seen.append(value)
        return value

    @endpoint
    def now(self, value: Any) -> Any:
        assert threading.get_ident() == self.thread
        self._enter()
        return self._leave(value)

    @endpoint
    async def later(self, value: Any) -> Any:
        assert threading.get_ident() != self.thread
        self._enter()
        await asyncio.sleep(0)
        return self._leave(value)

    @endpoint(concurrent=True)
    async def beside(self, value: Any) -> Any:
        """Overlaps with what comes after it."""
        await asyncio.sleep(0)
        self.others.append(value)
        return value

    @endpoint
    def items(self, value: Any) -> Iterator[Any]:
        self._enter()
        yield self._leave(value)

    @endpoint(explicit_response_port=True)
    async def answer(self, port: Port[Any], value: Any) -> None:
        self._enter()
        await asyncio.sleep(0)
        await port.send(self._leave(value))

    def plain(self, value: Any) -> Any:
        self._enter()
        return self._leave(value)

    async def plain_later(self, value: Any) -> Any:
        self._enter()
        await asyncio.sleep(0)
        return self._leave(value)

    @endpoint
    def all(self) -> tuple[list[Any], list[Any]]:
        return self.seen, self.others

    @endpoint
    async def hold(self, gate: str) -> str:
        """Occupies the actor until it is cancelled."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append(f"{gate} cancelled")
            raise
        return gate

    @endpoint(concurrent=True)
    async def wait(self, gate: str) -> str:
        await self.gates.setdefault(gate, asyncio.Event()).wait()
        return gate

    @endpoint
    async def open(self, gate: str) -> None:
        self.gates.setdefault(gate, asyncio.Event()).set()

    @endpoint
    def fail(self) -> None:
        raise ValueError("on the thread")

    @endpoint
    async def fail_later(self) -> None:
        raise ValueError("on the loop")

    @endpoint
    def where(self) -> tuple[str, str]:
        before, now = WHERE.get(), context().message_rank
        WHERE.set("thread")
        return before, str(now)

    @endpoint
    async def where_later(self) -> str:
        return WHERE.get()

    @endpoint
    def ask(self, other: Any, value: Any) -> Any:
        return [other.now.call_one(value).get(WITHIN), other.later.call_one(value).get(WITHIN)]

    @endpoint
    async def ask_later(self, other: Any, value: Any) -> Any:
        return [await other.now.call_one(value), await other.later.call_one(value)]

    @endpoint
    async def get_here(self, other: Any, name: str) -> Any:
        return getattr(other, name).call_one("got").get(WITHIN)


def send(actor: Any, chance: random.Random, value: int) -> Any:
    """Send a message in one of many ways; return its future, if it has one."""
    way = chance.randrange(11)
    if way < 2:
        (actor.later if way else actor.now).broadcast(value)
        return None
    if way == 2:
        return actor.beside.call_one(value)
    if way == 3:
        return as_endpoint(actor.plain).call_one(value)
    if way == 4:
        return as_endpoint(actor.plain_later).call_one(value)
    if way == 5:
        return actor.answer.call_one(value)
    if way == 6:
        return next(iter(actor.items.stream(value)))
    return (actor.now if way % 2 else actor.later).call_one(value)


@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures_are_handled_one_at_a_time_in_order(own: ProcMesh, seed: int) -> None:
    chance, actor = random.Random(seed), own.spawn("both", Both)
    futures = []
    for value in range(300):
        future = send(actor, chance, value)
        if future is not None:
            futures.append((value, future))
        if chance.random() < 0.1 and futures:
            # Now and then the inbox runs empty, and both wait.
            at, last = futures.pop(chance.randrange(len(futures)))
            assert last.get(WITHIN) == at
    for value, future in futures:
        assert future.get(WITHIN) == value
    seen, others = actor.all.call_one().get(WITHIN)
    assert seen == sorted(seen)
    assert sorted(seen + others) == list(range(300))


def test_what_is_not_an_endpoint_runs_where_its_kind_does(own: ProcMesh) -> None:
    actor: Any = own.spawn("both", Both)
    for _ in range(3):
        assert as_endpoint(actor.plain_later).call_one(1).get(WITHIN) == 1
        assert as_endpoint(actor.plain).call_one(2).get(WITHIN) == 2
        assert actor.later.call_one(3).get(WITHIN) == 3

    class Plain(Actor):
        """Has a thread, and no endpoint that is a coroutine."""

        @endpoint
        def thread(self) -> int:
            return threading.get_ident()

        async def loop(self) -> int:
            return threading.get_ident()

    plain: Any = own.spawn("plain", Plain)
    loops = [as_endpoint(plain.loop).call_one() for _ in range(3)]
    threads = {plain.thread.call_one().get(WITHIN) for _ in range(3)}
    there = {loop.get(WITHIN) for loop in loops}
    assert (len(there), len(threads), there & threads) == (1, 1, set())


def test_a_cancelled_coroutine_gives_the_turn_back(own: ProcMesh) -> None:
    actor: Any = own.spawn("both", Both)
    held = actor.hold.call_one("first")
    until_running("hold")
    behind = [actor.now.call_one(1), actor.later.call_one(2), actor.now.call_one(3)]
    never = actor.later.call_one("never")
    assert never.cancel()
    held.cancel()
    assert [each.get(WITHIN) for each in behind] == [1, 2, 3]
    assert actor.all.call_one().get(WITHIN)[0] == ["first cancelled", 1, 2, 3]


def test_deadlines_pass_whoever_has_the_turn(own: ProcMesh) -> None:
    actor: Any = own.spawn("both", Both)
    held = actor.hold.call_one("held")
    until_running("hold")
    late = [
        actor.now.with_options(timeout=0.1).call_one(1),
        actor.later.with_options(timeout=0.1).call_one(2),
    ]
    for each in late:
        assert isinstance(each.exception(WITHIN), ActorTimeout)
    held.cancel()
    assert actor.now.call_one(3).get(WITHIN) == 3
    # Its own deadline ends a coroutine, and with it its turn.
    assert isinstance(actor.hold.with_options(timeout=0.1).call_one("again").exception(WITHIN), ActorTimeout)
    assert actor.now.call_one(4).get(WITHIN) == 4
    assert [each for each in actor.all.call_one().get(WITHIN)[0] if each != "again cancelled"] == [
        "held cancelled",
        3,
        4,
    ]


@pytest.mark.parametrize("name", ["fail", "fail_later"])
def test_a_failure_ends_both(own: ProcMesh, told: Any, name: str) -> None:
    actor: Any = own.spawn("both", Both)
    waiting = actor.wait.call_one("never")
    assert actor.now.call_one(0).get(WITHIN) == 0
    getattr(actor, name).broadcast()
    behind = [actor.now.call_one(1), actor.later.call_one(2), actor.now.call_one(3)]
    assert told.next().mesh_name == "both"
    for each in [*behind, waiting]:
        assert isinstance(each.exception(WITHIN), SupervisionError)
    actor.stop().get(WITHIN)
    # An exception that a caller gets is nobody's failure.
    again: Any = own.spawn("again", Both)
    assert "on the" in str(getattr(again, name).call_one().exception(WITHIN))
    assert (again.now.call_one(1).get(WITHIN), again.later.call_one(2).get(WITHIN)) == (1, 2)


def test_a_constructor_that_raises_answers_both_kinds(own: ProcMesh) -> None:
    class Never(Both):
        def __init__(self) -> None:
            raise ValueError("never made")

    actor: Any = own.spawn("never", Never)
    for name in ("now", "later", "now"):
        assert "never made" in str(getattr(actor, name).call_one(1).exception(WITHIN))


def test_a_stop_comes_after_what_was_sent_and_before_what_comes(own: ProcMesh) -> None:
    actor: Any = own.spawn("both", Both)
    waiting = actor.wait.call_one("never")
    before = [(actor.now if n % 2 else actor.later).call_one(n) for n in range(20)]
    stopped = actor.stop()
    after = [actor.now.call_one(1), actor.later.call_one(2)]
    assert [each.get(WITHIN) for each in before] == list(range(20))
    stopped.get(WITHIN)
    assert isinstance(waiting.exception(WITHIN), Undeliverable)
    for each in after:
        assert each.exception(WITHIN) is not None


def test_a_process_ends_while_a_coroutine_has_the_turn(runtime: None) -> None:
    with this_host().spawn_procs() as procs:
        actor: Any = procs.spawn("both", Both)
        held = actor.wait.call_one("held")
        assert actor.later.call_one(1).get(WITHIN) == 1
    assert held.exception(WITHIN) is not None


def test_each_kind_has_its_contextvars(own: ProcMesh) -> None:
    actor: Any = own.spawn("both", Both)
    assert actor.where.call_one().get(WITHIN)[0] == "constructor"
    assert actor.where_later.call_one().get(WITHIN) == "nowhere"
    assert actor.where.call_one().get(WITHIN)[0] == "thread"


def test_each_kind_may_wait_for_either_of_another(own: ProcMesh) -> None:
    first: Any = own.spawn("first", Both)
    second: Any = own.spawn("second", Both)
    for n in range(20):
        assert first.ask.call_one(second, n).get(WITHIN) == [n, n]
        assert second.ask_later.call_one(first, n).get(WITHIN) == [n, n]


def test_waits_that_never_end_are_refused(own: ProcMesh) -> None:
    """WAIT-1 and WAIT-2."""
    first: Any = own.spawn("first", Both)
    second: Any = own.spawn("second", Both)
    for ask in (first.ask, first.ask_later):
        assert "waiting for its own endpoint" in str(ask.call_one(first, 1).exception(WITHIN))
    # A plain function runs on another thread, unless a coroutine on this very loop comes first.
    assert first.get_here.call_one(second, "now").get(WITHIN) == "got"
    assert "would block the thread" in str(first.get_here.call_one(second, "later").exception(WITHIN))
    held = second.hold.call_one("held")
    until_running("hold")
    assert "would block the thread" in str(first.get_here.call_one(second, "now").exception(WITHIN))
    held.cancel()
    assert first.get_here.call_one(second, "now").get(WITHIN) == "got"


def until_running(name: str) -> None:
    """Return once an endpoint runs."""
    until = time.monotonic() + WITHIN
    while not any(each.endpoint == name for actor in inspect.snapshot().actors for each in actor.running):
        assert time.monotonic() < until


def test_whoever_looks_sees_which_endpoint_runs_and_where(own: ProcMesh) -> None:
    class Stuck(Both):
        @endpoint
        def stick(self) -> None:
            threading.Event().wait()

    actor: Any = own.spawn("both", Stuck)
    held = actor.hold.call_one("held")
    until_running("hold")
    assert inspect.stacks(own).item().of("both").frames  # of its thread, which waits
    held.cancel()
    actor.stick.broadcast()
    until_running("stick")
    assert [frame.function for frame in inspect.stacks(own).item().of("both").own][-1] == "stick"
