"""Several hosts on one machine, for tests: real agents, real connections, real encryption."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_core._errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from mesh_core import HostMesh

_START_S = 60.0
_STOP_S = 10.0

# Without a detour through what is installed.
_SERVE = """
import os, signal, sys, threading
from mesh_core import run_worker_loop_forever

def end_with_parent():
    # It never writes: this returns when it is gone, however it went.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
run_worker_loop_forever(
    sys.argv[1],
    credentials=sys.argv[2],
    name=sys.argv[3],
    ready=lambda address: print("tcp://" + address, flush=True),
)
"""


class LocalCluster:
    """``hosts`` agents on this machine, each a process of its own with an address and credentials of its own.

    >>> from mesh_core.testing import LocalCluster
    >>> with LocalCluster(hosts=2) as cluster:
    ...     procs = cluster.attach().spawn_procs(per_host={"gpus": 1})
    ...     procs.sizes
    {'hosts': 2, 'gpus': 1}
    """

    def __init__(
        self, hosts: int, *, env: Mapping[str, str] | None = None, credentials: str | None = None
    ) -> None:
        if hosts < 1:
            raise ValueError(f"a cluster has at least one host, not {hosts}")
        self._count = hosts
        self._env = {**os.environ, **(env or {})}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._given = credentials
        self._agents: list[subprocess.Popen[str]] = []
        # Not the mesh: it would keep a runtime that was shut down.
        self._attached = False
        self.addresses: list[str] = []
        """Where the agents listen."""

    @property
    def credentials(self) -> str:
        """The folder with the job's credentials."""
        if self._given is not None:
            return self._given
        if self._folder is None:
            raise MeshError("the cluster is not started; use it in a with block")
        return str(Path(self._folder.name) / "job")

    @property
    def pids(self) -> list[int]:
        """The agents' processes."""
        return [agent.pid for agent in self._agents]

    def start(self) -> Self:
        """Start the agents, and wait until they listen."""
        from mesh_core._credentials import Credentials

        if self._folder is not None:
            raise MeshError("the cluster is started already; stop() it first")
        self._folder = tempfile.TemporaryDirectory(prefix="mesh-cluster-")
        try:
            if self._given is None:
                Credentials.new(self.credentials)
            for number in range(self._count):
                self._agents.append(self._launch(number, "127.0.0.1:0"))
            for number in range(self._count):
                self.addresses.append(self._address(number))
        except BaseException:
            self.stop()
            raise
        return self

    def _launch(self, number: int, listen: str) -> subprocess.Popen[str]:
        assert self._folder is not None
        folder = Path(self._folder.name) / f"host-{number}"
        if not folder.exists():
            from mesh_core._credentials import Credentials

            Credentials.load(self.credentials).issue_host(folder)
        command = [sys.executable, "-c", _SERVE, listen, str(folder), f"host-{number}"]
        with (Path(self._folder.name) / f"host-{number}.log").open("a") as log:
            return subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _address(self, number: int) -> str:
        import select

        agent = self._agents[number]
        assert agent.stdout is not None
        ready, _, _ = select.select([agent.stdout], [], [], _START_S)
        line = agent.stdout.readline().strip() if ready else ""
        if not line:
            raise MeshError(f"agent {number} has not begun to listen:\n{self.log(number)}")
        return line

    def log(self, number: int) -> str:
        """What an agent has written."""
        self._agent(number)
        assert self._folder is not None
        return (Path(self._folder.name) / f"host-{number}.log").read_text()

    def attach(self) -> HostMesh:
        """The agents as a mesh of hosts."""
        from mesh_core._attach import attach_to_workers

        self._attached = True
        # They listen, or have been killed.
        return attach_to_workers(self.addresses, credentials=self.credentials, timeout=0)

    def kill(self, number: int, with_signal: int = signal.SIGKILL) -> None:
        """Send an agent a signal; SIGKILL if none is named.

        Returns once it has ended by SIGKILL, or stands still by SIGSTOP with all its threads.
        """
        agent = self._agent(number)
        agent.send_signal(with_signal)
        if with_signal == signal.SIGKILL:
            agent.wait()
        elif with_signal in (signal.SIGSTOP, signal.SIGTSTP):
            _wait_stopped(agent)

    def _agent(self, number: int) -> subprocess.Popen[str]:
        if self._folder is None:
            raise MeshError("the cluster is not started; use it in a with block")
        if not 0 <= number < len(self._agents):
            raise IndexError(f"there is no agent {number}; this cluster has {len(self._agents)}, from 0 on")
        return self._agents[number]

    def restart(self, number: int) -> None:
        """Start an agent that has ended anew, at its old address."""
        if self._agent(number).poll() is None:
            self.kill(number)
        self._close(self._agents[number])
        self._agents[number] = self._launch(number, self.addresses[number])
        self._address(number)

    def stop(self) -> None:
        """End the agents, and all that runs on them."""
        if self._attached:
            from mesh_core import shutdown

            self._attached = False
            shutdown()
        for agent in self._agents:
            if agent.poll() is None:
                # Also one that was stopped by a signal.
                agent.send_signal(signal.SIGCONT)
                agent.terminate()
        for agent in self._agents:
            try:
                agent.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
            self._close(agent)
        self._agents.clear()
        self.addresses.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @staticmethod
    def _close(agent: subprocess.Popen[str]) -> None:
        for pipe in (agent.stdin, agent.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _wait_stopped(agent: subprocess.Popen[str]) -> None:
    """Wait until no thread of a process runs any more: a signal is sent long before the last one has heeded it."""
    until = time.monotonic() + _STOP_S
    while agent.poll() is None and not _stands_still(agent.pid):
        if time.monotonic() > until:
            raise MeshError(f"process {agent.pid} was sent a signal to stop, and goes on after {_STOP_S:g} s")
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    stopped = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (thread / "stat").read_text().rpartition(") ")[2][:1] not in ("T", "t"):
                return False
            stopped += 1
    return stopped > 0
