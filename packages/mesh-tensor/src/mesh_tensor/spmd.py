"""Programs written for torchrun, DDP, FSDP2 and DTensor inside a mesh, unchanged: the same program on every rank.

>>> import torch
>>> from mesh_core import this_host
>>> from mesh_tensor import spmd
>>> def total(n):
...     import torch.distributed as dist
...     x = torch.tensor(n * (dist.get_rank() + 1))
...     dist.all_reduce(x)
...     return int(x)
>>> with this_host().spawn_procs({"gpus": 2}) as procs:
...     print(spmd.setup(procs).run(total, 10).get(timeout=60).values())
[30, 30]
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mesh_core import Actor, context
from mesh_core.extensions import ProcEnd, current_proc, watch
from mesh_tensor._ranks import Layout, Ranks, Run, join, meetings

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core import ActorMesh, Future, ProcMesh, ValueMesh

__all__ = ["SPMD", "SPMDActor", "setup"]

P = ParamSpec("P")
R = TypeVar("R")
_TIMEOUT_S = 1800.0
_SETUP_S = 120.0


def setup(
    procs: ProcMesh,
    *,
    backend: str | None = None,
    timeout: float = _TIMEOUT_S,
    master_addr: str | None = None,
    start_timeout: float = _SETUP_S,
) -> SPMD:
    """Give each process of a mesh the environment of a torchrun rank, and return what runs functions and scripts on all of them.

    Ranks are those of the mesh, or of the slice that is given. The environment stays until the processes end or are set up again, so
    that :class:`SPMDActor` and code that calls ``init_process_group()`` in actors of any class find it. After a process was respawned set
    the mesh up again.

    Args:
        procs: where to run.
        backend: of process groups that :meth:`SPMD.run` makes; by default gloo, beside NCCL where each rank has a CUDA device.
        timeout: how many seconds a collective of theirs may take.
        master_addr: the address at which ranks on other hosts reach this process; by default its host's name.
        start_timeout: how many seconds the processes may take to start, and to import what they need; those that spawn them have the setting
            ``spawn_timeout`` besides.
    """
    if timeout <= 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    if start_timeout <= 0:
        raise ValueError(f"start_timeout must be positive, got {start_timeout}")
    meetings().install_on(procs).get(timeout=start_timeout)
    ranks = procs.spawn("spmd", Ranks)
    hosts = tuple(ranks.where.call().get(timeout=start_timeout).values())
    is_local = {*hosts} == {current_proc().host}
    layout = Layout(hosts, master_addr or ("127.0.0.1" if is_local else socket.gethostname()))
    job = SPMD(procs, layout, ranks, backend, timeout)
    ranks.enter.call(layout, job.meet(0)).get(timeout=start_timeout)
    return job


class SPMD:
    """The ranks of a mesh, as :func:`setup` has set them up."""

    def __init__(
        self,
        procs: ProcMesh,
        layout: Layout,
        ranks: ActorMesh[Ranks],
        backend: str | None,
        timeout: float,
    ) -> None:
        self.procs = procs
        self._layout = layout
        self._ranks = ranks
        self._meetings = meetings()
        self._backend = backend
        self._timeout = timeout
        self._job = self._meetings.next_job()
        self._points = [point for point, _ in procs]
        self._watch = watch(procs, self._ended)

    def __repr__(self) -> str:
        return f"<SPMD ranks of {self.procs}>"

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call a function on every rank, in a default process group that is there for this call.

        It is destroyed when the function has returned or raised; ranks that wait for one that has raised then raise as well, and say
        who was first. Calls run one after the other.
        """
        if not callable(function):
            raise TypeError(f"run() takes a function, got {function!r}")
        future: Future[ValueMesh[R]] = self._ranks.run.call(self._begin(), function, args, kwargs)
        return future

    def main(
        self, script: str | os.PathLike[str], *args: object, module: bool = False
    ) -> Future[ValueMesh[int]]:
        """Run a script on every rank as ``torchrun script args`` does, or a `module` by its name, and return the exit statuses.

        It runs as ``__main__`` in a thread of the process that is there, and makes its process group itself; what it leaves of
        it is destroyed. Its file must be there on every host. An exception that it raises is the rank's failure.
        """
        name = str(script) if module else str(Path(script).absolute())
        future: Future[ValueMesh[int]] = self._ranks.main.call(
            self._begin(), name, tuple(map(str, args)), module
        )
        return future

    def meet(self, ranks: int) -> int:
        """Open a store for so many ranks, or, for none, one that stays; return its port."""
        return self._meetings.open(self._job, ranks, local=self._layout.master == "127.0.0.1")

    def _begin(self) -> Run:
        return Run(
            self._layout, self.meet(len(self._layout.hosts)), current_proc(), self._backend, self._timeout
        )

    def _ended(self, end: ProcEnd) -> None:
        if end.failure is None or end.point is None:
            self._meetings.close(self._job)
        else:
            self._meetings.lost(self._job, self._points.index(end.point))


class SPMDActor(Actor):
    """Base class of actors that are ranks: each is in the default process group from its constructor until it ends.

    Set the processes up with :func:`setup` first, or spawn them with ``torch_env=True``. A process can have one such actor at a time.

    >>> import torch
    >>> from mesh_core import endpoint, this_host
    >>> from mesh_tensor import spmd
    >>> class Trainer(spmd.SPMDActor):
    ...     def __init__(self):
    ...         super().__init__()
    ...         from torch.nn.parallel import DistributedDataParallel
    ...         self.model = DistributedDataParallel(torch.nn.Linear(2, 1))
    ...     @endpoint
    ...     def step(self, x):
    ...         loss = self.model(torch.full((1, 2), x)).sum()
    ...         loss.backward()
    ...         return [each.grad.tolist() for each in self.model.parameters()][0]
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     ranks = spmd.setup(procs)
    ...     print(procs.spawn("trainers", Trainer).step.call(3.0).get(timeout=60).values())
    [[[3.0, 3.0]], [[3.0, 3.0]]]
    """

    def __init__(self, *, backend: str | None = None, timeout: float = _TIMEOUT_S) -> None:
        """Join the process group, together with the actors on all other ranks."""
        instance = context().actor_instance
        assert instance is not None, "actors are made by spawn"
        here = meetings()
        with here.turn:
            join(backend, timeout, under=f"actor {instance.actor_id}")
            self._member = here.member = instance.actor_id

    def __cleanup__(self, exc: BaseException | None) -> None:
        """Leave it: call this where you override it."""
        meetings().leave(self._member)
