"""The part of :mod:`mesh_tensor.spmd` in each process.

SPD-1: every run has a store of its own. A rank that fails has it closed before leaving its process group, so that nobody waits for a rank that does
not come, and ranks that fail later learn who was first.
SPD-2: a rank that has done its work in a run stays in the process group until all ranks have joined it.
"""

from __future__ import annotations

import itertools
import os
import runpy
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from mesh_core import Actor, MeshError, context, endpoint
from mesh_core.extensions import Extension, LocalActor, Proc, current_proc, find, install

_ASK_S = 10.0
_JOIN_S = 30.0
_REFUSE_S = 0.25
"""How long late ranks may wait for a rank that has failed."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a mesh are."""

    hosts: tuple[str, ...]
    """The host of each rank."""
    master: str

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """Return the variables that torchrun would set for a rank."""
        mine = self.hosts[rank]
        on_host = [each for each, host in enumerate(self.hosts) if host == mine]
        order = list(dict.fromkeys(self.hosts))
        size = str(len(self.hosts))
        return {
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(on_host.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(on_host)),
            "GROUP_RANK": str(order.index(mine)),
            "GROUP_WORLD_SIZE": str(len(order)),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"mesh-{port}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # The store exists, and the first rank must not make one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.hosts)) == 1


class _Meeting:
    """A store, and what is known about those that meet at it."""

    def __init__(self, job: int, ranks: int, address: str) -> None:
        self.job = job
        self.left = set(range(ranks))
        """Ranks that have not reported that they are done."""
        self.first: tuple[int, str] | None = None
        """The first rank that has failed, and why."""
        self.refuser: threading.Thread | None = None
        self._listening = socket.create_server((address, 0))
        self.port: int = self._listening.getsockname()[1]
        self._store: Any = None
        self.begin()

    def begin(self) -> None:
        """Open a store; those that wait at the previous one raise."""
        self._store = None
        self._store = serve(self._listening)

    def close(self) -> None:
        """Close the store."""
        self._store = None
        self._listening.close()


def serve(listening: socket.socket) -> Any:
    """Open a store at a socket, which stays the caller's."""
    from torch._C._distributed_c10d import TCPStore

    host, port, *_ = listening.getsockname()
    # Without a socket it would listen on all addresses. It closes its own copy of this one.
    listens = os.dup(listening.fileno())
    reached = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    return TCPStore(reached, port, is_master=True, wait_for_workers=False, master_listen_fd=listens)


@dataclass(frozen=True)
class Run:
    """One run on all ranks."""

    layout: Layout
    port: int
    owner: Proc
    """The process that has started it."""
    backend: str | None
    timeout: float


@dataclass(frozen=True)
class _Failed:
    """A message: this rank has failed. Which was the first?"""

    port: int
    rank: int
    why: str


@dataclass(frozen=True)
class _Done:
    """A message: a rank has ended its run, with or without an error."""

    port: int
    rank: int


class Meetings(Extension):
    """Keeps the stores at which ranks meet, in the process that sets them up.

    Not in the process of the first rank, as under torchrun: PyTorch keeps the interpreter's lock while a rank waits for others, and that
    process could not be told that one of them will not come.
    """

    name = "mesh_tensor.spmd"

    def start(self) -> None:
        """Have none yet."""
        self._open: dict[int, _Meeting] = {}
        self._changed = threading.Condition()
        self._jobs = itertools.count(1)
        self.turn = threading.Lock()
        """Held by a run that changes the environment and the group of this process: runs wait for each other."""
        self.member: int | None = None
        """The actor of this process that has joined the default group for its life."""

    def make_actor(self, actor: LocalActor) -> Any:
        """Let an actor whose constructor raises leave the group: `__cleanup__` is only for constructed ones."""
        try:
            return actor.construct()
        except BaseException:
            self.leave(actor.id)
            raise

    def leave(self, actor: int) -> None:
        """Leave the default group, if this actor has joined it."""
        if self.member == actor:
            self.member = None
            leave()

    def stop(self) -> None:
        """Close all."""
        with self._changed:
            refusers = [each.refuser for each in self._open.values() if each.refuser is not None]
            for port in list(self._open):
                self._close(port)
        for each in refusers:
            each.join()

    def next_job(self) -> int:
        """Return a number for ranks that are set up together."""
        return next(self._jobs)

    def open(self, job: int, ranks: int = 0, *, local: bool) -> int:
        """Open a store for so many ranks, or, for none, one that stays; return its port."""
        meeting = _Meeting(job, ranks, "127.0.0.1" if local else "")
        with self._changed:
            self._open[meeting.port] = meeting
        return meeting.port

    def lost(self, job: int, rank: int) -> None:
        """A rank's process has died: nobody should wait for it."""
        with self._changed:
            for port, each in list(self._open.items()):
                if each.job == job:
                    if each.left - {rank}:
                        each.first = each.first or (rank, "the death of its process")
                        self._refuse(port, each)
                    self._done(port, rank)

    def close(self, job: int) -> None:
        """Forget all of them."""
        with self._changed:
            for port in [port for port, each in self._open.items() if each.job == job]:
                self._close(port)

    def receive(self, message: Any, sender: Proc) -> Any:
        """A rank has reported its outcome."""
        with self._changed:
            meeting = self._open.get(message.port)
            if meeting is None:
                return None
            match message:
                case _Failed(port, rank, why):
                    meeting.first = meeting.first or (rank, why)
                    if meeting.left - {rank}:
                        self._refuse(port, meeting)
                    return meeting.first
                case _Done(port, rank):
                    self._done(port, rank)
                    return None
        raise TypeError(f"not a message of ranks: {message!r}")

    def _done(self, port: int, rank: int) -> None:
        meeting = self._open[port]
        meeting.left.discard(rank)
        if not meeting.left:
            self._close(port)

    def _close(self, port: int) -> None:
        self._open.pop(port).close()
        self._changed.notify_all()

    def _refuse(self, port: int, meeting: _Meeting) -> None:
        """Make everyone raise who waits at a store, or will: a rank that finds nobody there retries for half an hour."""
        if meeting.refuser is None:
            meeting.refuser = threading.Thread(
                target=self._keep_refusing, args=(port, meeting), name="mesh-tensor-refuse", daemon=True
            )
            meeting.refuser.start()

    def _keep_refusing(self, port: int, meeting: _Meeting) -> None:
        with self._changed:
            while self._open.get(port) is meeting:
                meeting.begin()
                self._changed.wait(_REFUSE_S)


class Ranks(Actor):
    """Runs functions and scripts, one after the other."""

    @endpoint
    def where(self) -> str:
        """Return this process's host."""
        return current_proc().host

    @endpoint
    def enter(self, layout: Layout, port: int) -> None:
        """Set this process's environment."""
        with meetings().turn:
            os.environ.update(layout.environment(context().message_rank.rank, port))
            if layout.is_local and Path("/sys/class/net", _LOOPBACK).exists():
                # Otherwise gloo looks up its own host's name, which may take seconds and may fail.
                os.environ.setdefault(_INTERFACE, _LOOPBACK)
            elif not layout.is_local and os.environ.get(_INTERFACE) == _LOOPBACK:
                del os.environ[_INTERFACE]

    @endpoint
    def run(
        self,
        run: Run,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function with a process group."""
        with _ranked(run):
            group = join(run.backend, run.timeout)
            with _stays(group, len(run.layout.hosts)):
                return function(*args, **kwargs)

    @endpoint
    def main(self, run: Run, script: str, args: tuple[str, ...], module: bool) -> int:
        """Run a script, and return its exit status."""
        with _ranked(run), _arguments(script, args, module):
            try:
                if module:
                    runpy.run_module(script, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                return _status(end.code)
            finally:
                for each in (sys.stdout, sys.stderr):
                    each.flush()
        return 0


def join(backend: str | None, timeout: float, *, under: str | None = None) -> Any:
    """Join the default process group that this environment names, for the first time or `under` a name; return its store, if Mesh has made that."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if dist.is_initialized():
        raise MeshError(
            f"{_here()} has a default process group already, and PyTorch has one in a process: stop the actors that use it, "
            "or call torch.distributed.destroy_process_group() there"
        )
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise MeshError(
            f"{_here()} has no {missing[0]} in its environment: call spmd.setup(procs) before the actors are spawned"
        )
    limit = timedelta(seconds=timeout)
    name = backend or _backend()
    if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        dist.init_process_group(name, timeout=limit)
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # If nobody listens any longer where a group is joined for life, that should be known soon.
    reached = limit if under is None else timedelta(seconds=min(timeout, _JOIN_S))
    try:
        store = TCPStore(host, port, is_master=False, timeout=reached)
        store.set_timeout(limit)
        # Leftovers of an earlier life of these actors must not be taken for this one's; a run has a store of its own.
        life = "run" if under is None else f"{under}/{(store.add(f'{under}/joined', 1) - 1) // size}"
        group = PrefixStore(life, store)
        dist.init_process_group(name, store=group, rank=rank, world_size=size, timeout=limit)
    except dist.DistError as error:
        if under is None:
            raise
        _recover()
        raise MeshError(
            f"rank {rank} of {size} cannot join its process group at {host}:{port}, where a process has ended since it was set up, or "
            f"has not come: {error}. Respawn what has ended, and call spmd.setup(procs) again."
        ) from error
    return group


@contextmanager
def _stays(group: Any, size: int) -> Iterator[None]:
    """Work in a group, and be ready to leave it once all ranks have joined (SPD-2).

    PyTorch returns from joining when a rank has its own connections. Others may still be making theirs, and raise if it leaves.
    """
    from torch.distributed import DistError

    # A rank that has failed makes this raise, and it will not come: what this one has done is done.
    with suppress(DistError):
        if group.add("joined", 1) == size:
            group.set("all joined", "")
    yield
    with suppress(DistError):
        group.wait(["all joined"])


def leave() -> None:
    """Leave the default process group, if there is one: those that wait for this process in it raise."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _recover() -> None:
    """Let the next group begin as on ranks whose last one was made successfully: PyTorch also counts failed ones."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


@contextmanager
def _ranked(run: Run) -> Iterator[None]:
    """Be one rank of a run."""
    rank = context().message_rank.rank
    with meetings().turn:
        mine = run.layout.environment(rank, run.port)
        before = {name: os.environ.get(name) for name in mine}
        # The group of an actor that lives here: a failure caused by it must not end the actor.
        is_taken = meetings().member is not None
        os.environ.update(mine)
        try:
            yield
        except BaseException as error:
            cause = _cause(run, rank, error)
            _recover()
            if cause is None or not _follows(error):
                raise
            first, why = cause
            raise MeshError(f"rank {first} had failed first, with {why}; then here: {error}") from error
        finally:
            if not is_taken:
                leave()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            meetings().tell(run.owner, _Done(run.port, rank))


def _cause(run: Run, rank: int, error: BaseException) -> tuple[int, str] | None:
    """Report that this rank has failed, and return which one did so first, if it was another one."""
    why = f"{type(error).__name__}: {error}"
    first: tuple[int, str] | None = None
    with suppress(MeshError):
        first = meetings().call(run.owner, _Failed(run.port, rank, why)).get(timeout=_ASK_S).item()
    return None if first is None or first[0] == rank else first


def meetings() -> Meetings:
    return find(Meetings) or install(Meetings)


def _follows(error: BaseException) -> bool:
    """Return whether an error is one that PyTorch raises when another rank has gone."""
    dist = sys.modules.get("torch.distributed")
    return type(error) is RuntimeError or (dist is not None and isinstance(error, dist.DistError))


@contextmanager
def _arguments(script: str, args: tuple[str, ...], module: bool) -> Iterator[None]:
    """Make the interpreter look as if it had been started with a script."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path.cwd() if module else Path(script).parent))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path


def _status(code: Any) -> int:
    """Return a process's exit status as the interpreter would."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    sys.stderr.write(f"{code}\n")
    return 1


def _backend() -> str:
    """Return the backend for the devices of this host's ranks: NCCL needs one device for each."""
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    return "cpu:gloo,cuda:nccl" if count >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "gloo"


def _here() -> str:
    proc = current_proc()
    return f"the process {proc} (pid {proc.pid})"
