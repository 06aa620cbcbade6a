"""A kind of device for tests, `late`, by PyTorch's mechanism for devices of others: what it is for is told in `late.cpp`.

`build` compiles it with a C++ compiler, which takes a minute or two; `load` makes it known to a process, for good, once for each.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_name("late.cpp")
NAME = "late"
VARIABLE = "MESH_LATE_DEVICE"
"""Names the library to tests and the processes that they start."""


def missing() -> str | None:
    """Return why it cannot be built here; none if it can."""
    return None if shutil.which("c++") else "the late device needs a C++ compiler: apt-get install g++"


def build(folder: Path) -> Path:
    """Compile it for this process's PyTorch into a folder, unless it is there, and return its path."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    told = SOURCE.read_bytes() + torch.__version__.encode()
    library = folder / f"liblate-{hashlib.sha256(told).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{library.name}.{os.getpid()}"
        command = [
            "c++",
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            "-w",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        command += [f"-I{path}" for path in include_paths()]
        command += [f"-L{path}" for path in library_paths()]
        subprocess.run([*command, "-o", str(made), str(SOURCE), "-ltorch_cpu", "-lc10"], check=True)
        made.rename(library)
    return library


class _Module(ModuleType):
    """`torch.late`, as PyTorch asks for it."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """There is one."""

    def synchronize(self, device: Any = None) -> None:
        import torch

        torch.ops.late.synchronize()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Its random numbers are the CPU's."""

    def get_amp_supported_dtype(self) -> list[Any]:
        import torch

        return [torch.bfloat16, torch.float16]


def load(library: str | None = None) -> None:
    """Make it known to this process, and to the global and per-rank view in it. A function of this kind is what bootstrap= takes."""
    path = library or os.environ[VARIABLE]
    import torch

    if hasattr(torch, NAME):
        return
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    torch.ops.late.start()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))  # noqa: SLF001 - as its documentation says
    torch.utils.generate_methods_for_privateuse1_backend()
    if "mesh_tensor" not in sys.modules:
        __import__("mesh_tensor")
    from mesh_tensor import _devices

    _devices.DEVICES[NAME] = _late()


def _late() -> Any:
    import torch

    from mesh_tensor._devices import Device

    class Late(Device):
        """As CUDA's entry in the table does, with what this device has."""

        def mark(self) -> Any:
            return torch.ops.late.mark()

        def wait(self, event: Any) -> None:
            torch.ops.late.wait(event)

        def placed(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
            # Its queue keeps the copy, as PyTorch keeps pinned memory.
            return tensor.clone().to(kind, non_blocking=True)

        def brought(self, tensors: Any, kind: str) -> Any:
            return [each.to(kind, non_blocking=True) for each in tensors], self.mark()

        def taken(self, tensors: Any) -> Any:
            made = [torch.empty_like(each, device="cpu").copy_(each, non_blocking=True) for each in tensors]
            return made, self.mark()

        def finish(self, event: Any) -> None:
            torch.ops.late.finish(event)

    return Late()
