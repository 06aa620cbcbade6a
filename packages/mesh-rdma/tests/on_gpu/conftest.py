"""These tests need memory of a GPU: `pytest packages/mesh-rdma/tests/on_gpu` runs them where there is one.

`test_gpu.py` runs them everywhere, on the stand-in for CUDA's driver, of which `MESH_RDMA_CUDA_LIBRARY` has the path then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from levels import level
from mesh_rdma._cuda import VARIABLE
from mesh_rdma._gpu import missing
from mesh_rdma.testing._ends import Process

ON_STAND_IN = VARIABLE in os.environ


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent.name == "on_gpu"]
    if ON_STAND_IN and level() != "all":
        left = [item for item in ours if "Stress" in item.nodeid]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    reason = missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.slow)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif not ON_STAND_IN and item.path.name == "test_stand_in.py":
            item.add_marker(pytest.mark.skip(reason="what it needs only the stand-in for CUDA's driver does"))


@pytest.fixture(scope="module")
def owner() -> Iterator[Process]:
    """A process with memory on a GPU, which no test ends."""
    made = Process("gpu")
    yield made
    made.end()


@pytest.fixture
def another() -> Iterator[Process]:
    """Such a process of the test's own."""
    made = Process("gpu")
    yield made
    made.end()
