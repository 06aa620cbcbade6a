"""`get_or_spawn_controller`: one actor of a name in a job."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from core_owners import WITHIN, Leaf, Soft, Told
from core_processes import Watch
from core_samples import Broken

from mesh_core import (
    Actor,
    SupervisionError,
    Undeliverable,
    endpoint,
    get_or_spawn_controller,
    set_fault_handler,
    shutdown,
    this_host,
)


@pytest.fixture
def job() -> Iterator[None]:
    """A runtime of its own: controllers live until it ends."""
    yield
    set_fault_handler(None)
    shutdown()


def test_many_who_ask_at_once_get_the_one(job: None) -> None:
    procs = this_host().spawn_procs({"n": 2})
    askers: Any = procs.spawn("askers", Asker)
    there = [askers.ask.call("shared") for _ in range(5)]
    with ThreadPoolExecutor(10) as pool:
        here = pool.map(lambda _: ask("shared"), range(10))
    pids = {*here, *(pid for call in there for pid in call.get(WITHIN).values())}
    assert len(pids) == 1
    assert asyncio.run(ask_async("shared")) in pids
    assert ask("another") not in pids


def ask(name: str) -> int:
    return int(get_or_spawn_controller(name, Leaf).get(WITHIN).pid.call_one().get(WITHIN))  # type: ignore[attr-defined]


async def ask_async(name: str) -> int:
    found: Any = await get_or_spawn_controller(name, Leaf)
    return int(await found.pid.call_one())


class Asker(Actor):
    """Asks for a controller from a worker."""

    @endpoint
    def ask(self, name: str) -> int:
        found: Any = get_or_spawn_controller(name, Leaf).get(WITHIN)
        return int(found.pid.call_one().get(WITHIN))


def test_a_controller_of_another_class_is_an_error(job: None) -> None:
    ask("classy")
    with pytest.raises(ValueError, match="is a Leaf, and a Soft was asked for"):
        get_or_spawn_controller("classy", Soft).get(WITHIN)
    with pytest.raises(TypeError, match="must be given a name and an actor class"):
        get_or_spawn_controller("classy", int)


def test_a_controllers_failing_constructor_is_reported_to_all_and_retried(job: None) -> None:
    calls = [get_or_spawn_controller("broken", Broken, "never was") for _ in range(3)]
    for call in calls:
        assert isinstance(call.exception(WITHIN), ValueError)
    found: Any = get_or_spawn_controller("broken", Leaf).get(WITHIN)
    assert found.pid.call_one().get(WITHIN)


@pytest.mark.parametrize("how", ["death", "failure"])
def test_a_controller_that_is_gone_is_replaced(job: None, how: str) -> None:
    told = Told()
    set_fault_handler(told.put)
    pids, watches = [], []
    for _ in range(3):
        found: Any = get_or_spawn_controller(f"mortal {how}", Leaf).get(WITHIN)
        pids.append(found.pid.call_one().get(WITHIN))
        watches.append(Watch(pids[-1:]))
        if how == "death":
            assert isinstance(found.exit.call_one(3).exception(WITHIN), SupervisionError)
        else:
            found.fail.broadcast(ValueError("no"))
            assert isinstance(found.pid.call_one().exception(WITHIN), (SupervisionError, Undeliverable))
    assert len(set(pids)) == 3
    assert [told.next().mesh_name for _ in range(3)] == [f"mortal {how}"] * 3
    assert told.empty()
    # No process of the replaced ones is left.
    for watch in watches:
        assert watch.wait() == []
