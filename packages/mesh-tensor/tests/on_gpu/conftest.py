"""These tests need a GPU: `pytest packages/mesh-tensor/tests/on_gpu` runs them where there is one, and a few where there are two.

With MESH_GPU_REHEARSAL set they run on the CPU, and with MESH_LATE_DEVICE on the device of `tools/late_device`: those aside that ask for
CUDA's own streams or NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mesh_core import ProcMesh, this_host

torch = pytest.importorskip("torch")

import late_device  # noqa: E402

LATE = late_device.VARIABLE in os.environ
if LATE:
    late_device.load()

REHEARSAL = "MESH_GPU_REHEARSAL" in os.environ


@pytest.fixture(scope="session")
def kind() -> str:
    """The kind of device."""
    return late_device.NAME if LATE else "cpu" if REHEARSAL else "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.path.parent.name != "on_gpu":
            continue
        item.add_marker(pytest.mark.slow)
        if REHEARSAL or LATE:
            if item.get_closest_marker("cudas_own") or item.get_closest_marker("two_gpus"):
                item.add_marker(pytest.mark.skip(reason="what it asks for only CUDA has"))
        elif not count:
            item.add_marker(pytest.mark.skip(reason="PyTorch finds no CUDA device"))
        elif item.get_closest_marker("two_gpus") is not None and count < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices, and there is one"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "two_gpus: needs two CUDA devices")
    config.addinivalue_line(
        "markers", "cudas_own: asks for what no other device has, not even in a rehearsal"
    )


@pytest.fixture(scope="module")
def shared(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Two processes that share one GPU."""
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    more = {"bootstrap": late_device.load} if LATE else {}
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="shared", env=env, **more) as procs:
        yield procs


@pytest.fixture(scope="module")
def apart(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Two processes with a GPU each."""
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="apart") as procs:
        yield procs
