# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator"
"""Monarch over several hosts: a worker loop each, on its tcp transport, as its own jobs start them; no encryption."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from time import perf_counter
from typing import Any

from monarch import actor as actor_module
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint, shutdown_context, this_host
from monarch.config import configure

from meshbench.adapter import PAYLOAD
from meshbench.network import LOOPBACK, Agents, free_ports
from meshbench.processes import Killer
from meshbench.timing import sample

_TIMEOUT = 120.0
_PATIENCE = "2m"
_LIMITS = (
    "actor_spawn_max_idle",
    "channel_reconnect_timeout",
    "host_spawn_ready_timeout",
    "mesh_orphan_timeout",
    "mesh_proc_spawn_max_idle",
    "message_delivery_timeout",
    "pending_actor_delivery_timeout",
)
_MANY = 32
"""Up to so many processes its own limits do."""
_AT_ONCE = 64
"""So many it starts in one spawn; see `_be_patient`."""
_TRUST = "trust_all_connections"  # the only value that 0.7.0 takes
_WORKER = f"from monarch.actor import run_worker_loop_forever; run_worker_loop_forever(address={{!r}}, ca={_TRUST!r})"


def _be_patient() -> None:
    """Longer limits here, and in the worker loops and their processes, which inherit the variables.

    Its 30 s are too short for a hundred processes, all of which it starts at once, on a small machine. One of
    30 s is left, on a host's processes until they are ready, that none of its settings moved: after it, they run and nobody
    hears of them. So more than `_AT_ONCE` are started in several spawns, of some hosts each.
    """
    names = {"actor_spawn_max_idle": "mesh_actor_spawn_max_idle"}
    os.environ.update({f"HYPERACTOR_{names.get(name, name).upper()}": _PATIENCE for name in _LIMITS})
    configure(**dict.fromkeys(_LIMITS, _PATIENCE))


class Far(Actor):
    """An actor on another host."""

    def __init__(self) -> None:
        self._data: Any = b""

    @endpoint
    def echo(self, x: Any) -> Any:
        """Answer with `x`."""
        return x

    @endpoint
    def take(self, x: Any) -> int:
        """Answer with the size of `x`."""
        return int(x.nbytes)

    @endpoint
    def give(self, size: int) -> Any:
        """An array of so many bytes, made once."""
        if len(self._data) != size:
            self._data = import_module("numpy").ones(size, dtype="uint8")
        return self._data

    @endpoint
    def rally(self, peer: Any, calls: int) -> list[float]:
        """Call `peer` one time after the other."""
        return sample(calls, lambda: peer.echo.call_one(PAYLOAD).get())


class Stuck(Actor):
    """Never answers."""

    @endpoint
    def ready(self) -> None:
        """Say that it is there."""

    @endpoint
    def hold(self) -> None:
        """Wait for ever."""
        threading.Event().wait()


class Hosts:
    """See `meshbench.adapter.HostsKillSystem`."""

    host_kills = 1  # each takes seconds

    def start_hosts(self, hosts: int, procs: int) -> None:
        """Start the worker loops, attach to them, spawn `procs` processes with an actor each on every one."""
        if hosts * procs > _MANY:
            _be_patient()
        enable_transport(f"tcp://{LOOPBACK}:0")
        ports = free_ports(hosts)
        addresses = [f"tcp://{LOOPBACK}:{port}" for port in ports]
        self._agents = Agents([[sys.executable, "-c", _WORKER.format(each)] for each in addresses], ports)
        try:
            self._hosts = attach_to_workers(ca=_TRUST, workers=addresses)
            self._hosts.initialized.get()
            some = max(1, _AT_ONCE // procs)
            self._parts = []
            for first in range(0, hosts, some):
                part = self._hosts.slice(hosts=slice(first, min(first + some, hosts)))
                self._parts.append(part.spawn_procs(per_host={"gpus": procs}).spawn("far", Far))
                self._parts[-1].echo.call(PAYLOAD).get()
        except BaseException:
            self._agents.end(at_once=True)
            raise
        self._far = self._parts[0]
        self._first = self._far.slice(hosts=0, gpus=0)

    def close_hosts(self) -> None:
        """Shut the hosts down, which ends their processes and worker loops; then the runtime in this process."""
        self._hosts.shutdown().get()
        shutdown_context().get()
        self._agents.end()

    def host_call(self, calls: int) -> list[float]:
        """Blocking calls to the first actor of the first host."""
        call = self._first.echo.call_one
        return sample(calls, lambda: call(PAYLOAD).get())

    def host_call_here(self, calls: int) -> list[float]:
        """The same to an actor of this host."""
        call = this_host().spawn_procs(per_host={"gpus": 1}).spawn("near", Far).slice(gpus=0).echo.call_one
        return sample(calls, lambda: call(PAYLOAD).get())

    def host_pair(self, calls: int, same: bool) -> list[float]:
        """The first actor of the first host calls."""
        peer = self._far.slice(hosts=0, gpus=1) if same else self._far.slice(hosts=1, gpus=0)
        return list(self._first.rally.call_one(peer, calls).get())

    def host_put(self, size: int, times: int) -> list[float]:
        """The array as an ordinary argument."""
        data = import_module("numpy").ones(size, dtype="uint8")
        return sample(times, lambda: self._first.take.call_one(data).get(), warm_up=1)

    def host_get(self, size: int, times: int) -> list[float]:
        """The array as an ordinary result."""
        return sample(times, lambda: self._first.give.call_one(size).get(), warm_up=1)

    def host_cast(self, size: int, times: int) -> list[float]:
        """The array to all the actors; those of several spawns are called at once."""
        data = import_module("numpy").ones(size, dtype="uint8")

        def cast() -> None:
            for reply in [part.take.call(data) for part in self._parts]:
                reply.get()

        return sample(times, cast, warm_up=2)

    def host_kill(self, kills: int) -> list[float]:
        """Two hosts, the second of which is killed; the first stays, as it would in use."""
        # By default a failure that no actor handles ends the script.
        actor_module.unhandled_fault_hook = lambda failure: None
        self.start_hosts(2, 1)
        stuck = self._hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 1}).spawn("stuck", Stuck)
        stuck.ready.call_one().get()
        waiting = stuck.hold.call_one()
        killer = Killer(self._agents.pids()[1])
        killer.start()
        try:
            waiting.get(timeout=_TIMEOUT)
        except Exception:  # noqa: BLE001 - whatever it calls it
            taken = perf_counter() - killer.struck()
        else:
            raise RuntimeError("a killed host has answered")
        shutdown_context().get()
        self._agents.end()
        return [taken]
