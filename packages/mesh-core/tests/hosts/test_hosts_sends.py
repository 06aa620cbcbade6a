"""The tests of sending in coroutines, and of budgets of channels and streams, repeated with the processes on two other hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_channel_budgets
import test_sends
import test_stream_budgets
from core_hosts import over_hosts

from mesh_core import ProcMesh, configured, shutdown
from mesh_core.testing import LocalCluster

globals().update(over_hosts(test_sends))
globals().update(over_hosts(test_channel_budgets))
globals().update(over_hosts(test_stream_budgets))


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Two processes, each on a host of its own, with small budgets."""
    shutdown()
    with (
        configured(mailbox_budget=test_sends.BUDGET, link_budget=test_sends.WAITING),
        LocalCluster(hosts=2) as cluster,
        cluster.attach().spawn_procs(per_host={"cores": 1}, name="sends") as procs,
    ):
        procs.initialized.get(timeout=60)
        yield procs.flatten("gpus")
        shutdown()
