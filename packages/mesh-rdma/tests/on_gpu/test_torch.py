"""Tensors of PyTorch on a GPU: where PyTorch and a GPU are at hand."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from mesh_rdma import Publication, RDMABuffer, explain

torch = pytest.importorskip("torch", reason="these tests need PyTorch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU here", allow_module_level=True)

OFFERS = """
import pickle, sys, torch
from mesh_rdma import RDMABuffer
tensor = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
buffers = [RDMABuffer(tensor), RDMABuffer(tensor.view(1024, 1024)[:, ::2])]
sys.stdout.buffer.write(pickle.dumps(buffers)); sys.stdout.buffer.flush()
sys.stdin.readline()
torch.cuda.synchronize()
sys.stdout.buffer.write(pickle.dumps(tensor.cpu())); sys.stdout.buffer.flush()
"""


@pytest.fixture(params=["", "expandable_segments:True"], ids=["cudaMalloc", "expandable segments"])
def there(request):
    """A process with tensors, and their buffers."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": request.param}
    command = [sys.executable, "-c", OFFERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        process.buffers = pickle.load(process.stdout)
        yield process
        process.stdin.close()
        process.kill()


def test_tensors_of_another_process_are_read_and_written(there):
    whole, columns = there.buffers
    expandable = "cuda" not in explain(whole).candidates
    for transport in ["tcp"] if expandable else ["cuda", "tcp"]:
        here = torch.zeros(1 << 20, device="cuda")
        whole.read_into(here, transport=transport).get(timeout=60)
        wanted = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
        assert torch.equal(here, wanted)
        half = torch.zeros(1024, 512)
        columns.read_into(half, transport=transport).get(timeout=60)
        assert torch.equal(half, wanted.view(1024, 1024)[:, ::2].cpu())
    whole.write_from(torch.full((1 << 20,), 7.0, device="cuda")).get(timeout=60)
    there.stdin.write(b"\n")
    there.stdin.flush()
    assert bool((pickle.load(there.stdout) == 7).all())


def test_the_current_stream_is_waited_for():
    """Of what is read from here, and of what is written over here."""
    there = torch.zeros(1 << 22)
    for _ in range(20):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 22, device="cuda")
            torch.cuda._sleep(20_000_000)  # noqa: SLF001 - the way to keep a stream busy
            tensor += 1
            RDMABuffer(there).write_from(tensor).get(timeout=60)
        assert bool((there == 1).all())
        there.zero_()


def test_weights_on_a_gpu_are_published_and_loaded():
    weights = {"w": torch.arange(1000.0, device="cuda")}
    publication = Publication(weights)
    try:
        reader = publication.reader()
        version = publication.publish()
        weights["w"].zero_()
        with reader.use() as published:
            assert published.version == version
            assert torch.equal(published["w"], torch.arange(1000.0))
    finally:
        publication.close()
