"""References to values of other hosts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from core_hosts import cluster, hosts, runtime  # noqa: F401 - fixtures
from core_refs import BUDGET, KIB, SIZE, Party

from mesh_core import Ref, RefLost, configured, put

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime", "fault_tolerant")]

SOON = 30.0


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
