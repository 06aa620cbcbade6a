"""One message at a time, and what may wait for what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flow_samples import Caller, Plain

from mesh_core import ActorTimeout, MeshError, ProcMesh

pytestmark = pytest.mark.python


@pytest.fixture
def pair(procs: ProcMesh) -> Iterator[tuple[Any, Any]]:
    """Two actors in two processes."""
    first = procs.slice(hosts=0, gpus=0).spawn("first", Caller)
    second = procs.slice(hosts=0, gpus=1).spawn("second", Caller)
    yield first, second
    first.stop().get(timeout=30)
    second.stop().get(timeout=30)


@pytest.fixture
def plain(procs: ProcMesh) -> Iterator[Any]:
    """An actor with its own thread, in the first one's process."""
    mesh = procs.slice(hosts=0, gpus=0).spawn("plain", Plain)
    yield mesh
    mesh.stop().get(timeout=30)


def test_an_actor_awaiting_itself_is_refused_at_once(pair: tuple[Any, Any]) -> None:
    """WAIT-1."""
    first, _ = pair
    for name in ("ping", "ping_concurrently"):
        with pytest.raises(MeshError, match="actor 'first' is waiting for its own endpoint"):
            first.wait_for.call_one(first, name).get(timeout=20)
    assert first.ping.call_one().get(timeout=20) == "pong"


def test_a_sync_actor_that_waits_for_itself_is_refused_at_once(plain: Any) -> None:
    """WAIT-1, for a sync actor."""
    with pytest.raises(MeshError, match="actor 'plain' is waiting for its own endpoint"):
        plain.get.call_one(plain, "ping").get(timeout=20)
    assert plain.ping.call_one().get(timeout=20) == "pong"


def test_a_concurrent_endpoint_may_await_its_actor(pair: tuple[Any, Any]) -> None:
    first, _ = pair
    for name in ("ping", "ping_concurrently"):
        assert first.wait_for_concurrently.call_one(first, name).get(timeout=20) == "pong"


def test_an_actor_may_call_itself_without_waiting(pair: tuple[Any, Any]) -> None:
    first, _ = pair
    first.send.call_one(first, "ping").get(timeout=20)
    assert first.collect.call_one().get(timeout=20) == "pong"


def test_two_actors_may_call_each_other_if_one_is_concurrent(pair: tuple[Any, Any]) -> None:
    first, second = pair
    assert first.back_concurrently.call_one(second, first).get(timeout=20) == "pong"


def test_two_actors_waiting_for_each_other_end_by_their_deadline(pair: tuple[Any, Any]) -> None:
    first, second = pair
    with pytest.raises(ActorTimeout):
        first.back.with_options(timeout=0.3).call_one(second, first).get(timeout=20)
    for each in pair:
        assert each.ping.call_one().get(timeout=20) == "pong"


def test_a_sync_endpoint_may_block_on_the_loop_of_its_process(pair: tuple[Any, Any], plain: Any) -> None:
    first, second = pair
    for other in (first, second):
        assert plain.get.call_one(other, "ping").get(timeout=20) == "pong"


def test_get_on_the_loop_for_an_answer_of_this_loop_is_refused(
    pair: tuple[Any, Any], procs: ProcMesh
) -> None:
    """WAIT-2."""
    first, second = pair
    neighbour = procs.slice(hosts=0, gpus=0).spawn("neighbour", Caller)
    neighbour.initialized.get(timeout=30)
    for local in (neighbour, first):
        with pytest.raises(MeshError, match="Await it"):
            first.get.call_one(local, "ping").get(timeout=20)
    # An answer from elsewhere is fine.
    assert first.get.call_one(second, "ping").get(timeout=20) == "pong"
    neighbour.stop().get(timeout=30)


def test_get_on_the_loop_for_an_answer_of_a_thread_is_allowed(pair: tuple[Any, Any], plain: Any) -> None:
    first, _ = pair
    plain.initialized.get(timeout=30)
    assert first.get.call_one(plain, "ping").get(timeout=20) == "pong"
