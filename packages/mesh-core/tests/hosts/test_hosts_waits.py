"""The wait-for graph over several hosts."""

from __future__ import annotations

import time
from typing import Any

import pytest
from core_hosts import cluster, hosts, runtime  # noqa: F401 - fixtures
from core_waits import WITHIN, AsyncWaiter, late_error, until_explained

from mesh_core import inspect

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime", "fault_tolerant")]


def test_circle_over_two_hosts(hosts: Any) -> None:  # noqa: F811
    with hosts.spawn_procs({"gpus": 1}, name="far") as procs:
        mesh = procs.spawn("c", AsyncWaiter)
        first, second = mesh.slice(hosts=0), mesh.slice(hosts=1)
        answer = first.ask.call_one(second, first)
        end = time.monotonic() + WITHIN
        while not ((graph := inspect.waits(WITHIN)).circles and graph.circles[0].is_stuck):
            assert time.monotonic() < end, graph
        assert {wait.proc for wait in graph.circles[0].waits} == {"far[0]", "far[1]"}
        assert graph.silent == ()
        until_explained("a deadlock", lambda: late_error(answer))
        answer.cancel()
