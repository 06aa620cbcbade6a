"""Processes that are killed, stopped and frozen."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from client import Client
from leftovers import children, command
from world import NAMED, Site

from mesh_core import SpawnError, SupervisionError, Undeliverable


class Vandal(Client):
    """Harms the meshes that there are, and says which."""

    def harm(self) -> Site | None:
        with self.world.lock:
            if not self.world.sites:
                return None
            site = self.random.choice(self.world.sites)
            site.harmed = True
            return site

    async def kill(self) -> None:
        site = self.harm()
        if site is None:
            return
        rank = self.random.randrange(site.size)
        how = self.random.choice(["kill", "term", "segv", "exit", "from outside"])
        self.world.note(f"kill rank {rank} of {site.name}: {how}")
        if how == "from outside":
            pid = site.procs.pids[rank]
            if pid is not None:
                _signal(pid, signal.SIGKILL)
            return
        future = site.workers.slice(gpus=rank).die.call_one(how)
        try:
            await self.result(future)
        except (SupervisionError, Undeliverable, SpawnError):
            pass
        except NAMED as error:
            self.world.violate(f"die({how}) on rank {rank} of {site.name}: {error!r}")
        else:
            self.world.violate(f"die({how}) on rank {rank} of {site.name} returned")

    async def pause(self) -> None:
        """Stop a process for a moment; nothing may fail, only wait."""
        site = self.pick()
        if site is None:
            return
        pid = site.procs.pids[self.random.randrange(site.size)]
        if pid is None:
            return
        self.world.note(f"pause {pid} of {site.name}")
        # Whoever sends to it meanwhile may wait for room, and so may the thread of this very client: another one resumes it.
        resume = threading.Timer(self.random.random() / 10, _signal, (pid, signal.SIGCONT))
        resume.name = f"resume {pid}"
        _signal(pid, signal.SIGSTOP)
        resume.start()
        future = site.workers.echo.call(1)
        await self.settle(
            f"echo after a pause of {site.name}", site, lambda: self.result(future), lambda got: True
        )

    async def freeze(self) -> None:
        """Stop a process for good: only killing it can end it."""
        site = self.harm()
        if site is None or self.random.random() < 0.7:
            return
        with self.world.lock:
            if site not in self.world.sites:
                return
            self.world.sites.remove(site)
        pid = site.procs.pids[self.random.randrange(site.size)]
        self.world.note(f"freeze {pid} of {site.name} and stop it")
        if pid is not None:
            _signal(pid, signal.SIGSTOP)
        stopped = site.procs.stop()
        await self.settle(
            f"stop of frozen {site.name}", None, lambda: self.result(stopped), lambda v: v is None
        )

    async def raze(self) -> None:
        """Kill a process that forks workers, and with it all of them."""
        if self.random.random() < 0.9:
            return
        with self.world.lock:
            for site in self.world.sites:
                site.harmed = True
            if self.world.pending:
                return
            fork_servers = [
                pid for pid in children(os.getpid()) if "mesh_core._process.fork_server" in command(pid)
            ]
            if fork_servers:
                pid = self.random.choice(fork_servers)
                self.world.note(f"kill fork_server {pid}")
                _signal(pid, signal.SIGKILL)
                # A spawn before its end is noticed would be its victim too, and rightly fail: none begins until then.
                _until_gone(pid)


def _until_gone(pid: int) -> None:
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.001)


def _signal(pid: int, number: int) -> None:
    # One of ours at any time: a worker's pid is only used again once its death was told.
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
