"""What this machine has: its GPU, PyTorch and what that was built for. `./dev gpu` runs it first."""

from __future__ import annotations

import os
import platform

import torch


def main() -> None:
    print(f"Python {platform.python_version()}, {os.cpu_count()} processors, {platform.release()}")
    print(f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}")
    if not torch.cuda.is_available():
        print(f"in short: no GPU here; PyTorch {torch.__version__}, Python {platform.python_version()}")
        return
    one = torch.cuda.get_device_properties(0)
    print(
        f"{torch.cuda.device_count()} × {one.name}, {one.total_memory >> 30} GiB, capability {one.major}.{one.minor}"
    )
    if torch.distributed.is_nccl_available():
        print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    x = torch.randn(1024, 1024, device="cuda")
    # Wrong numbers here would make everything that follows pointless.
    torch.testing.assert_close((x @ x).cpu(), x.cpu() @ x.cpu(), rtol=1e-2, atol=1e-1)
    print(f"in short: {one.name}, PyTorch {torch.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
