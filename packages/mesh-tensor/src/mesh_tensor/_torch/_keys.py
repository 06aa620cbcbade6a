"""Steps of PyTorch's dispatch that are left out where Python carries out an operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def resolving() -> Iterator[None]:
    """Carry out operators within a mode as outside of it: where their kernels conjugate or negate lazily, what they use then is resolved."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        torch._C.DispatchKey.Conjugate,
        torch._C.DispatchKey.Negative,
        torch._C.DispatchKey.ZeroTensor,
    ):
        left_out = left_out.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out):
        yield
