"""Replies and spawns to a process that was stopped, with the senders on another host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from core_hosts import cluster  # noqa: F401 - a fixture
from test_reply_budgets import (  # noqa: F401 - tests, and a fixture of theirs
    BUDGET,
    beside,
    test_a_process_that_stops_sends_its_last_replies_first,
    test_a_stopped_caller_holds_up_those_who_answer_it,
    test_deadlines_release_those_who_answer,
    test_the_death_of_the_caller_releases_those_who_answer_it,
    test_within_the_budget_others_are_answered_meanwhile,
)
from test_spawn_budgets import (  # noqa: F401 - tests
    test_a_coroutine_is_refused_beyond_the_budget_and_a_thread_waits,
    test_a_stop_waits_for_the_arguments_that_it_follows,
    test_arguments_wait_and_nothing_overtakes_them,
    test_references_may_be_sent_on_before_the_arguments_have_gone,
    test_the_death_of_the_process_drops_what_waits_for_it,
    test_the_death_of_the_spawner_answers_those_who_wait_for_its_actors,
)

from mesh_core import HostMesh, ProcMesh, configured, shutdown, this_proc
from mesh_core.testing import LocalCluster


@pytest.fixture(scope="module")
def hosts(cluster: LocalCluster) -> Iterator[HostMesh]:  # noqa: F811 - the fixture
    shutdown()
    with configured(link_budget=BUDGET):
        hosts = cluster.attach()
        with hosts.spawn_procs() as procs:
            procs.initialized.get(timeout=60)
        this_proc()
        yield hosts
        shutdown()


@pytest.fixture(scope="module")
def answering(hosts: HostMesh) -> Iterator[ProcMesh]:
    """On the second host."""
    with hosts.slice(hosts=1).spawn_procs(name="answering") as procs:
        procs.initialized.get(timeout=60)
        yield procs


@pytest.fixture
def asking(answering: ProcMesh, hosts: HostMesh) -> Iterator[ProcMesh]:
    """On the third host."""
    with hosts.slice(hosts=2).spawn_procs(name="asking", supervise=lambda failure: True) as procs:
        procs.initialized.get(timeout=60)
        yield procs


@pytest.fixture
def there(hosts: HostMesh) -> Iterator[ProcMesh]:
    """Two processes of the second host."""
    with hosts.slice(hosts=1).spawn_procs(
        per_host={"gpus": 2}, name="there", supervise=lambda failure: True
    ) as procs:
        procs.initialized.get(timeout=60)
        yield procs
