"""Processes to compute on. All of it needs PyTorch, which the package's user brings."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_core import ProcMesh, shutdown, this_host

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def runtime() -> None:
    """Goes on from one module to the next: its fork servers have imported PyTorch, which takes them many seconds."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Leave nothing running behind the last of these modules: those of other packages count what there is."""
    if nextitem is None or HERE not in nextitem.path.parents:
        shutdown()


@pytest.fixture(scope="session")
def preload() -> list[str]:
    """What fork servers import, once for all processes. Meshes with the same list share a fork server, and do not wait for PyTorch again."""
    return ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo"]


@pytest.fixture(scope="module")
def procs(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Two processes, which no test ends."""
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="pair") as procs:
        yield procs


@pytest.fixture(scope="module")
def grid(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Four processes in two dimensions."""
    with this_host().spawn_procs({"data": 2, "model": 2}, preload=preload, name="grid") as procs:
        yield procs


# A fork server serves spawns with its own environment, and PyTorch takes seconds to import. pytest changes this variable for each
# test, so that each test with preloaded modules would have a fork server of its own.


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    # Tensors that earlier tests have left in circles are not to go while this one counts: some milliseconds, as what was imported is passed over.
    gc.collect()
