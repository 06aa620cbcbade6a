"""How long the tensors of a mesh live, and where they can go."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import Usage, fetch, fetch_shard, share, usage  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def counts(procs: ProcMesh) -> list[int]:
    gc.collect()
    return [each.tensors for each in usage(procs).values()]


def test_tensors_are_freed_as_python_frees_them(procs: ProcMesh) -> None:
    before = counts(procs)
    x = share(torch.ones(4), procs).requires_grad_()
    y = x
    for _ in range(2000):
        y = y * 1.5
    y = y.tanh()
    (y[:2]).sum().backward()
    del y
    assert counts(procs) == [each + 2 for each in before]
    x.grad = None
    del x
    assert counts(procs) == before


def test_usage_counts_memory_once(procs: ProcMesh) -> None:
    (before, _) = usage(procs).values()
    x = share(torch.ones(1000), procs)
    y = x[10:]
    (after, _) = usage(procs).values()
    assert after == Usage(before.tensors + 2, before.nbytes + 4000)
    del x, y


def test_copies(procs: ProcMesh) -> None:
    x = torch.nn.Parameter(share(torch.ones(2), procs))
    both: Any = copy.deepcopy([x, x])
    assert both[0] is both[1]
    assert isinstance(both[0], torch.nn.Parameter)
    assert both[0].requires_grad
    with torch.no_grad():
        x.add_(1)
    assert fetch_shard(both[0].detach()).tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(x * 2)


def test_threads_issue_at_once(procs: ProcMesh) -> None:
    x = share(torch.zeros(2), procs)
    found: list[Any] = []

    def work(n: int) -> None:
        y = x
        for _ in range(300):
            y = y + n
        found.append((n, fetch_shard(y).tolist()))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(found) == [(n, [300.0 * n] * 2) for n in range(4)]


def test_meshes_are_the_same_wherever_they_come_from(procs: ProcMesh) -> None:
    assert procs.slice(gpus=0) == procs.slice(gpus=0)
    assert procs.slice(gpus=0) != procs.slice(gpus=1)
    x = share(torch.ones(1), procs.slice(gpus=0)) + share(torch.ones(1), procs.slice(gpus=0))
    assert fetch(x).item().tolist() == [2.0]
