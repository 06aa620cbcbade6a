# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator"
"""Mesh over several hosts, as its page on several machines shows it: a `mesh host` each, mutual TLS between all."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from mesh_core import Actor, SupervisionError, endpoint, this_host
from meshbench.adapter import PAYLOAD
from meshbench.network import LOOPBACK, Agents, free_ports
from meshbench.processes import Killer, descendants, running
from meshbench.timing import sample

_TIMEOUT = 120.0
_GRACE = 2.0  # seconds in which a stopped process may still be on its way out before it counts as left behind


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

    @endpoint
    def pid(self) -> int:
        """Which process this is."""
        return os.getpid()


class Stuck(Actor):
    """Never answers."""

    @endpoint
    def ready(self) -> None:
        """Say that it is there."""

    @endpoint(concurrent=True)
    async def hold(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


class Hosts:
    """See `meshbench.adapter.MeshHosts`."""

    host_kills = 5

    def start_hosts(self, hosts: int, procs: int) -> None:
        """Start the agents, attach to them, spawn `procs` processes with an actor each on every one."""
        self._start_agents(hosts)
        try:
            self._attach(procs)
        except BaseException:
            self._agents.end(at_once=True)
            raise
        self._first = self._far.slice(hosts=0, gpus=0)

    def close_hosts(self) -> None:
        """Stop the processes, then the agents."""
        self._procs.stop().get(timeout=_TIMEOUT)
        self._agents.end()
        self._folder.cleanup()

    def _start_agents(self, hosts: int) -> None:
        """Credentials for the job, a folder for its hosts, and so many agents that run when this returns."""
        from mesh_core import Credentials  # not at the top: items of one host start without it

        self._folder = tempfile.TemporaryDirectory(prefix="hosts-")
        self._credentials = Credentials.new(Path(self._folder.name, "job"))
        theirs = Path(self._folder.name, "host")
        self._credentials.issue_host(theirs)
        ports = free_ports(hosts)
        self._addresses = [f"tcp://{LOOPBACK}:{port}" for port in ports]
        mesh = Path(sys.executable).with_name("mesh")
        self._agents = Agents(
            [
                [str(mesh), "host", "--listen", f"{LOOPBACK}:{port}", "--credentials", str(theirs)]
                for port in ports
            ],
            ports,
        )

    def _attach(self, procs: int) -> None:
        from mesh_core import attach_to_workers

        self._hosts = attach_to_workers(workers=self._addresses, credentials=self._credentials)
        self._procs = self._hosts.spawn_procs(per_host={"gpus": procs})
        self._far = self._procs.spawn("far", Far)
        self._far.echo.call(PAYLOAD).get(timeout=_TIMEOUT)

    def host_call(self, calls: int) -> list[float]:
        """Blocking calls to the first actor of the first host."""
        call = self._first.echo.call_one
        return sample(calls, lambda: call(PAYLOAD).get())

    def host_call_here(self, calls: int) -> list[float]:
        """The same to an actor of this host."""
        with this_host().spawn_procs(per_host={"gpus": 1}) as procs:
            call = procs.spawn("near", Far).slice(gpus=0).echo.call_one
            return sample(calls, lambda: call(PAYLOAD).get())

    def gateway(self) -> tuple[int, str]:
        """The agent of the first host, and where it listens."""
        return self._agents.pids()[0], self._addresses[0].removeprefix("tcp://")

    def host_calls(self, seconds: float) -> int:
        """As `host_call`, counted."""
        call, end, done = self._first.echo.call_one, perf_counter() + seconds, 0
        while perf_counter() < end:
            call(PAYLOAD).get()
            done += 1
        return done

    def host_pair(self, calls: int, same: bool) -> list[float]:
        """The first actor of the first host calls."""
        peer = self._far.slice(hosts=0, gpus=1) if same else self._far.slice(hosts=1, gpus=0)
        return list(self._first.rally.call_one(peer, calls).get(timeout=_TIMEOUT))

    def host_put(self, size: int, times: int) -> list[float]:
        """The array as an ordinary argument."""
        data = import_module("numpy").ones(size, dtype="uint8")
        return sample(times, lambda: self._first.take.call_one(data).get(), warm_up=1)

    def host_get(self, size: int, times: int) -> list[float]:
        """The array as an ordinary result."""
        return sample(times, lambda: self._first.give.call_one(size).get(), warm_up=1)

    def host_cast(self, size: int, times: int) -> list[float]:
        """The array to the whole mesh."""
        data = import_module("numpy").ones(size, dtype="uint8")
        return sample(times, lambda: self._far.take.call(data).get(), warm_up=2)

    def host_kill(self, kills: int) -> list[float]:
        """As many hosts, each with a mesh of its own, one killed after the other."""
        from mesh_core import attach_to_workers

        self._start_agents(kills)
        # No mesh over all of them: its ranks would be lost with the hosts, and nobody calls it who would hear of that.
        hosts = attach_to_workers(workers=self._addresses, credentials=self._credentials)
        hosts.initialized.get(timeout=_TIMEOUT)
        taken = []
        for i, agent in enumerate(self._agents.pids()):
            stuck = hosts.slice(hosts=i).spawn_procs(per_host={"gpus": 1}).spawn("stuck", Stuck)
            stuck.ready.call_one().get(timeout=_TIMEOUT)
            waiting = stuck.hold.call_one()
            killer = Killer(agent)
            killer.start()
            error = waiting.exception(timeout=_TIMEOUT)
            taken.append(perf_counter() - killer.struck())
            if not isinstance(error, SupervisionError):
                raise RuntimeError(f"a killed host gave {error!r}")
        self._agents.end()
        self._folder.cleanup()
        return taken

    def attach(self, hosts: int, procs: int) -> tuple[float, int]:
        """Agents that already run are attached to, spawned on and called; then all is stopped, and looked after."""
        self._start_agents(hosts)
        start = perf_counter()
        self._attach(procs)
        taken = perf_counter() - start
        pids = [int(pid) for pid in self._far.pid.call().get(timeout=_TIMEOUT).values()]
        if len(set(pids)) != hosts * procs:
            raise RuntimeError(f"asked for {hosts * procs} processes, reached {len(set(pids))}")
        started = [pid for agent in self._agents.pids() for pid in (agent, *descendants(agent))]
        self.close_hosts()
        give_up = perf_counter() + _GRACE
        while (left := running(started)) and perf_counter() < give_up:
            time.sleep(0.02)
        return taken, len(left)
