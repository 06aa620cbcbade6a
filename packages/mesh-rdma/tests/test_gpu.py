"""The tests of `on_gpu/`, on the stand-in for CUDA's driver; and what is told where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cuda_stand_in
from mesh_rdma import explain, transports
from mesh_rdma._native_transports import CUDA
from mesh_rdma.testing import missing_gpu

FOLDER = Path(__file__).with_name("on_gpu")
LIMIT = 900
"""Seconds for all tests of a file, on a machine that has much other work."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if reason := cuda_stand_in.missing():
        pytest.skip(reason)
    return cuda_stand_in.build(tmp_path_factory.mktemp("cuda"))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(
    "file", sorted(path.stem for path in FOLDER.glob("test_*.py") if path.stem != "test_torch")
)
def test_passes_on_the_stand_in(library, file):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        f"--timeout={LIMIT // 3}",
    ]
    done = subprocess.run(
        [*command, str(FOLDER / f"{file}.py")],
        env={**os.environ, "MESH_RDMA_CUDA_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    # None of them is left out: a stand-in that cannot be opened would skip them all.
    assert not re.search(r"\d+ skipped", done.stdout), done.stdout[-2000:]


@pytest.mark.skipif(missing_gpu() is None, reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so_and_what_to_do():
    told = CUDA.probe()
    assert not told
    assert "/dev/nvidiactl" in told.reason or "CUDA" in told.reason
    assert "NVIDIA's driver" in told.remedy
    (found,) = (each for each in transports() if each.name == "cuda")
    assert found.reason == told.reason


def test_memory_of_the_processor_is_not_offered_by_it():
    from mesh_rdma import RDMABuffer

    assert explain(RDMABuffer(bytearray(8))).passed["cuda"] == "the owner does not offer it"
