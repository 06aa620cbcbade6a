"""The steps of `./dev gpu`, in order of worth: what comes first is run even if the rest finds no time."""

from __future__ import annotations

from dataclasses import dataclass

RDMA = "packages/mesh-rdma/tests/on_gpu"
TENSOR = "packages/mesh-tensor/tests/on_gpu"


@dataclass(frozen=True)
class Step:
    """A program or some tests, run in a process of their own."""

    name: str
    what: tuple[str, ...]
    """A program and its arguments, or tests for pytest."""
    limit_s: float
    is_tests: bool = True
    needs_gpu: bool = True
    stands_in: bool = False
    """Without a GPU a rehearsal runs it on the stand-in for CUDA's driver, which a C compiler makes."""


def suite(name: str, *what: str, limit_s: float = 60, stands_in: bool = False) -> Step:
    """Return a step that runs tests."""
    return Step(name, what, limit_s, stands_in=stands_in)


def program(
    name: str, *what: str, limit_s: float = 60, needs_gpu: bool = True, stands_in: bool = False
) -> Step:
    """Return a step that runs a program."""
    return Step(name, what, limit_s, is_tests=False, needs_gpu=needs_gpu, stands_in=stands_in)


STEPS = (
    program("the machine", "benchmarks/gpu_machine.py", limit_s=60, needs_gpu=False),
    suite("buffers in GPU memory", f"{RDMA}/test_gpu.py", limit_s=60, stands_in=True),
    suite("buffers of PyTorch's tensors, mapped and by virtual memory", f"{RDMA}/test_torch.py", limit_s=60),
    suite("names of GPU memory for RDMA devices (dma-buf)", f"{RDMA}/test_dma_buf.py", limit_s=20, stands_in=True),
    suite("tensors per rank: two processes, one GPU", f"{TENSOR}/test_cuda.py", limit_s=75),
    suite("tensors in the global view: two processes, one GPU", f"{TENSOR}/test_global.py", limit_s=75),
    suite("NCCL with one rank", f"{TENSOR}/test_nccl.py", limit_s=45),
    program("a transformer, beside PyTorch alone and DDP", "benchmarks/gpu_training.py", limit_s=150),
    program("operators", "benchmarks/gpu_operators.py", limit_s=40),
    program("copies, beside the driver's own", "benchmarks/gpu.py", limit_s=60, stands_in=True),
    suite("transports, the whole conformance suite", f"{RDMA}/test_conformance.py", "-k", "not Stress", limit_s=90, stands_in=True),
    suite("transports under stress", f"{RDMA}/test_conformance.py", "-k", "Stress", limit_s=60, stands_in=True),
)  # fmt: skip
