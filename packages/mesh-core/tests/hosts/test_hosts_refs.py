"""References to values of other hosts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from core_hosts import cluster, hosts, runtime  # noqa: F401 - fixtures
from core_refs import BUDGET, KIB, SIZE, Party

from mesh_core import Ref, RefLost, configured, put
from mesh_core._common.current import current

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime", "fault_tolerant")]

SOON = 30.0


def copies() -> int:
    """Return how many values of other hosts this host has copies of."""
    return current().runtime.counts()["copies"]


@pytest.fixture
def two(hosts: Any) -> Iterator[tuple[Any, Any]]:  # noqa: F811
    """An actor on each of two other hosts."""
    with configured(ref_budget=BUDGET), hosts.spawn_procs({"gpus": 1}, name="keepers") as procs:
        parties = procs.spawn("parties", Party)
        yield parties.slice(hosts=0), parties.slice(hosts=1)


def test_a_value_of_another_host_is_fetched(two: tuple[Any, Any]) -> None:
    first, second = two
    ref: Ref[Any] = first.make.with_options(keep=True).call_one(SIZE, 7).get(timeout=SOON)
    assert sum(ref.get(timeout=SOON)) == 7 * SIZE
    assert second.sum.call_one(ref).get(timeout=SOON) == 7 * SIZE
    assert second.kinds_async.call_one(ref, a=ref, b=[ref]).get(timeout=SOON) == [
        "bytearray",
        "bytearray",
        "list",
    ]
    second.hold.call_one("r", [ref]).get(timeout=SOON)
    assert second.await_value.call_one("r").get(timeout=SOON) == 7 * SIZE
    second.drop.call_one("r").get(timeout=SOON)
    del ref
    gc.collect()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


@pytest.fixture
def keeper_and_readers(hosts: Any) -> Iterator[tuple[Any, Any]]:  # noqa: F811
    """An actor on one host, and three on another."""
    with (
        configured(ref_budget=BUDGET),
        hosts.slice(hosts=1).spawn_procs(name="keeper") as keeper,
        hosts.slice(hosts=2).spawn_procs({"gpus": 3}, name="readers") as readers,
    ):
        yield keeper.spawn("keeper", Party), readers.spawn("readers", Party)


def test_a_value_comes_once_for_all_processes_of_a_host(keeper_and_readers: tuple[Any, Any]) -> None:
    keeper, readers = keeper_and_readers
    ref: Ref[Any] = keeper.make.with_options(keep=True).call_one(SIZE, 7).get(timeout=SOON)
    readers.hold.call("r", [ref]).get(timeout=SOON)
    assert readers.sum.call(ref).get(timeout=SOON).values() == [7 * SIZE] * 3
    assert [readers.slice(gpus=i).sum.call_one(ref).get(timeout=SOON) for i in range(3)] == [7 * SIZE] * 3
    assert keeper.fetched.call_one().get(timeout=SOON) == 1
    # The script is on a host of its own.
    for _ in range(2):
        assert sum(ref.get(timeout=SOON)) == 7 * SIZE
    assert keeper.fetched.call_one().get(timeout=SOON) == 2
    assert copies() == 1
    # What one of them writes is its own.
    value = ref.get(timeout=SOON)
    value[0] = 0
    assert sum(ref.get(timeout=SOON)) == 7 * SIZE
    readers.drop.call("r").get(timeout=SOON)
    del ref, value
    gc.collect()
    assert keeper.drained.call_one().get(timeout=SOON) == (0, 0)
    assert copies() == 0


def test_a_copy_outlives_those_that_have_read_it_and_ends_with_its_owner(
    hosts: Any,  # noqa: F811
    keeper_and_readers: tuple[Any, Any],
) -> None:
    _, readers = keeper_and_readers
    with configured(ref_budget=BUDGET), hosts.slice(hosts=1).spawn_procs(name="brief") as procs:
        keeper = procs.spawn("keeper", Party)
        ref: Ref[Any] = keeper.make.with_options(keep=True).call_one(SIZE, 7).get(timeout=SOON)
        first, others = readers.slice(gpus=0), readers.slice(gpus=slice(1, None))
        readers.hold.call("r", [ref]).get(timeout=SOON)
        assert first.await_value.call_one("r").get(timeout=SOON) == 7 * SIZE
        first.drop.call_one("r").get(timeout=SOON)
        assert others.await_value.call("r").get(timeout=SOON).values() == [7 * SIZE] * 2
        assert keeper.fetched.call_one().get(timeout=SOON) == 1
        assert sum(ref.get(timeout=SOON)) == 7 * SIZE
        assert copies() == 1
    with pytest.raises(RefLost, match="is lost"):
        ref.get(timeout=SOON)
    assert copies() == 0
    with pytest.raises(RefLost, match="is lost"):
        others.slice(gpus=0).await_value.call_one("r").get(timeout=SOON)


def test_a_value_of_the_script_is_fetched_by_other_hosts(two: tuple[Any, Any]) -> None:
    ref = put(bytearray([2]) * (300 * KIB))
    assert [each.sum.call_one(ref).get(timeout=SOON) for each in two] == [600 * KIB] * 2


def test_what_was_made_of_references_on_another_host_is_lost_with_its_process(hosts: Any) -> None:  # noqa: F811
    with hosts.spawn_procs({"gpus": 1}, name="brief") as procs:
        ref: Ref[Any] = (
            procs.spawn("p", Party).slice(hosts=1).make.with_options(keep=True).call_one().get(timeout=SOON)
        )
    with pytest.raises(RefLost, match="is lost"):
        ref.get(timeout=SOON)
