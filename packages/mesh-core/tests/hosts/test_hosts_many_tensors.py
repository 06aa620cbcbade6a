"""Messages of many small tensors between hosts: their blocks go through the agents, or past them."""

from __future__ import annotations

from typing import Any

import pytest
from core_samples import Echo

from mesh_core.testing import LocalCluster

torch: Any = pytest.importorskip("torch", reason="torch is not installed: mesh-core does without")

pytestmark = [pytest.mark.beside, pytest.mark.full]


def test_many_tensors_go_to_other_hosts_and_back() -> None:
    tensors = {f"layers.{number}": torch.full((number * 5,), float(number)) for number in range(1500)}
    tensors["large"] = torch.arange(1 << 20)
    with LocalCluster(hosts=2) as cluster:
        far = cluster.attach().spawn_procs().spawn("far", Echo)
        for back in far.echo.call(tensors).get(timeout=60).values():
            assert list(back) == list(tensors)
            assert all(torch.equal(each, back[name]) for name, each in tensors.items())
